"""The framed protocol: what is written is read back; what is altered, cut or lied about is found."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.agent import protocol
from ddtree_deploy.agent.protocol import (
    BLOB,
    MESSAGE,
    REQUEST,
    BlobReader,
    MessageReader,
    MessageWriter,
    ProtocolError,
    decode,
)

VALUES = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8), max_size=3)
BLOBS = st.lists(st.binary(max_size=2000), max_size=4)


def written(values, blobs) -> bytes:
    out = io.BytesIO()
    writer = MessageWriter(out.write)
    for value in values:
        writer.json(MESSAGE, value)
    for blob in blobs:
        writer.data(blob)
    writer.json(REQUEST, {"end": True})
    writer.end()
    return out.getvalue()


def read(data: bytes) -> list[tuple[bytes, bytes]]:
    return list(MessageReader(io.BytesIO(data).read).frames())


@given(st.lists(VALUES, max_size=3), BLOBS)
def test_round_trip(values, blobs):
    frames = read(written(values, blobs))
    assert [decode(payload) for kind, payload in frames if kind == MESSAGE] == values
    source = BlobReader(iter([payload for kind, payload in frames if kind == BLOB]))
    assert [source.take(len(blob)) for blob in blobs] == blobs
    source.finish()


@given(st.lists(VALUES, max_size=2), BLOBS, st.data())
def test_a_cut_message_is_found(values, blobs, data):
    whole = written(values, blobs)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        read(whole[:cut])


@given(st.lists(VALUES, max_size=2), BLOBS, st.data())
def test_an_altered_message_is_found(values, blobs, data):
    whole = bytearray(written(values, blobs))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        read(bytes(whole))


@given(st.binary(max_size=400))
def test_noise_is_never_taken_for_a_message(noise):
    with pytest.raises(ProtocolError):
        read(noise)


def test_two_messages_on_one_stream():
    one, two = written([{"a": 1}], [b"x"]), written([{"b": 2}], [])
    stream = MessageReader(io.BytesIO(one + two).read)
    assert decode(next(iter(list(stream.frames())))[1]) == {"a": 1}
    assert decode(next(iter(list(stream.frames())))[1]) == {"b": 2}


def frame(kind: bytes, payload: bytes) -> bytes:
    return protocol._HEADER.pack(kind, len(payload)) + payload


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ended"),
        (frame(b"X", b""), "unknown frame type"),
        (protocol._HEADER.pack(b"J", protocol.MAX_FRAME + 1), "too large"),
        (protocol._HEADER.pack(b"J", 100) + b"short", "ended"),
        (frame(b"Z", b"\0" * 36), "digest does not match"),
        (frame(b"B", b"not zlib"), "damaged"),
    ],
)
def test_hostile_bytes(data, says):
    with pytest.raises(ProtocolError, match=says):
        read(data)


@pytest.mark.parametrize("payload", [b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b'"x"'])
def test_only_json_objects_are_values(payload):
    with pytest.raises(ProtocolError):
        decode(payload)


def test_a_data_bomb_costs_no_memory_at_once():
    """A small frame that inflates to a gigabyte is handed on in small pieces, so that a reader can stop."""
    import zlib

    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(256)) + packer.flush()
    frames = MessageReader(io.BytesIO(frame(b"B", bomb)).read).frames()
    kind, piece = next(frames)
    assert kind == BLOB
    assert len(piece) <= protocol.CHUNK


@pytest.mark.parametrize(("pieces", "sizes"), [([b"abc"], [4]), ([b"abc"], [2]), ([], [1])])
def test_blobs_of_another_size_than_announced(pieces, sizes):
    source = BlobReader(iter(pieces))
    with pytest.raises(ProtocolError):
        for size in sizes:
            source.take(size)
        source.finish()
