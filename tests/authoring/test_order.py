from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.authoring.order import dropped, moved, reordered
from ddtree_deploy.authoring.series import Series
from ddtree_deploy.authoring.stack import stack_of
from ddtree_deploy.errors import DeployError
from tests.authoring.sets import ENGINE, F, G, H, a_set, numbered, series
from tests.authoring.test_refresh import SLOW, data, lines_of, stack_for

BASE = {F: numbered(40), G: numbered(6, "g")}
A, B, C, D = (f"{number:04d}-p.patch" for number in (1, 2, 3, 4))


def tree(*pairs, **more):
    return {F: lines_of(*pairs, count=40), G: BASE[G], **more}


# A adds lines at 5, B changes line 30, C changes a line that A brings, D makes H.
STACK = stack_for(
    [
        BASE,
        tree((5, "five\nand\na\nhalf")),
        tree((5, "five\nand\na\nhalf"), (30, "thirty")),
        tree((5, "five\nand\n1\nhalf"), (30, "thirty")),
        tree((5, "five\nand\n1\nhalf"), (30, "thirty"), **{H: b"h\n"}),
    ]
)


def finals(family):
    (item,) = STACK.sets
    again = stack_of([replace(item, families={"f": family})], ENGINE, BASE, trust_hashes=False)
    assert not Series(again)._moved
    return {path: again.final(path) for path in (F, G, H)}


def refused(code, call, *arguments):
    with pytest.raises(DeployError) as caught:
        call(*arguments)
    assert caught.value.code == code
    return "\n".join((caught.value.message, *caught.value.details))


def test_an_order_that_changes_nothing_else():
    family = reordered(STACK, [B, D, A, C])
    assert [patch.name for patch in family.patches] == [B, D, A, C]
    assert finals(family) == finals(STACK.family)
    assert family.hashes == STACK.family.hashes
    # B's hunk stood three lines further down behind A.
    assert b"@@ -30,7 +30,7 @@" in data(STACK.family)[B]
    assert b"@@ -27,7 +27,7 @@" in data(family)[B]
    assert data(family)[D] == data(STACK.family)[D]
    assert reordered(STACK, [A, B, C, D]).patches == STACK.family.patches


def test_a_patch_that_another_needs():
    said = refused("DD117", reordered, STACK, [B, C, A, D])
    assert f"{C} needs {A}, which would not be before it" in said
    assert f"hunk 1 of {F} builds on {A}" in said
    said = refused("DD117", dropped, STACK, A)
    assert f"{C} needs {A}" in said
    made = stack_for([BASE, tree(**{H: b"1\n"}), tree(**{H: b"2\n"})])
    assert f"{B} needs {A}" in refused("DD117", reordered, made, [B, A])


def test_names():
    for names in ([A, B, C], [A, B, C, D, D], [A, B, C, "x"]):
        assert "must name every patch once" in refused("DD001", reordered, STACK, names)
    assert "x is no patch" in refused("DD001", dropped, STACK, "x")
    assert moved([A, B, C], C, A) == [C, A, B]
    assert moved([A, B, C], A, None) == [B, C, A]
    assert moved([A, B, C], B, B) == [A, B, C]
    for arguments in (([A], "x", None), ([A], A, "x")):
        assert "x is no patch" in refused("DD001", moved, *arguments)


def test_dropping():
    family = dropped(STACK, B)
    assert finals(family)[F] == tree((5, "five\nand\n1\nhalf"))[F]
    assert data(family)[A] == data(STACK.family)[A]
    assert data(family)[C] == data(STACK.family)[C]
    family = dropped(STACK, D)
    assert finals(family)[H] is None
    alone = stack_for([BASE, tree((3, "three"))])
    assert dropped(alone, A).patches == ()


def test_a_hunk_that_finds_like_lines_elsewhere():
    """Patch 1 puts a block in front of one that is the same; without it the hunk of patch 2 fits the other one."""
    block = b"a\nb\nc\nd\ne\nf\n"
    before = {F: b"top\n" + block}
    one = {F: b"top\n" + block + b"mid\n" + block}
    # Patch 2 changes the second block; when patch 1 goes, only the first one is there.
    two = {F: b"top\n" + block + b"mid\n" + block.replace(b"c\nd\n", b"c\nD\n")}
    stack = stack_for([before, one, two])
    said = refused("DD117", dropped, stack, A)
    assert A in said


def test_an_order_that_applies_and_gives_other_files():
    """Every period looks alike: without the lines of patch 1 above, patch 2 would change the next one."""
    period = b"a\nb\nc\nd\n"
    before = b"top\n" + period * 10
    one = b"top\na\nb\nc\nNEW\n" + period * 10
    two = b"top\na\nb\nc\nNEW\n" + period * 4 + b"a\nB\nc\nd\n" + period * 5
    stack = stack_for([{F: before}, {F: one}, {F: two}])
    assert f"in that order {F} would end up otherwise" in refused("DD117", reordered, stack, [B, A])
    assert "later patches depend on what 0001-p.patch does" in refused("DD117", dropped, stack, A)


def test_the_reason_for_doing_without_a_patch():
    (item,) = STACK.sets
    other = replace(
        item.families["f"], name="g", engines=("0.5.12",), hashes={"0.5.12": item.families["f"].hashes[ENGINE]}
    )
    both = stack_of([replace(item, families={**item.families, "g": other})], ENGINE, BASE)
    assert dropped(both, B, "fixed upstream").left_out == {B: "fixed upstream"}
    assert dropped(both, B).left_out == {}
    assert f"none has {B}" in refused("DD001", dropped, STACK, B, "fixed upstream")


@given(series(), st.data())
@SLOW
def test_any_order_gives_the_same_files_or_is_refused(trees, draw):
    stack = stack_of([a_set(trees)], ENGINE, trees[0]) if len(trees) > 1 else None
    if stack is None:
        return
    names = draw.draw(st.permutations([patch.name for patch in stack.family.patches]))
    try:
        family = reordered(stack, names)
    except DeployError as error:
        assert error.code == "DD117"
        assert list(names) != [patch.name for patch in stack.family.patches]
        return
    item = replace(stack.sets[0], families={"f": family})
    again = stack_of([item], ENGINE, trees[0])
    assert [patch.name for patch in again.family.patches] == list(names)
    for path in (F, G, H):
        assert again.final(path) == trees[-1].get(path)


@given(series(), st.data())
@SLOW
def test_dropping_the_last_patch_is_the_tree_before_it(trees, draw):
    if len(trees) < 2:
        return
    stack = stack_for(trees)
    family = dropped(stack, stack.family.patches[-1].name)
    assert family.patches == stack.family.patches[:-1]
    any_name = draw.draw(st.sampled_from([patch.name for patch in stack.family.patches]))
    try:
        dropped(stack, any_name)
    except DeployError as error:
        assert error.code == "DD117"
        assert any_name != stack.family.patches[-1].name
