"""The engine's parser read from its sources, against the same parser built by running the published engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import parser as module
from ddtree_deploy.launch.constants import UNKNOWN, Sources
from ddtree_deploy.launch.known import Engine
from ddtree_deploy.launch.parser import ANY, MANY, NONE, ONE, OPTIONAL, EngineParser, Flag, read_parser
from tests.launch.conftest import VERSIONS

CHILD = Path(__file__).parent / "child" / "real_parser.py"
# Choices that come from modules which the child stubs.
STUBBED_CHOICES = {
    "--reasoning-parser",
    "--tool-call-parser",
    "--lora-target-modules",
    "--cuda-graph-backend-decode",
    "--cuda-graph-backend-prefill",
    "--kv-canary-real-data",
}


def real_flags(wheel: Path) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", CHILD, wheel], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def takes(nargs: object) -> str:
    return {None: ONE, 0: NONE, "?": OPTIONAL, "+": MANY, "*": ANY}.get(nargs, MANY)


@pytest.mark.wheel
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_read_is_what_the_engine_registers(
    version: str, wheel_of: Callable[[str], Path], engine_of: Callable[..., Engine]
) -> None:
    real = real_flags(wheel_of(version))
    read = engine_of(version).parser
    assert read.unread == ()
    assert sorted(flag.names for flag in read.flags) == sorted(tuple(flag["names"]) for flag in real)
    told = 0
    for theirs in real:
        ours = read.by_name[theirs["names"][0]]
        assert ours.takes == takes(theirs["nargs"]), ours
        assert (ours.required, ours.deprecated) == (theirs["required"], theirs["deprecated"]), ours
        if ours.takes != NONE and ours.type is not None:
            assert ours.type == theirs["type"], ours
        if ours.name not in STUBBED_CHOICES:
            assert (None if ours.choices is None else sorted(ours.choices)) == theirs["choices"], ours
        if ours.default is not UNKNOWN and not ours.deprecated:
            told += 1
            # A switch whose default the sources leave to argparse is off; one of theirs says so with None.
            assert repr(ours.default) == theirs["default"] or not ours.default, ours
    assert told > 0.9 * len(real)


@pytest.mark.wheel
def test_choices_of_registries_are_read(engine_of: Callable[..., Engine]) -> None:
    for version in VERSIONS:
        flags = engine_of(version).parser.by_name
        assert "qwen3" in flags["--reasoning-parser"].choices
        assert "qwen3_coder" in flags["--tool-call-parser"].choices
        assert ("auto" in flags["--reasoning-parser"].choices) == (version != "0.5.11")


@pytest.mark.wheel
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"),
        ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size"),
        ("--nsa-prefill-backend", "--dsa-prefill-backend"),
    ],
)
def test_renames(old: str, new: str, engine_of: Callable[..., Engine]) -> None:
    for version in VERSIONS:
        flags = engine_of(version).parser.by_name
        assert (old in flags) == (version in ("0.5.11", "0.5.14", "0.5.18")), version
        assert (new in flags) == (version != "0.5.11"), version
        if old in flags and new in flags:
            assert flags[old].deprecated
            assert flags[old].successor == new


@pytest.mark.wheel
def test_abbreviations_that_became_ambiguous(engine_of: Callable[..., Engine]) -> None:
    assert engine_of("0.5.11").parser.abbreviated("--cuda-graph-max") == ("--cuda-graph-max-bs",)
    assert set(engine_of("0.5.20").parser.abbreviated("--cuda-graph-max-bs")) == {
        "--cuda-graph-max-bs-decode",
        "--cuda-graph-max-bs-prefill",
    }
    assert len(engine_of("0.5.11").parser.abbreviated("--pp")) > 1
    assert engine_of("0.5.11").parser.abbreviated("--tp") == ("--tp-size",)


@pytest.mark.wheel
def test_ddtree_is_there_where_the_set_is_applied(engine_of: Callable[..., Engine]) -> None:
    for version in VERSIONS:
        assert not engine_of(version).parser.has_ddtree
    patched = engine_of("0.5.11", patched=True).parser
    assert patched.has_ddtree
    assert "DDTREE" in patched.by_name["--speculative-algorithm"].choices
    assert patched.by_name["--speculative-ddtree-budget"].type == "int"
    assert patched.unread == ()


def parse(files: dict[str, str]) -> EngineParser:
    return read_parser(lambda path: files[path].encode() if path in files else None)


def declared(body: str, before: str = "") -> Flag:
    source = f"{before}\nclass ServerArgs:\n    @staticmethod\n    def add_cli_args(parser):\n"
    return parse({module.SERVER_ARGS: source + "".join(f"        {line}\n" for line in body.splitlines())}).flags[0]


def test_what_cannot_be_told_is_not_guessed() -> None:
    flag = declared("parser.add_argument('--x', type=convert, choices=compute(), default=other.y)")
    assert (flag.type, flag.choices, flag.default) == (None, None, UNKNOWN)
    flag = declared("parser.add_argument('--x', choices=A + B)", "A = ['a']\nB = [f() for f in ()]")
    assert flag.choices is None


def test_names_that_are_computed_are_reported() -> None:
    found = parse(
        {
            module.SERVER_ARGS: "class ServerArgs:\n def add_cli_args(parser):\n"
            "  parser.add_argument('--a')\n  for n in names():\n   parser.add_argument('--' + n)\n  other(parser)\n"
        }
    )
    assert list(found.by_name) == ["--a"]
    assert len(found.unread) == 2


def test_a_parser_that_is_handed_on_is_followed() -> None:
    files = {
        module.SERVER_ARGS: "from sglang.srt.more import More, plain\nclass ServerArgs:\n def add_cli_args(parser):\n"
        "  More.add_cli_args(parser)\n  plain(parser)\n",
        "sglang/srt/more.py": "class More:\n @staticmethod\n def add_cli_args(parser):\n"
        "  parser.add_argument('--a', type=int)\ndef plain(parser):\n parser.add_argument('--b')\n",
    }
    assert list(parse(files).by_name) == ["--a", "--b"]


@pytest.mark.parametrize(
    "source",
    ["", "class ServerArgs: pass", "def broken(", "\x00", "class ServerArgs:\n def add_cli_args(p): pass", "(" * 3000],
)
def test_what_is_no_engine_is_an_error(source: str) -> None:
    with pytest.raises(DeployError) as caught:
        parse({module.SERVER_ARGS: source})
    assert caught.value.code == "DD610"


@pytest.mark.parametrize(
    "source", ["X = X", "X = Y\nY = X", "def f():\n return f()\nX = f()", "from sglang.a import X"]
)
def test_definitions_that_go_in_circles_end(source: str) -> None:
    sources = Sources(lambda path: source.encode() if path == "sglang/a.py" else None)
    found = sources.module("sglang/a.py")
    assert found is not None
    assert found.lookup("X") is UNKNOWN


def test_hostile_definitions_end() -> None:
    doubling = "A0 = [1]\n" + "".join(f"A{n} = A{n - 1} + A{n - 1}\n" for n in range(1, 39)) + "X = A38"
    deep = f"X = {' + '.join(['1'] * 5000)}"
    many = f"X = [{', '.join(['Y'] * 30_000)}]\nY = 1"
    for source in (doubling, deep, many):
        found = Sources(lambda _path, source=source: source.encode()).module("sglang/a.py")
        assert found is None or found.lookup("X") is UNKNOWN


SMALL = b"""
from sglang.srt.more import CHOICES
class ServerArgs:
    size: A[Optional[int], Arg(help="h", choices=CHOICES)] = None
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        parser.add_argument("--a", "--b", type=int, choices=[1, 2] + CHOICES, default=ServerArgs.size)
"""


@settings(max_examples=80, deadline=None)
@given(st.integers(0, len(SMALL)), st.integers(0, len(SMALL)), st.binary(max_size=3))
def test_damaged_sources_are_read_or_refused(start: int, end: int, instead: bytes) -> None:
    files = {module.SERVER_ARGS: SMALL[:start] + instead + SMALL[end:], "sglang/srt/more.py": b"CHOICES = [3]"}
    try:
        found = read_parser(files.get)
    except DeployError as error:
        assert error.code == "DD610"
    else:
        assert found.flags


literals = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(literals, literals)
def test_literals_are_read_as_they_are(one: object, other: object) -> None:
    found = Sources(lambda _path: f"A = {one!r}\nB = [A, {other!r}]\nC = B[0]".encode()).module("sglang/a.py")
    assert found is not None
    assert found.lookup("B") == [one, other]
    assert found.lookup("C") == one
