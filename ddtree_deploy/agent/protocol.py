"""The framed protocol between client and agent; both ends use this module.

A *message* is a run of frames: any number of ``Q`` / ``J`` / ``P`` / ``B`` frames and one last ``Z`` frame.
A frame is one type byte, a big-endian 32-bit length, and that many bytes. The payload of ``Z`` is the count
of frames before it (4 bytes) and the sha256 over all their bytes, so that a cut or altered stream is found.

====  =====================================================================================
type  payload
====  =====================================================================================
Q     JSON: a request ``{"op": ..., ...}`` (client to agent), or the agent's final result
J     JSON: an intermediate message
P     JSON: progress ``{"done": int, "total": int, "what": str}``
B     bytes: a piece of the message's one zlib stream of file contents
E     JSON: an error ``{"code", "message", "hint", "details"}``; a result follows no error
Z     end of message
====  =====================================================================================

Before its first frame the agent prints ``MAGIC + nonce + newline``: whatever a login shell printed
before that line is noise, and skipped.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

# The agent's one command-line argument. Free of quotes, '!', '$' and newlines: sh, fish and csh pass it alike.
LOADER = "import sys,zlib;r=sys.stdin.buffer;exec(zlib.decompress(r.read(int(r.readline()))))"
MAGIC = b"\x01ddtree-agent-1 "
MAX_NOISE = 64 * 1024
MAX_FRAME = 64 * 1024 * 1024
CHUNK = 256 * 1024

REQUEST, MESSAGE, PROGRESS, BLOB, ERROR, END = b"Q", b"J", b"P", b"B", b"E", b"Z"
_TYPES = frozenset((REQUEST, MESSAGE, PROGRESS, BLOB, ERROR, END))
_HEADER = struct.Struct(">cI")


class ProtocolError(Exception):
    """The other end's bytes are not a valid message."""


class AgentError(Exception):
    """A failure that the agent reports to the client: a stable code, a message, a hint, details.

    ``more``: further members of the error's frame.
    """

    def __init__(
        self,
        code: str,
        message: str,
        hint: Optional[str] = None,
        details: Sequence[str] = (),
        more: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = list(details)
        self.more = more or {}


class MessageWriter:
    """Writes one message after another through ``write(bytes)``; ``end()`` closes a message."""

    def __init__(self, write: Callable[[bytes], Any], flush: Optional[Callable[[], Any]] = None) -> None:
        self._write = write
        self._flush = flush
        self._restart()

    def _restart(self) -> None:
        self._count = 0
        self._digest = hashlib.sha256()
        self._zlib: Optional[Any] = None

    def frame(self, kind: bytes, payload: bytes) -> None:
        """Write one frame; the payload is at most ``MAX_FRAME`` bytes."""
        if len(payload) > MAX_FRAME:
            raise ProtocolError("frame of %d bytes is too large" % len(payload))
        header = _HEADER.pack(kind, len(payload))
        self._count += 1
        self._digest.update(header)
        self._digest.update(payload)
        self._write(header + payload)

    def json(self, kind: bytes, value: Any) -> None:
        """Write ``value`` as compact ASCII JSON in a frame of this kind, and let it leave at once."""
        self.frame(kind, json.dumps(value, separators=(",", ":"), sort_keys=True).encode("ascii"))
        if self._flush:
            self._flush()

    def data(self, piece: bytes) -> None:
        """Append ``piece`` to the message's zlib stream (level 1: the measured best from 27 Mbit/s up)."""
        if self._zlib is None:
            self._zlib = zlib.compressobj(1)
        for start in range(0, len(piece), CHUNK):
            packed = self._zlib.compress(piece[start : start + CHUNK])
            if packed:
                self.frame(BLOB, packed)

    def end(self) -> None:
        """Finish the zlib stream, write the ``Z`` frame and flush; the next message starts afresh."""
        if self._zlib is not None:
            self.frame(BLOB, self._zlib.flush())
        payload = struct.pack(">I", self._count) + self._digest.digest()
        self._write(_HEADER.pack(END, len(payload)) + payload)
        if self._flush:
            self._flush()
        self._restart()


class MessageReader:
    """Reads messages through ``read(n) -> bytes`` (fewer than n only at the end of the stream)."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def _exactly(self, size: int) -> bytes:
        pieces = []
        while size:
            piece = self._read(min(size, 1 << 20))
            if not piece:
                raise ProtocolError("the stream ended inside a message")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def frames(self) -> Iterator[Tuple[bytes, bytes]]:
        """Yield the frames of one message as (type, payload), ``B`` already decompressed; ends after a valid ``Z``.

        Raises ProtocolError for a cut stream, an unknown type, an oversized frame or a digest that differs.
        """
        count, digest = 0, hashlib.sha256()
        inflate: Optional[Any] = None
        while True:
            header = self._exactly(_HEADER.size)
            kind, size = _HEADER.unpack(header)
            if kind not in _TYPES:
                raise ProtocolError("unknown frame type %r" % kind)
            if size > MAX_FRAME:
                raise ProtocolError("frame of %d bytes is too large" % size)
            payload = self._exactly(size)
            if kind == END:
                if payload != struct.pack(">I", count) + digest.digest():
                    raise ProtocolError("the message's count or digest does not match")
                if inflate is not None and not inflate.eof:
                    raise ProtocolError("the message's data stream is cut")
                return
            count += 1
            digest.update(header)
            digest.update(payload)
            if kind != BLOB:
                yield kind, payload
                continue
            if inflate is None:
                inflate = zlib.decompressobj()
            while payload:
                try:
                    piece = inflate.decompress(payload, CHUNK)
                except zlib.error as error:
                    raise ProtocolError("the message's data stream is damaged: %s" % error) from None
                payload = inflate.unconsumed_tail
                if inflate.unused_data:
                    raise ProtocolError("bytes after the message's data stream")
                if piece:
                    yield BLOB, piece


def decode(payload: bytes) -> Dict[str, Any]:
    """The JSON object in a payload; raises ProtocolError for anything else."""
    try:
        value = json.loads(payload.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame is not JSON: %s" % error) from None
    if not isinstance(value, dict):
        raise ProtocolError("a frame is not a JSON object")
    return value


class BlobReader:
    """Splits a run of data pieces back into blobs of sizes known beforehand."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = b""

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes; raises ProtocolError if the stream ends before."""
        parts, have = [self._buffer], len(self._buffer)
        while have < size:
            piece = next(self._pieces, None)
            if piece is None:
                raise ProtocolError("the data stream is shorter than announced")
            parts.append(piece)
            have += len(piece)
        data = b"".join(parts)
        self._buffer = data[size:]
        return data[:size]

    def finish(self) -> None:
        """Raises ProtocolError if bytes are left over."""
        if self._buffer or next(self._pieces, None) is not None:
            raise ProtocolError("the data stream is longer than announced")
