"""Line search with a Python regular expression, with grep's output conventions. Pure: bytes in, hits out.

A line ends at ``\\n`` alone: a carriage return before it belongs to the line, as in grep. Bytes that are not
UTF-8 stand as lone surrogates. A file that holds a NUL byte is binary: that it matches is said, not where.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, Callable, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Pattern, Tuple

from .literals import Needles, needles
from .protocol import AgentError

MAX_CONTEXT = 100_000
_LEADING_FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))*")


class Hit(NamedTuple):
    """One line of output.

    ``kind`` is "match", "context", "gap" (between groups that are not adjacent), "binary" (the file matches),
    "file" (for ``-l``) or "count" (for ``-c``; ``line`` is the number of matching lines).
    """

    kind: str
    path: str
    line: int
    text: str

    def render(self) -> str:
        """The line as grep prints it, without its newline."""
        if self.kind == "match":
            return "%s:%d:%s" % (self.path, self.line, self.text)
        if self.kind == "context":
            return "%s-%d-%s" % (self.path, self.line, self.text)
        if self.kind == "count":
            return "%s:%d" % (self.path, self.line)
        if self.kind == "gap":
            return "--"
        return "Binary file %s matches" % self.path if self.kind == "binary" else self.path


def _bad(pattern: str, what: str, at: Optional[int] = None) -> AgentError:
    where = "" if at is None else " at character %d" % (at + 1)
    return AgentError(
        "DD008",
        "bad pattern: %s%s: %s" % (what, where, pattern),
        "patterns are Python regular expressions; -F searches for plain text",
    )


def compile_pattern(
    pattern: str, fixed: bool = False, ignore_case: bool = False, word: bool = False
) -> Tuple[Pattern[str], Optional[Needles]]:
    """The compiled pattern, and what a match needs to contain. Raises AgentError DD008 with the position."""
    source = re.escape(pattern) if fixed else pattern
    flags = re.IGNORECASE if ignore_case else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        # Before 3.11 flags in the middle only earned a warning: one rule for every host.
        warnings.simplefilter("error", DeprecationWarning)
        try:
            compiled = re.compile(source, flags)
            if "\n" in pattern and not compiled.flags & re.VERBOSE:
                raise _bad(pattern.replace("\n", "\\n"), "a line holds no newline", pattern.index("\n"))
            needed = needles(source, compiled.flags)
            if word:
                head = _LEADING_FLAGS.match(source)
                start = head.end() if head else 0
                # In verbose mode the pattern may end in a comment.
                end = "\n" if compiled.flags & re.VERBOSE else ""
                source = r"%s(?<!\w)(?:%s%s)(?!\w)" % (source[:start], source[start:], end)
                compiled = re.compile(source, flags)
        except re.error as error:
            raise _bad(pattern, error.msg, error.pos) from None
        except DeprecationWarning:
            raise _bad(pattern, "global flags not at the start of the expression") from None
        except (OverflowError, RecursionError, MemoryError, ValueError) as error:
            raise _bad(pattern, str(error) or "too large") from None
    return compiled, needed


class GrepOptions:
    """What to search for and what to print. ``before`` and ``after`` are None when no context was asked for."""

    def __init__(
        self,
        pattern: str,
        fixed: bool = False,
        ignore_case: bool = False,
        word: bool = False,
        before: Optional[int] = None,
        after: Optional[int] = None,
        files_only: bool = False,
        count: bool = False,
        prefilter: bool = True,
    ) -> None:
        """Raises AgentError DD008."""
        if files_only and count:
            raise AgentError("DD008", "-l and -c exclude each other", "ask for one of them")
        for value in (before, after):
            if value is not None and not 0 <= value <= MAX_CONTEXT:
                raise AgentError("DD008", "%d is not a number of context lines" % value)
        compiled, self.needles = compile_pattern(pattern, fixed, ignore_case, word)
        self.search: Callable[[str], Any] = compiled.search
        self.separated = before is not None or after is not None
        self.before = before or 0
        self.after = after or 0
        self.files_only = files_only
        self.count = count
        if not prefilter:
            self.needles = None

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> GrepOptions:
        """From a request's keys: ``pattern`` and, where set, the other parameters by name."""
        names = ("fixed", "ignore_case", "word", "before", "after", "files_only", "count")
        return cls(request["pattern"], **{name: request[name] for name in names if name in request})


def grep(files: Iterable[Tuple[str, bytes]], options: GrepOptions) -> Iterator[Hit]:
    """The hits in ``files`` (path, bytes), in the order in which the files come."""
    first_group = True
    for path, data in files:
        if options.needles is not None and not options.needles.may_match(data):
            continue
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        if not lines[-1]:
            lines.pop()
        search = options.search
        matched = [index for index, line in enumerate(lines) if search(line)]
        if not matched:
            continue
        if options.files_only:
            yield Hit("file", path, 0, "")
        elif options.count:
            yield Hit("count", path, len(matched), "")
        elif b"\0" in data:
            yield Hit("binary", path, 0, "")
        else:
            matching = set(matched)
            for start, stop in _groups(matched, len(lines), options.before, options.after):
                if options.separated and not first_group:
                    yield Hit("gap", path, 0, "")
                first_group = False
                for index in range(start, stop):
                    kind = "match" if index in matching else "context"
                    yield Hit(kind, path, index + 1, lines[index])


def _groups(matched: List[int], total: int, before: int, after: int) -> Iterator[Tuple[int, int]]:
    """Runs of adjacent output lines as (first index, index after the last)."""
    start, stop = max(0, matched[0] - before), min(total, matched[0] + after + 1)
    for index in matched[1:]:
        if index - before <= stop:
            stop = min(total, index + after + 1)
        else:
            yield start, stop
            start, stop = index - before, min(total, index + after + 1)
    yield start, stop
