"""``patchset port``: a real set to real engines, with and without conflicts, and finished by hand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ddtree_deploy.patching.patchset import load_set
from ddtree_deploy.resources import patches_dir

pytestmark = pytest.mark.wheel
PORT = ("patchset", "port", "dflash-fixes")
MODEL = "sglang/srt/models/dflash.py"


@pytest.fixture
def cli(cli, wheelhouse, monkeypatch):
    """The set as it was when it served 0.5.11 alone."""
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(cli.folder / "cache"))
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(wheelhouse))
    folder = cli.folder / "patches" / "dflash-fixes"
    later = shutil.ignore_patterns("0.5.1[2-9]*")
    shutil.copytree(patches_dir() / "dflash-fixes", folder, ignore=later)
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(folder.parent))
    toml = (folder / "patchset.toml").read_text()
    tables = re.split(r"^(?=\[)", toml, flags=re.MULTILINE)
    (folder / "patchset.toml").write_text(
        "".join(table for table in tables if not table.startswith("[") or '."0.5.11"' in table.splitlines()[0])
    )
    return cli


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_port_that_moves_by_itself(cli):
    folder = cli.folder / "patches"
    before = tree(folder)
    dry = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.12", "--check")
    assert dry.status == 0
    assert "would be a new family of 2 patches" in dry.err
    assert tree(folder) == before
    result = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.12", "--bump", "minor")
    assert result.status == 0
    assert "look at: <module>, DFlashVerifyInput.prepare_for_verify (sglang 0.5.12 changed it too)" in result.out
    assert result.err == "dflash-fixes 0.5.12: is a new family of 2 patches\n"
    after = tree(folder)
    assert {path for path in after if before.get(path) != after[path]} == {
        "dflash-fixes/patchset.toml",
        "dflash-fixes/0.5.12/series",
        "dflash-fixes/0.5.12/0001-rebuild-mamba-track-indices.patch",
        "dflash-fixes/0.5.12/0002-draft-rope-from-rope-parameters.patch",
    }
    joined = cli.run(*PORT, "--from", "0.5.12", "--to", "0.5.12.post1", "--json").json
    assert (joined["joined"], joined["family"], joined["written"]) == (True, "0.5.12", True)
    assert load_set(folder / "dflash-fixes").families["0.5.12"].engines == ("0.5.12", "0.5.12.post1")
    assert cli.run("patchset", "check", "dflash-fixes").status == 0
    again = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.12")
    assert (again.status, "DD001" in again.err) == (2, True)


def test_a_conflict_is_finished_by_hand(cli):
    folder = cli.folder / "patches"
    before = tree(folder)
    scratch = cli.folder / "scratch"
    result = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.13", "--into", str(scratch))
    assert result.status == 1
    assert "      conflict at line 120; upstream changed DFlashAttention.__init__" in result.out.splitlines()
    assert f"patchset refresh --from {scratch}" in result.err
    assert tree(folder) == before
    text = (scratch / MODEL).read_text()
    assert "<<<<<<< sglang 0.5.13\n        rope_theta, rope_scaling = get_rope_config(config)\n|||||||" in text
    refresh = ("patchset", "refresh", "--from", str(scratch), "--into", "0002")
    unfinished = cli.run(*refresh)
    assert (unfinished.status, "conflict marker" in unfinished.err) == (3, True)
    (scratch / MODEL).write_text(re.sub(r"<<<<<<< .*?=======\n(.*?)>>>>>>> .*?\n", r"\1", text, flags=re.DOTALL))
    finished = cli.run(*refresh, "--bump", "minor")
    assert finished.status == 0, finished.err
    ported = load_set(folder / "dflash-fixes")
    assert [patch.name for patch in ported.families["0.5.13"].patches] == [
        "0001-rebuild-mamba-track-indices.patch",
        "0002-draft-rope-from-rope-parameters.patch",
    ]
    assert cli.run("patchset", "check", "dflash-fixes", "--engine", "0.5.13").status == 0


def test_what_a_version_does_not_need(cli):
    folder = cli.folder / "patches" / "dflash-fixes"
    why = "upstream reads rope_parameters"
    result = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.13", "--leave-out", f"0002={why}")
    assert result.status == 0
    assert f"  0002-draft-rope-from-rope-parameters.patch: left out ({why})" in result.out.splitlines()
    assert load_set(folder).families["0.5.13"].left_out == {"0002-draft-rope-from-rope-parameters.patch": why}
    both = ("--leave-out", "0001=saved", "--leave-out", f"0002={why}")
    result = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.18", *both)
    assert (result.status, "is declared as not needed" in result.err) == (0, True)
    assert load_set(folder).unneeded == {"0.5.18": f"saved; {why}"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--from", "0.5.11", "--to", "0.5.11"),
        ("--from", "0.5.11", "--to", "0.5.12", "--bump", "minor", "--set-version", "2.0.0"),
        ("--from", "0.5.11", "--to", "0.5.12", "--leave-out", "0009=x"),
    ],
)
def test_usage(cli, arguments):
    result = cli.run(*PORT, *arguments)
    assert (result.status, "DD001" in result.err) == (2, True)


def test_a_folder_in_the_way(cli):
    (cli.folder / "scratch").mkdir()
    (cli.folder / "scratch" / "mine").write_text("x")
    result = cli.run(*PORT, "--from", "0.5.11", "--to", "0.5.13", "--into", str(cli.folder / "scratch"))
    assert (result.status, "DD118" in result.err) == (3, True)
    assert [path.name for path in (cli.folder / "scratch").iterdir()] == ["mine"]
