"""Porting: what can move moves, what cannot is told with both sides, and upstream's own fixes are seen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddtree_deploy.authoring.port import port_set
from ddtree_deploy.authoring.stack import stack_of
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.patchset import load_closure
from ddtree_deploy.resources import patches_dir
from tests.authoring.sets import ENGINE, NEW, F, G, a_set, series
from tests.patching.difftools import edits

LATER = "0.6.0"
MOVED = "sglang/kernels/f.py"
BODY = b"".join(b"def f%d():\n    a = %d\n    b = 2\n    return a + b\n\n\n" % (number, number) for number in range(6))


def changed(data: bytes, number: int, text: bytes) -> bytes:
    """``data`` with another second line in function ``number``."""
    old = b"    a = %d\n" % number
    assert data.count(old) == 1
    return data.replace(old, text)


MINE = changed(BODY, 1, b"    a = 100\n")
ALSO = changed(MINE, 3, b"    a = 300\n")
SET = a_set([{F: BODY}, {F: MINE}, {F: ALSO}])


def port(later: dict[str, bytes], item=SET, earlier=None, **options):
    return port_set([item], ENGINE, LATER, earlier or {F: BODY}, later, **options)


def applied(ported, later: dict[str, bytes]) -> dict[str, bytes | None]:
    """What the ported set makes of the later version's files, hashes checked."""
    stack = stack_of([ported.patch_set], LATER, later)
    return {path: stack.final(path) for path in stack.family.paths}


def test_an_unchanged_file_only_gets_hashes():
    ported = port({F: BODY})
    assert (ported.complete, ported.joined, ported.family) == (True, True, "f")
    assert ported.patch_set.families["f"].engines == (ENGINE, LATER)
    assert ported.patch_set.families["f"].patches == SET.families["f"].patches
    assert [patch.how for patch in ported.patches] == ["as it is", "as it is"]
    assert applied(ported, {F: BODY}) == {F: ALSO}


def test_lines_that_moved_make_a_family_of_their_own():
    later = b"# upstream\n" * 5 + BODY
    ported = port({F: later})
    assert (ported.complete, ported.joined, ported.family) == (True, False, LATER)
    assert ported.patch_set.families["f"] == SET.families["f"]
    assert [patch.how for patch in ported.patches] == ["merged", "merged"]
    assert applied(ported, {F: later}) == {F: b"# upstream\n" * 5 + ALSO}
    # The ported patches are for the new lines, and keep their text.
    first = ported.patch_set.families[LATER].patches[0]
    assert first.data.startswith(b"patch 1\n")
    assert first.diffs[0].hunks[0].new_start == SET.families["f"].patches[0].diffs[0].hunks[0].new_start + 5
    again = port_set([ported.patch_set], LATER, "0.6.1", {F: later}, {F: later})
    assert (again.joined, again.family) == (True, LATER)


def test_a_family_with_the_same_patches_is_joined_from_whichever_version():
    later = b"# upstream\n" + BODY
    once = port({F: later}).patch_set
    again = port_set([once], ENGINE, "0.6.1", {F: BODY}, {F: later})
    assert (again.joined, again.family) == (True, LATER)
    assert again.patch_set.families[LATER].engines == (LATER, "0.6.1")


def test_functions_that_both_changed_are_to_be_looked_at():
    later = {
        F: BODY.replace(b"    a = 1\n    b = 2\n    return a + b", b"    a = 1\n    b = 2\n    c = 3\n    return a - b")
    }
    ported = port(later)
    assert ported.complete
    looks = [file.look for patch in ported.patches for file in patch.files]
    assert looks == [("f1",), ()]


def test_a_conflict_is_told_with_both_sides_and_the_function():
    later = {F: changed(BODY, 3, b"    a = 333\n")}
    ported = port(later)
    assert not ported.complete
    assert [patch.how for patch in ported.patches] == ["as it is", "conflict"]
    (clash,) = ported.patches[1].files[0].clashes
    conflict = clash.conflict
    assert clash.functions == ("f3",)
    assert (conflict.ours, conflict.base, conflict.theirs) == (b"    a = 333\n", b"    a = 3\n", b"    a = 300\n")
    assert later[F].split(b"\n")[conflict.line - 1] == b"    a = 333"
    block = (
        b"<<<<<<< sglang 0.6.0\n    a = 333\n||||||| sglang 0.5.11\n    a = 3\n"
        b"=======\n    a = 300\n>>>>>>> 0002-p.patch\n"
    )
    assert ported.marked == {F: changed(changed(later[F], 1, b"    a = 100\n"), 333, block)}
    # What could be ported is whole: our side in the conflict, which is nothing of the second patch.
    assert [patch.name for patch in ported.patch_set.families[LATER].patches] == ["0001-p.patch"]
    assert ported.stack.final(F) == changed(later[F], 1, b"    a = 100\n")


