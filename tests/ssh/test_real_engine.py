"""The published engine behind a real sshd: the commands that people come for, with the answers that are known."""

from __future__ import annotations

import getpass
import sys

import pytest

from ddtree_deploy.cli.demo import tree_digest
from tests.cli.harness import Cli

PATTERNS = "update_mamba_state_after_mtp_verify|mamba_track_indices|TARGET_VERIFY|disable_state_update"
SETS = ["dflash-fixes", "ddtree"]


@pytest.fixture
def cli(start_sshd, copy_site, tmp_path, monkeypatch):
    sshd = start_sshd()
    sshd.target()  # writes known_hosts
    (tmp_path / "user").mkdir()
    user = Cli(tmp_path / "user", monkeypatch)
    user.site = copy_site
    inventory = tmp_path / "hosts.toml"
    inventory.write_text(
        f"""\
default_host = "box"
[hosts.box]
ssh = "{getpass.getuser()}@127.0.0.1:{sshd.port}"
python = "{sys.executable}"
any_python = true
root = "{copy_site}"
state_dir = "{tmp_path / "state"}"
identity_file = "{sshd.keys["client"]}"
known_hosts = "{sshd.folder / "known_hosts"}"
ssh_config = "none"
"""
    )
    monkeypatch.setenv("DDTREE_DEPLOY_INVENTORY", str(inventory))
    return user


@pytest.mark.wheel
def test_the_main_job(cli):
    before = tree_digest(cli.site)
    assert cli.run("snapshot").status == 0
    for place in (["--host", "box"], ["--snapshot", "latest"]):
        hits = cli.run("grep", PATTERNS, "--under", "srt/speculative", *place).out.splitlines()
        assert len(hits) == 25
        found = cli.run("find-def", "update_mamba_state_after_mtp_verify", "--json", *place).json["definitions"]
        lines = {item["path"].rpartition("/")[2]: (item["line"], item["body_line"]) for item in found}
        assert lines == {
            "hybrid_linear_attn_backend.py": (937, 917),
            "ascend_hybrid_linear_attn_backend.py": (220, 200),
        }
    pending = cli.run("status", "--json").json
    assert (pending["state"], pending["foreign"], pending["exit_status"]) == ("pristine", [], 0)
    for name in SETS:
        assert {item["name"]: item["state"] for item in pending["sets"]}[name] == "pending"
        applied = cli.run("apply", name, "-m", "test")
        assert applied.status == 0, applied.err
        assert "already applied" in cli.run("apply", name).out
        status = cli.run("status", "--json").json
        assert (status["state"], status["foreign"], status["exit_status"]) == ("applied", [], 0)
    snapshot = cli.run("snapshot", "--json").json
    assert snapshot["record"]["counts"]["differs"] == len(snapshot["changed"]) > 0
    for name in reversed(SETS):
        assert cli.run("rollback", name).status == 0
    assert tree_digest(cli.site) == before
    assert cli.run("status", "--json").json["state"] == "pristine"


@pytest.mark.wheel
def test_a_foreign_edit_is_told_from_ours(cli):
    path = cli.site / "sglang/srt/server_args.py"
    path.write_text(path.read_text() + "# mine\n")
    assert cli.run("apply", SETS[0]).status == 0
    status = cli.run("status", "--json").json
    assert status["exit_status"] == 1
    assert [item["path"] for item in status["foreign"]] == ["sglang/srt/server_args.py"]
    assert {item["name"]: item["state"] for item in status["sets"]}[SETS[0]] == "applied"
