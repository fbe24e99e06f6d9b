"""Texts that every match of a regular expression must contain, so that whole files can be passed over quickly.

Conservative: whatever is not understood for certain gives no answer, and then nothing is passed over.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any, List, NamedTuple, Optional

MAX_NEEDLES = 16


class Needles(NamedTuple):
    """A match holds at least one of ``texts`` (UTF-8 bytes; in lower case, and ASCII alone, when ``folded``)."""

    texts: List[bytes]
    folded: bool

    def may_match(self, data: bytes) -> bool:
        """False only if nothing in ``data`` can match."""
        if self.folded:
            # Outside ASCII, letters such as the Kelvin sign fold onto ASCII ones.
            if not data.isascii():
                return True
            data = data.lower()
        return any(text in data for text in self.texts)


def needles(pattern: str, flags: int) -> Optional[Needles]:
    """The texts that a match of ``pattern`` (compiled with ``flags``) needs; None when there is no telling."""
    # The parser's tree is not a documented interface: any surprise in it means no answer.
    try:
        parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
        found = _sequence(parser.parse(pattern, flags & ~re.DEBUG))
        if found is None:
            return None
        folded = bool(flags & re.IGNORECASE)
        if folded and not all(text.isascii() for text in found):
            return None
        texts = [text.lower() if folded else text for text in found]
        return Needles([text.encode("utf-8", "surrogateescape") for text in texts], folded)
    except Exception:  # noqa: BLE001
        return None


def _better(one: Optional[List[str]], other: Optional[List[str]]) -> Optional[List[str]]:
    """The rarer of two requirements: the one whose shortest text is longer."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda texts: (min(map(len, texts)), -len(texts)))


def _sequence(items: Any) -> Optional[List[str]]:
    best: Optional[List[str]] = None
    run = ""
    for operation, value in items:
        name = str(operation)
        if name == "LITERAL":
            run += chr(value)
            continue
        if name == "AT":
            continue
        best, run = _better(best, [run] if run else None), ""
        best = _better(best, _item(name, value))
    return _better(best, [run] if run else None)


def _item(name: str, value: Any) -> Optional[List[str]]:
    if name == "SUBPATTERN":
        _group, added, removed, below = value
        return None if added or removed else _sequence(below)
    if name == "ATOMIC_GROUP":
        return _sequence(value)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, _most, below = value
        return _sequence(below) if least >= 1 else None
    if name == "BRANCH":
        texts: List[str] = []
        for branch in value[1]:
            below = _sequence(branch)
            if below is None:
                return None
            texts += below
        return texts if len(texts) <= MAX_NEEDLES else None
    return None
