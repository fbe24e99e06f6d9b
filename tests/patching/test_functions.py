"""What counts as a changed function: cases as data, and random edits of random modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.patching.functions import UnparsableError, changed_functions, functions, parse

CASES = tomllib.loads((Path(__file__).parents[1] / "cases/functions/cases.toml").read_text())


def said(item) -> str:
    return f"{item.name} {item.first}-{item.last}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    before, after = (case[end].encode() if end in case else None for end in ("before", "after"))
    found = changed_functions(before, after)
    if "problem" in case:
        assert found.problem.startswith(case["problem"])
        assert "\n" not in found.problem
    else:
        assert found.problem is None
    assert [said(item) for item in found.added] == case.get("added", [])
    assert [said(item) for item in found.removed] == case.get("removed", [])
    assert [f"{said(one)} {two.first}-{two.last}" for one, two in found.changed] == case.get("changed", [])
    assert bool(found) == any(case.get(key) for key in ("added", "removed", "changed", "problem"))


def test_a_bom_and_an_encoding_are_the_compilers():
    latin = "# coding: latin-1\ndef f(): return 'é'\n".encode("latin-1")
    assert changed_functions(latin, "def f(): return 'é'\n".encode("utf-8-sig")).names == ()
    assert changed_functions(latin, latin.replace(b"\xe9", b"\xe8")).names == ("f",)


def test_nested_too_deeply_is_a_problem_not_a_crash():
    found = changed_functions(b"x = 1\n", b"x = " + b"(" * 5000 + b")" * 5000)
    assert found.problem.startswith("after: ")
    with pytest.raises(UnparsableError):
        parse(b"-" * 100_000 + b"1")


def test_every_function_with_its_lines():
    source = b"import x\n@d\ndef f():\n    pass\n\nclass C:\n    def m(self):\n        pass\n"
    assert [said(item) for item in functions(source)] == ["<module> 1-8", "f 2-4", "C 6-8", "C.m 7-8"]


NAMES = ["f", "g", "C.m", "C.n", "D.m"]


def module(bodies: dict[str, int], order: list[str], noise: list[str]) -> bytes:
    """A module of these functions in this order, each class where its first method is; ``noise`` goes among them."""
    groups: dict[str, list[str]] = {}
    for number, name in enumerate(order):
        owner, _, own = name.rpartition(".")
        indent = "    " if owner else ""
        comment = noise[number % len(noise)] if noise else ""
        text = f"{comment}\n{indent}def {own}():\n{indent}    {comment}\n{indent}    return {bodies[name]}\n"
        groups.setdefault(f"class {owner}:\n" if owner else name, []).append(text)
    return "".join((head if head.endswith("\n") else "") + "".join(texts) for head, texts in groups.items()).encode()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_edits_are_found_exactly(data):
    bodies = {name: data.draw(st.integers(0, 3)) for name in NAMES}
    later = {name: data.draw(st.integers(0, 3)) for name in NAMES}
    noise = data.draw(st.lists(st.sampled_from(["# a", "# b\n\n", ""]), max_size=3))
    before = module(bodies, NAMES, [])
    after = module(later, data.draw(st.permutations(NAMES)), noise)
    found = changed_functions(before, after)
    assert found.problem is None
    assert sorted(found.names) == sorted(name for name in NAMES if bodies[name] != later[name])
    back = changed_functions(after, before)
    assert sorted(back.names) == sorted(found.names)
