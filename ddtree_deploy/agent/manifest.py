"""The snapshot operation: every file of the engine's folders by path, mode, size and sha256, and their bytes.

An *entry* is one line of the manifest, as a JSON object: ``path``, ``kind`` and

- for a file ``mode`` (permission bits), ``size``, ``sha256``, ``nlink``, ``content`` (false: its bytes stay on
  the host) and ``record`` ("ok", "differs", "unlisted", "unhashed": against the installer's RECORD; None
  without one);
- for a link ``target``; for anything else (a socket, a device) no more.

The *tree* digest covers what the files are; equal trees have equal digests on any host. The *state* digest
covers all that the manifest says, so a client that sends the state it knows can be told "same".
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import time
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import root as root_module
from .protocol import AgentError
from .tree import local_name
from .walk import (
    MAX_TEXT,
    RETRY_AFTER,
    Changed,
    Node,
    Reading,
    hash_file,
    is_built,
    open_folder,
    read_file,
    read_link,
    walk,
)

if TYPE_CHECKING:
    from .call import Call

MAX_RECORD = 64 * 1024 * 1024
_FIRST_PROGRESS, _PROGRESS = 0.3, 0.2  # seconds


_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def entry_line(entry: Dict[str, Any]) -> bytes:
    """The entry as one line of ASCII JSON."""
    return _encode(entry).encode("ascii") + b"\n"


def identity(path: str, kind: str, mode: Optional[int], sha256: Optional[str], target: Optional[str]) -> bytes:
    """What the tree digest covers of one entry; the digest is the sha256 over all entries', in path order."""
    text = "%s\0%s\0%s\0%s\0%s\0" % (path, kind, "" if mode is None else oct(mode), sha256 or "", target or "")
    return text.encode("utf-8", "surrogateescape")


def facts_line(facts: Dict[str, Any]) -> bytes:
    """What goes into the state digest after the entries' lines."""
    return _encode(facts).encode("ascii")


class Record:
    """The installer's RECORD: which hash it gave each file."""

    def __init__(self, dist_info: Optional[str], parts: List[str]) -> None:
        self.state = "absent"
        self.problem: Optional[str] = None
        self._rows: Dict[str, str] = {}
        if dist_info is None:
            return
        try:
            with open(os.path.join(dist_info, "RECORD"), "rb") as handle:
                data = handle.read(MAX_RECORD + 1)
            if len(data) > MAX_RECORD:
                raise ValueError("larger than %d bytes" % MAX_RECORD)
            self._parse(data, tuple(part + "/" for part in parts))
            # An editable install's lists nothing of the engine: it is no record of the tree.
            self.state = "present" if self._rows else "absent"
        except FileNotFoundError:
            pass
        except (OSError, ValueError, csv.Error) as error:
            self.state, self.problem = "damaged", str(error)
            self._rows = {}

    def _parse(self, data: bytes, prefixes: Tuple[str, ...]) -> None:
        for row in csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")):
            if not row:
                continue
            if len(row) != 3:
                raise ValueError("RECORD row %r has not three fields" % (row,))
            path = row[0].replace("\\", "/")
            if path.startswith(prefixes) and not path.endswith(".pyc"):
                self._rows[path] = row[1]

    def expected(self) -> int:
        """How many files of the engine's folders the RECORD lists."""
        return len(self._rows)

    def verdict(self, path: str, digest: bytes) -> Optional[str]:
        """What the RECORD says of a file with this sha256; each path is asked for once."""
        if self.state != "present":
            return None
        if path not in self._rows:
            return "unlisted"
        told = self._rows.pop(path)
        if not told.startswith("sha256="):
            return "unhashed"
        # As PEP 376 writes it: URL-safe base64 without padding.
        mine = base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
        return "ok" if told[7:].rstrip("=") == mine else "differs"

    def summary(self, counts: Dict[str, int]) -> Dict[str, Any]:
        """The RECORD as a whole, after every file was asked for: ``missing`` are its files that are not there."""
        return {"state": self.state, "problem": self.problem, "counts": counts, "missing": sorted(self._rows)}


class Scan(NamedTuple):
    """One entry of the walk, its line, and the bytes its hash is of when they may travel."""

    entry: Dict[str, Any]
    line: bytes
    data: Optional[bytes]


