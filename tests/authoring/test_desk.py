"""From a folder of patch sets to a scratch tree and back, on small trees."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from ddtree_deploy.authoring import desk as desk_module
from ddtree_deploy.authoring import scratch as scratch_module
from ddtree_deploy.authoring.desk import Desk, Spread, Versioning
from ddtree_deploy.authoring.refresh import Wishes
from ddtree_deploy.authoring.scratch import existing, find_scratches, look, open_scratch, scratch_around, the_scratch
from ddtree_deploy.authoring.stack import Pristine, stack_of
from ddtree_deploy.authoring.write import new_folder, write_sets
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.patchset import load_set, load_sets
from tests.agent.test_crash import run_until
from tests.authoring.sets import ENGINE, NEW, F, G, a_set, numbered
from tests.authoring.test_refresh import lines_of
from tests.authoring.test_write import files
from tests.patching.difftools import GIT_ENV

TOOL = "sglang/srt/run.sh"
BASE = {
    F: numbered(20),
    G: numbered(5, "g"),
    TOOL: b"#!/bin/sh\n",
    "sglang/__init__.py": b"",
    "sglang/lang/a.py": b"a\n",
}
DEMO = a_set([BASE, {**BASE, F: lines_of((5, "five"))}, {**BASE, F: lines_of((5, "five"), (10, "ten"))}])
OVER = a_set(
    [{**BASE, F: lines_of((5, "five"), (10, "ten"))}, {**BASE, F: lines_of((5, "five"), (10, "ten"), (15, "x"))}],
    name="over",
    requires=("demo",),
    added={NEW: b"n\n"},
)
NO_SPREAD, SAME = Spread(), Versioning()


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_DATA", str(tmp_path / "data"))
    patches = tmp_path / "patches"
    patches.mkdir()
    for item in (DEMO, OVER):
        write_sets([(new_folder(patches / item.name), item)])
    return new_desk(patches)


def new_desk(patches):
    def pristine_of(engine):
        assert engine == ENGINE
        return Pristine(BASE, {TOOL: 0o755})

    return Desk(patches, pristine_of)


def refused(code, call, *arguments):
    with pytest.raises(DeployError) as caught:
        call(*arguments)
    assert caught.value.code == code, caught.value.message
    assert all(line.isprintable() for line in (caught.value.message, *caught.value.details))
    return "\n".join((caught.value.message, *caught.value.details, caught.value.hint or ""))


def refresh(desk, scratch, wishes=Wishes(), versioning=SAME, spread=NO_SPREAD):  # noqa: B008
    return new_desk(desk.patches).refresh(open_scratch(scratch.folder), wishes, versioning, spread)


def git(scratch, *command):
    environment = {**GIT_ENV, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a"}
    environment |= {"GIT_COMMITTER_EMAIL": "a"}
    del environment["GIT_DIR"]
    done = subprocess.run(["git", *command], cwd=scratch.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def worktree(scratch):
    return {path: data for path, data in files(scratch.folder).items() if not path.startswith(".git/")}


def test_what_a_scratch_tree_is(desk):
    scratch, kept = desk.edit("over", ENGINE, None)
    stack = stack_of([DEMO, OVER], ENGINE, BASE)
    assert scratch.folder == scratch_module.default_folder("over", ENGINE)
    assert kept is None
    assert worktree(scratch) == {path: stack.final(path) for path in (*BASE, NEW)}
    assert git(scratch, "log", "--format=%s").splitlines() == [
        "0001-p.patch",
        "over: new/",
        "demo 1.0.0",
        f"sglang {ENGINE}, pristine",
    ]
    assert git(scratch, "status", "--porcelain") == ""
    assert git(scratch, "diff", "HEAD~", "--", F).count("\n+x\n") == 1
    assert os.access(scratch.folder / TOOL, os.X_OK)
    assert not os.access(scratch.folder / F, os.X_OK)
    assert look(scratch).clean
    assert (scratch.state.set, scratch.state.engine, scratch.state.family) == ("over", ENGINE, "f")
    assert scratch_around(scratch.folder / "sglang" / "srt") == scratch
    assert scratch_around(desk.patches) is None


def test_attributes_of_the_tree_do_not_change_its_bytes(desk, monkeypatch):
    odd = {**BASE, ".gitattributes": b"", "sglang/.gitattributes": b"* text=auto eol=crlf ident\n", G: b"$Id$\r\n\n"}
    desk.pristine_of = lambda engine: Pristine(odd)
    monkeypatch.setitem(os.environ, "HOME", "/nonexistent")
    scratch, _ = desk.edit("demo", ENGINE, None)
    assert (scratch.folder / G).read_bytes() == odd[G]
    assert look(scratch).clean
    assert git(scratch, "status", "--porcelain") == ""


def test_there_and_back(desk):
    before = files(desk.patches)
    scratch, _ = desk.edit("demo", ENGINE, None)
    assert refresh(desk, scratch).written == ()
    assert files(desk.patches) == before
    edit(scratch, F, b"\nfive\n", b"\nFIVE\n")
    said = refused("DD117", refresh, desk, scratch)
    assert "over on 0.5.11 builds on files that demo now leaves otherwise" in said
    assert files(desk.patches) == before
    report = refresh(desk, scratch, versioning=Versioning("minor"), spread=Spread(with_dependents=True))
    assert [(item.name, item.version) for item in report.written] == [("demo", "1.1.0"), ("over", "1.0.1")]
    assert report.lines == (f"0001-p.patch: {F}:5 (1 line(s) changed)",)
    assert report.patches == ("0001-p.patch", "0002-p.patch")
    after = files(desk.patches)
    assert {path for path in after if after[path] != before[path]} == {
        *("demo/patchset.toml", "demo/f/0001-p.patch", "demo/f/0002-p.patch"),
        *("over/patchset.toml", "over/f/0001-p.patch"),
    } - {path for path in after if after[path] == before[path]}
    load_sets(desk.patches)
    # The scratch tree is one of the new set, and clean.
    again = open_scratch(scratch.folder)
    assert look(again).clean
    assert git(again, "status", "--porcelain") == ""
    assert "+FIVE" in git(again, "show", "HEAD~")
    assert refresh(desk, again).written == ()
    edit(again, F, b"\nten\n", b"\nTEN\n")
    assert refresh(desk, again, spread=Spread(with_dependents=True)).lines[0].startswith("0002-p.patch")


def edit(scratch, path, old, new):
    data = (scratch.folder / path).read_bytes()
    assert data.count(old) == 1
    (scratch.folder / path).write_bytes(data.replace(old, new))


def test_refused_means_nothing_was_written(desk):
    before = files(desk.patches)
    scratch, _ = desk.edit("over", ENGINE, None)
    edit(scratch, F, b"\nfive\n", b"\nFIVE\n")  # demo's line: nobody's here
    state = files(scratch.folder)
    assert f"{F}:5 (1 line(s) changed): no patch touches these lines" in refused("DD116", refresh, desk, scratch)
    assert "0009 is no patch" in refused("DD001", refresh, desk, scratch, Wishes(into="0009"))
    assert files(desk.patches) == before
    assert files(scratch.folder) == state


def test_new_and_renamed_files(desk):
    scratch, _ = desk.edit("over", ENGINE, None)
    (scratch.folder / G).rename(scratch.folder / "sglang/srt/g2.py")
    edit(scratch, NEW, b"n\n", b"N\n")
    report = refresh(desk, scratch, Wishes(new="move", message="Move g."))
    (over,) = report.written
    assert over.families["f"].added == {"sglang/srt/g2.py": BASE[G], NEW: b"N\n"}
    assert (desk.patches / "over/new/sglang/srt/g2.py").read_bytes() == BASE[G]
    assert (desk.patches / "over/f/0002-move.patch").read_bytes().startswith(b"Move g.\n\n--- a/sglang/srt/g.py\n")
    assert over.families["f"].hashes[ENGINE][G].after is None


def test_what_editors_leave_is_not_looked_at(desk):
    scratch, _ = desk.edit("demo", ENGINE, None)
    for path in (f"{F}~", "sglang/srt/.f.py.swp", "sglang/srt/__pycache__/f.cpython-312.pyc", ".idea/x", "notes.txt"):
        (scratch.folder / path).parent.mkdir(exist_ok=True)
        (scratch.folder / path).write_bytes(b"x")
    found = look(scratch)
    assert found.clean
    assert found.ignored == ("sglang/srt/.f.py.swp", f"{F}~")
    report = refresh(desk, scratch)
    assert report.notices == (f"not looked at: sglang/srt/.f.py.swp, {F}~",)


def test_what_a_set_cannot_hold(desk, tmp_path):
    scratch, _ = desk.edit("demo", ENGINE, None)
    (scratch.folder / F).chmod(0o755)
    (scratch.folder / TOOL).chmod(0o644)
    (scratch.folder / "sglang/srt/tool.py").write_text("x\n")
    (scratch.folder / "sglang/srt/tool.py").chmod(0o755)
    (scratch.folder / G).unlink()
    (scratch.folder / G).symlink_to("f.py")
    (scratch.folder / "sglang/srt/away").symlink_to(tmp_path)
    os.mkfifo(scratch.folder / "sglang/srt/pipe.py")
    said = refused("DD118", refresh, desk, scratch)
    for line in (
        f"{F} is now executable",
        f"{TOOL} is no longer executable",
        "sglang/srt/tool.py is executable",
        f"{G} is a symbolic link",
        "sglang/srt/away is a symbolic link",
        "sglang/srt/pipe.py is no regular file",
    ):
        assert line in said


def test_edit_again(desk):
    scratch, _ = desk.edit("demo", ENGINE, None)
    edit(scratch, F, b"\nten\n", b"\nTEN\n")
    assert "holds edits" in refused("DD118", desk.edit, "demo", ENGINE, None)
    edit(scratch, F, b"\nTEN\n", b"\nten\n")
    os.utime(scratch.folder / G, (1, 1))
    git(scratch, "checkout", "-q", "-b", "mine")
    (scratch.folder / G).write_bytes(b"mine\n")
    git(scratch, "commit", "-q", "-a", "-m", "mine")
    (scratch.folder / G).write_bytes(BASE[G])
    mine = git(scratch, "rev-parse", "HEAD").strip()
    patch = desk.patches / "demo/f/0001-p.patch"
    patch.write_bytes(b"More words.\n\n" + patch.read_bytes())
    again, kept = new_desk(desk.patches).edit("demo", ENGINE, None)
    assert kept == f"kept/{mine[:12]}"
    assert git(again, "rev-parse", kept).strip() == mine
    assert git(again, "status", "--porcelain") == ""
    assert git(again, "log", "--format=%s").splitlines()[0] == "0002-p.patch"
    assert refresh(desk, again).written == ()


def test_commits_and_stashes_do_not_matter(desk):
    scratch, _ = desk.edit("demo", ENGINE, None)
    edit(scratch, G, b"g2\n", b"G2\n")
    git(scratch, "stash")
    edit(scratch, F, b"\nten\n", b"\nTEN\n")
    git(scratch, "commit", "-q", "-a", "-m", "mine")
    report = refresh(desk, scratch, spread=Spread(with_dependents=True))
    assert report.lines == (f"0002-p.patch: {F}:10 (1 line(s) changed)",)
    assert "your commits are on the branch kept/" in report.notices[-1]
    git(scratch, "stash", "pop")
    assert list(look(open_scratch(scratch.folder)).edited) == [G]


def test_what_is_edited_while_refresh_runs_stays(desk, monkeypatch):
    scratch, _ = desk.edit("demo", ENGINE, None)
    edit(scratch, F, b"\nten\n", b"\nTEN\n")
    os.utime(scratch.folder / F, (1, 1))

    def write(writes):
        edit(scratch, G, b"g2\n", b"G2\n")
        return write_sets(writes)

    monkeypatch.setattr(desk_module, "write_sets", write)
    refresh(desk, scratch, spread=Spread(with_dependents=True))
    assert list(look(open_scratch(scratch.folder)).edited) == [G]
    assert (scratch.folder / F).stat().st_mtime == 1
    edit(scratch, F, b"\nTEN\n", b"\nTen\n")

    def write_more(writes):
        edit(scratch, F, b"\nTen\n", b"\ntenth\n")
        return write_sets(writes)

    monkeypatch.setattr(desk_module, "write_sets", write_more)
    refresh(desk, scratch, Wishes(new="g"), spread=Spread(with_dependents=True))
    assert b"\ntenth\n" in (scratch.folder / F).read_bytes()
    assert list(look(open_scratch(scratch.folder)).edited) == [F]


def test_the_set_changed_meanwhile(desk):
    scratch, _ = desk.edit("over", ENGINE, None)
    edit(scratch, F, b"\nx\n", b"\nX\n")
    toml = desk.patches / "over/patchset.toml"
    kept = toml.read_bytes()
    toml.write_bytes(kept + b"# mine\n")
    said = refused("DD118", refresh, desk, scratch)
    assert "over changed since it was made" in said
    assert "git diff HEAD > mine.diff" in said
    toml.write_bytes(kept)
    other, _ = desk.edit("demo", ENGINE, None)
    edit(other, F, b"\nfive\n", b"\nFIVE\n")
    report = refresh(desk, other, spread=Spread(with_dependents=True))
    assert len(report.written) == 2
    assert "over changed since it was made" in refused("DD118", refresh, desk, scratch)


def test_what_is_below_changed_meanwhile(desk):
    """The set itself may be untouched: then its hashes tell, and with hashes made to fit the scratch tree does."""
    scratch, _ = desk.edit("over", ENGINE, None)
    manifest = scratch.folder / ".git/ddtree-deploy/manifest.json"
    sha = scratch.manifest[F][0]
    manifest.write_text(manifest.read_text().replace(sha, "0" * 64))
    said = refused("DD118", refresh, desk, scratch)
    assert "what it is built on changed since it was made" in said


def test_folders_that_are_something_else(desk, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    assert "is no scratch tree" in refused("DD118", desk.edit, "demo", ENGINE, tmp_path / "other")
    assert files(tmp_path / "other") == {"x": b""}
    (tmp_path / "file").touch()
    refused("DD118", desk.edit, "demo", ENGINE, tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    refused("DD118", desk.edit, "demo", ENGINE, tmp_path / "link")
    assert existing(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    scratch, _ = desk.edit("demo", ENGINE, tmp_path / "empty")
    assert scratch.folder == tmp_path / "empty"
    assert "is a scratch tree of demo 0.5.11" in refused("DD118", desk.edit, "over", ENGINE, tmp_path / "empty")
    shutil.copytree(desk.patches, tmp_path / "copy")
    elsewhere = new_desk(tmp_path / "copy")
    assert "from" in refused("DD118", elsewhere.edit, "demo", ENGINE, tmp_path / "empty")
    for name, text in (
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", '{"schema": 1}'),
        ("manifest.json", "x"),
    ):
        target = tmp_path / "empty" / ".git" / "ddtree-deploy" / name
        kept = target.read_text()
        target.write_text(text)
        refused("DD118", open_scratch, tmp_path / "empty")
        target.write_text(kept)
    state = tmp_path / "empty" / ".git" / "ddtree-deploy" / "state.json"
    state.write_text(state.read_text().replace('"schema": 1', '"schema": 2'))
    assert "another version" in refused("DD118", open_scratch, tmp_path / "empty")
    refused("DD118", open_scratch, tmp_path)


def test_which_scratch_tree(desk):
    assert "no scratch tree of demo" in refused("DD118", the_scratch, "demo", None, None)
    refused("DD118", the_scratch, None, None, None)
    demo, _ = desk.edit("demo", ENGINE, None)
    over, _ = desk.edit("over", ENGINE, None)
    assert the_scratch("demo", None, None) == demo
    assert the_scratch("over", ENGINE, desk.patches) == over
    assert find_scratches() == [demo, over]
    assert "several" in refused("DD001", the_scratch, None, None, None)
    refused("DD118", the_scratch, "over", "0.5.12", None)
    refused("DD118", the_scratch, "over", None, desk.patches.parent)


def test_a_tree_that_cannot_be_made_leaves_nothing(desk, monkeypatch, tmp_path):
    def fail(*_):
        raise DeployError("DD009", "git failed")

    monkeypatch.setattr(scratch_module, "write_history", fail)
    refused("DD009", desk.edit, "demo", ENGINE, tmp_path / "deep" / "tree")
    assert list((tmp_path / "deep").iterdir()) == []


def test_an_interrupted_renewal_is_said(desk, monkeypatch):
    scratch, _ = desk.edit("demo", ENGINE, None)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(scratch_module, "write_history", fail)
        with pytest.raises(KeyboardInterrupt):
            desk.edit("demo", ENGINE, None)
    assert "was interrupted" in refused("DD118", desk.edit, "demo", ENGINE, None)
    assert "was interrupted" in refused("DD118", refresh, desk, scratch)


# -- without a scratch tree --------------------------------------------------------------------------


def test_begin(desk):
    made = desk.begin("fresh", [ENGINE, "0.5.12"], "what for", [])
    assert made.engines == (ENGINE, "0.5.12")
    assert files(desk.patches / "fresh").keys() == {"patchset.toml", f"{ENGINE}/series"}
    load_sets(desk.patches)
    made = new_desk(desk.patches).begin("above", [ENGINE], "what for", ["over"])
    assert made.requires == ("over",)
    assert "is there already" in refused("DD007", desk.begin, "demo", [ENGINE], "x", [])
    refused("DD107", desk.begin, "a", [ENGINE], "x", ["none"])
    assert "does not serve 0.5.12" in refused("DD108", desk.begin, "a", ["0.5.12"], "x", ["over"])
    for name, engine, summary in (
        ("a b", ENGINE, "x"),
        ("../x", ENGINE, "x"),
        ("a", "x y", "x"),
        ("a", ENGINE, "x\ny"),
    ):
        refused("DD108", desk.begin, name, [engine], summary, [])
    assert sorted(path.name for path in desk.patches.iterdir()) == ["above", "demo", "fresh", "over"]


def test_from_nothing_to_a_set(desk):
    desk.begin("fresh", [ENGINE], "what for", ["over"])
    scratch, _ = new_desk(desk.patches).edit("fresh", ENGINE, None)
    edit(scratch, G, b"g2\n", b"G2\n")
    report = refresh(desk, scratch, Wishes(new="g", message="Say G2."))
    assert (report.patches, report.notices) == (("0001-g.patch",), ())
    edit(scratch, G, b"G2\n", b"GG\n")
    assert refresh(desk, scratch).notices == ("fresh: the content changed and the version did not: still 0.1.0",)
    edit(scratch, G, b"GG\n", b"G2\n")
    assert refresh(desk, scratch, versioning=Versioning(exact="1.0.0")).notices == ()
    assert load_set(desk.patches / "fresh").version == "1.0.0"


def test_reorder_and_drop(desk):
    report = desk.reorder("demo", ENGINE, ["0001-p.patch", "0002-p.patch"], SAME)
    assert report.written == ()
    report = desk.reorder("demo", ENGINE, ["0002-p.patch", "0001-p.patch"], Versioning("patch"))
    assert report.patches == ("0002-p.patch", "0001-p.patch")
    sets = load_sets(desk.patches)
    assert sets["demo"].version == "1.0.1"
    assert sets["demo"].families["f"].hashes == DEMO.families["f"].hashes
    desk = new_desk(desk.patches)
    assert "--with-dependents" in refused("DD117", desk.drop, "demo", ENGINE, "0001-p.patch", SAME, NO_SPREAD)
    report = desk.drop("demo", ENGINE, "0001-p.patch", SAME, Spread(with_dependents=True))
    assert [item.name for item in report.written] == ["demo", "over"]
    assert not (desk.patches / "demo/f/0001-p.patch").exists()
    load_sets(desk.patches)
    scratch, _ = new_desk(desk.patches).edit("demo", ENGINE, None)
    edit(scratch, F, b"\nten\n", b"\nTEN\n")
    desk = new_desk(desk.patches)
    assert "holds edits of demo 0.5.11" in refused("DD118", desk.drop, "demo", ENGINE, "0002-p.patch", SAME, NO_SPREAD)
    assert "holds edits" in refused("DD118", desk.rehash, "demo", SAME, NO_SPREAD)


def test_another_order_must_fit_every_version(desk):
    """The order is tried where it is asked for; elsewhere the hashes must come out as they were."""
    two = {ENGINE: BASE, "0.5.12": {**BASE, F: b"top\n" + BASE[F]}}
    trees = [BASE, {**BASE, F: lines_of((5, "five"))}, {**BASE, F: lines_of((5, "five"), (10, "ten"))}]
    item = a_set(trees, name="two", engines=tuple(two), pristine=two)
    write_sets([(new_folder(desk.patches / "two"), item)])
    desk = Desk(desk.patches, lambda engine: Pristine(two[engine]))
    order = ["0002-p.patch", "0001-p.patch"]
    assert desk.reorder("two", ENGINE, order, SAME).patches == tuple(order)
    stale = Desk(
        desk.patches, lambda engine: Pristine({**two[engine], F: two[engine][F] + b"end\n" * (engine != ENGINE)})
    )
    said = refused("DD117", stale.reorder, "two", ENGINE, order[::-1], SAME)
    assert "on 0.5.12 files would end up otherwise" in said


def test_rehash(desk):
    """For people who edit patches by hand."""
    patch = desk.patches / "demo/f/0002-p.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+ten", b"+TEN"))
    new = desk.patches / "over/new" / NEW
    new.write_bytes(b"changed\n")
    assert "demo on 0.5.11" in refused("DD108", new_desk(desk.patches).rehash, "over", SAME, NO_SPREAD)
    report = new_desk(desk.patches).rehash("demo", Versioning("patch"), NO_SPREAD)
    assert report.notices == ("over requires it and is not valid: it was left as it is",)
    report = new_desk(desk.patches).rehash("over", SAME, NO_SPREAD)
    assert report.written[0].families["f"].added == {NEW: b"changed\n"}
    load_sets(desk.patches)
    patch.write_bytes(patch.read_bytes().replace(b"+TEN", b"+zehn"))
    refused("DD117", new_desk(desk.patches).rehash, "demo", SAME, NO_SPREAD)
    report = new_desk(desk.patches).rehash("demo", SAME, Spread(with_dependents=True))
    assert [item.name for item in report.written] == ["demo", "over"]
    load_sets(desk.patches)
    assert new_desk(desk.patches).rehash("demo", SAME, NO_SPREAD).written == ()


# -- crashes -----------------------------------------------------------------------------------------


def test_killed_while_refreshing(desk, tmp_path):
    """The sets are old or new as a whole; what is in the scratch tree is never lost."""
    scratch, _ = desk.edit("demo", ENGINE, None)
    edit(scratch, F, b"\nten\n", b"\nTEN\n")
    shutil.copytree(tmp_path, tmp_path.with_name("kept"), symlinks=True)
    old = files(desk.patches)
    spread = Spread(with_dependents=True)

    def action():
        refresh(desk, scratch, spread=spread)

    assert run_until(None, action)[0] is False
    new = files(desk.patches)
    seen = set()
    for count in range(1, 200, 11):
        shutil.rmtree(tmp_path)
        shutil.copytree(tmp_path.with_name("kept"), tmp_path, symlinks=True)
        killed, _ = run_until(count, action)
        new_desk(desk.patches)  # ends what was interrupted
        now = files(desk.patches)
        assert now in (old, new)
        assert (scratch.folder / F).read_bytes().count(b"TEN") == 1
        seen.add(now == new)
        if not killed:
            break
    assert seen == {True, False}
