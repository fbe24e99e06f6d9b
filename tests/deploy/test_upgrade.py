"""Other versions of a set that is applied: replaced, taken back, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_deploy.deploy.rollback import undo_apply
from ddtree_deploy.errors import DeployError
from tests.agent.harness import tree_of
from tests.deploy.sets import Desk

A1, A2, A3, A4 = (b"A = %d\n" % number for number in range(1, 5))
B1, B2, B3 = (b"B = %d\n" % number for number in range(1, 4))
C1, C2 = (b"C = %d\n" % number for number in range(1, 3))
N1, N2 = b"N = 1\n", b"N = 2\n"


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def refused(code: str, action, *args, **options) -> DeployError:
    with pytest.raises(DeployError) as caught:
        action(*args, **options)
    assert caught.value.code == code, caught.value
    return caught.value


def base(desk: Desk, version: str) -> None:
    """A set of three versions that touch different files."""
    desk.write(
        "base",
        version,
        {
            "1.0": {"a.py": (A1, A2), "b.py": (B1, B2), "old/n.py": (None, N1)},
            "2.0": {"a.py": (A1, A3), "sub/c.py": (C1, None), "new/n.py": (None, N2)},
            "3.0": {"a.py": (A1, A4)},
        }[version],
    )


def top(desk: Desk, version: str, on: bytes) -> None:
    """A set built on ``base``, which leaves a.py as ``on``."""
    desk.write(
        "top", version, {"a.py": (on, on + b"TOP = 1\n"), "t.py": (None, b"T = '%s'\n" % version.encode())}, ["base"]
    )


def test_another_version_takes_the_place_of_the_applied_one(desk):
    pristine = tree_of(desk.host.site)
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    assert (desk.line("base").state, desk.line("base").known) == ("superseded", "2.0")
    applied = desk.apply("base")
    assert applied.ground.replaced == {"base": "1.0"}
    assert {path: desk.read(path) for path in ("a.py", "b.py", "sub/c.py", "new/n.py", "old/n.py")} == {
        "a.py": A3,
        "b.py": B1,
        "sub/c.py": None,
        "new/n.py": N2,
        "old/n.py": None,
    }
    assert not (desk.host.site / "sglang/srt/old").exists()
    assert desk.applied() == {"base": "2.0"}
    assert desk.line("base").back == ("1.0",)
    assert desk.history() == ["apply base 1.0", "apply base 1.0 -> 2.0"]
    assert not desk.apply("base").to_do
    desk.rollback("base")
    assert tree_of(desk.host.site) == pristine


def test_no_file_passes_through_what_it_was_before_the_set(desk, monkeypatch):
    """Each changed file is renamed onto once, and only with its new content."""
    import os

    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    real, seen = os.replace, []

    def replace(source, target, **keywords):
        real(source, target, **keywords)
        if "src_dir_fd" in keywords:
            seen.append((target, desk.read("a.py")))

    monkeypatch.setattr(os, "replace", replace)
    result = desk.apply("base").result
    assert sorted(path for path, _ in seen) == ["a.py", "b.py", "n.py"]
    assert all(content == A3 for _, content in seen[[path for path, _ in seen].index("a.py") :])
    assert A1 not in [content for _, content in seen]
    assert len(result["files"]) == 5


def test_back_to_the_version_before(desk):
    base(desk, "1.0")
    desk.apply("base")
    one = tree_of(desk.host.site)
    base(desk, "2.0")
    desk.apply("base")
    result = desk.rollback("base", "1.0")
    assert result["back"] == [{"name": "base", "version": "1.0", "from": "2.0"}]
    assert result["left"] == [{"name": "base", "version": "1.0"}]
    assert tree_of(desk.host.site) == one
    assert desk.applied() == {"base": "1.0"}
    assert desk.line("base").back == ()
    assert desk.history()[-1] == "rollback base 2.0 -> 1.0"
    desk.rollback("base")
    assert desk.read("old/n.py") is None


def test_back_needs_nothing_but_the_host(desk):
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    desk.apply("base")
    (desk.patches / "base/patchset.toml").unlink()
    desk.rollback("base", "1.0")
    assert desk.read("a.py") == A2


def test_back_over_two_versions_and_the_bound(desk):
    base(desk, "1.0")
    desk.apply("base")
    one = tree_of(desk.host.site)
    for version in ("2.0", "3.0"):
        base(desk, version)
        desk.apply("base")
    assert desk.line("base").back == ("2.0", "1.0")
    desk.rollback("base", "1.0")
    assert tree_of(desk.host.site) == one
    for number in range(10, 16):
        desk.write("base", f"{number}.0", {"a.py": (A1, b"A = %d\n" % number)})
        desk.apply("base")
    assert desk.line("base").back == ("14.0", "13.0", "12.0")
    error = refused("DD115", desk.rollback, "base", "11.0")
    assert error.message == "box: base cannot go back to 11.0: this host keeps no such version"
    assert error.hint == "versions to go back to: 14.0, 13.0, 12.0"
    assert "in force" in refused("DD115", desk.rollback, "base", "15.0").message


def test_contents_of_versions_to_go_back_to_are_not_pruned(desk):
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    desk.apply("base")
    for _ in range(12):
        patch = desk.patch("other", "b.py", B1, B3)
        desk.apply(patch)
        desk.rollback("other")
    desk.rollback("base", "1.0")
    assert (desk.read("a.py"), desk.read("b.py"), desk.read("old/n.py")) == (A2, B2, N1)


def test_an_older_version_needs_downgrade(desk):
    base(desk, "2.0")
    desk.apply("base")
    base(desk, "1.0")
    before = tree_of(desk.host.site)
    error = refused("DD114", desk.apply, "base")
    assert error.message == "box: base 2.0 is applied, and is newer than 1.0"
    assert "--downgrade" in error.hint
    assert tree_of(desk.host.site) == before
    assert desk.line("base").state == "applied"
    assert "older" in desk.line("base").detail
    desk.apply("base", downgrade=True)
    assert desk.applied() == {"base": "1.0"}
    assert desk.read("a.py") == A2
    assert desk.line("base").back == ("2.0",)


def test_a_version_to_the_same_effect_changes_the_record_alone(desk):
    base(desk, "1.0")
    desk.apply("base")
    files = {"a.py": (A1, A2), "b.py": (B1, B2), "old/n.py": (None, N1)}
    desk.write("base", "1.1", files)
    before = tree_of(desk.host.site)
    assert desk.line("base").detail == "1.1 is known here, with the same effect"
    assert desk.apply("base").result["files"] == {}
    assert tree_of(desk.host.site) == before
    assert desk.applied() == {"base": "1.1"}
    desk.write("base", "1.0", files)
    applied = desk.apply("base")
    assert not applied.to_do
    assert applied.ground.notices == ("base 1.1 is applied; 1.0 does the same on this engine",)
    desk.rollback("base")
    assert desk.read("old/n.py") is None


def test_a_patch_file_is_replaced_in_place(desk):
    first = desk.apply(desk.patch("fix", "b.py", B1, B2)).plan.layers[0].patch_set.version
    applied = desk.apply(desk.patch("fix", "b.py", B1, B3))
    assert applied.ground.replaced == {"fix": first}
    assert desk.read("b.py") == B3
    desk.rollback("fix", first)
    assert desk.read("b.py") == B2
    desk.rollback("fix")
    assert desk.read("b.py") == B1


def test_another_content_of_the_same_version_can_be_gone_back_from(desk):
    """A maintainer's loop: the set is edited, its version is not."""
    desk.write("base", "1.0", {"a.py": (A1, A2)})
    desk.apply("base")
    desk.write("base", "1.0", {"a.py": (A1, A3)})
    desk.apply("base")
    assert desk.read("a.py") == A3
    assert desk.line("base").back == ("1.0",)
    desk.rollback("base", "1.0")
    assert desk.read("a.py") == A2
    assert "in force" in refused("DD115", desk.rollback, "base", "1.0").message


