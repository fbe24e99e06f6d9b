"""The doctor's cases: recorded facts, and one-field edits of them with what they must lead to. All of it is data."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CASES = Path(__file__).parent.parent / "cases"
FOLDER = CASES / "doctor"
AREAS = sorted(path for path in FOLDER.glob("*.json") if "cases" in json.loads(path.read_text()))
#: Name of recorded facts -> the codes of the errors that they are known to have.
RECORDED: dict[str, list[str]] = json.loads((FOLDER / "recorded.json").read_text())


@dataclass(frozen=True)
class Case:
    """One edit of recorded facts. ``finds``: (code, severity, a part of the message) of every finding that it adds."""

    area: str
    name: str
    row: str
    base: str
    patch: list[dict[str, Any]]
    finds: list[list[str]]

    def facts(self) -> dict[str, Any]:
        facts = recorded(self.base)
        for step in self.patch:
            edit(facts, step)
        return facts


def cases() -> list[Case]:
    return [Case(path.stem, **case) for path in AREAS for case in json.loads(path.read_text())["cases"]]


@cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text()


def recorded(name: str) -> dict[str, Any]:
    return json.loads(_text(name))


def edit(document: Any, step: dict[str, Any]) -> None:
    """One step of a JSON patch (RFC 6902): add, remove or replace. ``file`` takes the value from a file of cases."""
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
    place = document
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    value = json.loads((CASES / step["file"]).read_text()) if "file" in step else copy.deepcopy(step.get("value"))
    if isinstance(place, list):
        index = len(place) if last == "-" else int(last)
        if step["op"] == "add":
            place.insert(index, value)
            return
        last = index
    elif step["op"] == "add":
        assert last not in place, f"{step['path']} is there already"
    if step["op"] == "remove":
        del place[last]
        return
    if step["op"] == "replace":
        assert place[last] != value, f"{step['path']} is {value!r} already"
    place[last] = value
