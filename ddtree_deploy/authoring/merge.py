"""Three-way merges of one file, with every conflict in parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddtree_deploy.authoring.gittools import merge3
from ddtree_deploy.authoring.weave import split

_MARKERS = re.compile(rb"^(?:<+|\|+|=+|>+)", re.MULTILINE)
_PLAIN = 7  # the length of markers that people and editors know
_KINDS = (b"<", b"|", b"=", b">")


@dataclass(frozen=True)
class Conflict:
    """A place that both sides changed. ``line``: where it begins (from 1) in the file that has ours there; the three
    texts are whole lines.
    """

    line: int
    ours: bytes
    base: bytes
    theirs: bytes


@dataclass(frozen=True)
class Merge:
    """``data``: the merge, with our side wherever there is a conflict. ``marked``: with diff3 markers there."""

    data: bytes
    marked: bytes
    conflicts: tuple[Conflict, ...]


def merge(base: bytes, ours: bytes, theirs: bytes, labels: Sequence[str]) -> Merge:
    """What ``theirs`` made of ``base``, done to ``ours``; ``labels`` name ours, base and theirs in the markers.

    Raises DeployError DD009 without a usable git, DD104 for contents that it takes for binary.
    """
    # Longer than anything like it at the start of a line: what looks like a marker is one.
    runs = (len(run) for data in (base, ours, theirs) for run in _MARKERS.findall(data))
    size = max(_PLAIN, *runs, 0) + 1
    found = _read(merge3(base, ours, theirs, labels, marker_size=size).data, size, labels)
    if found.conflicts and found.marked.rpartition(b"\n")[0].rpartition(b"\n")[2].startswith(_KINDS[3] * _PLAIN):
        # A marker after the last line makes it a whole one; ours may not be.
        return replace(found, data=found.data if ours.endswith(b"\n") else found.data.removesuffix(b"\n"))
    return found


def _read(said: bytes, size: int, labels: Sequence[str]) -> Merge:
    starts = [kind * size for kind in _KINDS]
    marks = [kind * _PLAIN for kind in _KINDS]
    marked: list[bytes] = []
    data: list[bytes] = []
    conflicts: list[Conflict] = []
    parts: list[list[bytes]] = []
    for line in split(said):
        kind = next((number for number, start in enumerate(starts) if line.startswith(start)), None)
        if kind is None:
            (parts[-1] if parts else data).append(line)
            marked.append(line)
            continue
        label = b"" if kind == 2 else b" " + labels[min(kind, 2)].encode()
        marked.append(marks[kind] + label + b"\n")
        if kind < 3:
            parts.append([])
            continue
        ours, base, theirs = (b"".join(part) for part in parts)
        conflicts.append(Conflict(len(data) + 1, ours, base, theirs))
        data += parts[0]
        parts = []
    return Merge(b"".join(data), b"".join(marked), tuple(conflicts))