def test_later_patches_go_on_over_a_conflict():
    last = changed(ALSO, 5, b"    a = 500\n")
    item = a_set([{F: BODY}, {F: MINE}, {F: ALSO}, {F: last}])
    later = {F: changed(BODY, 3, b"    a = 333\n")}
    ported = port(later, item)
    assert [patch.how for patch in ported.patches] == ["as it is", "conflict", "as it is"]
    assert ported.stack.final(F) == changed(changed(later[F], 1, b"    a = 100\n"), 5, b"    a = 500\n")
    assert b"    a = 500\n" in ported.marked[F]
    assert ported.marked[F].count(b"<<<<<<<") == 1


def test_what_upstream_has_already():
    later = {F: changed(BODY, 1, b"    a = 100\n")}
    ported = port(later)
    assert [patch.how for patch in ported.patches] == ["already upstream", "as it is"]
    family = ported.patch_set.families[LATER]
    assert [patch.name for patch in family.patches] == ["0002-p.patch"]
    assert family.left_out == {"0001-p.patch": "already upstream"}
    assert applied(ported, later) == {F: ALSO}
    whole = port({F: ALSO + b"\n\nmore = 1\n"})
    assert (whole.complete, whole.family, whole.stack) == (True, None, None)
    assert whole.patch_set.unneeded == {LATER: "already upstream"}
    assert whole.patch_set.families == SET.families


def test_patches_that_are_left_out_on_purpose():
    later = {F: changed(BODY, 1, b"    a = 'otherwise'\n")}
    ported = port(later, leave_out={"0001": "fixed otherwise"})
    assert [patch.how for patch in ported.patches] == ["left out", "as it is"]
    assert ported.patch_set.families[LATER].left_out == {"0001-p.patch": "fixed otherwise"}
    assert applied(ported, later) == {F: changed(later[F], 3, b"    a = 300\n")}
    none = port(later, leave_out={"0001": "fixed", "0002-p.patch": "gone"})
    assert none.patch_set.unneeded == {LATER: "fixed; gone"}
    for odd in ({"000": "x"}, {"0003": "x"}, {"0001": " "}, {"0001": "a\nb"}):
        with pytest.raises(DeployError) as caught:
            port(later, leave_out=odd)
        assert caught.value.code == "DD001"


def test_a_file_that_upstream_moved_is_followed():
    later = {MOVED: b"# moved\n" + BODY}
    item = replace(SET, roots=("sglang",))
    ported = port(later, item)
    assert ported.complete
    assert {(file.path, file.now) for patch in ported.patches for file in patch.files} == {(F, MOVED)}
    assert applied(ported, later) == {MOVED: b"# moved\n" + ALSO}


def test_a_moved_file_that_the_set_deletes():
    item = replace(a_set([{F: BODY, G: b"x = 1\n"}, {G: b"x = 1\n"}]), roots=("sglang",))
    later = {MOVED: BODY, G: b"x = 1\n"}
    ported = port(later, item, {F: BODY, G: b"x = 1\n"})
    assert ported.complete
    assert applied(ported, later) == {MOVED: None}


def test_a_file_that_is_gone():
    ported = port({G: b"def f1():\n    pass\n", "sglang/srt/deep/f.py": b"x = 1\n"})
    assert not ported.complete
    assert [patch.patch for patch in ported.patches] == [None, None]
    (file,) = ported.patches[0].files
    assert file.problem == (f"sglang {LATER} has no such file; of that name: sglang/srt/deep/f.py; f1 is in {G}")


def test_files_that_come_and_go():
    trees = [{F: BODY, G: b"old\n"}, {F: BODY, NEW: b"new\n"}]
    item = a_set(trees)
    assert applied(port(trees[0], item, trees[0]), trees[0]) == {G: None, NEW: b"new\n"}
    both = port({F: BODY, NEW: b"new\n"}, item, trees[0])
    assert both.patch_set.unneeded == {LATER: "already upstream"}
    torn = port({F: BODY, G: b"old, but longer\n", NEW: b"theirs\n"}, item, trees[0])
    assert sorted(file.problem for file in torn.patches[0].files) == [
        "the patch deletes it, and upstream changed it",
        f"the patch makes {NEW}, and sglang {LATER} has another file there",
    ]


def test_added_files():
    item = a_set([{F: BODY}, {F: MINE}], added={NEW: b"x = 1\n"})
    ported = port({F: BODY}, item)
    assert ported.joined
    assert applied(ported, {F: BODY}) == {F: MINE, NEW: b"x = 1\n"}
    taken = port({F: BODY, NEW: b"theirs\n"}, item)
    assert (taken.complete, taken.problems) == (
        False,
        (f"{NEW}: the set adds it, and sglang {LATER} has a file there",),
    )


def test_a_clean_merge_that_would_not_run_is_not_finished():
    uses = BODY + b"\n\ndef mine():\n    return f2()\n"
    item = a_set([{F: BODY}, {F: uses}])
    later = {F: BODY.replace(b"def f2", b"def renamed")}
    ported = port(later, item)
    assert [patch.how for patch in ported.patches] == ["as it is"]
    assert not ported.complete
    assert [problem.split(": ", 1)[1] for problem in ported.problems] == ["nothing defines f2"]


