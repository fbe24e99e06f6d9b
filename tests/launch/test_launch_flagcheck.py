"""Arguments against a parser: what argparse itself would refuse is refused, what it takes is taken."""

from __future__ import annotations

import argparse
import contextlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.launch.flagcheck import check_arguments
from ddtree_deploy.launch.parser import ANY, MANY, NONE, ONE, OPTIONAL, EngineParser, Flag

FLAGS = (
    Flag(("--size",), ONE, "int", None, None, False),
    Flag(("--share",), ONE, "float", None, None, False),
    Flag(("--backend", "--kernel"), ONE, "str", ("triton", "flashinfer"), None, False),
    Flag(("--level",), ONE, "int", ("1", "2"), None, False),
    Flag(("--switch",), NONE, None, None, False, False),
    Flag(("--sizes",), MANY, "int", None, None, False),
    Flag(("--maybe",), OPTIONAL, "str", None, None, False),
    Flag(("--any",), ANY, "str", None, None, False),
    Flag(("--json",), ONE, None, None, None, False),
    Flag(("--old-name",), ONE, "str", None, None, False, True, "--backend"),
    Flag(("--cuda-graph-max-bs-decode",), ONE, "int", None, None, False),
    Flag(("--cuda-graph-max-bs-prefill",), ONE, "int", None, None, False),
)
PARSER = EngineParser(FLAGS)


def real() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    nargs = {OPTIONAL: "?", MANY: "+", ANY: "*"}
    for flag in FLAGS:
        if flag.takes == NONE:
            parser.add_argument(*flag.names, action="store_true")
            continue
        convert = {"int": int, "float": float}.get(flag.type or "", str)
        more = {"nargs": nargs[flag.takes]} if flag.takes in nargs else {}
        choices = None if flag.choices is None else [convert(choice) for choice in flag.choices]
        parser.add_argument(*flag.names, type=convert, choices=choices, **more)
    return parser


def takes(words: list[str]) -> bool:
    """Whether argparse takes the words."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            real().parse_args(words)
    except (argparse.ArgumentError, SystemExit):
        return False
    return True


@pytest.mark.parametrize(
    ("words", "refused", "text"),
    [
        (["--size", "4"], False, None),
        (["--size=4"], False, None),
        (["--sizes", "1", "2"], False, None),
        (["--maybe"], False, None),
        (["--any"], False, None),
        (["--json", '{"a": 1}'], False, None),
        (["--size", "-1"], False, None),
        (["--size", "x"], True, "--size takes an integer, not 'x'"),
        (["--share", "x"], True, "--share takes a number, not 'x'"),
        (["--size"], True, "--size needs a value"),
        (["--size", "1", "2"], True, "--size takes one value, and '2' follows it"),
        (["--switch", "on"], True, "--switch takes no value"),
        (["--backend", "tritn"], True, "did you mean 'triton'?"),
        (["--level", "3"], True, "--level does not take '3'"),
        (["--bakend", "triton"], True, "this engine has no --bakend; did you mean '--backend'?"),
        (["stray", "--size", "1"], True, "'stray' stands in front of every flag"),
        (["--kern", "triton"], False, "--kern abbreviates --kernel"),
        (["--old-name", "x"], False, "--old-name is deprecated in this engine: use --backend"),
        (["--cuda-graph-max-bs", "1"], True, "--cuda-graph-max-bs is ambiguous in this engine"),
        (["--mamba-scheduler-strategy", "auto"], True, "it is --mamba-radix-cache-strategy from sglang 0.5.14 on"),
        (["--mamba-radix-cache-strategy", "auto"], True, "it is --mamba-scheduler-strategy before sglang 0.5.14"),
    ],
)
def test_words(words: list[str], refused: bool, text: str | None) -> None:
    found = check_arguments(PARSER, [words])
    assert [finding.refused for finding in found] == ([] if text is None else [refused])
    assert text is None or text in found[0].text
    assert takes(words) != refused


atoms = st.sampled_from(
    [name for flag in FLAGS for name in flag.names]
    + ["--nope", "--cuda", "--swi", "1", "2", "-3", "1.5", "triton", "x", "", "--size=3", "--switch=1", "{}"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(atoms, max_size=5))
def test_refused_is_what_argparse_refuses(words: list[str]) -> None:
    found = check_arguments(PARSER, [words])
    assert all(finding.text.isprintable() for finding in found)
    assert any(finding.refused for finding in found) == (not takes(words))
