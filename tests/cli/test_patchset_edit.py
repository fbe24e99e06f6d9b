"""Writing patch sets on the command line, on the published wheel and the shipped sets."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.authoring.write import new_folder, write_sets
from ddtree_deploy.patching.images import sha256
from ddtree_deploy.patching.patchset import load_closure, load_sets
from ddtree_deploy.resources import patches_dir
from tests.authoring.test_write import files
from tests.patching.difftools import GIT_ENV
from tests.patching.sets import changed_copy

ENGINE = "0.5.11"
OTHER_ENGINES = ("0.5.12", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.18")
FIXES = "dflash-fixes"
INFO = "sglang/srt/speculative/dflash_info.py"
MODEL = "sglang/srt/models/dflash.py"


@pytest.fixture
def sets(cli, monkeypatch):
    """The shipped sets for one engine alone, where a user may write, named by the environment."""
    folder = cli.folder / "patches"
    folder.mkdir()
    for item in load_closure("ddtree", patches_dir()):
        family = item.family_for(ENGINE)
        family = replace(family, engines=(ENGINE,), hashes={ENGINE: family.hashes[ENGINE]}, left_out={})
        only = replace(item, version="1.0.0", families={family.name: family}, unneeded={})
        write_sets([(new_folder(folder / item.name), only)])
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(folder))
    return folder


@pytest.fixture
def wheelhouse_of_one(wheel, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(wheel.parent))
    monkeypatch.setenv("DDTREE_DEPLOY_OFFLINE", "1")


def replace_in(path, old, new):
    data = path.read_text()
    assert data.count(old) == 1
    path.write_text(data.replace(old, new))


# -- without an engine -------------------------------------------------------------------------------


def test_list_says_which_are_broken(cli):
    folder = changed_copy(cli.folder / "sets", {"demo/0.5.11/series": "0001-f.patch\n0002-g.patch\n0009-no.patch\n"})
    changed_copy(cli.folder / "good")
    (cli.folder / "good" / "demo").rename(folder / "fine")
    replace_in(folder / "fine" / "patchset.toml", 'name = "demo"', 'name = "fine"')
    done = cli.run("patchset", "list", "--patches", str(folder))
    assert done.status == 2
    assert [line.split()[0] for line in done.out.splitlines()] == ["NAME", "fine", "demo", "over"]
    assert "demo  not valid  -" in done.out
    assert done.out.endswith("the patch set over requires demo, which is not valid\n")
    assert "demo is not valid:\n  demo/0.5.11/series:3: there is no file 0009-no.patch\n" in done.err
    assert "over is not valid:\n  the patch set over requires demo, which is not valid\n" in done.err
    document = cli.run("patchset", "list", "--patches", str(folder), "--json").json
    assert [item["name"] for item in document["sets"]] == ["fine"]
    assert [item["name"] for item in document["invalid"]] == ["demo", "over"]
    assert document["invalid"][0]["problems"][0].startswith("demo/0.5.11/series:3: ")


def test_one_broken_set_does_not_stop_another(cli, monkeypatch):
    folder = changed_copy(cli.folder / "sets", {"over/all/0001-f.patch": None})
    shown = cli.run("patchset", "show", "demo", "--engine", ENGINE, "--patches", str(folder))
    assert (shown.status, shown.err) == (0, "")
    refused = cli.run("patchset", "show", "over", "--engine", ENGINE, "--patches", str(folder))
    assert refused.status == 2
    assert "over/all/series:1: there is no file 0001-f.patch" in refused.err
    status = cli.on_host("status", "--patches", str(folder))
    assert status.status == 0, status.err
    assert "note: the patch set over is not valid: over/all/series:1: there is no file 0001-f.patch" in status.err
    assert "demo 1.0.0" in status.out
    applied = cli.on_host("apply", "demo", "--patches", str(folder))
    assert "no family serves 0.4.0" in applied.err
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(cli.folder / "none"))
    assert "there is no folder" in cli.run("patchset", "list").err


def test_a_set_that_a_version_does_not_need(cli):
    """`unneeded`: for the sets that require it, it counts as applied there."""
    folder = cli.folder / "sets"
    for name, requires in (("below", ""), ("above", 'requires = ["below"]\n')):
        (folder / name / "f").mkdir(parents=True)
        (folder / name / "f" / "series").write_text("one.patch\n")
        (folder / name / "f" / "one.patch").write_text(
            f"--- a/sglang/srt/{name[0]}.py\n+++ b/sglang/srt/{name[0]}.py\n@@ -1 +1 @@\n-{name[0].upper()} = 1\n+x\n"
        )
        (folder / name / "patchset.toml").write_text(
            f'schema = 1\nname = "{name}"\nversion = "1"\nsummary = "s"\npackage = "sglang"\nroot = "sglang/srt"\n'
            f"{requires}"
        )

    def declare(name, engine, more=""):
        before, after = (sha256(text) for text in (f"{name[0].upper()} = 1\n".encode(), b"x\n"))
        text = f'{more}[family.f]\nengines = ["{engine}"]\n[hashes."{engine}"."sglang/srt/{name[0]}.py"]\n'
        with (folder / name / "patchset.toml").open("a") as handle:
            handle.write(text + f'before = "{before}"\nafter = "{after}"\n')

    declare("below", "0.3.0", '[unneeded]\n"0.4.0" = "fixed upstream"\n')
    declare("above", "0.4.0")
    for path, text in (("a.py", "A = 1\n"), ("b.py", "B = 1\n")):
        (cli.site / "sglang" / "srt" / path).write_text(text)
    options = ("--patches", str(folder))
    assert "note: below is not needed on 0.4.0: fixed upstream" in cli.run("patchset", "list", *options).err
    assert "+x" in cli.run("patchset", "show", "above", "--engine", "0.4.0", *options).out
    refused = cli.run("patchset", "show", "below", "--engine", "0.4.0", *options)
    assert (refused.status, "below is not needed on 0.4.0: fixed upstream" in refused.err) == (3, True)
    status = cli.on_host("status", *options, "--json").json
    assert {line["name"]: (line["state"], line["detail"]) for line in status["sets"]} == {
        "above": ("pending", ""),
        "below": ("unneeded", "fixed upstream"),
    }
    done = cli.on_host("apply", "above", *options)
    assert done.status == 0, done.err
    assert "below 1  not needed" in done.out
    assert "note: below: not needed on 0.4.0: fixed upstream" in done.err
    assert (cli.site / "sglang/srt/a.py").read_text() == "x\n"
    assert (cli.site / "sglang/srt/b.py").read_text() == "B = 1\n"
    alone = cli.on_host("apply", "below", *options)
    assert (alone.status, "not needed" in alone.out) == (0, True)


def test_new(cli, sets):
    done = cli.run(
        "patchset", "new", "mine", "--engine", ENGINE, "--summary", "What for", "--requires", f"{FIXES}, ddtree"
    )
    assert (done.status, done.out) == (0, f"{sets}/mine\n")
    assert done.err == f"mine {ENGINE}: no patches yet; next: `patchset edit mine`\n"
    assert load_sets(sets)["mine"].requires == (FIXES, "ddtree")
    assert cli.run("patchset", "new", "mine", "--engine", ENGINE, "--summary", "x").status == 2
    document = cli.run(
        "patchset", "new", "more", "--engine", ENGINE, "--engine", "0.5.12", "--summary", "x", "--json"
    ).json
    assert (document["schema"], document["engines"]) == ("ddtree-deploy.patchset-new/1", [ENGINE, "0.5.12"])
    shown = cli.run("patchset", "show", "more", "--engine", ENGINE)
    assert (shown.status, shown.out) == (0, "")


def test_a_set_that_does_nothing_is_not_applied(cli, sets):
    cli.run("patchset", "new", "mine", "--engine", "0.4.0", "--summary", "What for")
    done = cli.on_host("apply", "mine")
    assert done.status == 2
    assert done.err.splitlines()[0] == "error[DD108]: mine: the family 0.4.0 does nothing yet"
    assert "patchset edit mine" in done.err
    assert "mine 0.1.0  pending" in cli.on_host("status").out


def test_requests_that_make_no_sense(cli, sets):
    for arguments, says in (
        (("edit", "none"), "there is no patch set none"),
        (("refresh",), "there is no scratch tree"),
        (("refresh", FIXES), f"there is no scratch tree of {FIXES}"),
        (("refresh", FIXES, "--from", str(cli.folder)), "is no scratch tree"),
        (("refresh", "--rehash"), "--rehash needs NAME"),
        (("refresh", FIXES, "--rehash", "--new", "x"), "--rehash needs NAME"),
        (("refresh", FIXES, "--bump", "patch", "--set-version", "2"), "exclude one another"),
        (("reorder", FIXES), "say the new order"),
        (("reorder", FIXES, "x", "--move", "x"), "say the new order"),
        (("reorder", FIXES, "x", "--before", "x"), "say the new order"),
    ):
        done = cli.run("patchset", *arguments)
        assert done.status in (2, 3), done.err
        assert says in done.err


def test_without_the_wheel_nothing_is_downloaded(cli, sets, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(cli.folder / "cache"))
    monkeypatch.delenv("DDTREE_DEPLOY_WHEELHOUSE", raising=False)
    done = cli.run("patchset", "edit", FIXES)
    assert done.status == 3
    assert f"the wheel of sglang {ENGINE} is not here" in done.err
    assert not (cli.folder / "data" / "scratch").exists()


# -- on the published wheel --------------------------------------------------------------------------


@pytest.mark.wheel
def test_from_an_idea_to_a_set(cli, sets, wheelhouse_of_one, copy_site):
    cli.run("patchset", "new", "hello", "--engine", ENGINE, "--summary", "Says hello", "--requires", "ddtree")
    done = cli.run("patchset", "edit", "hello")
    tree = cli.folder / "data" / "scratch" / f"hello-{ENGINE}"
    assert (done.status, done.out, done.err) == (0, f"{tree}\n", f"hello {ENGINE}: 0 patches, scratch clean\n")
    subjects = _git(tree, "log", "--format=%s").splitlines()
    assert subjects == ["ddtree 1.0.0", f"{FIXES} 1.0.0", f"sglang {ENGINE}, pristine"]
    replace_in(tree / INFO, "import torch\n", "import torch\n\nHELLO = 1\n")
    (tree / "sglang/srt/hello.py").write_text("HELLO = 2\n")
    refused = cli.run("patchset", "refresh", "hello")
    assert refused.status == 3
    assert refused.err.startswith(
        "error[DD116]: 1 of 1 edit(s) belong to no patch, or to several: nothing was written\n"
    )
    done = cli.run("patchset", "refresh", "hello", "--new", "say-hello", "-m", "Say hello.", "--set-version", "1.0.0")
    assert done.status == 0, done.err
    assert done.out.splitlines()[0] == "new/sglang/srt/hello.py: added"
    assert done.err == f"hello {ENGINE}: 1 patch, version 1.0.0 written\n"
    applied = cli.run("apply", "hello", "--host", f"local:{copy_site}", "--state-dir", str(cli.folder / "state"))
    assert applied.status == 0, applied.err
    assert (copy_site / INFO).read_bytes() == (tree / INFO).read_bytes()
    assert (copy_site / "sglang/srt/hello.py").read_text() == "HELLO = 2\n"
    assert cli.run("patchset", "refresh", "hello").err == f"hello {ENGINE}: 1 patch, nothing to write\n"


@pytest.mark.wheel
def test_edits_of_the_shipped_sets(cli, sets, wheelhouse_of_one, monkeypatch):
    before = files(sets)
    tree = cli.folder / "fixes"
    assert cli.run("patchset", "edit", FIXES, "--into", str(tree)).out == f"{tree}\n"
    monkeypatch.chdir(tree / "sglang" / "srt")
    nothing = cli.run("patchset", "refresh", "--json")
    assert (nothing.status, nothing.json["written"]) == (0, [])
    assert files(sets) == before
    replace_in(tree / INFO, "        # async H2D\n", "        # asynchronous H2D\n")
    replace_in(tree / MODEL, "In transformers v5 the", "In transformers 5 the")
    done = cli.run("patchset", "refresh", "--bump", "patch", "--json")
    assert done.status == 0, done.err
    assert done.json["written"] == [{"name": FIXES, "version": "1.0.1"}]
    assert [line.split(":")[0] for line in done.json["changes"]] == [
        "0001-rebuild-mamba-track-indices.patch",
        "0002-draft-rope-from-rope-parameters.patch",
    ]
    after = files(sets)
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {
        f"{FIXES}/patchset.toml",
        f"{FIXES}/0.5.11/0001-rebuild-mamba-track-indices.patch",
        f"{FIXES}/0.5.11/0002-draft-rope-from-rope-parameters.patch",
    }
    for name in changed - {f"{FIXES}/patchset.toml"}:
        old, new = before[name].splitlines(), after[name].splitlines()
        assert len(old) == len(new)
        assert sum(one != other for one, other in zip(old, new, strict=True)) == 1
    # What ddtree builds on changed where it does: in the worker, which both sets change.
    worker = "sglang/srt/speculative/dflash_worker.py"
    replace_in(tree / worker, "# The fused kernel rotates all layers with one cos/sin cache.", "# One cos/sin cache.")
    refused = cli.run("patchset", "refresh")
    assert refused.status == 3
    assert f"ddtree on {ENGINE} builds on files that {FIXES} now leaves otherwise" in refused.err
    assert files(sets) == after
    done = cli.run("patchset", "refresh", "--with-dependents", "--bump", "minor", "--json")
    assert [item["name"] for item in done.json["written"]] == [FIXES, "ddtree"]
    now = files(sets)
    assert {path for path in now if now[path] != after[path]} == {
        f"{FIXES}/patchset.toml",
        f"{FIXES}/0.5.11/0002-draft-rope-from-rope-parameters.patch",
        "ddtree/patchset.toml",
    }
    # And back again: byte for byte what ships, but for the versions.
    replace_in(tree / worker, "# One cos/sin cache.", "# The fused kernel rotates all layers with one cos/sin cache.")
    replace_in(tree / INFO, "        # asynchronous H2D\n", "        # async H2D\n")
    replace_in(tree / MODEL, "In transformers 5 the", "In transformers v5 the")
    assert cli.run("patchset", "refresh", "--with-dependents", "--set-version", "1.0.0").status == 0
    back = files(sets)
    assert {path for path in back if back[path] != before[path]} <= {"ddtree/patchset.toml"}


@pytest.mark.wheel
def test_an_edit_of_a_set_on_top_of_another(cli, sets, wheelhouse_of_one):
    """A line of one of its nine patches, one of a module that it adds, and one that is the lower set's."""
    before = files(sets)
    tree = cli.folder / "tree"
    assert (
        cli.run("patchset", "edit", "ddtree", "--into", str(tree)).err == f"ddtree {ENGINE}: 9 patches, scratch clean\n"
    )
    assert _git(tree, "log", "--format=%s", "-11").splitlines()[-2:] == ["ddtree: new/", f"{FIXES} 1.0.0"]
    worker, module = (f"sglang/srt/speculative/{name}.py" for name in ("dflash_worker", "ddtree_tree"))
    seam = "        self._configure_draft_server_args(draft_server_args)\n"
    replace_in(tree / worker, seam, "        # what a subclass wants of the drafter\n" + seam)
    (tree / module).write_text("# of trees\n" + (tree / module).read_text())
    done = cli.run("patchset", "refresh", "--from", str(tree), "--bump", "patch")
    assert done.status == 0, done.err
    assert done.out.splitlines()[0] == f"new/{module}: changed"
    assert done.out.splitlines()[1].startswith(f"0003-worker-seams.patch: {worker}:")
    after = files(sets)
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {"ddtree/patchset.toml", f"ddtree/{ENGINE}/0003-worker-seams.patch", f"ddtree/new/{module}"}
    checked = cli.run("patchset", "check", "ddtree", "--engine", ENGINE)
    assert checked.status == 0, checked.out
    replace_in(tree / worker, "# The fused kernel rotates all layers with one cos/sin cache.", "# One cos/sin cache.")
    refused = cli.run("patchset", "refresh", "ddtree", "--from", str(tree))
    assert (refused.status, "no patch touches these lines" in refused.err) == (3, True)
    assert files(sets) == after


