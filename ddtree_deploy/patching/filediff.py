"""What a unified diff says, as data: hunks and the changes of files.

A line is everything up to and including ``\\n``; every other byte is content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

REGULAR, EXECUTABLE = 0o100644, 0o100755


class Kind(StrEnum):
    """What a file diff does to its paths."""

    MODIFY = "modify"
    CREATE = "create"
    DELETE = "delete"
    RENAME = "rename"
    COPY = "copy"
    UNCOPY = "uncopy"  # the reverse of a copy; no input has it


class HunkLine(NamedTuple):
    """One line of a hunk: ``" "``, ``"-"`` or ``"+"``, and its bytes with their newline if they have one."""

    kind: str
    text: bytes


@dataclass(frozen=True)
class Hunk:
    """One hunk whose header was checked against its lines. ``line`` is the header's line in the diff."""

    number: int
    line: int
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[HunkLine, ...]

    @cached_property
    def old_lines(self) -> tuple[bytes, ...]:
        """The lines that must be there: context and removed ones."""
        return tuple(line.text for line in self.lines if line.kind != "+")

    @cached_property
    def old(self) -> bytes:
        """The bytes that must be there."""
        return b"".join(self.old_lines)

    @cached_property
    def new(self) -> bytes:
        """The bytes that take their place."""
        return b"".join(line.text for line in self.lines if line.kind != "-")

    @cached_property
    def leading(self) -> int:
        """How many lines of context precede the first change."""
        return next(at for at, line in enumerate(self.lines) if line.kind != " ")

    @cached_property
    def trailing(self) -> int:
        """How many lines of context follow the last change."""
        return next(at for at, line in enumerate(reversed(self.lines)) if line.kind != " ")

    @property
    def index(self) -> int:
        """The 0-based line of the old file at which the header puts the hunk."""
        return self.old_start - 1 if self.old_count else self.old_start

    @property
    def new_index(self) -> int:
        """The 0-based line of the new file at which the header puts the hunk."""
        return self.new_start - 1 if self.new_count else self.new_start

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        swap = {" ": " ", "-": "+", "+": "-"}
        return replace(
            self,
            old_start=self.new_start,
            old_count=self.new_count,
            new_start=self.old_start,
            new_count=self.old_count,
            lines=tuple(HunkLine(swap[line.kind], line.text) for line in self.lines),
        )


@dataclass(frozen=True)
class FileDiff:
    """The change of one file.

    ``old_path`` is None for CREATE, ``new_path`` for DELETE and UNCOPY. Modes are git's (``0o100644``,
    ``0o100755``) and only there when the diff states a new or a changed one. ``part`` counts the
    messages (mails) of the input: a copy takes its source as it was at the beginning of its part.
    """

    source: str
    line: int
    kind: Kind
    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...] = ()
    old_mode: int | None = None
    new_mode: int | None = None
    part: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """The one or two paths, old one first."""
        both = (self.old_path, self.new_path)
        return tuple(dict.fromkeys(path for path in both if path is not None))


_REVERSED = {
    Kind.MODIFY: Kind.MODIFY,
    Kind.CREATE: Kind.DELETE,
    Kind.DELETE: Kind.CREATE,
    Kind.RENAME: Kind.RENAME,
    Kind.COPY: Kind.UNCOPY,
}


def reverse(diffs: Sequence[FileDiff]) -> tuple[FileDiff, ...]:
    """The diffs that undo ``diffs``, last one first.

    The reverse of a copy removes the copy if its hunks reverse; it does not look at the source.
    """
    undone = []
    for diff in reversed(diffs):
        kind = _REVERSED[diff.kind]
        undone.append(
            replace(
                diff,
                kind=kind,
                old_path=diff.new_path,
                new_path=None if kind is Kind.UNCOPY else diff.old_path,
                old_mode=diff.new_mode,
                new_mode=diff.old_mode,
                hunks=tuple(hunk.reversed() for hunk in diff.hunks),
            )
        )
    return tuple(undone)
