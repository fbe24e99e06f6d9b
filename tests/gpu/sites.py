"""Engine sources to run: the published one, and copies of it with patch sets applied.

A copy holds the package `sglang` only. It goes before the folder it was made of on the import path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ddtree_deploy.patching.images import FileImage, Image
from ddtree_deploy.patching.patchset import PatchSet, load_sets, with_requirements
from ddtree_deploy.patching.plan import plan

ENGINE = "0.5.11"
SET_OF_SITE = {"patched": "ddtree"}


def sets_of(site: str, patches: Path) -> tuple[PatchSet, ...]:
    """The sets that a site of this name has applied, in order."""
    return with_requirements(SET_OF_SITE[site], load_sets(patches))


def family_digests(patches: Path) -> dict[str, str]:
    """The digests of the families that a patched site has applied, by set, in order."""
    families = {patch_set.name: patch_set.family_for(ENGINE) for patch_set in sets_of("patched", patches)}
    return {name: family.digest for name, family in families.items() if family}


def set_digest(patches: Path) -> str:
    """One digest of all that a patched site has applied."""
    return hashlib.sha256("".join(family_digests(patches).values()).encode()).hexdigest()[:16]


def make_site(site: str, kit: Path, patches: Path, into: Path) -> Path:
    """A copy of the kit's `sglang` in the folder `into`, which is made, with the site's sets applied."""
    sets = sets_of(site, patches)
    changes = plan(sets, ENGINE, _images(sets, kit)).changes
    into.mkdir(parents=True)
    shutil.copytree(kit / "sglang", into / "sglang", copy_function=os.link)
    for path, change in changes.items():
        target = into / path
        target.unlink(missing_ok=True)
        if isinstance(change.after, FileImage):
            target.write_bytes(change.after.data)
    return into


def _images(sets: Sequence[PatchSet], kit: Path) -> dict[str, Image]:
    families = [family for family in (patch_set.family_for(ENGINE) for patch_set in sets) if family]
    paths = {path for family in families for path in family.paths}
    return {path: FileImage((kit / path).read_bytes()) if (kit / path).exists() else None for path in sorted(paths)}
