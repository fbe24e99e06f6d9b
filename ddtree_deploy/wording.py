"""Words that messages about configuration share: names of TOML types, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_TYPES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def toml_type(value: object) -> str:
    """What TOML calls the type of a parsed value, with its article."""
    return _TYPES.get(type(value), "a date or time")


def wrong_type(wanted: str, value: object) -> str:
    """The sentence for a value of another TOML type than ``wanted``."""
    return f"must be {wanted}, not {toml_type(value)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'X'?`` for the known word that is closest in spelling (case aside), or nothing."""
    spellings: dict[str, str] = {}
    for each in known:
        spellings.setdefault(each.lower(), each)
    close = difflib.get_close_matches(word.lower(), spellings, n=1)
    return f"; did you mean {spellings[close[0]]!r}?" if close else ""
