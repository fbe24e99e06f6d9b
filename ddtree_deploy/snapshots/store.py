"""The snapshots on this machine: file contents by hash, and one manifest a snapshot.

Layout below the folder::

    objects/ab/cdef...                 a file's bytes, named by their sha256, read-only
    hosts/<host>/<stamp>-<tree8>.jsonl the manifest: a header line, then a line an entry
    incoming-*/                        what a transfer has brought so far; becomes objects when it is whole

Nothing is trusted for being there: a manifest is checked against its digests when it is loaded, an object
against its name when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.entries import (
    BadEntry,
    Entry,
    FileEntry,
    Manifest,
    ManifestReader,
    check_facts,
)
from ddtree_deploy.snapshots.places import data_folder, usable

SCHEMA = 1
STAMP = "%Y%m%dT%H%M%SZ"
_NAME = re.compile(r"(\d{8}T\d{6}Z)-([0-9a-f]{8})\.jsonl\Z")
_INCOMING = "incoming-"
_ABANDONED = 24 * 3600  # seconds; no transfer takes that long
_AGAIN = "take a snapshot of the host again: what is damaged is fetched anew"


@dataclass(frozen=True)
class Header:
    """A snapshot's first line: whose it is, when it was taken (by this machine's clock, UTC) and of what.

    ``tree``, ``state`` and ``facts`` are those of :class:`~ddtree_deploy.snapshots.entries.Manifest`.
    """

    host: str
    taken: datetime
    tree: str
    state: str
    count: int
    facts: Mapping[str, Any]

    @property
    def version(self) -> str | None:
        """The engine's version on the host."""
        value = self.facts["root"].get("version")
        return None if value is None else str(value)

    def line(self) -> bytes:
        """The header as the manifest's first line."""
        value = {
            "schema": SCHEMA,
            "host": self.host,
            "taken": self.taken.isoformat(),
            "tree": self.tree,
            "state": self.state,
            "count": self.count,
            "facts": self.facts,
        }
        return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


class Snapshot:
    """One stored snapshot. Its header and entries are read when first asked for."""

    def __init__(self, store: Store, path: Path, host: str, manifest: Manifest | None = None) -> None:
        self._store = store
        self._path = path
        self.host = host
        if manifest:
            self.manifest = manifest

    def __repr__(self) -> str:
        return f"<Snapshot {self.id}>"

    @property
    def name(self) -> str:
        """The part of the id after the host: ``20260102T030405Z-89abcdef``."""
        return self._path.name.removesuffix(".jsonl")

    @property
    def id(self) -> str:
        """``<host>/<UTC stamp>-<first 8 digits of the tree digest>``; a host's ids sort by age."""
        return f"{self.host}/{self.name}"

    @cached_property
    def header(self) -> Header:
        """Raises DeployError DD402."""
        try:
            with self._path.open("rb") as handle:
                return _read_header(handle.readline())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._damaged(str(error)) from None

    @cached_property
    def manifest(self) -> Manifest:
        """Raises DeployError DD402."""
        header, reader = self.header, ManifestReader()
        told = {"tree": header.tree, "state": header.state, "count": header.count, "facts": header.facts}
        try:
            with self._path.open("rb") as handle:
                handle.readline()
                for line in handle:
                    reader.read(line)
            return reader.finish(told)
        except (OSError, BadEntry) as error:
            raise self._damaged(str(error)) from None

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Path -> entry, in the order of the paths' bytes. Raises DeployError DD402."""
        return self.manifest.entries

    def _damaged(self, why: str) -> DeployError:
        return DeployError("DD402", f"snapshot {self.id}: {why}", _AGAIN)

    def read(self, path: str) -> bytes:
        """The bytes of a file. Raises KeyError, DeployError DD402 when damaged, DD401 when not fetched."""
        entry = self.entries[path]
        if not isinstance(entry, FileEntry) or not entry.content:
            raise DeployError(
                "DD401",
                f"snapshot {self.id} does not hold the contents of {path}",
                "built objects and large files are fetched with --binaries",
            )
        return self._store.read_object(entry)

    def files(self, wants: Callable[[str], bool] | None = None) -> Iterator[tuple[str, bytes]]:
        """(path, bytes) of the files whose contents are held, in path order."""
        for path, entry in self.entries.items():
            if isinstance(entry, FileEntry) and entry.content and (wants is None or wants(path)):
                yield path, self._store.read_object(entry)


