"""One operation under way on the agent's side: its request, the data that came with it, and the way back."""

from __future__ import annotations

import hashlib
import os
import select
from typing import Any, Callable, Dict, Iterator, Optional

from . import protocol
from .protocol import MessageReader, MessageWriter, ProtocolError


class Call:
    """One operation under way: its request, the data that came with it, and the way back."""

    def __init__(
        self, request: Dict[str, Any], reader: MessageReader, writer: MessageWriter, stdin: Optional[int] = None
    ) -> None:
        self.request = request
        self._stdin = stdin
        self.blobs: Dict[str, bytes] = {}
        self._reader = reader
        self._writer = writer
        self.deaf = False

    def _tell(self, action: Callable[[], None]) -> None:
        # A client that went away must not stop a commit half-way.
        if not self.deaf:
            try:
                action()
            except OSError:
                self.deaf = True

    def progress(self, done: int, total: int, what: str) -> None:
        """Tell the client how far the work is."""
        self._tell(lambda: self._writer.json(protocol.PROGRESS, {"done": done, "total": total, "what": what}))

    def message(self, value: Dict[str, Any]) -> None:
        """Send an intermediate message."""
        self._tell(lambda: self._writer.json(protocol.MESSAGE, value))

    def data(self, piece: bytes) -> None:
        """Append bytes to the answer's data stream."""
        self._tell(lambda: self._writer.data(piece))

    def turn(self) -> Dict[str, Any]:
        """End the message so far and wait for the client's next request object (same exec, one round trip)."""
        self._tell(self._writer.end)
        return read_request(self._reader, {})

    def client_gone(self) -> bool:
        """Whether the client's end of our stdin is closed: it sends nothing after its request, and keeps it open."""
        if self._stdin is None:
            return False
        ready, _writable, _failed = select.select([self._stdin], [], [], 0)
        return bool(ready) and not os.read(self._stdin, 1)

    def finish(self, kind: bytes, value: Dict[str, Any]) -> None:
        """Send the last frame and end the answer."""
        self._tell(lambda: self._writer.json(kind, value))
        self._tell(self._writer.end)


def read_request(reader: MessageReader, blobs: Dict[str, bytes]) -> Dict[str, Any]:
    """One whole request message; its blobs (sizes and sha256 announced in it) land in ``blobs``."""
    frames = reader.frames()
    kind, payload = next(frames)
    if kind != protocol.REQUEST:
        raise ProtocolError("a request begins with a Q frame")
    request = protocol.decode(payload)

    def pieces() -> Iterator[bytes]:
        for piece_kind, piece in frames:
            if piece_kind != protocol.BLOB:
                raise ProtocolError("a request's Q frame is followed by data alone")
            yield piece

    source = protocol.BlobReader(pieces())
    for entry in request.pop("blobs", []):
        blob = source.take(int(entry["size"]))
        if hashlib.sha256(blob).hexdigest() != entry["sha256"]:
            raise ProtocolError("a blob does not have the announced sha256")
        blobs[entry["sha256"]] = blob
    source.finish()
    return request
