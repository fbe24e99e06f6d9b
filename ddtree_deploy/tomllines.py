"""On which line of a TOML document each key stands; ``tomllib`` gives values without places."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from contextlib import suppress

KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}#\r\n]+")
# A closing run of three to five quotes ends a multi-line string: one or two of them belong to it.
_STRING = re.compile(
    r'"""(?:[^\\]|\\[\s\S])*?"{3,5}(?!")'
    r"|'''[\s\S]*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
)


class KeyLines:
    """The line (from 1) of every key, table and array item of one document that ``tomllib`` has accepted.

    A path is the tuple of keys down to the value; items of arrays, ``[[tables]]`` too, stand as their index.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._breaks = [found.start() for found in re.finditer("\n", text)]
        self._tables: dict[KeyPath, int] = {}  # arrays of tables: how many items so far
        self.lines: dict[KeyPath, int] = {}
        # What was found before it lost its way still helps: the values themselves come from tomllib.
        with suppress(_Lost, RecursionError):
            self._document()

    def of(self, path: KeyPath) -> int:
        """The line of ``path``, else of the nearest table around it, else 1."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 1

    def _document(self) -> None:
        table: KeyPath = ()
        while self._skip(_BLANK):
            if self._text.startswith("[", self._at):
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        start = self._at
        many = self._text.startswith("[[", start)
        self._at += 1 + many
        *outer, last = self._key()
        self._take("]]" if many else "]")
        table: KeyPath = ()
        for part in outer:
            table += (part,)
            self._note(table, start)
            if table in self._tables:
                table += (self._tables[table] - 1,)
        table += (last,)
        self._note(table, start)
        if many:
            self._tables[table] = self._tables.get(table, 0) + 1
            table += (self._tables[table] - 1,)
            self._note(table, start)
        return table

    def _pair(self, table: KeyPath) -> None:
        start = self._at
        path = table
        for part in self._key():
            path += (part,)
            self._note(path, start)
        self._take("=")
        self._value(path)

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip(_SPACE)
            found = _STRING.match(self._text, self._at) or _BARE_KEY.match(self._text, self._at)
            if found is None:
                raise _Lost
            self._at = found.end()
            parts.append(_unquoted(found.group()))
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        self._skip(_BLANK)
        if self._text.startswith("[", self._at):
            self._at += 1
            index = 0
            while not self._closed_by("]"):
                self._note((*path, index), self._at)
                self._value((*path, index))
                index += 1
        elif self._text.startswith("{", self._at):
            self._at += 1
            while not self._closed_by("}"):
                self._pair(path)
        else:
            found = _STRING.match(self._text, self._at) or _BARE_VALUE.match(self._text, self._at)
            if found is None:
                raise _Lost
            self._at = found.end()

    def _closed_by(self, bracket: str) -> bool:
        """Pass blanks and one comma; True (and past it) where the bracket closes."""
        self._skip(_BLANK)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(_BLANK)
        if self._text.startswith(bracket, self._at):
            self._at += 1
            return True
        return False

    def _take(self, what: str) -> None:
        self._skip(_SPACE)
        if not self._text.startswith(what, self._at):
            raise _Lost
        self._at += len(what)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Pass what ``pattern`` matches; False at the end of the text."""
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at < len(self._text)

    def _note(self, path: KeyPath, position: int) -> None:
        self.lines.setdefault(path, bisect_right(self._breaks, position - 1) + 1)


def _unquoted(part: str) -> str:
    if part[0] not in "'\"":
        return part
    try:
        return str(tomllib.loads(f"k = {part}")["k"])
    except tomllib.TOMLDecodeError:
        raise _Lost from None


class _Lost(Exception):
    """The text is not the TOML that this reader knows."""
