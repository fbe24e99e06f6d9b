"""What became of an engine's file in another version: the same, changed, moved, gone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ddtree_deploy.patching.functions import FunctionChanges, changed_functions

#: The share of a file's lines that another must have to be taken for it.
SIMILAR = 0.5
#: A name that is defined in more files than these says nothing about where a function went.
MOST_PLACES = 3
_WORD = re.compile(rb"\w")
_DEF = re.compile(rb"^[ \t]*(?:async[ \t]+)?def[ \t]+([A-Za-z_0-9]+)", re.MULTILINE)


class Fate(StrEnum):
    """What the later version has of a file."""

    SAME = "unchanged"
    CHANGED = "changed"
    MOVED = "moved"
    GONE = "gone"
    APPEARED = "appeared"  # only the later version has it
    ABSENT = "absent"  # neither version has it


@dataclass(frozen=True)
class Change:
    """One file between two versions. ``path``: in the earlier one; ``now``: in the later one, None where it is gone.

    ``candidates``: for a file that is gone, those of the same name that hold less than ``SIMILAR`` of it, or
    equally much. ``functions``: what differs in a Python file.
    """

    path: str
    now: str | None
    fate: Fate
    functions: FunctionChanges
    candidates: tuple[str, ...] = ()


def change_of(path: str, earlier: Mapping[str, bytes], later: Mapping[str, bytes], roots: Iterable[str]) -> Change:
    """What became of ``path``. A file that is no longer there is followed when exactly one new file of the same name
    below the roots (``sglang/srt``, which stand for their package) has most of its lines.
    """
    before = earlier.get(path)
    now: str | None = path if path in later else None
    candidates: Sequence[str] = ()
    if before is None:
        return Change(path, now, Fate.APPEARED if now else Fate.ABSENT, FunctionChanges())
    if now is None:
        now, candidates = _find(path, before, earlier, later, roots)
    after = later[now] if now is not None else None
    functions = changed_functions(before, after) if path.endswith(".py") else FunctionChanges()
    if now is None:
        fate = Fate.GONE
    elif now != path:
        fate = Fate.MOVED
    else:
        fate = Fate.SAME if before == after else Fate.CHANGED
    return Change(path, now, fate, functions, tuple(candidates))


def _find(
    path: str, before: bytes, earlier: Mapping[str, bytes], later: Mapping[str, bytes], roots: Iterable[str]
) -> tuple[str | None, list[str]]:
    name = path.rpartition("/")[2]
    packages = tuple({root.partition("/")[0] + "/" for root in roots})
    found = [
        other
        for other in later
        if other.rpartition("/")[2] == name and other not in earlier and other.startswith(packages)
    ]
    shares = {other: similarity(before, later[other]) for other in found}
    similar = [other for other in found if shares[other] >= SIMILAR]
    if len(similar) == 1:
        return similar[0], []
    return None, sorted(similar or found, key=lambda other: (-shares[other], other))


def whereabouts(names: Iterable[str], tree: Mapping[str, bytes], roots: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Function (its name may be qualified) -> the Python files of a tree that define one of that bare name.

    Only files below the packages of the roots count. Left out are special methods and names that are in none, or
    in more than ``MOST_PLACES`` files: these say nothing about where a function went.
    """
    bare = {name: name.rpartition(".")[2] for name in names}
    bare = {name: last for name, last in bare.items() if last.isidentifier() and not last.startswith("__")}
    packages = tuple({root.partition("/")[0] + "/" for root in roots})
    found: dict[str, list[str]] = {last: [] for last in bare.values()}
    for path in sorted(path for path in tree if path.startswith(packages) and path.endswith(".py")) if found else ():
        for name in {match.decode() for match in _DEF.findall(tree[path])}.intersection(found):
            found[name].append(path)
    return {name: tuple(found[last]) for name, last in bare.items() if 0 < len(found[last]) <= MOST_PLACES}


def similarity(one: bytes, two: bytes) -> float:
    """The share (0 to 1) of lines that two files have in common, by count, without regard to their order.

    Lines without a letter or digit say nothing and are left out; so is indentation.
    """
    lines = [
        Counter(stripped for line in data.split(b"\n") if _WORD.search(stripped := line.strip())) for data in (one, two)
    ]
    total = sum(lines[0].values()) + sum(lines[1].values())
    return 2 * sum((lines[0] & lines[1]).values()) / total if total else float(one == two)
