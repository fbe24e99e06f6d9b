"""The dflash-fixes set against the published wheel: it applies, reverses, compiles, and so for other tools."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.filediff import reverse
from ddtree_deploy.patching.images import FileImage, sha256
from ddtree_deploy.resources import patches_dir
from tests.engine.conftest import ENGINE

pytestmark = pytest.mark.wheel

TOOLS = {
    "git": ["git", "apply", "-p1"],
    "patch": ["patch", "-p1", "-F0", "--no-backup-if-mismatch", "-i"],
}


def test_hashes_are_of_the_wheel_and_of_what_the_set_makes(fixes, wheel_site, patched_files):
    hashes = fixes.hashes[ENGINE]
    assert {path: sha256((wheel_site / path).read_bytes()) for path in hashes} == {
        path: item.before for path, item in hashes.items()
    }
    assert {path: sha256(data) for path, data in patched_files.items()} == {
        path: item.after for path, item in hashes.items()
    }


def test_every_hunk_is_where_it_says_and_reverses(fixes, wheel_site, patched_files):
    diffs = [diff for patch in fixes.patches for diff in patch.diffs]
    pristine = {path: FileImage((wheel_site / path).read_bytes()) for path in fixes.paths}
    assert apply_diffs(pristine, diffs).offsets == ()
    patched = {path: FileImage(data) for path, data in patched_files.items()}
    assert apply_diffs(patched, reverse(diffs)).images == pristine


def test_patched_source_compiles(patched_files):
    for path, data in patched_files.items():
        compile(data, path, "exec")


@pytest.mark.parametrize("tool", [name for name in TOOLS if shutil.which(name)])
def test_other_tools_make_the_same_files(tool, fixes, wheel_site, patched_files, tmp_path):
    for path in fixes.paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel_site / path, tmp_path / path)
    for patch in fixes.patches:
        file = patches_dir() / "dflash-fixes" / ENGINE / patch.name
        subprocess.run([*TOOLS[tool], file], cwd=tmp_path, check=True, capture_output=True)
    assert {path: (tmp_path / path).read_bytes() for path in fixes.paths} == patched_files
