"""The entries of a manifest as typed values; everything that a host says about its files is checked here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.agent.manifest import entry_line, facts_line, identity
from ddtree_deploy.agent.root import PACKAGE, PARTS

MAX_FILES = 500_000
MAX_FILE_BYTES = 4 << 30
MAX_TOTAL_BYTES = 64 << 30
MAX_PATH = 4096
MAX_NAME = 255

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_ROOTS = tuple(f"{PACKAGE}/{part}/" for part in PARTS)
_VERDICTS = (None, "ok", "differs", "unlisted", "unhashed")


class BadEntry(ValueError):
    """An entry that no honest and well agent sends."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file: permission bits, size in bytes, sha256 in hex; ``content`` tells whether its bytes are kept.

    ``record`` is the installer's RECORD on it: ok, differs, unlisted, unhashed; None without a RECORD.
    """

    path: str
    mode: int
    size: int
    sha256: str
    nlink: int
    content: bool
    record: str | None
    kind: str = "file"


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """A symbolic link and the text it holds."""

    path: str
    target: str
    kind: str = "link"


@dataclass(frozen=True, slots=True)
class OtherEntry:
    """A socket, a device or a FIFO."""

    path: str
    kind: str = "other"


Entry = FileEntry | LinkEntry | OtherEntry


def path_bytes(path: str) -> bytes:
    """The path's bytes on the host; raises UnicodeEncodeError for what no host can have sent."""
    return path.encode("utf-8", "surrogateescape")


def line_of(entry: Entry) -> bytes:
    """The entry's line, as an agent writes it."""
    return entry_line({name: getattr(entry, name) for name in entry.__slots__})


def tree_digest(entries: Iterable[Entry]) -> str:
    """The sha256, in hex, of what the entries (in path order) are, whatever else is known of them."""
    digest = hashlib.sha256()
    for entry in entries:
        mode, sha256 = (entry.mode, entry.sha256) if isinstance(entry, FileEntry) else (None, None)
        target = entry.target if isinstance(entry, LinkEntry) else None
        digest.update(identity(entry.path, entry.kind, mode, sha256, target))
    return digest.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """A whole manifest that is true to its digests: entries by path, in order, and the lines they came as.

    ``tree`` is the digest of what the files are, ``state`` of all that the manifest says. ``facts`` are the
    host's: ``root`` (site, version, installer, python ...) and ``record`` (its state, counts, missing files).
    """

    tree: str
    state: str
    facts: Mapping[str, Any]
    entries: Mapping[str, Entry]
    lines: Sequence[bytes]


class ManifestReader:
    """Reads a manifest line by line; raises :class:`BadEntry` for the first thing that cannot be true."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lines: list[bytes] = []
        self._last = b""
        self._folders: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._total = 0

    def read(self, line: bytes) -> Entry:
        """The entry in a line of JSON."""
        try:
            raw = json.loads(line.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise BadEntry(f"an entry is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise BadEntry("an entry is not a JSON object")
        self._check_path(raw.get("path"))
        entry = _entry(raw)
        if raw.keys() != set(entry.__slots__):
            raise BadEntry(f"the entry of {entry.path!r} says too much")
        if isinstance(entry, FileEntry):
            self._total += entry.size if entry.content else 0
            if self._sizes.setdefault(entry.sha256, entry.size) != entry.size:
                raise BadEntry(f"the sha256 of {entry.path!r} has two sizes")
        self._entries[entry.path] = entry
        self._lines.append(line)
        if len(self._lines) > MAX_FILES or self._total > MAX_TOTAL_BYTES:
            raise BadEntry(f"more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes")
        return entry

    def finish(self, told: Mapping[str, Any]) -> Manifest:
        """The manifest, if it is as ``told``: its ``tree``, ``state``, ``count`` and ``facts``."""
        facts = check_facts(told.get("facts"))
        tree, state = tree_digest(self._entries.values()), hashlib.sha256(b"".join(self._lines))
        state.update(facts_line(facts))
        if (told.get("tree"), told.get("state"), told.get("count")) != (tree, state.hexdigest(), len(self._lines)):
            raise BadEntry("the manifest does not have the digest that was announced")
        return Manifest(tree, state.hexdigest(), facts, self._entries, self._lines)

    def _check_path(self, path: Any) -> None:
        if not isinstance(path, str) or not path:
            raise BadEntry(f"an entry's path is {path!r}")
        try:
            raw = path_bytes(path)
        except UnicodeEncodeError:
            raise BadEntry(f"the path {path!r} is not text") from None
        components = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in components):
            raise BadEntry(f"the path {path!r} is not a clean relative path")
        if len(raw) > MAX_PATH or any(len(path_bytes(part)) > MAX_NAME for part in components):
            raise BadEntry(f"the path {path[:80]!r}... is too long")
        if not path.startswith(_ROOTS):
            raise BadEntry(f"the path {path!r} is outside the engine's folders")
        if raw == self._last:
            raise BadEntry(f"the path {path!r} comes twice")
        if raw < self._last:
            raise BadEntry(f"the path {path!r} is out of order")
        self._last = raw
        parents = ["/".join(components[:end]) for end in range(1, len(components))]
        if path in self._folders or any(parent in self._entries for parent in parents):
            raise BadEntry(f"the path {path!r} is both a folder and not")
        self._folders.update(parents)


def check_facts(facts: Any) -> dict[str, Any]:
    """``facts``, if they have the shape of a host's facts; else raises :class:`BadEntry`."""
    if not isinstance(facts, dict) or facts.keys() != {"root", "record"}:
        raise BadEntry("the facts about the host are not complete")
    root, record = facts["root"], facts["record"]
    if not isinstance(root, dict) or not isinstance(record, dict):
        raise BadEntry("the facts about the host are not objects")
    missing = record.get("missing")
    if not isinstance(missing, list) or not all(isinstance(path, str) for path in missing):
        raise BadEntry("the RECORD's missing files are not a list of paths")
    return facts


def _integer(raw: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = raw.get(key)
    if type(value) is not int or not least <= value <= most:
        raise BadEntry(f"the {key} of {raw['path']!r} is {value!r}")
    return value


def _entry(raw: Mapping[str, Any]) -> Entry:
    path, kind = raw["path"], raw.get("kind")
    if kind == "file":
        sha256, content, record = raw.get("sha256"), raw.get("content"), raw.get("record")
        if not isinstance(sha256, str) or not _SHA256.match(sha256):
            raise BadEntry(f"the sha256 of {path!r} is {sha256!r}")
        if type(content) is not bool or record not in _VERDICTS:
            raise BadEntry(f"the entry of {path!r} is not complete")
        return FileEntry(
            path,
            _integer(raw, "mode", 0, 0o7777),
            _integer(raw, "size", 0, MAX_FILE_BYTES),
            sha256,
            _integer(raw, "nlink", 0, 1 << 32),
            content,
            record,
        )
    if kind == "link":
        target = raw.get("target")
        if not isinstance(target, str) or not target or "\0" in target or len(target) > MAX_PATH:
            raise BadEntry(f"the target of the link {path!r} is {target!r}")
        try:
            path_bytes(target)
        except UnicodeEncodeError:
            raise BadEntry(f"the target of the link {path!r} is not text") from None
        return LinkEntry(path, target)
    if kind == "other":
        return OtherEntry(path)
    raise BadEntry(f"the kind of {path!r} is {kind!r}")
