"""Writes a snapshot out as a plain tree of files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.entries import FileEntry, LinkEntry, path_bytes
from ddtree_deploy.snapshots.places import usable
from ddtree_deploy.snapshots.store import Snapshot

MARK = ".ddtree-snapshot.json"
SCHEMA = 1


@dataclass(frozen=True)
class Exported:
    """What was written where, and what was not: (path, why)."""

    into: Path
    files: int
    left_out: tuple[tuple[str, str], ...]


def export(snapshot: Snapshot, into: Path) -> Exported:
    """Write the snapshot's files below ``into``: all of them, or ``into`` is as it was.

    ``into`` may be absent, empty, or an earlier export that nobody has edited, which is replaced. Modes are kept
    less group and world write; links are written if they cannot lead out of the tree. Raises DeployError DD007
    when ``into`` cannot be used, DD402 when the snapshot is damaged.
    """
    into = into.absolute()
    with usable(into):
        earlier = _replaceable(into)
        into.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
        try:
            exported = _write(snapshot, draft, into)
            draft.chmod(0o755)
            if earlier:
                _exchange(draft, into)
            else:
                draft.rename(into)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return exported


def _exchange(draft: Path, into: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{into.name}-old-", dir=into.parent))
    try:
        into.rename(aside)
        try:
            draft.rename(into)
        except BaseException:
            aside.rename(into)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _replaceable(into: Path) -> bool:
    """Whether there is an unedited earlier export at ``into``; raises DeployError DD007 if anything else is."""
    if into.is_symlink():
        raise DeployError("DD007", f"{into} is a symbolic link", "name the folder itself")
    if not into.exists():
        return False
    if not into.is_dir():
        raise DeployError("DD007", f"{into} is not a folder", "--into takes a folder")
    if not any(into.iterdir()):
        return False
    try:
        mark = json.loads((into / MARK).read_bytes())
        written = mark["files"]
        if mark["schema"] != SCHEMA or not isinstance(written, dict):
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError):
        raise DeployError(
            "DD007", f"{into} is not empty and is no earlier snapshot", "name a new or an empty folder"
        ) from None
    edited = _edited(into, written)
    if edited:
        raise DeployError(
            "DD007",
            f"{into} was edited since it was written: {len(edited)} paths differ",
            "name another folder, or move this one away",
            edited[:10],
        )
    return True


def _edited(into: Path, written: Mapping[str, str]) -> list[str]:
    top = os.fsencode(into)
    present: set[str] = set()
    edited = []
    for folder, names, files in os.walk(top):
        names[:] = [name for name in names if name != b"__pycache__"]
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]  # noqa: PTH114, PTH118
        for name in files + links:
            full = os.path.join(folder, name)  # noqa: PTH118
            path = full[len(top) + 1 :].decode("utf-8", "surrogateescape")
            present.add(path)
            if path != MARK and written.get(path) != _seen(full):
                edited.append(path)
    return sorted(edited + [path for path in written if path not in present])


def _seen(full: bytes) -> str | None:
    try:
        if os.path.islink(full):  # noqa: PTH114
            return "link:" + os.readlink(full).decode("utf-8", "surrogateescape")  # noqa: PTH115
        with open(full, "rb") as handle:  # noqa: PTH123
            return "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return None


def _write(snapshot: Snapshot, draft: Path, into: Path) -> Exported:
    top = os.fsencode(draft)
    made: set[bytes] = set()
    written: dict[str, str] = {}
    left_out: list[tuple[str, str]] = []
    for path, entry in snapshot.entries.items():
        full = top + b"/" + path_bytes(path)
        folder = full.rpartition(b"/")[0]
        if folder not in made:
            os.makedirs(folder, mode=0o755, exist_ok=True)  # noqa: PTH103
            made.add(folder)
        if isinstance(entry, FileEntry):
            if not entry.content:
                left_out.append((path, "its contents were not fetched (--binaries)"))
                continue
            handle = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(handle, "wb") as file:  # noqa: PTH123
                file.write(snapshot.read(path))
                os.fchmod(handle, (entry.mode & 0o755) | 0o600)
            written[path] = "sha256:" + entry.sha256
        elif isinstance(entry, LinkEntry):
            if not _stays_inside(path, entry.target):
                left_out.append((path, f"it is a link to {entry.target}, which may lead out of the folder"))
                continue
            os.symlink(path_bytes(entry.target), full)  # noqa: PTH211
            written[path] = "link:" + entry.target
        else:
            left_out.append((path, "it is neither a file nor a link"))
    mark = {"schema": SCHEMA, "snapshot": snapshot.id, "tree": snapshot.header.tree, "files": written}
    (draft / MARK).write_text(json.dumps(mark, indent=1) + "\n", "ascii")
    return Exported(into, len(written), tuple(left_out))


def _stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path`` cannot lead out of the tree, whatever the other links in it are.

    It goes up only from its own, real folder, and not beyond the top; what it then passes through are folders
    or links of which the same is true.
    """
    if target.startswith("/"):
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return ".." not in parts[up:] and up <= path.count("/")
