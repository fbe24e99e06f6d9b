"""Whose line is it: the lines of a file through a series of patches.

A :class:`Weave` holds every line that any level of the file has, once and in order, with the level at which it
appears and the one at which it is gone: the interleaved delta of SCCS (Rochkind 1975). Level 0 is the file before
the series, level k the file after patch k. Any level can be read off, and a change made at one level is thereby
made at all later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddtree_deploy.patching.filediff import FileDiff, Hunk, Kind

#: The level at which lines go that stay to the end.
NEVER = 1 << 30


@dataclass(eq=False, slots=True)
class Line:
    """A line: its bytes with their newline if they have one, the level that brings it and the one that takes it."""

    text: bytes
    born: int
    died: int = NEVER

    def alive(self, level: int) -> bool:
        """Whether the file of that level has the line."""
        return self.born <= level < self.died


def split(data: bytes) -> list[bytes]:
    """The lines of ``data``, each with its ``\\n``; the last may have none."""
    pieces = data.split(b"\n")
    return [piece + b"\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


class OverlapError(Exception):
    """A change at one level meets lines that a later patch (``level``) brings or takes."""

    def __init__(self, level: int) -> None:
        super().__init__(f"level {level}")
        self.level = level


@dataclass(eq=False)
class Weave:
    """One file through the series. ``names``: its path at every level, None where it is not there."""

    lines: list[Line]
    names: list[str | None]
    touched: set[int] = field(default_factory=set)  # levels whose patches change it

    @classmethod
    def of(cls, data: bytes | None, path: str) -> Weave:
        """The file as it is at level 0."""
        lines = [Line(text, 0) for text in split(data or b"")]
        return cls(lines, [None if data is None else path])

    @property
    def top(self) -> int:
        """The last level."""
        return len(self.names) - 1

    @property
    def creator(self) -> int:
        """The level that brings the file; 0 for one that is there before the series."""
        return next(level for level, name in enumerate(self.names) if name is not None)

    def image(self, level: int) -> bytes | None:
        """The file's bytes at a level, None where it is not there."""
        if self.names[level] is None:
            return None
        return b"".join(line.text for line in self.lines if line.alive(level))

    def alive(self, level: int) -> list[int]:
        """The places in ``lines`` of the lines that the level has, in order."""
        return [at for at, line in enumerate(self.lines) if line.alive(level)]

    def grow(self) -> None:
        """Add a level that is like the last one."""
        self.names.append(self.names[-1])

    def patch(self, diff: FileDiff, places: Sequence[int]) -> None:
        """Do one file diff at the top level; ``places``: the 0-based line at which each of its hunks stands."""
        level = self.top
        self.touched.add(level)
        # Hunks are placed by the lines before any of them is applied; from the last one on, nothing moves.
        alive = self.alive(level)
        for hunk, place in reversed(list(zip(diff.hunks, places, strict=True))):
            self._hunk(hunk, alive, place, level)
        self.names[level] = None if diff.kind is Kind.DELETE else diff.new_path

    def _hunk(self, hunk: Hunk, alive: Sequence[int], place: int, level: int) -> None:
        first = at = alive[place - 1] + 1 if place else 0
        spans = iter(alive[place : place + len(hunk.old_lines)])
        woven: list[Line] = []
        for kind, text in hunk.lines:
            if kind == "+":
                woven.append(Line(text, level))
                continue
            span = next(spans)
            woven += self.lines[at:span]  # gone before
            line = self.lines[span]
            at = span + 1
            if kind == "-":
                line.died = level
            woven.append(line)
        self.lines[first:at] = woven

    def replace(self, level: int, place: int, removed: int, added: Sequence[bytes]) -> None:
        """At ``level`` and from it on: ``added`` in the place of ``removed`` lines, from line ``place`` of the top.

        Raises OverlapError where a later patch brings one of the removed lines; nothing is changed then.
        """
        alive = self.alive(self.top)
        gone = alive[place : place + removed]
        late = max((self.lines[at].born for at in gone), default=0)
        if late > level:
            raise OverlapError(late)
        at = gone[-1] + 1 if gone else alive[place - 1] + 1 if place else 0
        self.lines[at:at] = [Line(text, level) for text in added]
        for span in reversed(gone):
            if self.lines[span].born == level:
                del self.lines[span]
            else:
                self.lines[span].died = level
        self.touched.add(level)

    def delete(self, level: int) -> None:
        """The file goes at ``level``. Raises OverlapError where a later patch changes it."""
        late = max(self.touched, default=0)
        if late > level:
            raise OverlapError(late)
        self.lines = [line for line in self.lines if line.born != level]
        for line in self.lines:
            line.died = min(line.died, level)
        self.names[level:] = [None] * (len(self.names) - level)
        self.touched.add(level)

    def torn(self) -> int | None:
        """A level at which a line without a newline is not the last one, or None."""
        for level in range(len(self.names)):
            lines = [line for line in self.lines if line.alive(level)]
            if any(not line.text.endswith(b"\n") for line in lines[:-1]):
                return level
        return None

    def gap(self, place: int) -> tuple[set[int], set[int]]:
        """Around the place before line ``place`` of the top level: the levels that bring the lines beside it, and
        those that take the lines that stood there.
        """
        alive = self.alive(self.top)
        beside = {self.lines[at].born for at in alive[max(place - 1, 0) : place + 1]}
        first = alive[place - 1] + 1 if place else 0
        end = alive[place] if place < len(alive) else len(self.lines)
        return beside, {line.died for line in self.lines[first:end]}

    def spanned(self, place: int, count: int) -> set[int]:
        """The levels from 1 that bring the ``count`` lines at ``place`` of the top level, or take lines among them."""
        alive = self.alive(self.top)[place : place + count]
        lines = self.lines[alive[0] : alive[-1] + 1] if alive else []
        return {level for line in lines for level in (line.born, line.died)} - {0, NEVER}

    def without(self, level: int) -> bytes:
        """The lines at the end if that level were not: what it takes stays, what it brings does not come."""
        return b"".join(line.text for line in self.lines if line.born != level and line.died in (level, NEVER))

    def owners(self, place: int, removed: int) -> set[int]:
        """The levels that bring the lines at ``place`` of the top level."""
        return {self.lines[at].born for at in self.alive(self.top)[place : place + removed]}


