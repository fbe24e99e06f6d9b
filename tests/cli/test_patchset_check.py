"""``patchset check``: one table for the shipped sets on every engine that they name, and its findings."""

from __future__ import annotations

import shutil

import pytest

from ddtree_deploy.resources import patches_dir

pytestmark = pytest.mark.wheel
TOML = "dflash-fixes/patchset.toml"


@pytest.fixture
def cli(cli, wheelhouse, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(cli.folder / "cache"))
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(wheelhouse))
    shutil.copytree(patches_dir(), cli.folder / "patches")
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(cli.folder / "patches"))
    return cli


def test_the_table(cli):
    engines = ("0.5.12", "0.5.13.post1", "0.5.14", "0.5.20")
    result = cli.run("patchset", "check", "dflash-fixes", *(part for name in engines for part in ("--engine", name)))
    assert result.status == 0, result.err
    assert [line.split() for line in result.out.splitlines()[:-1]] == [
        ["SET", "ENGINE", "APPLIES", "COMPILES", "HASHES", "UNDOES", "SYMBOLS"],
        *(["dflash-fixes", engine, "ok", "ok", "ok", "ok", "ok"] for engine in engines[:3]),
    ]
    assert result.out.splitlines()[-1].startswith("dflash-fixes  0.5.20        not needed: upstream saves")


def test_findings(cli):
    file = cli.folder / "patches/dflash-fixes/0.5.14/0001-save-mamba-states-of-a-verify.patch"
    good = file.read_text()
    file.write_text(good.replace("import prepare_mamba_track_for_verify", "import prepare_mamba_tracks"))
    arguments = ("patchset", "check", "dflash-fixes", "--engine", "0.5.14")
    result = cli.run(*arguments)
    assert result.status == 1
    assert result.out.splitlines()[1].split()[2:] == ["ok", "ok", "1", "wrong", "ok", "2", "wrong"]
    info = "sglang/srt/speculative/dflash_info.py"
    said = "dflash-fixes on 0.5.14: symbols: "
    lines = result.out.splitlines()
    assert f"{said}{info}:16: sglang.srt.speculative.spec_utils has no prepare_mamba_tracks" in lines
    assert f"{said}{info}:74: nothing defines prepare_mamba_track_for_verify" in lines
    document = cli.run(*arguments, "--json").json
    assert (document["schema"], document["clean"]) == ("ddtree-deploy.patchset-check/1", False)
    (item,) = document["checks"]
    assert {name: len(found) for name, found in item["problems"].items()} == {
        **{"applies": 0, "compiles": 0, "hashes": 1, "undoes": 0, "symbols": 2}
    }
    file.write_text(good.replace(" if batch.forward_mode.is_idle()", " if batch.forward_mode.idle()", 1))
    torn = cli.run(*arguments)
    assert torn.status == 1
    assert torn.out.splitlines()[1].split()[2:] == ["1", "wrong", "-", "-", "-", "-"]


def test_what_is_to_be_checked(cli):
    assert cli.run("patchset", "check").status == 2
    assert cli.run("patchset", "check", "ddtree", "--all").status == 2
    unknown = cli.run("patchset", "check", "dflash-fixes", "--engine", "0.4.9")
    assert (unknown.status, "DD109" in unknown.err) == (3, True)
    toml = cli.folder / "patches" / TOML
    toml.write_text(toml.read_text().replace("schema = 1", "schema = 7"))
    broken = cli.run("patchset", "check", "--all")
    assert (broken.status, "DD108" in broken.err) == (2, True)
