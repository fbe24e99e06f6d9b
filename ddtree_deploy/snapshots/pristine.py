"""The published sglang wheels: read file by file, unpacked as an installer would."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import io
import os
import re
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from ddtree_deploy.agent.root import PACKAGE, PARTS
from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.entries import Entry, FileEntry, path_bytes
from ddtree_deploy.snapshots.places import usable

MAX_MEMBER = 1 << 30

_SCOPE = tuple(f"{PACKAGE}/{part}/" for part in PARTS)
_BRING = "take the file as the index serves it: `ddtree-deploy wheel fetch VERSION`"


class PristineTree(Mapping[str, bytes]):
    """The files of a wheel by path (relative to the site), read when asked for; each must have RECORD's hash.

    A context manager; closing it closes the wheel. Raises DeployError DD405 for a file that is not a sound
    sglang wheel.
    """

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        try:
            self._zip = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise self._unsound(str(error)) from None
        try:
            self._read_index()
        except BaseException:
            self._zip.close()
            raise

    def _read_index(self) -> None:
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in self._zip.infolist():
            name, kind = member.filename, stat.S_IFMT(member.external_attr >> 16)
            components = name.removesuffix("/").split("/")
            if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in components):
                raise self._unsound(f"it holds the unsafe name {name!r}")
            if kind == stat.S_IFLNK:
                raise self._unsound(f"{name} is a symbolic link")
            if name.endswith("/"):
                continue
            if name in self._members:
                raise self._unsound(f"it holds {name} twice")
            self._members[name] = member
        infos = {name.partition("/")[0] for name in self._members if ".dist-info/" in name.partition("/")[0] + "/"}
        if len(infos) != 1 or not infos.copy().pop().startswith(f"{PACKAGE}-"):
            raise self._unsound("it has no dist-info of sglang")
        #: The name of the dist-info folder.
        self.dist_info = infos.pop()
        if any(name.partition("/")[0].endswith(".data") for name in self._members):
            raise self._unsound("it has a .data folder, which is not supported")
        self._rows = self._read_record()
        if f"{self.dist_info}/METADATA" not in self:
            raise self._unsound("it has no METADATA")
        metadata = self[f"{self.dist_info}/METADATA"].decode("utf-8", "replace")
        found = re.search(r"^Version: *(\S+)", metadata, re.MULTILINE)
        if not found:
            raise self._unsound("its METADATA names no version")
        #: The engine's version.
        self.version = found.group(1)

    def _read_record(self) -> dict[str, tuple[str, int]]:
        """Path -> (sha256 in hex, size) of every file but RECORD itself."""
        own = f"{self.dist_info}/RECORD"
        rows: dict[str, tuple[str, int]] = {}
        try:
            for path, told, size in csv.reader(io.StringIO(self._inflate(own).decode("utf-8"), newline="")):
                if path != own:
                    algorithm, _, text = told.partition("=")
                    digest = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
                    if algorithm != "sha256" or path in rows:
                        raise ValueError(f"the row of {path}")
                    rows[path] = digest.hex(), int(size)
        except (KeyError, ValueError, csv.Error) as error:
            raise self._unsound(f"its RECORD cannot be used: {error}") from None
        odd = sorted((rows.keys() ^ self._members.keys()) - {own})
        if odd:
            raise self._unsound(f"RECORD and contents differ in {len(odd)} files, the first is {odd[0]}")
        return rows

    def _unsound(self, why: str) -> DeployError:
        return DeployError("DD405", f"{self.wheel} is not a sound sglang wheel: {why}", _BRING)

    def __enter__(self) -> PristineTree:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._zip.close()

    def _inflate(self, path: str) -> bytes:
        member = self._members[path]
        if member.file_size > MAX_MEMBER:
            raise self._unsound(f"{path} is too large")
        try:
            return self._zip.read(member)
        except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error) as error:
            raise self._unsound(f"{path}: {error}") from None

    def __getitem__(self, path: str) -> bytes:
        data = self._inflate(path)
        row = self._rows.get(path)
        if row is not None and (hashlib.sha256(data).hexdigest(), len(data)) != row:
            raise self._unsound(f"{path} does not have RECORD's hash")
        return data

    def read(self, path: str) -> bytes:
        """As indexing; raises KeyError where there is no such file."""
        return self[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, path: object) -> bool:
        return path in self._members

    def mode(self, path: str) -> int:
        """The permission bits that an installer gives the file: 0644, or 0755 for one packed as executable."""
        return 0o755 if self._members[path].external_attr >> 16 & 0o111 else 0o644

    def sha256(self, path: str) -> str:
        """The file's sha256 in hex, from RECORD."""
        return self._rows[path][0]

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The engine's folders (what a snapshot holds) as manifest entries, in the order of the paths' bytes."""
        paths = sorted((path for path in self._rows if path.startswith(_SCOPE)), key=path_bytes)
        return MappingProxyType(
            {
                path: FileEntry(path, self.mode(path), self._rows[path][1], self._rows[path][0], 1, True, "ok")
                for path in paths
            }
        )


def read_pristine(wheel: Path) -> PristineTree:
    """The wheel's files as a mapping from path to bytes. Raises DeployError DD405."""
    return PristineTree(wheel)


def unpack(wheel: Path, into: Path, installer: str = "ddtree-deploy") -> Path:
    """Unpack the wheel as a site-packages folder ``into``, which must not exist or be empty; all of it or nothing.

    Every file is checked against RECORD; modes are an installer's; the dist-info gets its INSTALLER. Returns
    ``into``. Raises DeployError DD405, DD007.
    """
    into = into.absolute()
    with usable(into), PristineTree(wheel) as tree:
        into.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
        try:
            _write_site(tree, str(draft), installer)
            draft.chmod(0o755)
            draft.rename(into)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return into


def _write_site(tree: PristineTree, site: str, installer: str) -> None:
    made: set[str] = set()

    def write(path: str, data: bytes, mode: int) -> None:
        folder = f"{site}/{path}".rpartition("/")[0]
        if folder not in made:
            os.makedirs(folder, mode=0o755, exist_ok=True)  # noqa: PTH103
            made.add(folder)
        handle = os.open(f"{site}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "wb") as file:  # noqa: PTH123
            file.write(data)

    own, mark = f"{tree.dist_info}/RECORD", f"{tree.dist_info}/INSTALLER"
    for path, data in tree.items():
        if path not in (own, mark):
            write(path, data, tree.mode(path))
    name = installer.encode() + b"\n"
    write(mark, name, 0o644)
    digest = base64.urlsafe_b64encode(hashlib.sha256(name).digest()).rstrip(b"=").decode()
    rows = tree[own].decode("utf-8").rstrip("\n")
    write(own, f"{rows}\n{mark},sha256={digest},{len(name)}\n".encode(), 0o644)
