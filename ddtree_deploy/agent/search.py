"""grep and find-def on the live tree: the operations that the agent runs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Tuple

from . import root as root_module
from .selection import Selection
from .tree import local_name
from .walk import MAX_TEXT, is_built, read_file, walk

if TYPE_CHECKING:
    from .call import Call

_BATCH = 64 * 1024


class _Tree:
    """The engine's sources on this host, as (path, bytes), counted while they are read."""

    def __init__(self, call: Call) -> None:
        self._root = root_module.locate(call.request)
        self._selection = Selection.parse(call.request)
        site = self._root.site
        self._starts = self._selection.starts(
            self._root.parts(), lambda path: os.path.lexists(os.path.join(site, local_name(path)))
        )
        self.read = 0

    def files(self, suffixes: Tuple[str, ...] = ()) -> Iterator[Tuple[str, bytes]]:
        """Built objects and files too large to be sources are left out, as in a snapshot."""

        def wants(path: str) -> bool:
            return (not suffixes or path.endswith(suffixes)) and self._selection.wants(path)

        for node in walk(self._root.site, self._starts, wants):
            if node.kind != "file" or is_built(node.path):
                continue
            try:
                _info, data = read_file(node, MAX_TEXT)
            except FileNotFoundError:
                continue
            if data is not None:
                self.read += 1
                yield node.path, data

    def summary(self, **found: int) -> Dict[str, Any]:
        return {"site": self._root.site, "version": self._root.version, "searched": self.read, **found}


class _Lines:
    """Sends JSON arrays, one a line, in the answer's data stream."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lines: List[str] = []
        self._size = 0

    def add(self, value: List[Any]) -> None:
        line = json.dumps(value, separators=(",", ":"))
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _BATCH:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            self._call.data(("\n".join(self._lines) + "\n").encode("ascii"))
            self._lines, self._size = [], 0


def run_grep(call: Call) -> Dict[str, Any]:
    """Answer with a line ``[kind, path, line, text]`` a hit; the result counts what was searched and found."""
    from .grep import GrepOptions, grep

    options = GrepOptions.parse(call.request)
    tree, lines, hits, matched = _Tree(call), _Lines(call), 0, 0
    last = ""
    for hit in grep(tree.files(), options):
        if call.deaf:
            break
        lines.add(list(hit))
        if hit.kind in ("match", "count", "file", "binary"):
            hits += hit.line if hit.kind == "count" else 1
            matched += hit.path != last
            last = hit.path
    lines.flush()
    return tree.summary(hits=hits, matched=matched)


def run_find_def(call: Call) -> Dict[str, Any]:
    """Answer with a line ``["definition" | "reference" | "unparsed", *fields]`` a finding, in output order."""
    from .definitions import SUFFIXES, FindOptions, find_def

    options = FindOptions.parse(call.request)
    tree, lines = _Tree(call), _Lines(call)
    found = find_def(tree.files(SUFFIXES), options)
    for kind, findings in (
        ("definition", found.definitions),
        ("reference", found.references),
        ("unparsed", found.unparsed),
    ):
        for finding in findings:
            lines.add([kind, *finding])
    lines.flush()
    return tree.summary(
        definitions=len(found.definitions), references=len(found.references), unparsed=len(found.unparsed)
    )
