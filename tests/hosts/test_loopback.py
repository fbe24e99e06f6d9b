from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import loopback, ssh
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.loopback import LoopbackServer
from ddtree_deploy.hosts.transport import Transport
from tests.hosts import contract


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as running:
        yield running


@pytest.fixture
def transport(server: LoopbackServer) -> Iterator[Transport]:
    opened = connect(server.target())
    yield opened
    opened.close()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(transport: Transport, check: Callable[[Transport], None]) -> None:
    check(transport)


def test_a_reader_in_another_thread(transport: Transport) -> None:
    contract.check_a_reader_in_another_thread(transport)


def test_its_files_are_private_and_go_away() -> None:
    with LoopbackServer() as server:
        folder = server.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in (server.identity_file, server.known_hosts_file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        known = server.known_hosts_file.read_bytes()
        connect(server.target()).close()
        assert server.known_hosts_file.read_bytes() == known
    assert not folder.exists()


def test_two_servers_have_different_keys() -> None:
    with LoopbackServer() as one, LoopbackServer() as two:
        stranger = replace(one.target(), ssh=two.target().ssh)
        with pytest.raises(DeployError) as caught:
            connect(stranger)
        assert caught.value.code == "DD302"
        intruder = replace(two.target(), identity_file=str(one.identity_file), known_hosts=str(two.known_hosts_file))
        with pytest.raises(DeployError) as caught:
            connect(intruder)
        assert caught.value.code == "DD304"


def test_it_listens_on_this_machine_only(server: LoopbackServer) -> None:
    assert server._listener.getsockname()[0] == "127.0.0.1"


def test_only_its_user_and_only_commands(server: LoopbackServer, transport: Transport) -> None:
    with pytest.raises(DeployError) as caught:
        connect(replace(server.target(), ssh=f"root@127.0.0.1:{server.port}"))
    assert caught.value.code == "DD304"
    for kind in ("direct-tcpip", "x11"):
        with pytest.raises(Exception, match="prohibited"):
            transport._transport.open_channel(kind, ("127.0.0.1", server.port), ("127.0.0.1", 1))  # type: ignore[attr-defined]
    channel = transport._transport.open_session()  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="closed"):
        channel.invoke_subsystem("sftp")


def test_the_command_sees_a_login_environment(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/leaks")
    lines = contract.read_all(transport.start(["env"])).decode().splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert {"HOME", "PATH", "USER"} <= names
    assert not {name for name in names if name.startswith(("PYTHON", "SSH_AUTH", "DDTREE", "VIRTUAL_ENV"))}


def test_a_fast_command_is_never_refused(transport: Transport) -> None:
    """The end of a command never overtakes the yes to it."""
    for _ in range(60):
        assert transport.start(["true"]).wait() == 0


def test_a_host_that_does_not_answer_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """paramiko waits for the answer without a limit; we do not."""
    free = threading.Event()

    def silent(gate: object, channel: object, command: bytes) -> bool:
        return free.wait(20) and False

    monkeypatch.setattr(loopback._Gate, "check_channel_exec_request", silent)
    with LoopbackServer() as server:
        transport = connect(server.target())
        monkeypatch.setattr(ssh, "CONNECT_TIMEOUT", 0.3)
        with pytest.raises(DeployError, match="does not run commands") as caught:
            transport.start(["true"])
        assert caught.value.code == "DD306"
        assert not free.is_set()
        free.set()
        transport.close()


def test_stop_ends_commands_and_connections() -> None:
    server = LoopbackServer()
    server.start()
    before = threading.active_count()
    transport = connect(server.target())
    process = transport.start(["/bin/sh", "-c", "trap '' TERM; echo $$; sleep 60 & wait; sleep 60"])
    pid = int(process.read(20))
    server.stop()
    assert not contract.alive(pid)
    assert process.read(10) == b""
    assert process.wait() != 0
    with pytest.raises(DeployError) as caught:
        transport.start(["true"])
    assert caught.value.code == "DD308"
    transport.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), 1)
    deadline = time.monotonic() + 10
    while threading.active_count() >= before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)


def test_a_large_answer_arrives_whole(transport: Transport) -> None:
    process = transport.start(["head", "-c", "20000000", "/dev/zero"])
    assert len(contract.read_all(process)) == 20_000_000
    assert process.wait() == 0


@pytest.mark.skipif(not shutil.which("ssh"), reason="OpenSSH's ssh is not installed")
def test_openssh_s_client_is_served(server: LoopbackServer, tmp_path: Path) -> None:
    command = [
        "ssh", "-F", "none", "-T", "-p", str(server.port), "-i", str(server.identity_file),
        "-o", f"UserKnownHostsFile={server.known_hosts_file}", "-o", "StrictHostKeyChecking=yes",
        "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "demo@127.0.0.1", "cat; echo e >&2; exit 4",
    ]  # fmt: skip
    done = subprocess.run(
        command, input=b"x" * 300_000, capture_output=True, timeout=60, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (4, 300_000, b"e\n")
