"""A real OpenSSH server on loopback, with throw-away keys and nothing of the user's own configuration."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.hosts.target import Target

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PASSPHRASE = "correct horse"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ssh)
            if SSHD is None:
                item.add_marker(pytest.mark.skip(reason="OpenSSH's sshd is not installed"))


@dataclass
class Keys:
    """Key files by name: host keys, the client's key, one that is encrypted, one that no host knows."""

    folder: Path

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def public(self, name: str) -> str:
        """Type and base64 of a public key."""
        return " ".join((self.folder / f"{name}.pub").read_text().split()[:2])


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    for name, kind, passphrase in (
        ("host_ed25519", "ed25519", ""),
        ("host_rsa", "rsa", ""),
        ("host_ecdsa", "ecdsa", ""),
        ("client", "ed25519", ""),
        ("client_rsa", "rsa", ""),
        ("locked", "ed25519", PASSPHRASE),
        ("stranger", "ed25519", ""),
    ):
        command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", name, "-f", str(folder / name)]
        subprocess.run(command + (["-b", "2048"] if kind == "rsa" else []), check=True)
    return Keys(folder)


@dataclass
class Sshd:
    """One running sshd and how to reach it."""

    folder: Path
    port: int
    keys: Keys
    options: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        authorized = self.folder / "authorized_keys"
        authorized.write_text("".join(f"{self.keys.public(name)}\n" for name in ("client", "client_rsa", "locked")))
        options = {
            "ListenAddress": f"127.0.0.1:{self.port}",
            "HostKey": f"{self.keys['host_ed25519']}",
            "AuthorizedKeysFile": str(authorized),
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "LogLevel": "VERBOSE",
            "SetEnv": f"HOME={self.folder}",  # none of the user's login files
            **self.options,
        }
        lines = []
        for word, value in options.items():
            lines += [f"{word} {each}\n" for each in value.split("\n")]
        (self.folder / "sshd_config").write_text("".join(lines))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command = [str(SSHD), "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "log")]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd did not start: {self.log()}")
            time.sleep(0.02)

    def stop(self) -> None:
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.terminate()
        self.process.wait()

    def children(self) -> list[int]:
        """The processes that serve connections now."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def name(self) -> str:
        return f"[127.0.0.1]:{self.port}"

    def target(self, **changes: Any) -> Target:
        """The target that reaches this server with all in order."""
        known = self.folder / "known_hosts"
        if not known.exists():
            known.write_text(f"{self.name} {self.keys.public('host_ed25519')}\n")
        target = Target(
            name="box",
            kind="ssh",
            ssh=f"{getpass.getuser()}@127.0.0.1:{self.port}",
            identity_file=str(self.keys["client"]),
            known_hosts=str(known),
            ssh_config="none",
        )
        return replace(target, **changes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def start_sshd(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Iterator[Callable[..., Sshd]]:
    """start_sshd(Option="value", ...) -> Sshd; a value of several lines stands for the option several times."""
    running: list[Sshd] = []

    def start(**options: str) -> Sshd:
        server = Sshd(tmp_path_factory.mktemp("sshd"), free_port(), keys, options)
        server.start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def sshd(start_sshd: Callable[..., Sshd]) -> Sshd:
    """A server with nothing special."""
    return start_sshd()


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own agent has no part in a test."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Starts an ssh-agent for the test; agent(path, ...) adds key files, encrypted ones by the passphrase."""
    sock = tmp_path / "agent.sock"
    # Nobody is there to confirm the use of a key, and no window may ask for it.
    nobody = {**os.environ, "SSH_ASKPASS": "/bin/false", "SSH_ASKPASS_REQUIRE": "force"}
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL, env=nobody)
    deadline = time.monotonic() + 10
    while not sock.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    ask = tmp_path / "askpass"
    ask.write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    ask.chmod(0o700)
    environment = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}

    def add(*paths: Path) -> None:
        subprocess.run(["ssh-add", "-q", *map(str, paths)], check=True, env=environment, stdin=subprocess.DEVNULL)

    yield add
    process.terminate()
    process.wait()
