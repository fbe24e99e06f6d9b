"""The agent's install of a service's files: one transaction, generations to go back through, nothing foreign lost."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent import install as module
from ddtree_deploy.agent.installation import UnitTransaction
from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.unitfiles import UnitFiles, masked, secrets_problems
from tests.agent.test_crash import run_until
from tests.serve.unit import ONE, TWO, UNIT, Unit


@pytest.fixture
def unit(tmp_path):
    return Unit(tmp_path)


def refused(code: str, action) -> AgentError:
    with pytest.raises(AgentError) as caught:
        action()
    assert caught.value.code == code, caught.value.message
    return caught.value


def test_install_previous_uninstall(unit):
    result = unit.install(**ONE)
    assert result["changed"]
    assert set(result["files"]) == {unit.path("svc.json"), unit.path("svc.sh"), unit.path("svc.env")}
    first = unit.tree()
    assert first["etc/svc.env"] == (0o600, b"A=1\n")
    assert not unit.install(**ONE)["changed"]
    unit.install(**TWO)
    assert set(unit.tree()) == {"etc/svc.json", "etc/svc.sh", "etc/svc.py"}, "what the new install lacks goes away"
    back = unit.previous()
    assert unit.tree() == first
    assert [item["version"] for item in back["left"]] == [unit.look()["generations"][0]["version"]]
    refused("DD607", unit.previous)
    unit.uninstall()
    assert not unit.etc.exists(), "the folder that the install made goes, too"
    refused("DD607", unit.uninstall)
    assert unit.run("units")["services"] == []


def test_what_was_there_before_comes_back(unit):
    unit.etc.mkdir()
    (unit.etc / "svc.env").write_text("MINE=1\n")
    error = refused("DD603", lambda: unit.install(**ONE))
    assert error.details == [f"/{unit.path('svc.env')}: not of this tool"]
    assert unit.tree() == {"etc/svc.env": (0o644, b"MINE=1\n")}
    unit.install(force=True, **ONE)
    unit.uninstall()
    assert unit.tree() == {"etc/svc.env": (0o644, b"MINE=1\n")}


def test_edits_are_not_lost(unit):
    unit.install(**ONE)
    (unit.etc / "svc.env").write_text("A=edited\n")
    assert unit.look()["edited"] == [unit.path("svc.env")]
    assert refused("DD603", lambda: unit.install(**TWO)).details == [
        f"/{unit.path('svc.env')}: edited since it was installed"
    ]
    assert refused("DD101", unit.uninstall).details == [f"/{unit.path('svc.env')}"]
    saved = unit.uninstall(force=True)["saved"]
    assert [Path(path).read_text() for path in saved] == ["A=edited\n"]
    assert not unit.etc.exists()


def test_generations_are_bounded_and_the_oldest_before_stays(unit):
    unit.etc.mkdir()
    (unit.etc / "svc.sh").write_text("exec echo original\n")
    for number in range(module.KEEP_GENERATIONS + 3):
        unit.install(force=True, **{**ONE, "svc_env": f"A={number}\n"})
    assert len(unit.look()["generations"]) == module.KEEP_GENERATIONS
    for number in reversed(range(3, module.KEEP_GENERATIONS + 2)):
        unit.previous()
        assert unit.tree()["etc/svc.env"][1] == f"A={number}\n".encode()
    unit.uninstall()
    assert {name: data for name, (_mode, data) in unit.tree().items()} == {"etc/svc.sh": b"exec echo original\n"}


def test_an_unsound_script_is_undone(unit):
    unit.install(**ONE)
    old = unit.tree()
    error = refused("DD505", lambda: unit.install(**{**TWO, "svc_sh": "if true\n"}))
    assert "the script is not sound" in error.message
    assert unit.tree() == old
    assert len(unit.look()["generations"]) == 1


def test_a_broken_configuration_does_not_lock_anyone_out(unit):
    unit.install(**ONE)
    (unit.etc / "svc.json").write_text("{")
    assert unit.look()["state"]["active"] == "unknown"
    assert unit.run("units")["services"][0]["state"]["notes"]
    unit.install(force=True, **TWO)
    (unit.etc / "svc.json").unlink()
    unit.uninstall(force=True)
    assert not unit.etc.exists()


def test_planned_on_something_else(unit):
    unit.install(**ONE)
    wire = [{"path": unit.path("svc.env"), "before": None, "mode": 0o600, "sha256": "0" * 64}]
    refused("DD307", lambda: unit.run("unit_install", service=unit.facts, files=wire, version="v"))
    data = b"A=2\n"
    wire[0]["sha256"] = hashlib.sha256(data).hexdigest()
    refused("DD502", lambda: unit.run("unit_install", [data], service=unit.facts, files=wire, version="v"))


@pytest.mark.parametrize(
    "path",
    ["/etc/x", "etc/../x", "proc/sys/x", "run/x", "dev/x", "etc/svc.secrets.env", "", "etc//x", "x", None, "etc/a\nb"],
)
def test_paths_that_no_install_may_have(path):
    refused("DD105", lambda: UnitFiles(UNIT).check_path(path))


@pytest.mark.parametrize("name", ["x", "../x.service", "a/b.service", "-x.service", ".service", "x.service\n", None, 3])
def test_names_that_no_unit_of_ours_has(name):
    refused("DD307", lambda: UnitFiles(name))


def test_a_link_is_not_followed(unit, tmp_path):
    (tmp_path / "real").mkdir()
    unit.etc.symlink_to(tmp_path / "real")
    refused("DD509", lambda: unit.install(**ONE))
    assert list((tmp_path / "real").iterdir()) == []


def test_a_forged_record_is_not_believed(unit):
    unit.install(**ONE)
    (record,) = unit.state_dir.glob("*/record.json")
    value = json.loads(record.read_text())
    value["layers"][0]["files"][0]["path"] = "proc/sys/kernel/x"
    record.write_text(json.dumps(value))
    refused("DD508", unit.uninstall)
    assert unit.run("units")["notes"], "and the others are still listed"


@pytest.mark.parametrize("action", ["install", "previous", "uninstall"])
def test_killed_anywhere(tmp_path, action):
    """SIGKILL before changes of the disk, spread over all: files and record are together as before or as after."""

    def prepared(folder) -> Unit:
        unit = Unit(folder)
        unit.install(**ONE)
        if action == "previous":
            unit.install(**TWO)
        return unit

    def act(unit: Unit) -> None:
        unit.install(**TWO) if action == "install" else getattr(unit, action)()

    surveyed = prepared(tmp_path / "survey")
    old, before = surveyed.tree(), len(surveyed.look()["generations"])
    _killed, total = run_until(None, lambda: act(surveyed))
    new, after = surveyed.tree(), len(surveyed.look()["generations"])
    assert total > 30
    seen = set()
    for count in range(1, total + 1, 2 if action == "install" else 5):
        unit = prepared(tmp_path / f"{count}")
        killed, _ = run_until(count, lambda unit=unit: act(unit))
        assert killed
        recovered = unit.recover()
        now = unit.tree()
        assert now in (old, new)
        assert len(unit.look()["generations"]) == (after if now == new else before)
        assert unit.look()["interrupted"] is None
        assert unit.look()["edited"] == []
        seen.add((recovered[0]["action"] if recovered else "nothing", "new" if now == new else "old"))
        assert unit.recover() == []
    assert {("undone", "old"), ("finished", "new")} <= seen
    assert ("finished", "old") not in seen and ("undone", "new") not in seen


def test_unit_is_undone_where_it_was_not_checked_yet(unit):
    """All files are written, the check is not done: nobody knows whether the unit is sound, so it goes back."""
    unit.install(**ONE)
    old = unit.tree()

    def killed_in_check() -> None:
        UnitTransaction.smoke = lambda _self: os.kill(os.getpid(), 9)
        unit.install(**TWO)

    pid = os.fork()
    if pid == 0:
        try:
            killed_in_check()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    assert unit.tree() != old
    refused("DD503", lambda: unit.install(**TWO))
    assert [item["action"] for item in unit.recover()] == ["undone"]
    assert unit.tree() == old


# --- secrets


def test_secrets_are_checked_by_name_alone(tmp_path):
    path = tmp_path / "svc.secrets.env"
    assert "does not exist" in secrets_problems(str(path), ["HF_TOKEN"])[0]
    path.write_text("# a note\nHF_TOKEN='abc'\nEMPTY=\nexport X=1\n")
    path.chmod(0o640)
    problems = secrets_problems(str(path), ["HF_TOKEN", "EMPTY", "X"])
    assert [problem.partition(" ")[2] for problem in problems] == [
        "has mode 0640: others can read it; chmod 0600",
        "does not set EMPTY, X",
    ]
    assert "abc" not in "".join(problems)
    path.chmod(0o600)
    assert secrets_problems(str(path), ["HF_TOKEN"]) == []
    assert secrets_problems(None, []) == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30))
def test_values_named_like_secrets_are_masked(value):
    text = f"A={value}\nHF_TOKEN={value}\n  MY_API_KEY = no\nB_KEY={value}"
    lines = masked(text).split("\n")
    assert lines[0] == f"A={value}"
    assert lines[1] == "HF_TOKEN=***"
    assert lines[3] == "B_KEY=***"