class Weaves:
    """All files that a series touches, level by level."""

    def __init__(self) -> None:
        self.all: list[Weave] = []
        self._now: dict[str, Weave] = {}

    def __iter__(self) -> Iterator[Weave]:
        return iter(self.all)

    @property
    def now(self) -> dict[str, Weave]:
        """Path at the top level -> file, for those that are there."""
        return dict(self._now)

    def named(self, path: str) -> list[Weave]:
        """The files that have this path at some level."""
        return [weave for weave in self.all if path in weave.names]

    def take(self, path: str, data: bytes | None, level: int) -> Weave:
        """The file that is at ``path`` now; one that no patch has touched yet has ``data`` since level 0."""
        if path not in self._now:
            weave = Weave.of(data, path)
            while weave.top < level:
                weave.grow()
            self.all.append(weave)
            self._now[path] = weave
        return self._now[path]

    def grow(self) -> None:
        """Begin the next level."""
        for weave in self.all:
            weave.grow()

    def patch(self, diff: FileDiff, data: bytes | None, places: Sequence[int], level: int) -> Weave:
        """Do one file diff at ``level``; ``data`` is what its old path holds before. Returns the file."""
        start = diff.old_path if diff.old_path is not None else diff.new_path
        assert start is not None
        weave = self.take(start, data, level)
        if diff.kind is Kind.CREATE and weave.names[level] is not None:
            return weave  # made before, with the same bytes
        weave.patch(diff, places)
        if weave.names[level] != start:
            del self._now[start]
        if weave.names[level] is not None:
            self._now[str(weave.names[level])] = weave
        return weave
