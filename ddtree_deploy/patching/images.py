"""What a path holds: a file's bytes and mode, a symbolic link, or nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

EXECUTABLE = 0o111


@dataclass(frozen=True, slots=True)
class FileImage:
    """A regular file: its bytes and permission bits (``st_mode & 0o7777``)."""

    data: bytes
    mode: int = 0o644

    @property
    def executable(self) -> bool:
        """True when any execute bit is set."""
        return bool(self.mode & EXECUTABLE)

    def with_executable(self, on: bool) -> FileImage:
        """The same file, executable by whoever may read it, or by nobody; the other bits stay."""
        bits = (self.mode & 0o444) >> 2
        return FileImage(self.data, (self.mode & ~EXECUTABLE) | (bits if on else 0))


@dataclass(frozen=True, slots=True)
class LinkImage:
    """A symbolic link and what it points to. Nothing is ever written to or through one."""

    target: str


Image = FileImage | LinkImage | None


def sha256(data: bytes) -> str:
    """The sha256 of ``data`` in lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def fingerprint(image: Image) -> str | None:
    """A file's sha256; ``link:TARGET`` for a link, which equals no file's; None for nothing."""
    if isinstance(image, FileImage):
        return sha256(image.data)
    if isinstance(image, LinkImage):
        return "link:" + image.target
    return None
