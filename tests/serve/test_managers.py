"""How systemd's answers are read: of versions and kinds that the booted machine does not give."""

from __future__ import annotations

import subprocess
import time

import pytest

from ddtree_deploy.agent import managers
from ddtree_deploy.agent.managers import Systemd
from ddtree_deploy.agent.protocol import AgentError

UNIT = "sglang-x.service"


@pytest.fixture
def answers(monkeypatch):
    """Answers by the first word of a command that they fit: (status, stdout, stderr); and the commands asked."""
    given: dict[str, tuple[int, str, str]] = {}
    asked: list[list[str]] = []

    def run_program(argv, limit_s=60.0):
        asked.append(argv)
        for words, (status, out, err) in given.items():
            if words in " ".join(argv):
                return subprocess.CompletedProcess(argv, status, out, err)
        raise AssertionError(argv)

    monkeypatch.setattr(managers, "run_program", run_program)
    return given, asked


@pytest.mark.parametrize(("version", "recursive"), [("249", False), ("250", True), ("257.3-1", True)])
def test_verify_asks_as_the_version_can(answers, version, recursive):
    given, asked = answers
    given["--version"] = 0, f"systemd {version} (x)\n+PAM\n", ""
    given["verify"] = 0, "", ""
    assert Systemd(UNIT).verify("/etc/x") == []
    assert ("--recursive-errors=one" in asked[-1]) == recursive


@pytest.mark.parametrize(
    ("status", "said", "found"),
    [
        (0, "", []),
        # Old versions end with 0 for what they only ignore.
        (0, f"/etc/systemd/system/{UNIT}:9: Unknown key name 'X', ignoring.\n", 1),
        # Another unit's fault is not ours.
        (0, "/lib/systemd/system/other.service:9: Unknown key name 'X', ignoring.\n", []),
        (1, "/lib/systemd/system/other.service:9: bad\n", 1),
        (1, "", 1),
    ],
)
def test_verify_counts_what_is_said_of_the_unit(answers, status, said, found):
    given, _asked = answers
    given["--version"] = 0, "systemd 252\n", ""
    given["verify"] = status, "", said
    assert len(Systemd(UNIT).verify("/etc/x")) == (found or 0)


def state_of(answers, **shown):
    given, _asked = answers
    given["show"] = 0, "".join(f"{key}={value}\n" for key, value in shown.items()), ""
    return Systemd(UNIT).state()


def test_a_state(answers):
    now = time.time()
    state = state_of(
        answers,
        LoadState="loaded",
        ActiveState="active",
        SubState="running",
        UnitFileState="enabled",
        MainPID="12",
        NRestarts="2",
        Result="success",
        ExecMainCode="0",
        ExecMainStartTimestampMonotonic=str(int((time.monotonic() - 60) * 1e6)),
        TimeoutStopUSec="1min 30s",
        InvocationID="abc",
        NeedDaemonReload="yes",
        DropInPaths="/x.conf",
    )
    assert (state["active"], state["pid"], state["restarts"], state["enabled"]) == ("active", 12, 2, True)
    assert now - 61 < state["since"] < now - 58
    assert state["stop_limit_s"] == 90
    assert len(state["notes"]) == 2


@pytest.mark.parametrize("sub", ["auto-restart", "auto-restart-queued"])
def test_waiting_to_be_restarted(answers, sub):
    state = state_of(answers, LoadState="loaded", ActiveState="active", SubState=sub)
    assert (state["active"], state["restarting"]) == ("activating", True)


@pytest.mark.parametrize(
    ("active", "job", "said"),
    [
        ("inactive", "17", "activating"),
        ("failed", "17", "activating"),
        ("inactive", "0", "inactive"),
        ("active", "17", "active"),
        ("deactivating", "17", "deactivating"),
    ],
)
def test_a_start_that_is_queued(answers, active, job, said):
    state = state_of(answers, LoadState="loaded", ActiveState=active, SubState="dead", Job=job)
    assert (state["active"], state["restarting"]) == (said, False)


@pytest.mark.parametrize(
    ("result", "code", "status", "said"),
    [
        ("success", "2", "9", "signal 9"),
        ("signal", "2", "9", "signal (signal 9)"),
        ("exit-code", "1", "203", "exit-code (exit status 203)"),
        ("success", "0", "0", "success"),
        ("start-limit-hit", "1", "1", "start-limit-hit (exit status 1)"),
    ],
)
def test_how_a_run_ended(answers, result, code, status, said):
    assert state_of(answers, Result=result, ExecMainCode=code, ExecMainStatus=status)["result"] == said


def test_an_unknown_unit_and_an_old_systemctl(answers):
    state = state_of(answers, LoadState="not-found", ActiveState="inactive")
    assert (state["active"], state["pid"], state["since"], state["stop_limit_s"]) == ("inactive", 0, None, 90.0)
    assert state["notes"] == ["the unit is not-found"]
    assert state_of(answers)["active"] == "inactive"


def test_systemctl_refuses(answers):
    given, _asked = answers
    given["start"] = 1, "", "Failed to start x.service: Unit x.service not found.\nSee more\n"
    with pytest.raises(AgentError) as refused:
        Systemd(UNIT).start()
    assert refused.value.message == "systemctl start: Failed to start x.service: Unit x.service not found."
    given["reset-failed"] = 1, "", "Failed to reset failed state of unit x.service: Unit x.service not loaded.\n"
    Systemd(UNIT).settle()
    given["reset-failed"] = 1, "", "Access denied\n"
    with pytest.raises(AgentError):
        Systemd(UNIT).settle()


def test_a_host_without_the_program(monkeypatch):
    monkeypatch.setattr(managers, "find", lambda _program: None)
    with pytest.raises(AgentError) as refused:
        managers.run_program(["systemctl"])
    assert refused.value.message == "the host has no systemctl"


def test_a_program_that_hangs():
    with pytest.raises(AgentError) as refused:
        managers.run_program(["sleep", "100"], 0.1)
    assert "did not end within" in refused.value.message
