"""Three-way merges and their conflicts in parts."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddtree_deploy.authoring.merge import Conflict, merge
from tests.patching.difftools import contents, edits

LABELS = ("ours", "base", "theirs")
BASE = b"1\n2\n3\n4\n5\n6\n7\n8\n9\n"


def test_changes_in_different_places_come_together():
    found = merge(BASE, BASE.replace(b"1\n", b"one\n"), BASE.replace(b"9\n", b"nine\n"), LABELS)
    assert (found.data, found.marked, found.conflicts) == (b"one\n2\n3\n4\n5\n6\n7\n8\nnine\n",) * 2 + ((),)


def test_the_same_change_on_both_sides_is_no_conflict():
    new = BASE.replace(b"5\n", b"five\n")
    assert merge(BASE, new, new, LABELS).data == new


def test_a_conflict_has_its_three_sides_and_its_place():
    found = merge(BASE, BASE.replace(b"5\n", b"five\nand\n"), BASE.replace(b"5\n", b"V\n"), LABELS)
    assert found.conflicts == (Conflict(5, b"five\nand\n", b"5\n", b"V\n"),)
    assert found.data == BASE.replace(b"5\n", b"five\nand\n")
    block = b"<<<<<<< ours\nfive\nand\n||||||| base\n5\n=======\nV\n>>>>>>> theirs\n"
    assert found.marked == BASE.replace(b"5\n", block)


def test_lines_that_look_like_markers_are_text():
    odd = b"<<<<<<< x\n1\n||||||| y\n=======\n2\n>>>>>>> z\n=========================\n"
    found = merge(odd, odd.replace(b"1", b"one"), odd.replace(b"2", b"two"), LABELS)
    assert found.conflicts == ()
    assert found.data == found.marked == odd.replace(b"1", b"one").replace(b"2", b"two")
    found = merge(odd, odd.replace(b"1\n", b"=======\none\n"), odd.replace(b"1\n", b"uno\n"), LABELS)
    assert found.conflicts == (Conflict(2, b"=======\none\n", b"1\n", b"uno\n"),)


def test_a_conflict_at_an_end_without_a_newline():
    found = merge(b"1\n2", b"1\n2a", b"1\n2b", LABELS)
    assert [(item.ours, item.theirs) for item in found.conflicts] == [(b"2a\n", b"2b\n")]
    assert found.data == b"1\n2a"


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_random_merges(data):
    base = data.draw(contents(12))
    ours, theirs = data.draw(edits(base)), data.draw(edits(base))
    assume(b"\0" not in base + ours + theirs)
    found = merge(base, ours, theirs, LABELS)
    assert merge(base, ours, base, LABELS).data == ours
    assert merge(base, base, theirs, LABELS).data == theirs
    if not found.conflicts:
        assert found.marked == found.data
    # Whatever is in conflict, the lines of ours that stand there are ours.
    lines = found.data.split(b"\n")
    for conflict in found.conflicts:
        mine = conflict.ours.split(b"\n")[: conflict.ours.count(b"\n")]
        assert lines[conflict.line - 1 :][: len(mine)] == mine
        assert conflict.ours != conflict.theirs