class Manifest:
    """The walk over one root; its digests and facts are known when :meth:`scan` is exhausted."""

    def __init__(self, root: root_module.Root, binaries: bool) -> None:
        self.site = root.site
        self._parts = root.parts()
        self._root = root
        self.binaries = binaries
        self.record = Record(root.dist_info, self._parts)
        self.count = 0
        self.facts: Dict[str, Any] = {}
        self.tree = self.state = ""

    def scan(self) -> Iterator[Scan]:
        """Every entry in path order. Raises AgentError DD403, DD406, DD509."""
        tree, state = hashlib.sha256(), hashlib.sha256()
        counts: Dict[str, int] = {}
        for node in walk(self.site, self._parts):
            try:
                entry, data = self._look(node)
            except FileNotFoundError:
                continue
            self.count += 1
            verdict = entry.get("record")
            if verdict:
                counts[verdict] = counts.get(verdict, 0) + 1
            mode, sha256, target = entry.get("mode"), entry.get("sha256"), entry.get("target")
            tree.update(identity(node.path, node.kind, mode, sha256, target))
            line = entry_line(entry)
            state.update(line)
            yield Scan(entry, line, data)
        self.facts = {"root": self._root.describe(), "record": self.record.summary(counts)}
        state.update(facts_line(self.facts))
        self.tree, self.state = tree.hexdigest(), state.hexdigest()

    def summary(self, answer: str) -> Dict[str, Any]:
        """What the client is told about the manifest as a whole."""
        return {
            "answer": answer,
            "tree": self.tree,
            "state": self.state,
            "count": self.count,
            "facts": self.facts,
        }

    def _look(self, node: Node) -> Tuple[Dict[str, Any], Optional[bytes]]:
        entry: Dict[str, Any] = {"path": node.path, "kind": node.kind}
        data: Optional[bytes] = None
        if node.kind == "link":
            entry["target"] = read_link(node)
        elif node.kind == "file":
            built = is_built(node.path)
            if not built:
                info, data = read_file(node, MAX_TEXT)
            if data is not None:
                digest = hashlib.sha256(data).digest()
            else:
                info, digest = hash_file(node)
            entry.update(
                mode=info.st_mode & 0o7777,
                size=info.st_size,
                sha256=digest.hex(),
                nlink=info.st_nlink,
                content=data is not None or self.binaries,
                record=self.record.verdict(node.path, digest),
            )
        return entry, data


class _Pace:
    """Tells the client how far the walk is, a few times a second."""

    def __init__(self, call: Call, total: int) -> None:
        self._call = call
        self._total = total
        self._next = time.monotonic() + _FIRST_PROGRESS

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS
            self._call.progress(done, max(done, self._total), "files")


def run_snapshot(call: Call) -> Dict[str, Any]:
    """Send what the client lacks of the engine's folders.

    Request: ``have`` (the state digest of the client's newest snapshot, or ""), ``stream`` (true: send entries
    and contents at once, in one pass), ``binaries`` (true: contents of built and large files too).

    Answers, by the result's ``answer``:

    - "same": the state is ``have``; nothing else is sent.
    - "stream": the data was, entry by entry, the entry's line and, where ``content`` is true, its bytes. Not
      with ``binaries``, whose hash must be known before the first byte is sent.
    - "contents": a first message was ``{"answer": "manifest"}`` with the entries' lines as data; then came the
      client's request ``{"want": [indices of entries]}``; then the bytes of those files, in that order.

    "stream" and "manifest" carry ``tree``, ``state``, ``count`` (of entries) and ``facts``.
    """
    request = call.request
    manifest = Manifest(root_module.locate(request), bool(request.get("binaries")))
    if request.get("stream") and not manifest.binaries:
        return _stream(call, manifest)
    return _compare(call, manifest, request)


def _stream(call: Call, manifest: Manifest) -> Dict[str, Any]:
    pace = _Pace(call, manifest.record.expected())
    for _entry, line, data in manifest.scan():
        call.data(line + (data or b""))
        pace.at(manifest.count)
        if call.deaf:
            break
    return manifest.summary("stream")


def _compare(call: Call, manifest: Manifest, request: Dict[str, Any]) -> Dict[str, Any]:
    pace = _Pace(call, manifest.record.expected())
    entries: List[Dict[str, Any]] = []
    lines: List[bytes] = []
    for entry, line, _data in manifest.scan():
        entries.append(entry)
        lines.append(line)
        pace.at(manifest.count)
    if manifest.state == request.get("have"):
        return {"answer": "same", "state": manifest.state}
    call.message(manifest.summary("manifest"))
    call.data(b"".join(lines))
    wanted = call.turn().get("want")
    if not isinstance(wanted, list):
        raise AgentError("DD307", "the client's request holds no list of wanted files")
    for index in wanted:
        if not isinstance(index, int) or not 0 <= index < len(entries) or not entries[index].get("content"):
            raise AgentError("DD307", "the client asks for %r, which is not offered" % (index,))
        _send(call, manifest.site, entries[index])
        if call.deaf:
            break
    return {"answer": "contents", "files": len(wanted)}


def _send(call: Call, site: str, entry: Dict[str, Any]) -> None:
    """The file's bytes, if they still are those of its entry; else AgentError DD403."""
    folder_path, _, name = entry["path"].rpartition("/")
    try:
        folder = open_folder(site, folder_path)
    except OSError:
        raise Changed(entry["path"]) from None
    try:
        node = Node(entry["path"], "file", folder, local_name(name))
        if entry["size"] > MAX_TEXT:
            digest, left = hashlib.sha256(), entry["size"]
            with Reading(node) as reading:
                while left:
                    piece = reading.read(min(left, 1 << 20))
                    if not piece:
                        break
                    digest.update(piece)
                    call.data(piece)
                    left -= len(piece)
            if digest.hexdigest() != entry["sha256"]:
                raise Changed(entry["path"])
            return
        for attempt in (1, 2):
            _info, data = read_file(node, MAX_TEXT)
            if data is not None and hashlib.sha256(data).hexdigest() == entry["sha256"]:
                call.data(data)
                return
            if attempt == 1:
                time.sleep(RETRY_AFTER)
        raise Changed(entry["path"])
    except FileNotFoundError:
        raise Changed(entry["path"]) from None
    finally:
        os.close(folder)