# -- sets built on it ----------------------------------------------------------------------------------


def both(desk: Desk, version: str, on: bytes, top_version: str = "1.0") -> None:
    base(desk, version)
    top(desk, top_version, on)


def test_what_builds_on_it_comes_along(desk):
    pristine = tree_of(desk.host.site)
    both(desk, "1.0", A2)
    desk.apply("top")
    both(desk, "2.0", A3)
    applied = desk.apply("base")
    assert applied.ground.along == ("top",)
    assert desk.read("a.py") == A3 + b"TOP = 1\n"
    assert desk.applied() == {"base": "2.0", "top": "1.0"}
    assert desk.history()[-1] == "apply base 1.0 -> 2.0, top 1.0"
    assert {line.name: line.state for line in desk.status().sets} == {"base": "applied", "top": "applied"}
    desk.rollback("base", with_dependents=True)
    assert tree_of(desk.host.site) == pristine


def test_a_newer_version_of_what_builds_on_it_comes_along(desk):
    both(desk, "1.0", A2)
    desk.apply("top")
    both(desk, "2.0", A3, "1.5")
    desk.apply("base")
    assert desk.applied() == {"base": "2.0", "top": "1.5"}
    assert desk.history()[-1] == "apply base 1.0 -> 2.0, top 1.0 -> 1.5"


