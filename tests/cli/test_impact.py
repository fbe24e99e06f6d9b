"""``impact``: what it prints, and its exit status, on the published engines."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.wheel
FIXES = ("impact", "dflash-fixes")


@pytest.fixture
def cli(cli, wheelhouse, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(cli.folder / "cache"))
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(wheelhouse))
    return cli


def test_nothing_changed(cli):
    result = cli.run(*FIXES, "--from", "0.5.12", "--to", "0.5.12.post1")
    assert result.status == 0
    assert result.out.splitlines()[-1] == "  0 of 3 files changed, and in them 0 functions that the set changes"


def test_what_changed(cli):
    result = cli.run(*FIXES, "--from", "0.5.11", "--to", "0.5.14")
    assert result.status == 1
    lines = result.out.splitlines()
    assert lines[0] == "dflash-fixes 1.1.0: sglang 0.5.11 -> 0.5.14"
    assert "    changed  DFlashAttention.__init__  (0002-draft-rope-from-rope-parameters.patch)" in lines
    assert "  gone       sglang/srt/speculative/dflash_worker.py" in lines
    assert "             of that name now: sglang/srt/speculative/dflash_worker_v2.py" in lines


def test_as_a_document(cli):
    result = cli.run(*FIXES, "--from", "0.5.11", "--to", "0.5.12", "--json")
    assert result.status == 1
    document = result.json
    assert (document["schema"], document["clean"]) == ("ddtree-deploy.impact/1", False)
    (item,) = document["sets"]
    files = {file["path"].rpartition("/")[2]: file for file in item["files"]}
    assert files["dflash.py"]["state"] == "unchanged"
    touched = {one["function"]: one["patches"] for one in files["dflash_info.py"]["touched"]}
    assert touched["DFlashVerifyInput.prepare_for_verify"] == ["0001-rebuild-mamba-track-indices.patch"]


def test_an_engine_with_itself(cli):
    for extra in ((), ("--json",)):
        result = cli.run(*FIXES, "--from", "0.5.11", "--to", "0.5.11", *extra)
        assert result.status == 2
        assert result.err == "error[DD001]: --from and --to are both 0.5.11\n\nhint: name two versions\n"
    assert result.json["error"]["code"] == "DD001"


def test_without_a_set_all_that_serve_the_version(cli):
    found = cli.run("impact", "--from", "0.5.12", "--to", "0.5.12.post1", "--json").json["sets"]
    assert [item["name"] for item in found] == ["dflash-fixes"]
    nothing = cli.run("impact", "--from", "0.5.9", "--to", "0.5.12")
    assert (nothing.status, "DD109" in nothing.err) == (3, True)


def test_a_wheel_that_is_not_here(cli, monkeypatch):
    monkeypatch.delenv("DDTREE_DEPLOY_WHEELHOUSE")
    result = cli.run(*FIXES, "--from", "0.5.11", "--to", "0.5.23")
    assert (result.status, result.out) == (3, "")
    assert "the wheels of sglang 0.5.11, 0.5.23 are not here" in result.err
    assert "`ddtree-deploy wheel fetch 0.5.11 0.5.23`" in result.err
    unknown = cli.run(*FIXES, "--from", "0.5.11", "--to", "0.4.9")
    assert "wheel pin 0.4.9" in unknown.err
