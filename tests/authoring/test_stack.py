from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_deploy.authoring.stack import applied, stack_of
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.images import FileImage
from ddtree_deploy.patching.patchset import load_set, load_sets, with_requirements
from ddtree_deploy.patching.plan import plan
from tests.patching.sets import ENGINES, FOLDER, GOOD, changed_copy, images

ORDERED = with_requirements("over", load_sets(GOOD))
F, G, ADDED, OLD = (f"sglang/srt/{name}.py" for name in ("f", "g", "added", "old"))


def tree(engine):
    folder = FOLDER / "trees" / engine
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}


@pytest.mark.parametrize("engine", ENGINES)
def test_it_ends_where_the_planner_does(engine):
    stack = stack_of(ORDERED, engine, tree(engine))
    planned = plan(ORDERED, engine, images(ORDERED, engine)).changes
    for path, change in planned.items():
        want = change.after.data if isinstance(change.after, FileImage) else None
        assert stack.final(path) == want
    for path in set(tree(engine)) - set(planned):
        assert stack.before(path) == stack.final(path) == tree(engine)[path]


def test_levels():
    pristine = tree("0.5.11")
    stack = stack_of(ORDERED, "0.5.11", pristine)
    (demo, _over) = ORDERED
    below = stack_of([demo], "0.5.11", pristine)
    assert stack.family.name == "all"
    assert below.before(F) == pristine[F]
    assert below.before(ADDED) is None
    assert below.after(0, ADDED) == below.final(ADDED) == demo.family_for("0.5.11").added[ADDED]
    assert below.after(0, G) == pristine[G] != below.after(1, G)
    assert stack.before(F) == below.final(F) != stack.after(0, F)
    assert stack.after(0, OLD) == pristine[OLD]
    assert stack.after(1, OLD) is stack.final(OLD) is None
    assert stack.before("sglang/srt/none.py") is None
    for index in (-1, 4):
        with pytest.raises(IndexError):
            stack.after(index, F)


def refused(code, call, *arguments, **options):
    with pytest.raises(DeployError) as caught:
        call(*arguments, **options)
    assert caught.value.code == code
    return "\n".join((caught.value.message, *caught.value.details))


def test_refusals(tmp_path):
    pristine = tree("0.5.11")
    assert "over has no family for 9" in refused("DD109", stack_of, ORDERED[1:], "9", pristine)
    assert "demo does not serve 9" in refused("DD108", stack_of, ORDERED, "9", pristine)
    done = replace(ORDERED[0], unneeded={"9": "fixed upstream"})
    assert "demo is not needed on 9: fixed upstream" in refused("DD109", stack_of, [done], "9", pristine)
    drifted = {**pristine, F: b"# no\n" + pristine[F]}
    assert f"demo on 0.5.11: {F}: before is d432fa1fd3cd" in refused("DD108", stack_of, ORDERED, "0.5.11", drifted)
    assert F in refused("DD108", applied, ORDERED, "0.5.11", drifted)
    assert f"{F}: before is d432fa1fd3cd" in refused("DD108", stack_of, ORDERED[:1], "0.5.11", drifted)
    there = {**pristine, ADDED: b"x\n"}
    said = refused("DD106", stack_of, ORDERED[:1], "0.5.11", there, trust_hashes=False)
    assert f"demo adds {ADDED}, which is there before it" in said


def test_hashes_that_are_to_be_made_anew(tmp_path):
    folder = changed_copy(tmp_path / "sets", sub=[("demo/patchset.toml", "c6963939ec6a", "0" * 12)])
    demo = load_set(folder / "demo")
    pristine = tree("0.5.11")
    assert "after is 000000000000" in refused("DD108", stack_of, [demo], "0.5.11", pristine)
    assert stack_of([demo], "0.5.11", pristine, trust_hashes=False).final(G) is not None
    (patch, _) = demo.family_for("0.5.11").patches
    broken = replace(demo, families={"0.5.11": replace(demo.family_for("0.5.11"), patches=(patch, patch))})
    assert F in refused("DD102", stack_of, [broken], "0.5.11", pristine, trust_hashes=False)