def test_an_older_one_does_not_come_along_unasked(desk):
    both(desk, "1.0", A2, "1.5")
    desk.apply("top")
    both(desk, "2.0", A3, "1.0")
    error = refused("DD114", desk.apply, "base")
    assert "top 1.5 is applied, and is newer than 1.0" in error.message
    desk.apply("base", downgrade=True)
    assert desk.applied() == {"base": "2.0", "top": "1.0"}


def test_what_is_not_known_here_cannot_come_along(desk):
    import shutil

    both(desk, "1.0", A2)
    desk.apply("top")
    base(desk, "2.0")
    shutil.rmtree(desk.patches / "top")
    before = tree_of(desk.host.site)
    error = refused("DD110", desk.apply, "base")
    assert error.message == "box: top builds on base, and is not known here"
    assert "rollback top" in error.hint
    assert tree_of(desk.host.site) == before


def test_what_does_not_fit_any_more_is_named(desk):
    both(desk, "1.0", A2)
    desk.apply("top")
    base(desk, "2.0")
    desk.write("other", "1.0", {"sub/c.py": (C1, C2)})
    patch = desk.patch("mine", "b.py", B2, B3)
    desk.apply(patch)
    before = tree_of(desk.host.site)
    both(desk, "2.0", A3)
    error = refused("DD110", desk.apply, "base")
    assert "mine builds on base" in error.message
    error = refused("DD102", desk.apply, "base", patch)
    assert "b.py" in error.message
    assert tree_of(desk.host.site) == before
    assert desk.applied() == {"base": "1.0", "top": "1.0", "mine": desk.applied()["mine"]}


def test_several_sets_in_one_request(desk):
    """A patch file on a file of the set is named with it, in either order."""
    base(desk, "1.0")
    desk.apply("base")
    desk.apply(desk.patch("mine", "a.py", A2, A2 + b"MINE = 1\n"))
    base(desk, "2.0")
    patch = desk.patch("mine", "a.py", A3, A3 + b"MINE = 1\n")
    desk.apply(patch, "base")
    assert desk.read("a.py") == A3 + b"MINE = 1\n"
    assert list(desk.applied()) == ["base", "mine"]


def test_a_file_may_move_from_the_set_above_into_the_one_below(desk):
    """What is in the new version's way is the old version of the set above, which goes too."""
    desk.write("base", "1.0", {"a.py": (A1, A2)})
    desk.write("top", "1.0", {"b.py": (B1, B2)}, ["base"])
    desk.apply("top")
    desk.write("base", "2.0", {"a.py": (A1, A2), "b.py": (B1, B3)})
    desk.write("top", "2.0", {"b.py": (B3, B2)}, ["base"])
    desk.apply("top")
    assert desk.applied() == {"base": "2.0", "top": "2.0"}
    desk.rollback("top")
    assert desk.read("b.py") == B3


