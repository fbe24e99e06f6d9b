"""What a shared library of 64-bit ELF says about itself: needed libraries, symbols, and its GPU machine code.

Layouts: the System V ABI's ELF chapters for headers and dynamic sections. CUDA's fat binaries are not documented
by their maker; the few header fields used here (kind, sizes, architecture) were read off libraries that nvcc built for
known architectures.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

_PT_LOAD, _PT_DYNAMIC, _SHT_DYNSYM = 1, 2, 11
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 10, 14, 15, 29
_FATBIN_MAGIC = 0xBA55ED50
_PTX, _ELF_IMAGE = 1, 2
_MAX_HEADERS = 4096
_MAX_SYMBOLS = 4_000_000
_MAX_IMAGES = 1_000_000


class ElfError(ValueError):
    """The file is not a whole 64-bit little-endian ELF object."""


class Section(NamedTuple):
    """A section's name, type, place in the file, and linked section."""

    name: bytes
    kind: int
    offset: int
    size: int
    link: int


class Elf:
    """An ELF file mapped into memory; a context manager. Raises ElfError for damaged files, OSError."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as handle:
            try:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise ElfError("empty file") from None
        head = self._map[:64]
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            self._map.close()
            raise ElfError("no 64-bit little-endian ELF file")
        fields = struct.unpack("<HHIQQQIHHHHHH", head[16:])
        self._segments_at, self._sections_at = fields[4], fields[5]
        self._segment_count, self._section_count, self._names_index = fields[9], fields[11], fields[12]

    def __enter__(self) -> Elf:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._map.close()

    def _bytes(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > len(self._map):
            raise ElfError("the file ends before what its headers name")
        return self._map[offset : offset + size]

    def _string(self, offset: int) -> bytes:
        end = self._map.find(b"\0", offset, offset + 65536) if 0 <= offset < len(self._map) else -1
        if end < 0:
            raise ElfError("a name leads out of the file")
        return self._map[offset:end]

    def _segments(self) -> List[Tuple[int, int, int, int]]:
        """Type, file offset, address and size in the file of every segment."""
        found = []
        for index in range(min(self._segment_count, _MAX_HEADERS)):
            kind, _flags, offset, address, _physical, size = struct.unpack(
                "<IIQQQQ", self._bytes(self._segments_at + 56 * index, 40)
            )
            found.append((kind, offset, address, size))
        return found

    def dynamic(self) -> Dict[str, Any]:
        """``needed``, ``runpath`` (RUNPATH, else RPATH; its parts) and ``soname`` of the dynamic section."""
        segments = self._segments()
        entries: List[Tuple[int, int]] = []
        for kind, offset, _address, size in segments:
            if kind == _PT_DYNAMIC:
                data = self._bytes(offset, size - size % 16)
                entries = list(struct.iter_unpack("<QQ", data))
        values = dict(entries)
        if _DT_STRTAB not in values:
            return {"needed": [], "runpath": [], "soname": None}
        strings = self._file_offset(segments, values[_DT_STRTAB])

        def text(at: int) -> str:
            return self._string(strings + at).decode("utf-8", "replace")

        path = values.get(_DT_RUNPATH, values.get(_DT_RPATH))
        return {
            "needed": [text(value) for tag, value in entries if tag == _DT_NEEDED],
            "runpath": [] if path is None else [part for part in text(path).split(":") if part],
            "soname": text(values[_DT_SONAME]) if _DT_SONAME in values else None,
        }

    @staticmethod
    def _file_offset(segments: List[Tuple[int, int, int, int]], address: int) -> int:
        for kind, offset, start, size in segments:
            if kind == _PT_LOAD and start <= address < start + size:
                return offset + address - start
        raise ElfError("an address lies in no segment")

    def sections(self) -> List[Section]:
        """All sections; none where the file was stripped of their headers."""
        raw = []
        for index in range(min(self._section_count, _MAX_HEADERS) if self._sections_at else 0):
            name, kind, _flags, _address, offset, size, link = struct.unpack(
                "<IIQQQQI", self._bytes(self._sections_at + 64 * index, 44)
            )
            raw.append((name, kind, offset, size, link))
        if not 0 < self._names_index < len(raw):
            return []
        names = raw[self._names_index][2]
        return [Section(self._string(names + name), *rest) for name, *rest in raw]

    def symbols(self, wanted: Optional[Set[bytes]] = None) -> Tuple[Set[bytes], Set[bytes]]:
        """Names of the undefined and of the defined dynamic symbols; weak undefined ones are left out.

        With ``wanted``, only defined ones among these are returned, and no undefined ones.
        """
        undefined: Set[bytes] = set()
        defined: Set[bytes] = set()
        sections = self.sections()
        for section in sections:
            if section.kind != _SHT_DYNSYM or not section.link < len(sections):
                continue
            strings = sections[section.link].offset
            if section.size // 24 > _MAX_SYMBOLS:
                raise ElfError("too many symbols")
            table = self._bytes(section.offset, section.size - section.size % 24)
            for name, info, _other, index, _value, _size in struct.iter_unpack("<IBBHQQ", table):
                if not name or (index == 0 and (wanted is not None or info >> 4 == 2)):
                    continue
                symbol = self._string(strings + name)
                if index == 0:
                    undefined.add(symbol)
                elif wanted is None or symbol in wanted:
                    defined.add(symbol)
        return undefined, defined

    def architectures(self) -> Dict[str, List[int]]:
        """GPU code in the file: ``sm`` and ``ptx``, each a sorted list such as [90, 120]."""
        found: Dict[int, Set[int]] = {_PTX: set(), _ELF_IMAGE: set()}
        for section in self.sections():
            if section.name in (b".nv_fatbin", b"__nv_relfatbin"):
                for kind, architecture in self._images(section):
                    found.setdefault(kind, set()).add(architecture)
        return {"sm": sorted(found[_ELF_IMAGE]), "ptx": sorted(found[_PTX])}

    def _images(self, section: Section) -> Iterator[Tuple[int, int]]:
        position, end, count = section.offset, section.offset + section.size, 0
        while position + 16 <= end:
            magic, _version, header, size = struct.unpack("<IHHQ", self._bytes(position, 16))
            if magic != _FATBIN_MAGIC:
                position += 8  # containers are aligned, with padding between them
                continue
            inner, stop = position + header, position + header + size
            while inner + 32 <= min(stop, end):
                kind, _unknown, head, length = struct.unpack("<HHIQ", self._bytes(inner, 16))
                yield kind, struct.unpack("<I", self._bytes(inner + 28, 4))[0]
                count += 1
                if head + length == 0 or count > _MAX_IMAGES:
                    raise ElfError("a damaged fat binary")
                inner += head + length
            position = max(stop, position + 8)
