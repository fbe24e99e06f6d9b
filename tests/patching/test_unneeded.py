"""Sets that say which engine versions do not need them, sets that do nothing yet, and sets beside broken ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.classify import State, classify
from ddtree_deploy.patching.patchset import (
    check_chain,
    load_closure,
    load_set,
    load_sets,
    survey_sets,
    with_requirements,
)
from ddtree_deploy.patching.plan import plan
from ddtree_deploy.patching.show import show

from .sets import GOOD, changed_copy, images

V = "0.5.11"
SETS = load_sets(GOOD)
DEMO, OVER = SETS.values()
#: Where upstream has all that DEMO does: OVER builds on what the engine itself ships.
DONE = replace(DEMO, families={"0.5.12": DEMO.families["0.5.12"]}, unneeded={V: "fixed upstream"})


def upstream():
    """The files of an engine that has what DEMO does."""
    tree = images([DEMO, OVER], V)
    return {**tree, **{path: change.after for path, change in plan([DEMO], V, tree).changes.items()}}


def fingerprints(tree):
    from ddtree_deploy.patching.images import fingerprint

    return {path: fingerprint(image) for path, image in tree.items()}


def test_a_set_that_is_not_needed_counts_as_applied():
    tree = upstream()
    assert check_chain([DONE, OVER], V) == []
    done, over = classify([DONE, OVER], V, fingerprints(tree))
    assert (done.state, done.files, done.version, done.borrowed) == (State.UNNEEDED, (), None, False)
    assert over.state is State.PENDING
    planned = plan([DONE, OVER], V, tree)
    assert [layer.patch_set.name for layer in planned.to_apply] == ["over"]
    assert "demo: not needed on 0.5.11: fixed upstream" in planned.notices
    alone = plan([DONE], V, tree)
    assert (alone.to_apply, alone.notices) == ((), ("demo: not needed on 0.5.11: fixed upstream",))
    assert show([DONE, OVER], V) == show([DEMO, OVER], V, only=True)
    with pytest.raises(DeployError, match=r"demo is not needed on 0.5.11: fixed upstream") as caught:
        show([DONE], V)
    assert caught.value.code == "DD109"


def test_where_it_is_needed_nothing_is_different():
    with pytest.raises(DeployError) as caught:
        plan([DONE, OVER], V, images([DEMO, OVER], V))
    assert caught.value.code == "DD101"
    engine = "0.5.12"
    tree = images([DEMO, OVER], engine)
    assert [layer.patch_set.name for layer in plan([DONE, OVER], engine, tree).to_apply] == ["demo", "over"]
    assert [problem.text for problem in check_chain([DONE, OVER], "0.5.10")] == [
        "demo does not serve 0.5.10, and over requires it",
        "over does not serve 0.5.10, and over requires it",
    ]


def test_the_record_is_kept():
    """A set that was applied before the engine had its fixes is still known by name."""
    from ddtree_deploy.patching.classify import Recorded

    record = Recorded("demo", "0.9", "x" * 64, {})
    (status,) = classify([DONE], V, fingerprints(images([DEMO], V)), [record])
    assert (status.state, status.recorded) == (State.UNNEEDED, record)


def test_a_set_that_does_nothing_yet():
    empty = replace(DEMO.families["0.5.12"], patches=(), added={}, hashes={}, engines=(V,))
    item = replace(DEMO, families={"e": empty}, requires=())
    (status,) = classify([item], V, {})
    assert status.state is State.PENDING
    with pytest.raises(DeployError, match=r"demo: the family 0.5.12 does nothing yet") as caught:
        plan([item], V, {})
    assert caught.value.code == "DD108"
    assert "patchset edit demo --engine 0.5.11" in caught.value.hint


# -- sets beside broken ones -------------------------------------------------------------------------


def test_broken_sets_stand_alone(tmp_path):
    folder = changed_copy(tmp_path / "sets", sub=[("over/patchset.toml", 'version = "1.0.0"', "version = 1")])
    sets, broken = survey_sets(folder)
    assert (list(sets), list(broken)) == (["demo"], ["over"])
    assert [problem.text for problem in broken["over"]] == ["over/patchset.toml:3: version: must be a text"]
    assert load_closure("demo", folder) == (sets["demo"],)
    with pytest.raises(DeployError, match=r"over/patchset.toml:3") as caught:
        load_closure("over", folder)
    assert caught.value.code == "DD108"
    with pytest.raises(DeployError, match="there is no patch set ovr") as caught:
        load_closure("ovr", folder)
    assert (caught.value.code, caught.value.hint) == ("DD107", "did you mean over?")


def test_what_requires_a_broken_set_is_broken(tmp_path):
    folder = changed_copy(tmp_path / "sets", {"demo/0.5.11/0001-f.patch": "x\n"})
    sets, broken = survey_sets(folder)
    assert (sets, list(broken)) == ({}, ["demo", "over"])
    assert [problem.text for problem in broken["over"]] == ["the patch set over requires demo, which is not valid"]
    with pytest.raises(DeployError, match=r"demo/0.5.11/0001-f.patch"):
        load_closure("over", folder)


@pytest.mark.parametrize("first", ["aa", "zz"])
def test_the_order_of_names_does_not_matter(tmp_path, first):
    """Hashes that do not fit are the fault of the set above, whatever it is called."""
    folder = changed_copy(tmp_path / "sets")
    text = (folder / "over" / "patchset.toml").read_text()
    (folder / "over").rename(folder / first)
    broken_hash = text.replace('name = "over"', f'name = "{first}"').replace("dbb0b1b90fdf", "0" * 12, 1)
    (folder / first / "patchset.toml").write_text(broken_hash)
    sets, broken = survey_sets(folder)
    assert (list(sets), list(broken)) == (["demo"], [first])
    assert "before is 000000000000, but demo leaves dbb0b1b90fdf" in broken[first][0].text


def test_hashes_that_are_to_be_made_anew(tmp_path):
    folder = changed_copy(tmp_path / "sets", {"demo/new/sglang/srt/added.py": "changed = 1\n"})
    with pytest.raises(DeployError, match="refresh the set"):
        load_set(folder / "demo")
    assert load_set(folder / "demo", trust_hashes=False).families[V].added == {"sglang/srt/added.py": b"changed = 1\n"}
    (folder / "demo" / "0.5.11" / "0001-f.patch").write_text("x\n")
    with pytest.raises(DeployError, match=r"0001-f\.patch"):
        load_set(folder / "demo", trust_hashes=False)


def test_requirements_that_are_not_sound_are_said():
    with pytest.raises(DeployError, match="over requires demo, which is not valid") as caught:
        with_requirements("over", {"over": OVER, "demo": None})
    assert caught.value.code == "DD108"