def test_an_engine_version_that_no_family_lists(desk):
    """Where the set below is for another engine version with the same files, its next version is that too."""
    for number, left in ((1, A2), (2, A3)):
        desk.write("base", f"{number}.0", {"a.py": (A1, left)}, engine="0.5.10")
        applied = desk.apply("base")
        assert applied.plan.layers[0].status.borrowed
    assert desk.applied() == {"base": "2.0"}
    before = tree_of(desk.host.site)
    desk.write("base", "3.0", {"a.py": (A4, A2)}, engine="0.5.10")
    assert "no family serves 0.5.11" in refused("DD109", desk.apply, "base").message
    assert tree_of(desk.host.site) == before


def test_a_requirement_is_upgraded_by_the_set_that_needs_it(desk):
    both(desk, "1.0", A2)
    desk.apply("top")
    both(desk, "2.0", A3, "2.0")
    desk.apply("top")
    assert desk.applied() == {"base": "2.0", "top": "2.0"}


def test_going_back_takes_along_what_was_there_then(desk):
    both(desk, "1.0", A2)
    desk.apply("top")
    one = tree_of(desk.host.site)
    both(desk, "2.0", A3, "1.5")
    desk.apply("base")
    desk.apply(desk.patch("later", "a.py", A3 + b"TOP = 1\n", A4))
    error = refused("DD110", desk.rollback, "base", "1.0")
    assert error.message == "box: top, later builds on base"
    assert "take them back" in error.hint
    result = desk.rollback("base", "1.0", with_dependents=True)
    assert [(item["name"], item["from"], item["version"]) for item in result["back"]] == [
        ("base", "2.0", "1.0"),
        ("top", "1.5", "1.0"),
    ]
    assert [item["name"] for item in result["removed"]] == ["later"]
    assert tree_of(desk.host.site) == one
    assert desk.applied() == {"base": "1.0", "top": "1.0"}
    assert desk.history()[-1].startswith("rollback base 2.0 -> 1.0, top 1.5 -> 1.0, later ")
    desk.apply("base")
    assert desk.applied() == {"base": "2.0", "top": "1.5"}


def test_what_one_apply_did_is_undone_as_a_whole(desk):
    """Replaced sets go back, with what came along; what was new goes."""
    both(desk, "1.0", A2)
    desk.apply("top")
    free = desk.patch("free", "sub/c.py", C1, C2)
    desk.apply(free)
    before, applied = tree_of(desk.host.site), desk.applied()
    base(desk, "3.0")
    top(desk, "1.5", A4)
    desk.write("extra", "1.0", {"x.py": (None, N1)}, ["top"])
    done = desk.apply("extra", desk.patch("free", "sub/c.py", C1, b"C = 3\n"))
    assert desk.read("sub/c.py") == b"C = 3\n"
    undone = undo_apply(desk.session, done, desk.console, reason="it did not serve")
    assert undone[:3] == ["base 3.0", "top 1.5", "extra 1.0"]
    assert tree_of(desk.host.site) == before
    assert desk.applied() == applied


def test_going_back_where_the_set_above_did_not_change(desk):
    """The layer of ``top`` is the same on both: it is found by the transaction that replaced it, not by content."""
    base(desk, "1.0")
    desk.write("top", "1.0", {"t.py": (None, b"T = 1\n")}, ["base"])
    desk.apply("top")
    base(desk, "2.0")
    desk.apply("base")
    result = desk.rollback("base", "1.0", with_dependents=True)
    assert result["removed"] == []
    assert desk.applied() == {"base": "1.0", "top": "1.0"}
    assert desk.read("t.py") == b"T = 1\n"


def test_only_versions_that_still_fit_are_ways_back(desk):
    both(desk, "1.0", A2)
    desk.apply("top")
    both(desk, "1.0", A2, "2.0")
    desk.apply("top")
    assert desk.line("top").back == ("1.0",)
    both(desk, "2.0", A3, "2.0")
    desk.apply("base")
    assert desk.line("top").back == ()
    error = refused("DD115", desk.rollback, "top", "1.0")
    assert "sglang/srt/a.py is not as it was before that version" in error.message


def test_a_version_whose_requirement_is_gone_is_no_way_back(desk):
    base(desk, "1.0")
    desk.write("top", "1.0", {"t.py": (None, N1)}, ["base"])
    desk.apply("top")
    desk.write("top", "2.0", {"t.py": (None, N2)})
    desk.apply("top")
    assert desk.line("top").back == ("1.0",)
    desk.rollback("base")
    assert desk.line("top").back == ()
    assert refused("DD115", desk.rollback, "top", "1.0").message.endswith("it requires base, which is not applied")


