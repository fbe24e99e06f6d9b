"""Small ELF shared objects, made for the tests: dynamic section, symbols, and CUDA's container of machine code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_HEADER, _SEGMENT, _SECTION = 64, 56, 64


def fat_binary(images: Sequence[tuple[int, int]]) -> bytes:
    """A container of (kind, architecture) images: kind 1 is PTX, 2 machine code."""
    body = b""
    for kind, architecture in images:
        code = b"\xaa" * 24
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, architecture)
        body += header.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def shared_object(
    needed: Sequence[str] = (),
    runpath: str | None = None,
    undefined: Sequence[str] = (),
    defined: Sequence[str] = (),
    images: Sequence[tuple[int, int]] = (),
) -> bytes:
    """The bytes of a 64-bit shared object."""
    strings = b"\0"

    def string(text: str) -> int:
        nonlocal strings
        strings += text.encode() + b"\0"
        return len(strings) - len(text) - 1

    tags = [(1, string(name)) for name in needed] + ([(29, string(runpath))] if runpath is not None else [])
    symbols = b"\0" * 24
    for names, index in ((undefined, 0), (defined, 1)):
        for name in names:
            symbols += struct.pack("<IBBHQQ", string(name), 0x12, 0, index, 0, 0)
    names = b"\0.dynstr\0.dynsym\0.nv_fatbin\0.shstrtab\0"
    parts = [strings, symbols, fat_binary(images) if images else b"", names]
    offsets, at = [], _HEADER + 2 * _SEGMENT
    for part in parts:
        at += -at % 8
        offsets.append(at)
        at += len(part)
    dynamic_at = at + -at % 8
    dynamic = b"".join(struct.pack("<QQ", *pair) for pair in [*tags, (5, offsets[0]), (10, len(strings)), (0, 0)])
    sections_at = dynamic_at + len(dynamic)

    def section(name: bytes, kind: int, index: int, link: int = 0) -> bytes:
        place = names.index(name)
        return struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, offsets[index], len(parts[index]), link, 0, 8, 0)

    sections = [
        b"\0" * _SECTION,
        section(b".dynstr", 3, 0),
        section(b".dynsym", 11, 1, 1),
        section(b".nv_fatbin", 1, 2),
        section(b".shstrtab", 3, 3),
    ]
    size = sections_at + len(sections) * _SECTION
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER, sections_at, 0, 64, _SEGMENT, 2, _SECTION, len(sections), 4
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    points = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, 0, len(dynamic), len(dynamic), 8)
    out = bytearray(size)
    for start, data in ((0, head + load + points), *zip(offsets, parts, strict=True), (dynamic_at, dynamic)):
        out[start : start + len(data)] = data
    out[sections_at:] = b"".join(sections)
    return bytes(out)
