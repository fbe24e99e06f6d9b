"""The supervisor for hosts without systemd, run as it is installed: one file, one configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_deploy.agent import supervisor as module
from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.supervised import Supervised


class Service:
    """A shell script under a supervisor. What it prints is in :meth:`log`."""

    def __init__(self, folder: Path, script: str, **config) -> None:
        self.folder = folder / "run"
        self.config = folder / "svc.json"
        (folder / "svc.sh").write_text(script)
        value = {
            "command": ["/bin/sh", str(folder / "svc.sh")],
            "secrets_file": None,
            "folder": str(self.folder),
            "user": None,
            "group": None,
            "restart_s": 0.1,
            "burst": 3,
            "interval_s": 100,
            "stop_s": 10,
            **config,
        }
        self.config.write_text(json.dumps(value))
        self.manager = Supervised(str(self.config), module.__file__)

    def await_state(self, *wanted: str) -> dict:
        deadline = time.monotonic() + 30
        while (state := self.manager.state())["active"] not in wanted:
            assert time.monotonic() < deadline, state
            time.sleep(0.02)
        return state

    def await_log(self, text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def stop(self) -> dict:
        self.manager.begin_stop()
        return self.await_state("inactive", "failed")


@pytest.fixture
def service(tmp_path):
    made = []

    def make(script: str, **config) -> Service:
        one = Service(tmp_path, script, **config)
        made.append(one)
        return one

    yield make
    for one in made:
        one.stop()


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_start_state_stop(service):
    one = service("echo ready; exec sleep 1000\n")
    assert one.manager.state()["active"] == "inactive"
    one.manager.start()
    state = one.await_state("active")
    one.await_log("ready")
    assert alive(state["pid"])
    assert (state["manager"], state["restarts"], state["invocation"]) == ("script", 0, "run 1")
    with pytest.raises(AgentError) as twice:
        one.manager.start()
    assert "it is running already" in twice.value.message
    assert one.stop()["active"] == "inactive"
    assert not alive(state["pid"])
    assert one.manager.recent(10) == ["ready"]


def test_restarts_within_a_limit(service):
    one = service("echo began; exit 3\n")
    one.manager.start()
    state = one.await_state("failed")
    assert state["result"] == "exit status 3"
    assert state["restarts"] == 2
    assert one.log().count("began") == 3, "no more than the burst"
    assert one.log().count("=== run ") == 3


def test_a_crash_is_restarted(service):
    one = service("echo pid $$; exec sleep 1000\n")
    one.manager.start()
    pid = one.await_state("active")["pid"]
    one.await_log("pid ")
    os.kill(pid, signal.SIGKILL)
    one.await_log("=== run 2")
    state = one.await_state("active")
    assert state["pid"] != pid
    assert state["restarts"] == 1


def test_nothing_outlives_the_service(service):
    """A worker that left its process group and lost its parent would keep its GPU's memory."""
    one = service("setsid sh -c 'trap \"\" TERM; echo worker $$; sleep 1000 & wait' &\nsleep 0.2; exec sleep 1000\n")
    one.manager.start()
    one.await_state("active")
    one.await_log("worker ")
    worker = int(one.log().partition("worker ")[2].split()[0])
    assert alive(worker)
    one.stop()
    assert not alive(worker)


def test_one_that_does_not_stop_is_killed(service):
    one = service("trap '' TERM; echo deaf; while :; do sleep 0.1; done\n", stop_s=0.5)
    one.manager.start()
    one.await_log("deaf")
    pid = one.manager.state()["pid"]
    assert one.stop()["active"] == "inactive"
    assert not alive(pid)


def test_secrets_reach_the_service_and_no_command_line(service, tmp_path):
    secrets = tmp_path / "svc.secrets.env"
    secrets.write_text("# a note\nHF_TOKEN='it is secret'\nOTHER=x=y\n")
    one = service(
        'echo "got:$HF_TOKEN:$OTHER"; tr "\\0" " " </proc/$PPID/cmdline; exec sleep 1000\n', secrets_file=str(secrets)
    )
    one.manager.start()
    one.await_log("got:it is secret:x=y")
    one.await_log("supervisor.py")
    assert "it is secret" not in one.log().partition("supervisor.py")[2]
    for path in (one.folder / "state.json", one.config):
        assert "it is secret" not in path.read_text()


def test_what_cannot_be_started_is_no_loop(service):
    one = service("exit 0\n", secrets_file="/nowhere/at/all")
    one.manager.start()
    state = one.await_state("failed")
    assert "/nowhere/at/all" in state["result"]
    assert state["restarts"] == 0


def test_a_supervisor_that_was_killed(service):
    one = service("echo ready; exec sleep 1000\n")
    one.manager.start()
    state = one.await_state("active")
    supervisor = int((one.folder / "lock").read_text())
    os.kill(supervisor, signal.SIGKILL)
    assert "the supervisor is gone" in one.await_state("failed")["result"]
    deadline = time.monotonic() + 10
    while alive(state["pid"]):
        assert time.monotonic() < deadline, "the service outlived its supervisor"
        time.sleep(0.02)


def test_the_log_is_begun_anew(service, monkeypatch, tmp_path):
    one = service("exec sleep 1000\n")
    one.folder.mkdir()
    with (one.folder / "log").open("wb") as handle:
        handle.truncate(module.LOG_LIMIT + 1)
    one.manager.start()
    one.await_state("active")
    assert (one.folder / "log.1").stat().st_size == module.LOG_LIMIT + 1
    assert one.log().startswith("=== run 1")


def test_it_needs_no_other_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-S", module.__file__, str(tmp_path / "none")], capture_output=True, text=True
    )
    assert "FileNotFoundError" in done.stderr
    assert "ImportError" not in done.stderr
