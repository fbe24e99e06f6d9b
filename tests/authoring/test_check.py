"""Checking sets on pristine engines: each check passes on a sound set and fails on one that is broken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ddtree_deploy.authoring.check import CHECKS, added_lines, check_set
from ddtree_deploy.patching.declaration import FileHashes
from ddtree_deploy.patching.patchset import load_closure, load_sets
from ddtree_deploy.resources import patches_dir
from tests.authoring.sets import ENGINE, NEW, F, G, a_patch, a_set
from tests.patching.difftools import contents, edits

BODY = b"import os\n\n\ndef f():\n    return 1\n"
PATCHED = BODY.replace(b"return 1", b"return os.sep")
TREE = {F: BODY, G: b"def there():\n    pass\n"}


def bad(item, tree=TREE):
    """Check -> problems, of those that found something."""
    return {name: lines for name, lines in check_set([item], ENGINE, tree).problems.items() if lines}


def with_family(item, **changes):
    family = replace(item.families["f"], **changes)
    return replace(item, families={"f": family})


def test_a_sound_set_passes_every_check():
    item = a_set([TREE, {**TREE, F: PATCHED}], added={NEW: b"from sglang.srt.g import there\n"})
    found = check_set([item], ENGINE, TREE)
    assert found.good
    assert dict(found.problems) == dict.fromkeys(CHECKS, ())


def test_applies():
    item = a_set([TREE, {**TREE, F: PATCHED}])
    found = check_set([item], ENGINE, {**TREE, F: BODY.replace(b"return 1", b"return 2")})
    assert not found.good
    assert list(found.problems) == ["applies"]
    assert "0001-p.patch" in found.problems["applies"][0]


def test_compiles():
    found = bad(a_set([TREE, {**TREE, F: BODY.replace(b"def f():", b"def f(:")}]))
    assert set(found) == {"compiles", "symbols"}
    assert found["compiles"][0].startswith(f"{F}:4: ")
    assert "compiles" in bad(a_set([TREE, {**TREE, F: PATCHED}], added={NEW: b"return\n"}))
    not_python = a_set([{"sglang/srt/t.json": b"{}\n"}, {"sglang/srt/t.json": b"{\n"}])
    assert bad(not_python, {"sglang/srt/t.json": b"{}\n"}) == {}


def test_hashes():
    item = a_set([TREE, {**TREE, F: PATCHED}])
    good = item.families["f"].hashes[ENGINE][F]
    for wrong in (FileHashes(good.before, "0" * 64), FileHashes("0" * 64, good.after), FileHashes(None, good.after)):
        (line,) = bad(with_family(item, hashes={ENGINE: {F: wrong}}))["hashes"]
        assert line.startswith(f"{F}: ")
    assert len(bad(with_family(item, hashes={ENGINE: {}}))["hashes"]) == 2


def test_undoes():
    # A patch whose header says one thing and whose reverse meets another: it creates what is there already.
    tree = {F: BODY, G: b"x\n"}
    twice = a_patch("0002-p.patch", {}, {G: b"x\n"})
    item = a_set([tree, {**tree, F: PATCHED}], pristine={ENGINE: tree})
    found = bad(with_family(item, patches=(*item.families["f"].patches, twice)), tree)
    assert found["undoes"] == (f"{G}: the reversed patches do not give back what was there",)


def test_symbols():
    gone = a_set([TREE, {**TREE, F: PATCHED + b"\n\nfrom sglang.srt.g import gone\n"}])
    assert bad(gone) == {"symbols": (f"{F}:8: sglang.srt.g has no gone",)}
    new = a_set([TREE, {**TREE, F: PATCHED}], added={NEW: b"import sglang.srt.nowhere\n"})
    assert bad(new) == {"symbols": (f"{NEW}:1: there is no module sglang.srt.nowhere",)}
    # What is wrong upstream, on lines that are not the set's, is not the set's fault.
    tree = {**TREE, F: b"gone()\n" + BODY}
    assert bad(a_set([tree, {**tree, F: b"gone()\n" + PATCHED}]), tree) == {}


def test_an_engine_that_needs_nothing():
    item = replace(a_set([TREE, {**TREE, F: PATCHED}]), unneeded={"9.9": "fixed upstream"})
    found = check_set([item], "9.9", {})
    assert (found.good, found.unneeded, dict(found.problems)) == (True, "fixed upstream", {})


@settings(max_examples=60, deadline=None)
@given(before=contents(12), edited=contents(12).flatmap(edits))
def test_lines_that_are_not_added_are_those_of_before(before, edited):
    for after in (edited, before, before + edited, edited + before):
        lines = after.split(b"\n")
        added = added_lines(before, after)
        assert added <= set(range(1, len(lines) + 1))
        kept = iter(before.split(b"\n"))
        assert all(line in kept for number, line in enumerate(lines, 1) if number not in added)
    assert added_lines(before, before) == set()
    assert added_lines(None, edited) == set(range(1, len(edited.split(b"\n")) + 1))


@pytest.mark.wheel
def test_every_shipped_set_holds_on_every_engine_that_it_names(engine_tree, wheelhouse):
    checked = 0
    for name in load_sets(patches_dir()):
        closure = load_closure(name, patches_dir())
        for engine in closure[-1].engines:
            if list(wheelhouse.glob(f"sglang-{engine}-*.whl")):
                found = check_set(closure, engine, engine_tree(engine))
                assert found.good, found
                checked += 1
    assert checked >= 6