def test_what_the_set_requires_must_serve_the_version():
    below = a_set([{F: BODY}, {F: MINE}], name="below")
    above = a_set([{F: MINE}, {F: ALSO}], requires=("below",))
    with pytest.raises(DeployError) as caught:
        port_set([below, above], ENGINE, LATER, {F: BODY}, {F: BODY})
    assert (caught.value.code, "port below --from" in caught.value.hint) == ("DD109", True)
    later = {F: b"# upstream\n" + BODY}
    below = port(later, below).patch_set
    ported = port_set([below, above], ENGINE, LATER, {F: BODY}, later)
    stack = stack_of([below, ported.patch_set], LATER, later)
    assert stack.final(F) == b"# upstream\n" + ALSO
    # Where what is below is not needed, the set stands on upstream's own.
    below = replace(a_set([{F: BODY}, {F: MINE}], name="below"), unneeded={LATER: "upstream has it"})
    ported = port_set([below, above], ENGINE, LATER, {F: BODY}, {F: MINE})
    assert stack_of([below, ported.patch_set], LATER, {F: MINE}).final(F) == ALSO


def test_a_version_that_the_set_knows_already():
    for item in (port({F: BODY}).patch_set, replace(SET, unneeded={LATER: "why"})):
        with pytest.raises(DeployError) as caught:
            port({F: BODY}, item)
        assert caught.value.code == "DD001"
    with pytest.raises(DeployError) as caught:
        port_set([SET], "0.0.1", LATER, {F: BODY}, {F: BODY})
    assert caught.value.code == "DD109"


def plain(text: bytes) -> bytes:
    """The text without what git takes for binary."""
    return text.replace(b"\0", b"0")


@settings(max_examples=12, deadline=None)
@given(trees=series(), data=st.data())
def test_random_ports(trees, data):
    """Whatever upstream did, a port without conflicts applies; where it did nothing, the set is as it was."""
    trees = [{path: plain(text) for path, text in tree.items()} for tree in trees]
    assume(all(one != two for one, two in itertools.pairwise(trees)) and len(trees) > 1)
    item = a_set(trees)
    same = port(trees[0], item, trees[0])
    assert {patch.how for patch in same.patches} == {"as it is"}
    assert same.joined
    later = {path: plain(data.draw(edits(text))) for path, text in trees[0].items()}
    ported = port(later, item, trees[0])
    if ported.stack is not None:
        for path in ported.stack.family.paths:
            if path not in ported.marked:
                assert ported.stack.final(path) is None or b"<<<<<<< sglang" not in ported.stack.final(path)
        if all(patch.how != "conflict" for patch in ported.patches):
            assert applied(ported, later) == {path: ported.stack.final(path) for path in ported.stack.family.paths}
            assert ported.marked == {}


# -- the shipped set on the published engines ---------------------------------------------------------


@pytest.mark.wheel
def test_the_shipped_families_are_what_port_makes(engine_tree):
    """Porting dflash-fixes again gives its families: nothing in them was made by hand."""
    closure = load_closure("dflash-fixes", patches_dir())
    shipped = closure[-1]
    item = replace(shipped, families={"0.5.11": shipped.families["0.5.11"]}, unneeded={})
    for engine, later, leave_out in (
        ("0.5.11", "0.5.12", {}),
        ("0.5.12", "0.5.12.post1", {}),
        ("0.5.12.post1", "0.5.13", dict(shipped.families["0.5.13"].left_out)),
        ("0.5.13", "0.5.13.post1", {}),
    ):
        ported = port_set([item], engine, later, engine_tree(engine), engine_tree(later), leave_out)
        assert ported.complete
        item = ported.patch_set
    for name in ("0.5.11", "0.5.12", "0.5.13"):
        mine, theirs = item.families[name], shipped.families[name]
        assert (mine.engines, mine.hashes, mine.left_out) == (theirs.engines, theirs.hashes, theirs.left_out)
        assert [(one.name, one.data) for one in mine.patches] == [(one.name, one.data) for one in theirs.patches]


@pytest.mark.wheel
def test_where_the_worker_is_another_one(engine_tree):
    """0.5.14 has another worker, and its drafter reads the RoPE base as 0002 does: nothing moves by itself."""
    closure = load_closure("dflash-fixes", patches_dir())
    item = replace(closure[-1], families={"0.5.11": closure[-1].families["0.5.11"]}, unneeded={})
    ported = port_set([item], "0.5.11", "0.5.14", engine_tree("0.5.11"), engine_tree("0.5.14"))
    assert [patch.how for patch in ported.patches] == ["conflict", "conflict"]
    files = {file.path.rpartition("/")[2]: file for patch in ported.patches for file in patch.files}
    assert "_init_fused_kv_helper is in sglang/srt/speculative/dflash_worker_v2.py" in files["dflash_worker.py"].problem
    functions = {name for clash in files["dflash.py"].clashes for name in clash.functions}
    assert "DFlashAttention.__init__" in functions