def test_a_set_that_later_took_a_file_over_stands_in_the_way_back(desk):
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "3.0")
    desk.apply("base")
    desk.apply(desk.patch("mine", "b.py", B1, B3))
    error = refused("DD115", desk.rollback, "base", "1.0")
    assert "sglang/srt/b.py is not as it was" in error.message
    desk.rollback("mine")
    desk.rollback("base", "1.0")
    assert desk.read("b.py") == B2


# -- edits, races, and a state that others had their hands in -------------------------------------------


@pytest.mark.parametrize("path", ["a.py", "b.py", "old/n.py"])
def test_an_edited_file_refuses_the_upgrade(desk, path):
    """Also a file that the new version does not touch, and one that it leaves as it is."""
    base(desk, "1.0")
    desk.apply("base")
    (desk.host.site / "sglang/srt" / path).write_bytes(b"MINE = 1\n")
    base(desk, "2.0")
    before = tree_of(desk.host.site)
    error = refused("DD101", desk.apply, "base")
    assert path in "\n".join((error.message, *error.details))
    assert tree_of(desk.host.site) == before
    assert desk.applied() == {"base": "1.0"}


def test_an_edited_file_refuses_the_way_back_and_force_saves_it(desk):
    desk.write("base", "1.0", {"a.py": (A1, A2), "b.py": (B1, B2)})
    desk.apply("base")
    desk.write("base", "2.0", {"a.py": (A1, A3), "b.py": (B1, B2)})
    desk.apply("base")
    (desk.host.site / "sglang/srt/b.py").write_bytes(b"MINE = 1\n")
    error = refused("DD101", desk.rollback, "base", "1.0")
    assert "+MINE = 1" in error.details
    result = desk.rollback("base", "1.0", force=True)
    assert desk.read("b.py") == B2
    assert Path(result["saved"][0]).read_bytes() == b"MINE = 1\n"


def test_a_mode_that_was_changed_is_an_edit(desk):
    base(desk, "1.0")
    desk.apply("base")
    (desk.host.site / "sglang/srt/a.py").chmod(0o755)
    base(desk, "2.0")
    assert "another mode" in refused("DD101", desk.apply, "base").details[0]


def between(desk: Desk, monkeypatch, operation: str, action) -> None:
    """Do ``action`` once, right before the host is asked for ``operation``."""
    real = type(desk.session).collect
    done = []

    def collect(self, name, args, blobs=(), progress=None):
        if name == operation and not done:
            done.append(True)
            action()
        return real(self, name, args, blobs, progress)

    monkeypatch.setattr(type(desk.session), "collect", collect)


@pytest.mark.parametrize("operation", ["stored", "apply"])
def test_another_deployer_between_look_and_commit(desk, monkeypatch, operation):
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    between(desk, monkeypatch, operation, lambda: desk.rollback("base"))
    error = refused("DD502", desk.apply, "base")
    assert "changed since it was" in error.message
    assert desk.applied() == {}


def test_the_same_version_applied_anew_in_between_is_another_record(desk, monkeypatch):
    patch = desk.patch("fix", "b.py", B1, B2)
    desk.apply(patch)
    base(desk, "1.0")

    def meddle():
        desk.rollback("fix")
        desk.apply(patch)

    desk.write("base", "1.0", {"a.py": (A1, A2)})
    between(desk, monkeypatch, "apply", meddle)
    assert refused("DD502", desk.apply, "base").hint == "run the command again"


