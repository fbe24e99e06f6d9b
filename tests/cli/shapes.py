"""The shape of JSON documents: every key that was seen, by its path, and the types that its values had.

A path is ``a.b`` for a key of a key, ``a[]`` for the elements of an array and ``a{}`` for the values of a map, whose
keys are data. A type is string, integer, number, boolean, null, array, object, map, or the name of a part: an object
that several kinds of documents have, with a shape of its own. ``absent``: an object of that place was without the key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = dict[str, list[str]]
_LAST = ("null", "absent")


@dataclass
class Shapes:
    """Collects values of one kind. ``maps``: paths of maps; ``opaque``: of objects that are not looked into;
    ``parts``: path -> the part that the object there is."""

    maps: Collection[str] = ()
    opaque: Collection[str] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    #: part -> the values that were met of it.
    met: dict[str, list[Any]] = field(default_factory=dict)

    def of(self, values: Iterable[Any]) -> Shape:
        """The shape of all of the values together."""
        seen: dict[str, set[str]] = {}
        objects: dict[str, list[set[str]]] = {}
        for value in values:
            self._look(value, "", seen, objects)
        for path, keys in objects.items():
            for key in set().union(*keys):
                if not all(key in each for each in keys):
                    seen[_join(path, key)].add("absent")
        return {path: ordered(types) for path, types in sorted(seen.items())}

    def _look(self, value: Any, path: str, seen: dict[str, set[str]], objects: dict[str, list[set[str]]]) -> None:
        part = self.parts.get(path) if isinstance(value, dict) else None
        kind = part or ("map" if path in self.maps and isinstance(value, dict) else type_of(value))
        if path:
            seen.setdefault(path, set()).add(kind)
        if part:
            self.met.setdefault(part, []).append(value)
        elif path in self.opaque:
            return
        elif kind == "map":
            for item in value.values():
                self._look(item, f"{path}{{}}", seen, objects)
        elif kind == "object":
            objects.setdefault(path, []).append(set(value))
            for key, item in value.items():
                self._look(item, _join(path, key), seen, objects)
        elif kind == "array":
            for item in value:
                self._look(item, f"{path}[]", seen, objects)


def ordered(types: Iterable[str]) -> list[str]:
    """Types by name, null and absent last."""
    return sorted(types, key=lambda word: (word in _LAST, word))


def type_of(value: Any) -> str:
    """What JSON (and JSON Schema) calls the type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
