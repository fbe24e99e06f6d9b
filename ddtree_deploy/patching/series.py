"""The ``series`` file of a family: one patch name a line, in apply order, as quilt writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree_deploy.patching.problems import Problem, printable

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_STRIP = re.compile(r"-p(\d)")


@dataclass(frozen=True, slots=True)
class SeriesEntry:
    """A patch of the series, the line (from 1) that names it, and its own strip level if it has one."""

    name: str
    line: int
    strip: int | None


def read_series(data: bytes, where: str, *, strips: bool) -> tuple[list[SeriesEntry], list[Problem]]:
    """Read a series: names, blank lines, ``#`` comments; ``-pN`` after a name only where ``strips``.

    Problems (DD108) name ``where`` and the line: an unsafe or a second name, anything after a name.
    """
    entries: dict[str, SeriesEntry] = {}
    problems = []
    for number, raw in enumerate(data.split(b"\n"), 1):
        # A lone '#' inside a name is no comment: quilt wants it at the start or after a blank.
        words = re.sub(r"(?:^|[ \t])#.*", "", raw.decode("utf-8", "replace"), flags=re.DOTALL).split()
        if not words:
            continue
        name, *options = words
        strip = _STRIP.fullmatch(options[0]) if strips and len(options) == 1 else None
        reason = None
        if raw.endswith(b"\r"):
            reason = "the file has CRLF line ends"
        elif not NAME.fullmatch(name):
            reason = f"{printable(name.encode())} is not a patch's name (letters, digits, '.', '_', '-')"
        elif options and strip is None:
            reason = f"unknown option {printable(' '.join(options).encode())} after {name}"
        elif name in entries:
            reason = f"{name} is named twice, first on line {entries[name].line}"
        if reason:
            problems.append(Problem("DD108", f"{where}:{number}: {reason}"))
        else:
            entries[name] = SeriesEntry(name, number, int(strip[1]) if strip else None)
    return list(entries.values()), problems
