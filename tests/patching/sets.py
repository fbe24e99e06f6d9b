"""The patch sets of ``tests/cases/patchsets``: ``good/`` sets, the ``trees`` they are for, ``bad.json``.

A bad case is ``{name, [edit], [sub], says}``: ``edit`` path -> new text (null: no such file), ``sub`` a list of
[path, old, new] (every occurrence), ``says`` what the refusal of ``good/`` so changed must hold.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ddtree_deploy.patching.classify import touched_paths
from ddtree_deploy.patching.images import FileImage

from .cases import as_bytes

FOLDER = Path(__file__).parent.parent / "cases" / "patchsets"
GOOD = FOLDER / "good"
ENGINES = sorted(path.name for path in (FOLDER / "trees").iterdir())
BAD = {case["name"]: case for case in json.loads((FOLDER / "bad.json").read_text())}


def images(sets, engine):
    """The pristine images of all paths that ``sets`` touch."""
    tree = FOLDER / "trees" / engine
    return {
        path: FileImage((tree / path).read_bytes()) if (tree / path).is_file() else None for path in touched_paths(sets)
    }


def changed_copy(folder, edit=None, sub=()):
    """A copy of ``good/`` in ``folder``, changed."""
    shutil.copytree(GOOD, folder)
    for path, text in (edit or {}).items():
        target = folder / path
        if text is None:
            target.unlink()
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(as_bytes(text))
    for path, old, new in sub:
        before = (folder / path).read_text()
        assert old in before
        (folder / path).write_text(before.replace(old, new))
    return folder
