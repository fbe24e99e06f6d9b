"""The way to a host: jump hosts, proxy commands, busy servers, and hosts that are not there."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import ssh
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.target import Target
from tests.hosts import contract
from tests.ssh.conftest import Keys, Sshd, free_port

USER = getpass.getuser()


class Network:
    """Two servers, `jump` and `inner`, and an ssh configuration that leads through one to the other."""

    def __init__(self, jump: Sshd, inner: Sshd, keys: Keys, folder: Path) -> None:
        self.jump, self.inner, self.keys, self.folder = jump, inner, keys, folder
        self.known = folder / "known_hosts"
        self.config = folder / "ssh_config"
        self.know(jump, inner)

    def know(self, *servers: Sshd) -> None:
        self.known.write_text("".join(f"{each.name} {self.keys.public('host_ed25519')}\n" for each in servers))

    def target(self, text: str, name: str = "inner") -> Target:
        common = (
            f"  HostName 127.0.0.1\n  User {USER}\n  IdentityFile {self.keys['client']}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known}\n  GlobalKnownHostsFile none\n"
        )
        self.config.write_text(
            text
            + f"Host inner\n  Port {self.inner.port}\n"
            + f"Host jump*\n  Port {self.jump.port}\n"
            + f"Host *\n{common}"
        )
        return Target("box", "ssh", ssh=name, ssh_config=str(self.config))


@pytest.fixture
def network(start_sshd: Callable[..., Sshd], sshd: Sshd, keys: Keys, tmp_path: Path) -> Network:
    return Network(start_sshd(), sshd, keys, tmp_path)


def _works(target: Target) -> None:
    transport = connect(target)
    process = transport.start(["cat"])
    process.write(b"z" * 1_000_000)
    process.close_stdin()
    assert len(contract.read_all(process)) == 1_000_000
    assert process.wait() == 0
    transport.close()


def _logins(server: Sshd) -> int:
    return server.log().count("Accepted publickey")


def test_through_a_jump_host(network: Network) -> None:
    before = _logins(network.jump), _logins(network.inner)
    _works(network.target("Host inner\n  ProxyJump jump\n"))
    assert (_logins(network.jump), _logins(network.inner)) == (before[0] + 1, before[1] + 1)


def test_through_two_jump_hosts_named_in_full(network: Network) -> None:
    before = _logins(network.jump)
    address = f"{USER}@127.0.0.1:{network.jump.port}"
    _works(network.target(f"Host inner\n  ProxyJump ssh://{address},jump\n"))
    assert _logins(network.jump) == before + 2


def test_a_jump_host_with_a_jump_host_of_its_own(network: Network) -> None:
    before = _logins(network.jump)
    _works(network.target("Host inner\n  ProxyJump jump-near\nHost jump-near\n  ProxyJump jump-far\n"))
    assert _logins(network.jump) == before + 2


def test_jump_hosts_in_a_circle(network: Network) -> None:
    with pytest.raises(DeployError, match="loop") as caught:
        connect(network.target("Host inner\n  ProxyJump jump\nHost jump\n  ProxyJump inner\n"))
    assert caught.value.code == "DD305"


@pytest.mark.parametrize("unknown", ["jump", "inner"])
def test_each_hop_is_verified(network: Network, unknown: str) -> None:
    network.know(network.inner if unknown == "jump" else network.jump)
    before = network.known.read_bytes()
    target = network.target("Host inner\n  ProxyJump jump\n")
    with pytest.raises(DeployError) as caught:
        connect(target)
    assert caught.value.code == "DD302"
    assert caught.value.message.startswith(f"{unknown}:")
    assert network.known.read_bytes() == before
    connect(target, accept_new=True).close()
    connect(target).close()


def test_a_changed_hop_is_never_accepted(network: Network) -> None:
    network.known.write_text(f"{network.jump.name} {network.keys.public('stranger')}\n")
    with pytest.raises(DeployError) as caught:
        connect(network.target("Host inner\n  ProxyJump jump\n"), accept_new=True)
    assert caught.value.code == "DD303"


def test_a_jump_host_that_does_not_reach_the_next(network: Network, start_sshd: Callable[..., Sshd]) -> None:
    text = f"Host inner\n  ProxyJump jump\n  Port {free_port()}\n"
    with pytest.raises(DeployError, match="the jump host does not reach") as caught:
        connect(network.target(text))
    assert caught.value.code == "DD301"
    network.jump = start_sshd(AllowTcpForwarding="no")
    network.know(network.jump, network.inner)
    with pytest.raises(DeployError, match="the jump host does not reach"):
        connect(network.target("Host inner\n  ProxyJump jump\n"))


def test_a_named_key_is_for_the_host_alone(network: Network) -> None:
    """As `ssh -i`: a jump host gets the keys of the configuration."""
    stranger = f"  IdentityFile {network.keys['stranger']}\n"
    target = network.target(f"Host inner\n  ProxyJump jump\nHost jump\n{stranger}")
    network.config.write_text(network.config.read_text().replace(f"  IdentityFile {network.keys['client']}\n", ""))
    target = replace(target, identity_file=str(network.keys["client"]))
    with pytest.raises(DeployError, match=r"^jump: could not log in") as caught:
        connect(target)
    assert caught.value.details == (f"offered: {network.keys['stranger']}",)


def test_closing_closes_every_hop(network: Network) -> None:
    transport = connect(network.target("Host inner\n  ProxyJump jump\n"))
    assert network.jump.children()
    transport.close()
    wait_for(lambda: not network.jump.children())


def test_a_bad_jump(network: Network) -> None:
    config = network.target("").ssh_config
    text = Path(str(config)).read_text()
    Path(str(config)).write_text("Host inner\n  ProxyJump jump:notaport\n" + text)
    with pytest.raises(DeployError) as caught:
        connect(network.target("Host inner\n  ProxyJump jump:notaport\n"))
    assert caught.value.code == "DD305"


RELAY = """
import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while piece := os.read(0, 65536):
        peer.sendall(piece)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while piece := peer.recv(65536):
    os.write(1, piece)