def test_a_file_edited_between_look_and_commit(desk, monkeypatch):
    """Also one that the new version leaves as it is."""
    desk.write("base", "1.0", {"a.py": (A1, A2), "b.py": (B1, B2)})
    desk.apply("base")
    desk.write("base", "2.0", {"a.py": (A1, A3), "b.py": (B1, B2)})
    between(desk, monkeypatch, "apply", lambda: (desk.host.site / "sglang/srt/b.py").write_bytes(b"MINE = 1\n"))
    error = refused("DD502", desk.apply, "base")
    assert "b.py" in error.details[0]
    assert desk.read("a.py") == A2


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (lambda files: files.pop("sglang/srt/b.py"), "sglang/srt/b.py"),
        (lambda files: files["sglang/srt/a.py"].update(sha256="0" * 64), "sglang/srt/a.py"),
        (lambda files: files.update({"sglang/srt/more.py": None}), "sglang/srt/more.py"),
    ],
    ids=["one is missing", "one is another", "one too many"],
)
def test_what_the_host_read_back_is_held_against_the_plan(desk, monkeypatch, tamper, named):
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    real = type(desk.session).collect

    def collect(self, name, args, blobs=(), progress=None):
        result, frames = real(self, name, args, blobs, progress)
        if name == "apply":
            tamper(result["files"])
        return result, frames

    monkeypatch.setattr(type(desk.session), "collect", collect)
    assert refused("DD505", desk.apply, "base").details == (named,)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"forged\n")])
def test_a_pre_image_that_is_gone_refuses_the_upgrade(desk, damage):
    from tests.deploy.sets import digest

    base(desk, "1.0")
    desk.apply("base")
    damage(desk.host.state / "objects" / digest(A1))
    base(desk, "2.0")
    before = tree_of(desk.host.site)
    error = refused("DD508", desk.apply, "base")
    assert error.message == "box: what 1 file(s) held before the set is gone from the host's state"
    assert "reinstall sglang 0.5.11" in error.hint
    assert "a.py" in error.details[0]
    error = refused("DD508", desk.rollback, "base")
    assert "cannot be put back" in error.message
    assert tree_of(desk.host.site) == before


def test_an_image_to_go_back_to_that_is_gone(desk):
    from tests.deploy.sets import digest

    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    desk.apply("base")
    (desk.host.state / "objects" / digest(N1)).unlink()
    before = tree_of(desk.host.site)
    error = refused("DD508", desk.rollback, "base", "1.0")
    assert "old/n.py" in error.details[0]
    assert tree_of(desk.host.site) == before
    assert desk.host.status()["interrupted"] is None


FORGED = [
    {"replaced": 3},
    {"replaced": [3]},
    {"replaced": [{"set": "base"}]},
    {"replaced": "again"},
    {"path": "sglang/../../victim"},
    {"before": {"kind": "file", "sha256": "../../x", "mode": 420, "size": 1}},
    {"replaced_by": None},
    {"replaced_by": {"transaction": 3}},
    {"install": 3},
]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_a_forged_earlier_layer_is_not_believed(desk, forged):
    base(desk, "1.0")
    desk.apply("base")
    base(desk, "2.0")
    desk.apply("base")
    path = desk.host.state / "record.json"
    record = json.loads(path.read_text())
    layer = record["layers"][0]
    past = layer["replaced"][0]
    if forged == {"replaced": "again"}:
        past["replaced"] = []
    elif "replaced" in forged:
        layer.update(forged)
    elif "install" in forged or "replaced_by" in forged:
        past.update(forged)
    else:
        past["files"][0].update(forged)
    path.write_text(json.dumps(record))
    before = tree_of(desk.host.site)
    for action in (desk.status, lambda: desk.rollback("base", "1.0"), lambda: desk.apply("base")):
        assert "record.json is damaged" in refused("DD508", action).message
    assert tree_of(desk.host.site) == before
    # The journal of an interrupted transaction holds the same, and is read with the same care.
    journal = max(desk.host.state.glob("transactions/*/journal.json"), key=lambda item: item.stat().st_mtime_ns)
    value = json.loads(journal.read_text())
    journal.write_text(json.dumps({**value, "state": "staged", "record": {"layers": record["layers"]}}))
    (desk.host.state / "record.json").unlink()
    with pytest.raises(Exception, match=r"journal\.json is damaged"):
        desk.host.recover()


def test_a_record_from_before_upgrades_were_known_is_read(desk):
    base(desk, "1.0")
    desk.apply("base")
    path = desk.host.state / "record.json"
    record = json.loads(path.read_text())
    assert "replaced" not in record["layers"][0]
    base(desk, "2.0")
    desk.apply("base")
    assert desk.line("base").back == ("1.0",)
