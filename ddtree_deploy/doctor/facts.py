"""Reading recorded facts: every access says which field it needs, and a field that is not there is *not known*."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LARGEST = 2.0**63


class NotKnown(Exception):
    """A field that a check needs was not gathered, or is of another type than it should be."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


def _why(value: object) -> str | None:
    """Why a part of the facts is not there, as it says itself: None, or ``{"error": why}``."""
    if value is None:
        return "is not known"
    why = value.get("error") if isinstance(value, dict) and len(value) == 1 else None
    return why if isinstance(why, str) else None


class Facts:
    """A part of the facts, with the path that leads to it. Every reader raises :class:`NotKnown`.

    A key that is not there is not known; ``None`` is a value of its own, which only the ``maybe_`` readers take.
    """

    def __init__(self, value: object, path: str = "") -> None:
        self.value = value
        self.path = path

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _get(self, key: str) -> Any:
        if not isinstance(self.value, dict):
            raise NotKnown(self.path or key, "is not an object")
        if key not in self.value:
            raise (
                NotKnown(self.path, why)
                if (why := _why(self.value))
                else NotKnown(self._below(key), "was not gathered")
            )
        return self.value[key]

    def _typed(self, key: str, *kinds: type) -> Any:
        value = self._get(key)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise NotKnown(self._below(key), _why(value) or f"is no {kinds[0].__name__}")
        return value

    def at(self, key: str) -> Facts:
        """The object below ``key``."""
        return Facts(self._typed(key, dict), self._below(key))

    def maybe(self, key: str) -> Facts | None:
        """The object below ``key``, or None."""
        return None if self._get(key) is None else self.at(key)

    def has(self, key: str) -> bool:
        """Whether a table of names holds ``key``. Not for fields that are always there."""
        return isinstance(self.value, dict) and key in self.value

    def text(self, key: str) -> str:
        """A string."""
        return str(self._typed(key, str))

    def maybe_text(self, key: str) -> str | None:
        """A string or None."""
        return None if self._get(key) is None else self.text(key)

    def number(self, key: str) -> float:
        """A number."""
        value = self._typed(key, int, float)
        if not -_LARGEST <= value <= _LARGEST:
            raise NotKnown(self._below(key), "is no size that anything has")
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """A number or None."""
        return None if self._get(key) is None else self.number(key)

    def integer(self, key: str) -> int:
        """A whole number."""
        value = self.number(key)
        if int(value) != value:
            raise NotKnown(self._below(key), "is no whole number")
        return int(value)

    def maybe_integer(self, key: str) -> int | None:
        """A whole number or None."""
        return None if self._get(key) is None else self.integer(key)

    def flag(self, key: str) -> bool:
        """A boolean."""
        return bool(self._typed(key, bool))

    def maybe_flag(self, key: str) -> bool | None:
        """A boolean or None."""
        return None if self._get(key) is None else self.flag(key)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        return [Facts(item, f"{self._below(key)}[{index}]").as_text() for index, item in self._listed(key)]

    def maybe_texts(self, key: str) -> list[str] | None:
        """A list of strings, or None."""
        return None if self._get(key) is None else self.texts(key)

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        found = []
        for index, item in self._listed(key):
            if not isinstance(item, int) or isinstance(item, bool) or not -_LARGEST <= item <= _LARGEST:
                raise NotKnown(f"{self._below(key)}[{index}]", "is no whole number")
            found.append(item)
        return found

    def items(self, key: str) -> list[Facts]:
        """A list of objects."""
        found = [Facts(item, f"{self._below(key)}[{index}]") for index, item in self._listed(key)]
        for item in found:
            if not isinstance(item.value, dict):
                raise NotKnown(item.path, "is not an object")
        return found

    def _listed(self, key: str) -> Iterator[tuple[int, object]]:
        return enumerate(self._typed(key, list))

    def table(self, key: str) -> dict[str, Facts]:
        """An object of objects, by name; an entry that is None is left out."""
        below = self.at(key)
        names = [name for name, value in below.value.items() if value is not None]  # type: ignore[attr-defined]
        return {name: below.at(name) for name in names}

    def words(self, key: str) -> dict[str, str]:
        """An object of strings, by name."""
        below = self.at(key)
        return {name: below.text(name) for name in below.value}  # type: ignore[attr-defined]

    def as_text(self) -> str:
        """This very value, a string."""
        if not isinstance(self.value, str):
            raise NotKnown(self.path, "is no string")
        return self.value
