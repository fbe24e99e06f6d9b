"""Putting hunks onto bytes: exact, or refused.

Where a hunk goes:

1. Nothing is ever fuzzed: every context and removed line must be there, byte for byte.
2. If every hunk of the file matches at the line its header states, that is where they go.
3. If one does not, the file was shifted and the stated lines of the whole file are no evidence: then every
   hunk's lines must occur in the file exactly once, in the order of the hunks and without overlap.
4. A hunk without trailing context ends at the end of the file; one whose old start is line 1 (or 0) and that
   has less leading than trailing context begins at the beginning. (git anchors every hunk at line 1; one with
   full leading context is as well located as any other, so here rule 3 decides about it.) A hunk without
   leading context at another line goes to that line only.
5. A hunk without any context goes to its stated line only, and only if it removes a line: a pure insertion has
   nothing to compare with. (In an empty file there is only one place.)
6. A line without a newline is the last one of the file, before and after.

``exact`` says that the whole file's hash is the one that the diff was made for: then stated lines are right and
rules 4 and 5 have nothing to add. Rules 1 and 6 hold always.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ddtree_deploy.patching.filediff import Hunk
from ddtree_deploy.patching.problems import Problem, RefusedError, printable

_MANY = 5


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a hunk was put: its number, the 1-based line, and how far from the stated line that is."""

    number: int
    line: int
    offset: int


