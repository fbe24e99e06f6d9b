"""Symbols: every kind of alarm fires where it must, and stays silent where the tree does not settle the matter."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ddtree_deploy.authoring.modules import Sources
from ddtree_deploy.authoring.symbols import check_symbols

CASES = tomllib.loads((Path(__file__).parents[1] / "cases/symbols/cases.toml").read_text())
KINDS = {"import", "name", "attribute", "argument", "syntax"}


def found_in(tree: dict[str, str], path: str, lines) -> list[str]:
    sources = Sources(tree, lambda name: tree[name].encode() if name in tree else None, "pkg")
    return [f"{item.line} {item.kind}: {item.text}" for item in check_symbols(sources, {path: lines})]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    found = found_in(case["tree"], "pkg/a.py", case.get("lines"))
    assert len(found) == len(case["findings"]), found
    for one, wanted in zip(found, case["findings"], strict=True):
        assert one == wanted or (wanted.endswith(": ") and one.startswith(wanted))


def test_every_kind_of_alarm_has_a_case():
    assert {line.split()[1].rstrip(":") for case in CASES.values() for line in case["findings"]} == KINDS


def test_a_missing_file_is_no_finding():
    assert found_in({"pkg/a.py": ""}, "pkg/b.py", None) == []


@pytest.mark.wheel
def test_the_engines_own_drafting_raises_no_alarm(engine_tree):
    """Every line of the modules that patch sets touch most: what upstream runs must pass."""
    tree = engine_tree("0.5.14")
    sources = Sources(tree, tree.get)
    names = ("dflash_info", "dflash_utils", "dflash_worker_v2", "spec_info")
    paths = [path for name in names if (path := f"sglang/srt/speculative/{name}.py") in tree]
    assert len(paths) == 4
    assert check_symbols(sources, dict.fromkeys([*paths, "sglang/srt/models/dflash.py"])) == []
