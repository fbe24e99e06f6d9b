"""The whole way where no systemd may be used: a script and its supervisor, by the real command line on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.agent.harness import make_site
from tests.agent.test_interpreters import interpreters
from tests.cli.harness import Cli
from tests.systemd import machine
from tests.systemd.deployer import toml
from tests.systemd.machine import free_port

STANDIN = Path(machine.__file__).parent
PYTHON = interpreters()[0]  # the oldest one here runs agent and supervisor


class Box(Cli):
    """This machine as a host, with the stand-in engine and one service."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        super().__init__(folder, monkeypatch)
        shutil.rmtree(self.site)
        self.site = make_site(folder / "host", "0.5.11")
        shutil.copy(STANDIN / "server_args.py", self.site / "sglang/srt/server_args.py")
        (self.site / "sglang/srt/mode.py").write_text('MODE = "serve"\n')
        self.etc = folder / "etc"
        program = folder / "python"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN / "standin.py"} "$@"\n')
        program.chmod(0o755)
        self.port = free_port()
        self.environment = {"STANDIN_SITE": str(self.site), "STANDIN_FOLDER": str(folder)}
        self.service = {
            "model": "org/target",
            "algorithm": "DFLASH",
            "drafter": "org/draft",
            "python": str(program),
            "port": self.port,
            "environment_directory": str(self.etc),
        }
        self.save()

    def save(self, **environment: str) -> None:
        service = {**self.service, "environment": {**self.environment, **environment}}
        host = {"local": str(self.site), "python": PYTHON, "state_dir": str(self.state)}
        lines = ['default_host = "box"', "[hosts.box]", *(f"{key} = {toml(value)}" for key, value in host.items())]
        lines += ["[services.svc]", *(f"{key} = {toml(value)}" for key, value in service.items())]
        (self.folder / "hosts.toml").write_text("\n".join(lines) + "\n")

    def launch(self, *arguments: str, status: int = 0):
        result = self.run("launch", *arguments, "--inventory", str(self.folder / "hosts.toml"))
        assert result.status == status, f"{result.status}\n{result.out}\n{result.err}"
        return result

    def on_box(self, *arguments: str):
        return self.run(*arguments, "--inventory", str(self.folder / "hosts.toml"))


@pytest.fixture
def box(tmp_path, monkeypatch):
    one = Box(tmp_path, monkeypatch)
    yield one
    lock = one.etc / "svc.run/lock"
    if lock.exists() and lock.read_text().strip():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(lock.read_text()), signal.SIGTERM)


def test_the_whole_way(box: Box) -> None:
    checked = box.launch("--install", "--no-systemd", "--check")
    assert not box.etc.exists()
    assert f"+++ {box.etc}/svc.sh" in checked.out
    installed = box.launch("--install", "--no-systemd")
    assert "nothing starts it at boot" in installed.err
    started = box.launch("--start")
    assert "speculation: DFLASH, accept length 4.20" in started.out
    assert "nothing here starts it at boot" in started.err
    status = box.on_box("status")
    assert "sglang-svc.service  active since" in status.out
    assert "supervised script" in status.out
    assert "ready to roll" in box.on_box("logs").out
    restarted = box.launch("--restart", "--json").json
    assert restarted["run"]["state"]["manager"] == "script"
    assert box.launch("--uninstall", status=3).err.count("is running") == 1

    box.save(STANDIN="crash")
    box.launch("--install", "--no-systemd")
    failed = box.launch("--restart", status=1)
    assert "cause: a GPU ran out of memory" in failed.err
    back = box.launch("--previous", "--restart")
    assert "serves on" in back.out
    box.launch("--stop", "--uninstall")
    left = sorted(str(path.relative_to(box.etc)) for path in box.etc.rglob("*") if path.is_file())
    assert left == ["svc.run/lock", "svc.run/log", "svc.run/state.json"], "the log is nobody's to throw away"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--install", "--uninstall"], "--install and --uninstall do not go together"),
        (["--start", "--stop"], "--start and --stop do not go together"),
        (["--uninstall", "--start"], "what is uninstalled cannot be started"),
        (["--install", "--stop"], "--stop and --install do not go together"),
        (["--check"], "--check is for --install alone"),
        (["--install", "--check", "--start"], "--check is for --install alone"),
        (["--no-systemd", "--start"], "--no-systemd is for --install"),
        (["--install", "--engine", "0.5.11"], "its own engine and models count"),
        (["--start", "--deadline", "0"], "--deadline"),
    ],
)
def test_options_that_do_not_go_together(box: Box, options: list[str], said: str) -> None:
    refused = box.launch(*options, status=2)
    assert said in refused.err
    assert not box.state.exists()


def test_nothing_installed(box: Box) -> None:
    for option in ("--start", "--stop", "--restart", "--previous", "--uninstall"):
        refused = box.launch(option, status=3)
        assert "DD607" in refused.err
        assert "launch --install" in refused.err
    assert "DD607" in box.on_box("logs").err
    assert "DD006" in box.on_box("logs", "none").err
    assert "no end" in box.on_box("logs", "-f", "--json").err