class _Text:
    """A file's bytes with the offsets at which its lines begin; the last offset is the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        pieces = data.split(b"\n")
        self.starts = [0, *accumulate(len(piece) + 1 for piece in pieces[:-1])]
        if pieces[-1]:
            self.starts.append(len(data))
        self.count = len(self.starts) - 1

    def line(self, at: int) -> bytes:
        return self.data[self.starts[at] : self.starts[at + 1]]

    def has(self, block: bytes, at: int) -> bool:
        """Whether the whole lines ``block`` stand at line ``at``."""
        if not 0 <= at <= self.count:
            return False
        start = self.starts[at]
        return self.data.startswith(block, start) and self.whole(block, start)

    def whole(self, block: bytes, start: int) -> bool:
        end = start + len(block)
        if block:
            return block.endswith(b"\n") or end == len(self.data)
        return start == 0 or self.data[start - 1] == ord("\n")

    def find(self, block: bytes, limit: int) -> list[int]:
        """The lines, in order, at which the whole lines ``block`` (not empty) stand: the first ``limit``."""
        found = []
        if self.data.startswith(block) and self.whole(block, 0):
            found.append(0)
        needle = b"\n" + block
        at = self.data.find(needle)
        while at >= 0 and len(found) < limit:
            if self.whole(block, at + 1):
                found.append(bisect_left(self.starts, at + 1))
            at = self.data.find(needle, at + 1)
        return found


def apply_hunks(
    data: bytes, hunks: Sequence[Hunk], *, path: str, source: str, exact: bool = False
) -> tuple[bytes, tuple[Placement, ...]]:
    """The bytes after ``hunks`` (of one file, in order) and where each one went.

    ``path`` and ``source`` (the diff's name) are for messages. Raises RefusedError with a problem for every
    hunk that has no place (DD102) or more than one (DD103); see the module's rules.
    """
    text = _Text(data)
    try:
        places = _place(text, hunks, path, source, exact)
    except RefusedError as refused:
        undo = [hunk.reversed() for hunk in hunks]
        try:
            _place(text, undo, path, source, exact=False)
        except RefusedError:
            raise refused from None
        raise RefusedError(refused.problems, f"{path} looks already patched: the reverse matches it") from None
    pieces, done = [], 0
    for hunk, at in zip(hunks, places, strict=True):
        start = text.starts[at]
        pieces += [data[done:start], hunk.new]
        done = start + len(hunk.old)
    pieces.append(data[done:])
    placements = (Placement(hunk.number, at + 1, at - hunk.index) for hunk, at in zip(hunks, places, strict=True))
    return b"".join(pieces), tuple(placements)


def _place(text: _Text, hunks: Sequence[Hunk], path: str, source: str, exact: bool) -> list[int]:
    """The 0-based line of every hunk, or RefusedError."""
    stated = [hunk.index for hunk in hunks]
    reasons = [_stated_reason(text, hunk, exact) for hunk in hunks]
    if not any(reasons):
        return stated
    places: list[int] = []
    wrong: list[Problem] = []  # has no place, whatever the other hunks do
    unsure: list[Problem] = []  # would be right where it is stated, were it not for the others
    moved = end = 0
    for hunk, reason in zip(hunks, reasons, strict=True):
        where = f"{path}: hunk {hunk.number} ({source}:{hunk.line})"
        try:
            at = _find(text, hunk, reason, moved)
            if at < end:
                raise _NowhereError("DD102", f"matches only at line {at + 1}, not after the hunk above it")
        except _NowhereError as nowhere:
            (wrong if reason else unsure).append(Problem(nowhere.code, f"{where} {nowhere}"))
            continue
        moved, end = at - hunk.index, at + len(hunk.old_lines)
        places.append(at)
    if wrong or unsure:
        raise RefusedError(wrong or unsure)
    return places


class _NowhereError(Exception):
    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def _stated_reason(text: _Text, hunk: Hunk, exact: bool) -> str | None:
    """Why the hunk may not go to its stated line, or None. An empty text is not returned."""
    at = hunk.index
    if not text.has(hunk.old, at):
        return "does not match"
    return _unfit(text, hunk, at, exact)


def _unfit(text: _Text, hunk: Hunk, at: int, exact: bool) -> str | None:
    """Why a hunk whose lines stand at ``at`` may all the same not go there, or None."""
    goes_on = at + len(hunk.old_lines) < text.count
    if goes_on and hunk.new and not hunk.new.endswith(b"\n"):
        return f"ends in a line without a newline, but the file goes on after line {at + len(hunk.old_lines)}"
    if exact:
        return None
    if not hunk.leading and not hunk.trailing:
        if not hunk.old and text.count:
            return "inserts without any context to compare; make the diff with context (diff -u)"
        return None
    if goes_on and not hunk.trailing:
        return f"ends at the end of the file, but the file goes on after line {at + len(hunk.old_lines)}"
    if at and hunk.old_start <= 1 and hunk.leading < hunk.trailing:
        return f"begins at the beginning of the file, but its lines stand at line {at + 1}"
    return None


def _find(text: _Text, hunk: Hunk, reason: str | None, moved: int) -> int:
    """The one line at which the hunk's lines stand in a file whose stated lines are no evidence."""
    if not hunk.leading and not hunk.trailing:
        if reason and text.has(hunk.old, hunk.index):
            raise _NowhereError("DD102", reason)
        if not hunk.old:
            at = hunk.index
            raise _NowhereError("DD102", f"inserts without any context at line {at + 1}, where no whole line ends")
        if reason:
            raise _NowhereError("DD102", f"has no context and {_mismatch(text, hunk, [hunk.index])}")
        raise _NowhereError("DD102", "has no context, and another hunk shows that the file's lines have moved")
    found = text.find(hunk.old, _MANY + 1)
    if not found:
        longest = max(range(len(hunk.old_lines)), key=lambda at: len(hunk.old_lines[at]))
        tries = [at - longest for at in text.find(hunk.old_lines[longest], _MANY)]
        raise _NowhereError("DD102", _mismatch(text, hunk, [hunk.index, hunk.index + moved, *tries]))
    if len(found) > 1:
        lines = " and ".join(
            [", ".join(str(at + 1) for at in found[:-1]), "more" if len(found) > _MANY else str(found[-1] + 1)]
        )
        why = "" if reason else ", and another hunk shows that the file's lines have moved"
        raise _NowhereError("DD103", f"matches at lines {lines}{why}")
    at = found[0]
    unfit = _unfit(text, hunk, at, exact=False)
    if unfit:
        raise _NowhereError("DD102", unfit)
    if at != hunk.index and not hunk.leading:
        raise _NowhereError("DD102", f"has no leading context, so it belongs at line {hunk.index + 1}, not at {at + 1}")
    return at


def _mismatch(text: _Text, hunk: Hunk, tries: Sequence[int]) -> str:
    """The first line that differs at the one of ``tries`` where most of the hunk's lines stand."""
    want = hunk.old_lines

    def line(at: int) -> bytes | None:
        return text.line(at) if 0 <= at < text.count else None

    start = max(tries, key=lambda start: sum(line(at) == one for at, one in enumerate(want, start)))
    at, expected = next((at, one) for at, one in enumerate(want, start) if line(at) != one)
    found = line(at)
    place = f"does not match at line {at + 1}: expected {_shown(expected)}, "
    if found is None:
        return place + f"the file ends after line {text.count}"
    return place + f"found {_shown(found)}{_ends(expected, found)}"


def _shown(line: bytes) -> str:
    return printable(line.removesuffix(b"\n"))


def _ends(want: bytes, found: bytes) -> str:
    """What to say when two lines differ only in how they end."""
    if want.rstrip(b"\r\n") != found.rstrip(b"\r\n"):
        return ""
    if found.endswith(b"\r\n") and want.endswith(b"\n"):
        return " (the file has CRLF line ends, the diff has LF)"
    if want.endswith(b"\r\n") and found.endswith(b"\n"):
        return " (the diff has CRLF line ends, the file has LF)"
    if found.endswith(b"\n"):
        return " (the diff says that the file ends without a newline)"
    return " (the file ends without a newline, the diff says it has one)"
