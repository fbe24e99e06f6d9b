"""Put rendered files into a folder: all or none, each whole, and no edited file lost unnoticed."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.render import RenderedFile

WRITTEN, REPLACED, UNCHANGED = "written", "replaced", "unchanged"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one file: ``written`` (new), ``replaced`` or ``unchanged``."""

    path: Path
    outcome: str


@dataclass(frozen=True, slots=True)
class _Present:
    """The file that lies where one is to be written."""

    data: bytes
    mode: int


def write_files(files: Sequence[RenderedFile], folder: Path, *, force: bool = False) -> list[Outcome]:
    """Write ``files`` into ``folder``, which is made if need be. All are written, or none is changed.

    Raises :class:`DeployError` ``DD603`` if a file there has other content and not ``force``, ``DD007`` if
    something cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {file.name: _look(folder / file.name) for file in files}
    except OSError as error:
        raise _unusable(folder, error) from error
    edited = [file.name for file in files if (old := present[file.name]) is not None and old.data != file.text.encode()]
    if edited and not force:
        raise DeployError(
            "DD603",
            f"{folder} holds {', '.join(edited)} with other content",
            hint="compare, then use --force to replace, or another folder",
        )
    wanted = {file.name: _Present(file.text.encode(), file.mode) for file in files}
    pending = [file.name for file in files if present[file.name] != wanted[file.name]]
    try:
        _commit(folder, {name: wanted[name] for name in pending}, present)
    except OSError as error:
        raise _unusable(folder, error) from error
    return [Outcome(folder / file.name, _outcome(file.name in pending, present[file.name])) for file in files]


def _outcome(pending: bool, old: _Present | None) -> str:
    if not pending:
        return UNCHANGED
    return WRITTEN if old is None else REPLACED


def _look(path: Path) -> _Present | None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        raise DeployError("DD007", f"{path} is not a regular file and is not replaced")
    return _Present(path.read_bytes(), stat.S_IMODE(info.st_mode))


def _commit(folder: Path, wanted: dict[str, _Present], present: dict[str, _Present | None]) -> None:
    staged: dict[str, Path] = {}
    done: list[str] = []
    try:
        for name, file in wanted.items():
            staged[name] = _stage(folder, name, file)
        for name, path in staged.items():
            path.replace(folder / name)
            done.append(name)
        _sync(folder)
    except BaseException:
        for name in done:
            old = present[name]
            with contextlib.suppress(OSError):
                if old is None:
                    (folder / name).unlink()
                else:
                    _stage(folder, name, old).replace(folder / name)
        raise
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


def _stage(folder: Path, name: str, file: _Present) -> Path:
    """A complete temporary file beside its target, on disk, with the target's permissions."""
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(file.data)
            stream.flush()
            os.fchmod(stream.fileno(), file.mode)
            os.fsync(stream.fileno())
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(temporary)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(folder: Path, error: OSError) -> DeployError:
    return DeployError("DD007", f"cannot write into {folder}: {error.strerror or error}")