def _read_header(line: bytes) -> Header:
    raw = json.loads(line)
    if raw["schema"] != SCHEMA:
        raise ValueError(f"its schema {raw['schema']!r} is of another version of ddtree-deploy")
    header = Header(
        raw["host"], datetime.fromisoformat(raw["taken"]), raw["tree"], raw["state"], raw["count"], raw["facts"]
    )
    check_facts(header.facts)
    return header


class Store:
    """All snapshots in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects = folder / "objects"
        self._hosts = folder / "hosts"

    @classmethod
    def default(cls) -> Store:
        """The user's store."""
        return cls(data_folder() / "snapshots")

    # What is there.

    def snapshots(self, host: str | None = None) -> list[Snapshot]:
        """Every snapshot (of one host), oldest first."""
        found = []
        folders = [self._host_folder(host)] if host is not None else _listing(self._hosts)
        for folder in folders:
            for path in _listing(folder):
                if _NAME.match(path.name):
                    found.append(Snapshot(self, path, _host_of(folder, path)))
        return sorted(found, key=lambda item: (item.name, item.host))

    def newest(self, host: str) -> Snapshot | None:
        """The host's newest snapshot whose manifest is whole."""
        for snapshot in reversed(self.snapshots(host)):
            with suppress(DeployError):
                if snapshot.manifest:
                    return snapshot
        return None

    def find(self, text: str, host: str | None = None) -> Snapshot:
        """The snapshot that ``text`` names: an id, a host (its newest), ``latest``, or a unique prefix.

        A prefix is of the id, of its part after the host, or of the digest in it. Raises DeployError DD401.
        """
        every = self.snapshots(host)
        if text == "latest" and every:
            # Stamps order one host's snapshots; between hosts the clock decides.
            newest = {item.host: item for item in every}
            return max(newest.values(), key=lambda item: item.header.taken)
        exact = [item for item in every if text in (item.id, item.host)]
        if exact:
            return exact[-1]
        near = [
            item
            for item in every
            if text and any(name.startswith(text) for name in (item.id, item.name, item.name.rpartition("-")[2]))
        ]
        if len(near) == 1:
            return near[0]
        if near:
            raise DeployError(
                "DD401",
                f"{len(near)} snapshots begin with {text!r}",
                "give more of the name",
                [item.id for item in near[-20:]],
            )
        raise DeployError(
            "DD401",
            f"there is no snapshot {text!r}" + (f" of {host}" if host else ""),
            "`ddtree-deploy snapshots` lists them; `ddtree-deploy snapshot HOST` takes one",
        )

    def _host_folder(self, host: str) -> Path:
        raw = host.encode("utf-8", "surrogateescape")
        name = quote(raw, safe="@+=,~")
        if name.startswith((".", "-")):
            name = f"%{ord(name[0]):02X}{name[1:]}"
        if len(name) > 200:
            name = f"{name[:180]}%~{hashlib.sha256(raw).hexdigest()[:16]}"
        return self._hosts / name

    # Objects.

    def _object(self, sha256: str) -> str:
        return f"{self._objects}/{sha256[:2]}/{sha256[2:]}"

    def holds(self, entry: FileEntry) -> bool:
        """Whether there is an object of this name and size (its bytes are checked when they are read)."""
        try:
            return os.stat(self._object(entry.sha256)).st_size == entry.size  # noqa: PTH116
        except OSError:
            return False

    def complete(self, snapshot: Snapshot) -> bool:
        """Whether the store holds everything that the snapshot's manifest says it has."""
        return all(
            self.holds(entry) for entry in snapshot.entries.values() if isinstance(entry, FileEntry) and entry.content
        )

    def read_object(self, entry: FileEntry) -> bytes:
        """The file's bytes. Raises DeployError DD402; a damaged object is dropped, so that it is fetched again."""
        path = Path(self._object(entry.sha256))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DeployError("DD402", f"the contents of {entry.path}: {error.strerror}", _AGAIN) from None
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            with suppress(OSError):
                path.unlink()
            raise DeployError("DD402", f"the contents of {entry.path} do not have their hash", _AGAIN)
        return data

    # What arrives.

    @contextmanager
    def incoming(self) -> Iterator[Incoming]:
        """A place for one transfer. Leaving it without :meth:`Incoming.commit` leaves nothing behind."""
        with usable(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder = self._folder / f"{_INCOMING}{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir()
            try:
                yield Incoming(self, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        for path in _listing(self._folder):
            if path.name.startswith(_INCOMING):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _ABANDONED:
                        shutil.rmtree(path, ignore_errors=True)

    def adopt(self, files: Iterable[tuple[Path, str]]) -> None:
        """Move whole, checked files in as objects of these hashes."""
        made: set[str] = set()
        for path, sha256 in files:
            target = Path(self._object(sha256))
            if sha256[:2] not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(sha256[:2])
            path.replace(target)

    def add(self, host: str, manifest: Manifest) -> Snapshot:
        """Write the manifest of a snapshot whose objects are here."""
        folder = self._host_folder(host)
        folder.mkdir(parents=True, exist_ok=True)
        taken = datetime.now(UTC)
        header = Header(host, taken, manifest.tree, manifest.state, len(manifest.entries), manifest.facts)
        draft = folder / f".{secrets.token_hex(8)}"
        try:
            with draft.open("xb") as handle:
                handle.write(header.line())
                handle.writelines(manifest.lines)
                handle.flush()
                os.fsync(handle.fileno())
            # Ids sort by age even when the clock stands still or goes back.
            stamp = taken.replace(microsecond=0)
            earlier = self.snapshots(host)
            if earlier:
                last = datetime.strptime(earlier[-1].name.partition("-")[0], STAMP).replace(tzinfo=UTC)
                stamp = max(stamp, last + timedelta(seconds=1))
            while True:
                path = folder / f"{stamp.strftime(STAMP)}-{manifest.tree[:8]}.jsonl"
                try:
                    os.link(draft, path)
                except FileExistsError:
                    stamp += timedelta(seconds=1)
                else:
                    return Snapshot(self, path, host, manifest)
        finally:
            draft.unlink(missing_ok=True)


class Incoming:
    """The files of one transfer, each checked on arrival, not yet part of the store."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._arrived: dict[str, Path] = {}

    def holds(self, entry: FileEntry) -> bool:
        """Whether the file's bytes arrived already or are in the store."""
        return entry.sha256 in self._arrived or self._store.holds(entry)

    def put(self, entry: FileEntry, pieces: Iterable[bytes]) -> None:
        """Keep a file's bytes. Raises :class:`BadEntry` unless they have its size and sha256."""
        digest, size = hashlib.sha256(), 0
        again = entry.sha256 in self._arrived
        path = self._folder / (secrets.token_hex(8) if again else entry.sha256)
        with path.open("xb") as handle:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                handle.write(piece)
        if size != entry.size or digest.hexdigest() != entry.sha256:
            raise BadEntry(f"the bytes of {entry.path!r} do not have the size and hash that were announced")
        if again:
            path.unlink()
        else:
            path.chmod(0o444)
            self._arrived[entry.sha256] = path

    def commit(self, host: str, manifest: Manifest) -> Snapshot:
        """Make the transfer a snapshot. Raises :class:`BadEntry` when a file's bytes never arrived."""
        for entry in manifest.entries.values():
            if isinstance(entry, FileEntry) and entry.content and not self.holds(entry):
                raise BadEntry(f"the bytes of {entry.path!r} did not arrive")
        self._store.adopt((path, sha256) for sha256, path in self._arrived.items())
        return self._store.add(host, manifest)


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _host_of(folder: Path, manifest: Path) -> str:
    name = folder.name
    if "%~" not in name:
        return unquote(name, errors="surrogateescape")
    try:
        with manifest.open("rb") as handle:
            return str(json.loads(handle.readline())["host"])
    except (OSError, ValueError, LookupError, TypeError):
        return unquote(name.partition("%~")[0], errors="surrogateescape")