"""


def test_through_a_proxy_command(network: Network, tmp_path: Path) -> None:
    """The command goes through a shell, and a lot on its stderr stops nothing."""
    relay = tmp_path / "relay.py"
    relay.write_text(f"import sys\nsys.stderr.write('n' * 300_000)\n{RELAY}")
    proxy = f"Host inner\n  ProxyCommand {sys.executable} {relay} $(printf %%s %p) 2>&2\n"
    _works(network.target(proxy))


def test_a_proxy_command_that_fails(network: Network) -> None:
    with pytest.raises(DeployError, match="ProxyCommand failed: no way") as caught:
        connect(network.target("Host inner\n  ProxyCommand sh -c 'echo no way >&2; exit 1'\n"))
    assert caught.value.code == "DD301"


def test_a_proxy_command_is_ended_with_the_connection(network: Network, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{RELAY}")
    transport = connect(network.target(f"Host inner\n  ProxyCommand {sys.executable} {relay} %p\n"))
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)
    transport.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come about")


# --- busy servers ---


class Drops:
    """A server that hangs up on the first ``drops`` connections before any banner, then passes them on."""

    def __init__(self, port: int, drops: int, says: bytes = b"Exceeded MaxStartups\r\n") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.seen = 0
        self._target, self._drops, self._says = port, drops, says
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _address = self.listener.accept()
            except OSError:
                return
            self.seen += 1
            if self.seen <= self._drops:
                client.sendall(self._says)
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        try:
            while piece := one.recv(65536):
                other.sendall(piece)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def _through(sshd: Sshd, proxy: Drops, tmp_path: Path) -> Target:
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{proxy.port} {sshd.keys.public('host_ed25519')}\n")
    return sshd.target(ssh=f"{USER}@127.0.0.1:{proxy.port}", known_hosts=str(known))


@pytest.mark.parametrize("says", [b"", b"Exceeded MaxStartups\r\n"])
def test_a_busy_server_is_tried_again(sshd: Sshd, tmp_path: Path, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(ssh.time, "sleep", waits.append)
    proxy = Drops(sshd.port, 2, says)
    connect(_through(sshd, proxy, tmp_path)).close()
    assert proxy.seen == 3
    waits = [seconds for seconds in waits if seconds >= 0.2]  # subprocess waits too, in milliseconds
    assert len(waits) == 2
    assert max(waits) <= 1.2
    proxy.listener.close()


def test_a_server_that_stays_busy(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_pause", lambda attempt: None)
    proxy = Drops(sshd.port, 99)
    with pytest.raises(DeployError, match="hung up without an ssh greeting") as caught:
        connect(_through(sshd, proxy, tmp_path))
    assert caught.value.code == "DD301"
    assert "MaxStartups" in str(caught.value.hint)
    assert proxy.seen == 3
    proxy.listener.close()


def test_a_real_sshd_at_its_limit(start_sshd: Callable[..., Sshd], monkeypatch: pytest.MonkeyPatch) -> None:
    """One log-in is under way and MaxStartups is 1; it goes away while we wait to try again."""
    server = start_sshd(MaxStartups="1")
    others: list[socket.socket] = []

    def only_log_in() -> bool:
        others.append(socket.create_connection(("127.0.0.1", server.port)))
        return others[-1].recv(100).startswith(b"SSH-2.0")

    wait_for(only_log_in)  # until sshd has noticed that the one before is over
    pauses = []

    def pause(attempt: int) -> None:
        pauses.append(attempt)
        for other in others:
            other.close()
        threading.Event().wait(0.5)

    monkeypatch.setattr(ssh, "_pause", pause)
    connect(server.target()).close()
    assert pauses in ([0], [0, 1])
    assert "MaxStartups" in server.log()


@pytest.fixture
def no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pause(attempt: int) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr(ssh, "_pause", no_pause)


def test_nothing_else_is_tried_again(sshd: Sshd, tmp_path: Path, no_second_try: None) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")
    broken = Drops(sshd.port, 99, b"SSH-2.0-broken\r\n")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ssh": f"x@127.0.0.1:{free_port()}"}, "DD301"),
        ({"ssh": f"x@127.0.0.1:{broken.port}"}, "DD301"),
        ({"known_hosts": str(known)}, "DD302"),
        ({"identity_file": str(sshd.keys["stranger"])}, "DD304"),
    )
    for changes, code in cases:
        with pytest.raises(DeployError) as caught:
            connect(sshd.target(**changes))
        assert caught.value.code == code
    assert broken.seen == 1
    broken.listener.close()


def test_a_server_that_says_nothing(sshd: Sshd, no_second_try: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeployError, match=r"no ssh answer in 0\.5 s") as caught:
            connect(sshd.target(ssh=f"x@127.0.0.1:{port}", connect_timeout=0.5))
        assert caught.value.code == "DD301"


# --- hosts that are not there ---


def test_nobody_listens(sshd: Sshd) -> None:
    with pytest.raises(DeployError, match="connection refused") as caught:
        connect(sshd.target(ssh=f"127.0.0.1:{free_port()}"))
    assert (caught.value.code, caught.value.exit_status) == ("DD301", 4)


def test_a_name_that_nobody_knows(sshd: Sshd) -> None:
    target = sshd.target(ssh="no-such-host.invalid", unresolved_hint="it was taken as an ssh name")
    with pytest.raises(DeployError, match=r"no-such-host\.invalid: the name is unknown") as caught:
        connect(target)
    assert caught.value.code == "DD301"
    assert caught.value.hint == "it was taken as an ssh name"


def test_a_host_that_drops_packets(sshd: Sshd) -> None:
    """A listener whose queue is full does not answer further connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            waiting.append(one)
        with pytest.raises(DeployError, match=r"no answer in 0\.4 s") as caught:
            connect(sshd.target(ssh=f"127.0.0.1:{port}", connect_timeout=0.4))
        assert caught.value.code == "DD301"
        for one in waiting:
            one.close()


def test_no_algorithm_in_common(start_sshd: Callable[..., Sshd], no_second_try: None) -> None:
    server = start_sshd(KexAlgorithms="sntrup761x25519-sha512@openssh.com")
    with pytest.raises(DeployError, match="no algorithm in common") as caught:
        connect(server.target())
    assert caught.value.code == "DD301"


def test_the_window_is_large_and_nothing_is_compressed(sshd: Sshd) -> None:
    transport = connect(sshd.target())
    inner: paramiko.Transport = transport._transport  # type: ignore[attr-defined]
    assert inner.default_window_size == 32 << 20
    assert inner.local_compression == inner.remote_compression == "none"
    process = transport.start(["true"])
    assert process._channel.in_window_size == 32 << 20  # type: ignore[attr-defined]
    transport.close()
