"""The modules that the ddtree set adds to an engine, as they are and with one edit."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddtree_deploy.resources import patches_dir

NEW = patches_dir() / "ddtree" / "new"


def edited(folder: Path, module: str, *edits: tuple[str, str]) -> Path:
    """A copy of the added modules below `folder`, one of them edited: each edit's old text is there exactly once."""
    copy = folder / "new"
    shutil.copytree(NEW, copy)
    file = copy / "sglang" / "srt" / "speculative" / f"{module}.py"
    source = file.read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    file.write_text(source)
    return copy