@pytest.mark.wheel
def test_order_of_the_shipped_sets(cli, sets, wheelhouse_of_one):
    before = files(sets)
    hashes = load_sets(sets)[FIXES].families[ENGINE].hashes
    first, second = "0001-rebuild-mamba-track-indices.patch", "0002-draft-rope-from-rope-parameters.patch"
    done = cli.run("patchset", "reorder", FIXES, "--move", first, "--engine", ENGINE, "--json")
    assert done.json["patches"] == [second, first]
    assert load_sets(sets)[FIXES].families[ENGINE].hashes == hashes
    assert cli.run("patchset", "reorder", FIXES, first, second, "--engine", ENGINE).status == 0
    assert files(sets) == before
    refused = cli.run("patchset", "drop", FIXES, second, "--engine", ENGINE)
    assert (refused.status, "ddtree on 0.5.11 builds on" in refused.err) == (3, True)
    refused = cli.run("patchset", "drop", FIXES, first, "--engine", ENGINE, "--because", "fixed upstream")
    assert (refused.status, f"none has {first}" in refused.err) == (2, True)
    done = cli.run("patchset", "drop", FIXES, first, "--engine", ENGINE, "--bump", "major")
    assert done.status == 0, done.err
    assert done.out == f"{first}: dropped\n"


