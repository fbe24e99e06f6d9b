"""Brings a host's engine folders here: what the host says is checked whole before any of it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import ConnectionLost, Exchange, HostSession, Progress
from ddtree_deploy.snapshots.compare import compare
from ddtree_deploy.snapshots.entries import BadEntry, FileEntry, Manifest, ManifestReader
from ddtree_deploy.snapshots.store import Incoming, Snapshot, Store

MAX_LINE = 64 * 1024


@dataclass(frozen=True)
class Pulled:
    """What a snapshot brought. ``same``: the host is as the newest snapshot says, and no new one was made.

    ``earlier`` is the host's newest snapshot before this one; ``added``, ``changed`` (bytes, mode, kind or link
    target) and ``removed`` are paths against it. Bytes are what travelled, in both directions.
    """

    snapshot: Snapshot
    same: bool
    earlier: Snapshot | None
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    files_fetched: int
    bytes_received: int
    bytes_sent: int


def pull(session: HostSession, store: Store, *, binaries: bool = False, progress: Progress | None = None) -> Pulled:
    """Take a snapshot of the session's host into ``store``, in one exec.

    ``binaries`` brings the bytes of built objects and of files above 8 MiB too. Raises DeployError: DD3xx, DD403
    when a file changed under the agent's hands, DD406 for what cannot be read there, DD307 for a reply that cannot
    be true; then the store is as before.
    """
    host = session.target.name
    earlier = store.newest(host)
    known = earlier if earlier and store.complete(earlier) else None
    request = {
        "have": known.header.state if known else "",
        # With nothing to compare with, contents travel while the host is still reading.
        "stream": not binaries and not store.snapshots(),
        "binaries": binaries,
    }
    with session.exchange("snapshot", request) as exchange, _honest(host), store.incoming() as incoming:
        answer = _Answer(exchange.frames(), progress)
        opening = answer.opening()
        if opening == "same":
            answer.finish()
            if known is None:
                raise BadEntry("the host says that nothing changed, but nothing was known")
            return Pulled(known, True, known, (), (), (), 0, exchange.bytes_received, exchange.bytes_sent)
        if opening == "manifest":
            manifest, fetched = _compare(host, exchange, answer, incoming, progress)
        else:
            manifest, fetched = _stream(answer, incoming)
        snapshot = incoming.commit(host, manifest)
    differing = compare(earlier, snapshot) if earlier else []
    return Pulled(
        snapshot,
        False,
        earlier,
        tuple(diff.path for diff in differing if diff.status == "added") if earlier else tuple(manifest.entries),
        tuple(diff.path for diff in differing if diff.status not in ("added", "removed")),
        tuple(diff.path for diff in differing if diff.status == "removed"),
        fetched,
        exchange.bytes_received,
        exchange.bytes_sent,
    )


@contextmanager
def _honest(host: str) -> Iterator[None]:
    try:
        yield
    except BadEntry as error:
        raise DeployError(
            "DD307",
            f"{host}: the reply cannot be true: {error}",
            "nothing was kept; if it persists, look at the host's python",
        ) from error


def _stream(answer: _Answer, incoming: Incoming) -> tuple[Manifest, int]:
    reader, fetched = ManifestReader(), 0
    for line in answer.lines():
        entry = reader.read(line)
        if isinstance(entry, FileEntry) and entry.content:
            incoming.put(entry, answer.take(entry.size))
            fetched += 1
    return reader.finish(answer.finish()), fetched


def _compare(
    host: str, exchange: Exchange, answer: _Answer, incoming: Incoming, progress: Progress | None
) -> tuple[Manifest, int]:
    reader = ManifestReader()
    for line in answer.lines():
        reader.read(line)
    manifest = reader.finish(answer.finish())
    wanted: dict[str, tuple[int, FileEntry]] = {}
    for index, entry in enumerate(manifest.entries.values()):
        if isinstance(entry, FileEntry) and entry.content and not incoming.holds(entry):
            wanted.setdefault(entry.sha256, (index, entry))
    try:
        exchange.send({"want": [index for index, _entry in wanted.values()]})
    except OSError:
        raise ConnectionLost(host) from None
    contents = _Answer(exchange.frames(), progress)
    if contents.opening() not in ("data", "contents"):
        raise BadEntry("the contents do not follow the manifest")
    for done, (_index, entry) in enumerate(wanted.values()):
        incoming.put(entry, contents.take(entry.size))
        if progress and done % 64 == 0:
            progress(done, len(wanted), "files")
    contents.finish()
    return manifest, len(wanted)


class _Answer:
    """One answer message: its data stream, cut into lines and files, and the object that describes it."""

    def __init__(self, frames: Iterable[tuple[str, Any]], progress: Progress | None) -> None:
        self._frames = iter(frames)
        self._progress = progress
        self._told: dict[str, Any] = {}
        self._buffer = b""
        self._at = 0

    def opening(self) -> str:
        """What the answer is: its ``answer`` where that comes first, else "data"."""
        if not self._more():
            return str(self._told.get("answer"))
        return str(self._told.get("answer", "data"))

    def _more(self) -> bool:
        """Read on until there is more data; False at the message's end."""
        for kind, payload in self._frames:
            if kind == "P":
                self._say(payload)
            elif kind == "B":
                self._buffer = self._buffer[self._at :] + payload
                self._at = 0
                return True
            else:
                self._told = payload
        return False

    def _say(self, payload: Mapping[str, Any]) -> None:
        done, total = payload.get("done"), payload.get("total")
        if self._progress and isinstance(done, int) and isinstance(total, int):
            self._progress(done, total, str(payload.get("what")))

    def lines(self) -> Iterator[bytes]:
        """The data's lines with their newline; what :meth:`take` takes in between is not among them."""
        while True:
            end = self._buffer.find(b"\n", self._at)
            if end >= 0:
                line = self._buffer[self._at : end + 1]
                self._at = end + 1
                yield line
            elif len(self._buffer) - self._at > MAX_LINE:
                raise BadEntry("an entry is too long")
            elif not self._more():
                if self._at != len(self._buffer):
                    raise BadEntry("the data ends inside an entry")
                return

    def take(self, size: int) -> Iterator[bytes]:
        """The next ``size`` bytes of data, in pieces."""
        while size:
            piece = self._buffer[self._at : self._at + size]
            if piece:
                self._at += len(piece)
                size -= len(piece)
                yield piece
            elif not self._more():
                raise BadEntry("the data ends inside a file")

    def finish(self) -> dict[str, Any]:
        """The object that describes the answer, after the whole message was read and its digest found right."""
        if self._at != len(self._buffer) or self._more():
            raise BadEntry("the data is longer than announced")
        return self._told
