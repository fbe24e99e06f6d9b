"""The pieces that the shapes of replies are made of. Each raises what is in :data:`WRONG` for any other value."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.records import check_entry, is_history
from ddtree_deploy.agent.tree import check_path

Shape = Callable[[Any], None]

MAX_SIZE = 1 << 40  # bytes of one file
#: What a shape raises; beside ValueError, what the agent's own checks do.
WRONG = (AgentError, ValueError, KeyError, TypeError)
_LARGEST = 1 << 63
_LAST_SECOND = 253402300799  # of the year 9999
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")


def kind_of(*kinds: type) -> Shape:
    """One of these types; a bool is no int."""

    names = " or ".join(kind.__name__ for kind in kinds)

    def check(value: Any) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{str(value)[:60]!r} is not {names}")

    return check


def maybe(shape: Shape) -> Shape:
    """Null, or the shape."""

    def check(value: Any) -> None:
        if value is not None:
            shape(value)

    return check


def _at(where: str, shape: Shape, value: Any) -> None:
    try:
        shape(value)
    except WRONG as error:
        raise ValueError(f"{where}: {error}") from None


def list_of(shape: Shape) -> Shape:
    """An array whose elements all have the shape."""

    def check(value: Any) -> None:
        kind_of(list)(value)
        for at, item in enumerate(value):
            _at(str(at), shape, item)

    return check


def map_of(shape: Shape, key: Shape | None = None) -> Shape:
    """An object whose keys are data, its values of one shape."""

    def check(value: Any) -> None:
        kind_of(dict)(value)
        for name, item in value.items():
            if key is not None:
                key(name)
            _at(name, shape, item)

    return check


def table(optional: Mapping[str, Shape] | None = None, **fields: Shape) -> Shape:
    """An object with these members; further ones may be there."""

    def check(value: Any) -> None:
        kind_of(dict)(value)
        for name, shape in fields.items():
            if name not in value:
                raise ValueError(f"{name} is missing")
            _at(name, shape, value[name])
        for name, shape in (optional or {}).items():
            if name in value:
                _at(name, shape, value[name])

    return check


TEXT, NUMBER, FLAG = kind_of(str), kind_of(int), kind_of(bool)
NOTES = list_of(TEXT)
SETS = list_of(table(name=TEXT, version=TEXT))


def entry(value: Any) -> None:
    """What stands at a path, as the agent's tree module describes it."""
    if isinstance(value, dict) and value.get("kind") == "other":
        return
    check_entry(value)
    if value is not None and value["kind"] == "file" and not 0 <= value["size"] <= MAX_SIZE:
        raise ValueError(f"a file of {value['size']} bytes")


def history(value: Any) -> None:
    """A line of a history."""
    if not is_history(value):
        raise ValueError("no line of a history")
    told = {"kind": TEXT, "time": TEXT, "who": TEXT, "outcome": TEXT, "reason": maybe(TEXT)}
    table(told)(value)


def one_of(words: Collection[str]) -> Shape:
    """One of these words."""

    def check(value: Any) -> None:
        TEXT(value)
        if value not in words:
            raise ValueError(f"{value[:60]!r} is not {' or '.join(sorted(words))}")

    return check


def _between(value: Any, most: float) -> None:
    kind_of(int, float)(value)
    if not 0 <= value <= most:  # NaN is not, either
        raise ValueError(f"{str(value)[:60]} is out of range")


def count(value: Any) -> None:
    """A whole number, 0 or more, that any arithmetic can take."""
    NUMBER(value)
    _between(value, _LARGEST)


def amount(value: Any) -> None:
    """A number, 0 or more, that any arithmetic can take."""
    _between(value, _LARGEST)


def seconds(value: Any) -> None:
    """A moment in seconds since 1970."""
    _between(value, _LAST_SECOND)


def moment(value: Any) -> None:
    """A moment in UTC, ISO 8601 to the second."""
    TEXT(value)
    if not _MOMENT.match(value):
        raise ValueError(f"{value[:60]!r} is no moment")
    datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ")


def host_path(value: Any) -> None:
    """A clean path, counted from the host's root folder."""
    check_path(value, value.split("/")[0] if isinstance(value, str) else "")
