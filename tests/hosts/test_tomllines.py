from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.tomllines import KeyLines

DOCUMENT = '''\
default_host = "a"                         # 1
"quoted.key" . 'x' = 1                     # 2
[hosts."a.b"]                              # 3
ssh = "x # not a comment"                  # 4
labels = {gpu = "r", "n m".o = [1, {z=2}, """a
b""", ]}                                   # 6
[[many]]                                   # 7
v = [                                      # 8
  1, # ]                                   # 9
  [2,                                      # 10
   3],                                     # 11
]                                          # 12
[[many]]                                   # 13
[many.sub]                                 # 14
when = 1979-05-27 07:32:00                 # 15
text = \'\'\'
[not.a.header]                             # 17
\'\'\'\'\'
t = """ \\""" = [ """                        # 19
[[many.sub.inner]]                         # 20
y = 1                                      # 21
[[many.sub.inner]]                         # 22
y = 2                                      # 23
'''


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    found = {path} if path else set()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found |= _paths(inner, (*path, key))
    return found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("default_host",), 1),
        (("quoted.key", "x"), 2),
        (("hosts", "a.b"), 3),
        (("hosts", "a.b", "ssh"), 4),
        (("hosts", "a.b", "labels", "gpu"), 5),
        (("hosts", "a.b", "labels", "n m", "o", 1, "z"), 5),
        (("many", 0), 7),
        (("many", 0, "v", 0), 9),
        (("many", 0, "v", 1, 0), 10),
        (("many", 0, "v", 1, 1), 11),
        (("many", 1), 13),
        (("many", 1, "sub", "when"), 15),
        (("many", 1, "sub", "text"), 16),
        (("many", 1, "sub", "t"), 19),
        (("many", 1, "sub", "inner", 0, "y"), 21),
        (("many", 1, "sub", "inner", 1, "y"), 23),
        (("hosts", "a.b", "absent"), 3),
        (("nowhere",), 1),
    ],
)
def test_lines(path: tuple[str | int, ...], line: int) -> None:
    assert KeyLines(DOCUMENT).of(path) == line
    assert KeyLines(DOCUMENT.replace("\n", "\r\n")).of(path) == line


def test_every_key_has_a_line_and_nothing_else_has() -> None:
    assert set(KeyLines(DOCUMENT).lines) == _paths(tomllib.loads(DOCUMENT))


def test_a_text_that_is_not_toml_keeps_what_came_before() -> None:
    assert KeyLines("a = 1\n= 2\nb = 3\n").lines == {("a",): 1}
    assert KeyLines("a = 1\nb = [[[").of(("b",)) == 2
    assert KeyLines("a = " + "[" * 100_000).of(("a",)) == 1


# --- a writer of random documents that knows where it put each key ---

_bare = st.text("abz09_-", min_size=1, max_size=5)
_keys = _bare | st.text(min_size=0, max_size=4).filter(lambda key: not _surrogate(key))


def _surrogate(text: str) -> bool:
    return any(0xD800 <= ord(char) < 0xE000 for char in text)


def _escaped(text: str) -> str:
    return '"' + "".join(f"\\U{ord(char):08x}" if not char.isalnum() else char for char in text) + '"'


def _plain_text(text: str) -> bool:
    return "'" not in text and all(char == "\t" or 0x20 <= ord(char) != 0x7F for char in text)


@st.composite
def _spelled_key(draw: st.DrawFn, key: str) -> str:
    forms = [_escaped(key)]
    if key and all(char in "abcdefghijklmnopqrstuvwxyz0123456789_-" for char in key):
        forms.append(key)
    if _plain_text(key) and not _surrogate(key):
        forms.append(f"'{key}'")
    return draw(st.sampled_from(forms))


_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@st.composite
def _value(draw: st.DrawFn, depth: int = 2) -> str:
    kinds = ["number", "basic", "literal", "multi", "raw", "date"] + (["list", "table"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "number":
        return draw(st.sampled_from(["1", "-2.5e3", "true", "inf", "0x1F", "1_000"]))
    if kind == "date":
        return draw(st.sampled_from(["1979-05-27", "07:32:00", "1979-05-27 07:32:00.5-07:00"]))
    text = draw(_texts)
    if kind == "basic":
        return _escaped(text)
    if kind == "literal":
        return "'" + "".join(char for char in text if _plain_text(char)) + "'"
    if kind == "multi":
        return '"""' + draw(st.sampled_from(["", "\n", "a\n\nb", '""', "\\\n   x", '\\"""', "[x]\n#", 'a""'])) + '"""'
    if kind == "raw":
        return "'''" + draw(st.sampled_from(["", "\n", "''x", "a\\", "[t]\nk = 1\n", "a''"])) + "'''"
    if kind == "list":
        gap = st.sampled_from(["", " ", "\n", " # ]\n", "\r\n\t"])
        items = draw(st.lists(_value(depth - 1), max_size=3))
        body = "".join(f"{draw(gap)}{item}{draw(gap)}," for item in items)
        return f"[{body}{draw(gap)}]"
    keys = draw(st.lists(_bare, max_size=3, unique=True))
    pairs = [f"{draw(_spelled_key(key))} = {draw(_value(depth - 1))}" for key in keys]
    return "{" + ", ".join(pairs) + "}"


@st.composite
def _document(draw: st.DrawFn) -> tuple[str, dict[tuple[str, ...], int]]:
    """A document and the line of each key that it sets in a line of its own."""
    text, lines = "", {}

    def add(piece: str) -> None:
        nonlocal text
        text += piece + draw(st.sampled_from(["\n", " # = [x]\n", "\n\n", "\r\n"]))

    def pairs(table: tuple[str, ...]) -> None:
        for key in draw(st.lists(_keys, max_size=3, unique=True)):
            lines[(*table, key)] = text.count("\n") + 1
            add(f"{draw(_spelled_key(key))} = {draw(_value())}")

    pairs(())
    taken = {path[0] for path in lines}
    for name in draw(st.lists(_keys, max_size=3, unique=True)):
        if name not in taken:
            lines[(name,)] = text.count("\n") + 1
            add(f"[ {draw(_spelled_key(name))} ]")
            pairs((name,))
    return text, lines


@settings(max_examples=150, deadline=None)
@given(_document())
def test_random_documents(made: tuple[str, dict[tuple[str, ...], int]]) -> None:
    text, lines = made
    value = tomllib.loads(text)
    found = KeyLines(text)
    assert set(found.lines) == _paths(value)
    assert {path: found.lines[path] for path in lines} == lines


@settings(deadline=None)
@given(st.text("[]{}=.,#\"'\\\n ab1", max_size=40))
def test_any_text_ends_and_valid_toml_is_read_whole(text: str) -> None:
    found = KeyLines(text)
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(found.lines) == _paths(value)
