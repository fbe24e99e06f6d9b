"""Replacing folders whole: they are built beside, and a marker on disk makes the exchange of all of them one step.

::

    <parent>/.patchset-XXXX/<name>/       the new folder; after the exchange the old one
                           /commit.json   there from the moment at which the exchange is decided

Without a marker an interrupted write has not happened; with one, :func:`finish` ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.places import usable

STAGE = ".patchset-"
_MARKER = "commit.json"
_DISPLACED = ".displaced"
_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextlib.contextmanager
def locked(parent: Path) -> Iterator[None]:
    """Hold the folder against other writers of patch sets, and end what an interrupted one began.

    Raises DeployError DD010 where another one is at work, DD007 for a folder that cannot be used.
    """
    import fcntl  # POSIX alone has it

    with usable(parent):
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DeployError(
                    "DD010", f"another ddtree-deploy is writing patch sets in {parent}", "run it again when it is done"
                ) from None
            finish(parent)
            yield
        finally:
            os.close(descriptor)


def unfinished(parent: Path) -> bool:
    """Whether a decided exchange waits below ``parent`` for :func:`finish`."""
    with usable(parent):
        return any((stage / _MARKER).is_file() for stage in parent.glob(STAGE + "*"))


def exchange(parent: Path, old: Mapping[str, str | None], stage: Path) -> None:
    """Put ``stage/<name>`` in the place of ``parent/<name>`` for every name of ``old``, all of them or none.

    ``old``: name -> :func:`digest` of the folder that is to go, None where there is none. The staged folders are
    complete. Called under :func:`locked`.
    """
    names = {name: {"old": before, "new": digest(stage / name)} for name, before in old.items()}
    for folder, _folders, files in os.walk(stage):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    draft = stage / (_MARKER + ".draft")
    draft.write_text(json.dumps(names))
    sync(draft)
    draft.rename(stage / _MARKER)
    sync(stage)
    _roll_forward(parent, stage)


@contextlib.contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A hidden folder below ``parent`` to build new folders in; removed if their exchange is not decided."""
    stage = Path(tempfile.mkdtemp(prefix=STAGE, dir=parent))
    try:
        yield stage
    finally:
        if stage.exists() and not (stage / _MARKER).exists():
            shutil.rmtree(stage)


def finish(parent: Path) -> None:
    """End every interrupted write below ``parent``: forward if it was decided, else it is dropped.

    Raises DeployError DD010 if a folder is neither as before nor as after it.
    """
    for stage in sorted(parent.glob(STAGE + "*")):
        if (stage / _MARKER).is_file():
            _roll_forward(parent, stage)
        else:
            shutil.rmtree(stage)


def _roll_forward(parent: Path, stage: Path) -> None:
    for name, ends in json.loads((stage / _MARKER).read_text()).items():
        now = digest(parent / name)
        if now == ends["new"]:
            continue
        # Between the two renames of a file system that cannot exchange, nothing is there.
        if now != ends["old"] and (now is not None or not (stage / (name + _DISPLACED)).exists()):
            raise DeployError(
                "DD010",
                f"{parent / name} changed after the writing of patch sets was interrupted",
                f"the new folder is {stage / name}: keep what you want of both, then remove {stage}",
            )
        _swap(stage, parent, name)
        sync(parent)
    (stage / _MARKER).unlink()
    sync(stage)
    shutil.rmtree(stage)


def _swap(stage: Path, parent: Path, name: str) -> None:
    new, place = stage / name, parent / name
    if place.exists():
        if _exchanged(new, place):
            return
        place.rename(stage / (name + _DISPLACED))
    new.rename(place)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))


def digest(folder: Path) -> str | None:
    """A digest of all files below ``folder``, links by their targets; None if there is no such folder."""
    if not folder.is_dir():
        return None
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        if path.is_symlink():
            content = b"link " + os.fsencode(path.readlink())
        elif path.is_file():
            content = b"file " + path.read_bytes()
        else:
            continue
        whole.update(b"%d %d:%b%b" % (len(name), len(content), name, content))
    return whole.hexdigest()


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