@pytest.mark.wheel
@pytest.mark.parametrize("engine", OTHER_ENGINES)
def test_every_command_on_a_later_engine(cli, wheelhouse, monkeypatch, engine):
    """From an idea to two patches, in another order, one dropped: on the engine as published, on top of a set."""
    folder = cli.folder / "patches"
    shutil.copytree(patches_dir() / FIXES, folder / FIXES)
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(folder))
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(wheelhouse))
    monkeypatch.setenv("DDTREE_DEPLOY_OFFLINE", "1")

    def patchset(*words):
        done = cli.run("patchset", *words)
        assert done.status == 0, done.err
        return done

    patchset("new", "mine", "--engine", engine, "--summary", "Two things", "--requires", FIXES)
    tree = Path(patchset("edit", "mine").out.strip())
    for number, path in enumerate(("sglang/srt/speculative/spec_info.py", INFO), 1):
        with (tree / path).open("a") as file:
            file.write(f"\n\nMINE = {number}\n")
        patchset("refresh", "mine", "--new", f"thing-{number}")
    names = [f"{number:04d}-thing-{number}.patch" for number in (1, 2)]
    assert [patch.name for patch in load_sets(folder)["mine"].families[engine].patches] == names
    patchset("reorder", "mine", names[1], names[0])
    checked = patchset("check", "mine", "--json").json
    assert [(item["set"], item["engine"], item["good"]) for item in checked["checks"]] == [("mine", engine, True)]
    patchset("drop", "mine", names[0])
    (left,) = load_sets(folder)["mine"].families[engine].patches
    assert (left.name, list(load_sets(folder)["mine"].families[engine].hashes[engine])) == (names[1], [INFO])


def _git(folder, *command):
    environment = {name: value for name, value in GIT_ENV.items() if name != "GIT_DIR"}
    return subprocess.run(
        ["git", *command], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_documents_are_documents(cli, sets):
    """Every JSON document of these commands has its schema, errors too."""
    done = cli.run("patchset", "drop", FIXES, "none", "--engine", "9", "--json")
    assert json.loads(done.out)["schema"] == "ddtree-deploy.error/1"
