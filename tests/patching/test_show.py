"""What `show` prints is what the planner applies: by our own reader, by git and by GNU patch."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.filediff import Kind
from ddtree_deploy.patching.images import FileImage
from ddtree_deploy.patching.patchset import load_sets, with_requirements
from ddtree_deploy.patching.plan import plan
from ddtree_deploy.patching.show import new_file_diff, show

from .difftools import contents, git_apply, read_tree, write_tree
from .sets import ENGINES, GOOD, changed_copy, images
from .test_properties import QUICK

ORDERED = with_requirements("over", load_sets(GOOD))


def present(tree):
    return {path: image for path, image in tree.items() if image is not None}


def wanted(engine):
    tree = images(ORDERED, engine)
    planned = plan(ORDERED, engine, tree)
    return present({**tree, **{path: change.after for path, change in planned.changes.items()}})


@pytest.mark.parametrize("engine", ENGINES)
def test_our_own_reader(engine):
    tree = images(ORDERED, engine)
    diffs = parse(show(ORDERED, engine), source="shown")
    assert present({**tree, **apply_diffs(tree, diffs).images}) == wanted(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_git(tmp_path, engine):
    write_tree(tmp_path, present(images(ORDERED, engine)))
    assert git_apply(tmp_path, show(ORDERED, engine), "-p1") == (0, "")
    assert read_tree(tmp_path) == wanted(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_gnu_patch(tmp_path, engine):
    if shutil.which("patch") is None:
        pytest.skip("GNU patch is not installed")
    write_tree(tmp_path, present(images(ORDERED, engine)))
    done = subprocess.run(["patch", "-p1", "-F0", "-s"], cwd=tmp_path, input=show(ORDERED, engine), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert read_tree(tmp_path) == wanted(engine)


def test_only():
    demo, over = ORDERED
    assert show(ORDERED, "0.5.11", only=True) == show([over], "0.5.11")
    whole = show(ORDERED, "0.5.11")
    assert whole == show([demo], "0.5.11") + b"\n" + show([over], "0.5.11")
    for item in ORDERED:
        assert all(patch.data in whole for patch in item.family_for("0.5.11").patches)


def test_a_patch_that_ends_without_a_newline(tmp_path):
    """It can only be text after the diff; the next title must not run into it."""
    patch = (GOOD / "demo/0.5.11/0001-f.patch").read_text()
    folder = changed_copy(tmp_path / "sets", {"demo/0.5.11/0001-f.patch": patch + "-- \n2.39"})
    ordered = with_requirements("over", load_sets(folder))
    shown = show(ordered, "0.5.11")
    assert b"-- \n2.39\n\n# demo 1.0.0: 0.5.11/0002-g.patch\n" in shown
    tree = images(ordered, "0.5.11")
    assert present({**tree, **apply_diffs(tree, parse(shown, source="shown")).images}) == wanted("0.5.11")


def test_unlisted_version():
    with pytest.raises(DeployError) as caught:
        show(ORDERED, "0.5.10")
    assert caught.value.code == "DD109"
    assert "0.5.11, 0.5.12, 0.5.12.post1" in caught.value.hint


@given(contents())
@QUICK
def test_new_file_diff_is_exact(data):
    (diff,) = parse(new_file_diff("sglang/srt/x.py", data), source="x")
    assert (diff.kind, diff.new_path) == (Kind.CREATE, "sglang/srt/x.py")
    assert apply_diffs({}, [diff]).images == {"sglang/srt/x.py": FileImage(data)}


@pytest.mark.parametrize("data", [b"", b"\n", b"a", b"a\nb", b"a\r\nb\r\n", b"-- \n+x\n@@ -1 +1 @@\n"])
def test_new_file_diff_for_other_tools(tmp_path, data):
    patch = new_file_diff("sglang/srt/x.py", data)
    write_tree(tmp_path / "git", {})
    assert git_apply(tmp_path / "git", patch) == (0, "")
    assert (tmp_path / "git/sglang/srt/x.py").read_bytes() == data
    if shutil.which("patch"):
        write_tree(tmp_path / "gnu", {})
        subprocess.run(["patch", "-p1", "-s"], cwd=tmp_path / "gnu", input=patch, check=True)
        assert (tmp_path / "gnu/sglang/srt/x.py").read_bytes() == data
