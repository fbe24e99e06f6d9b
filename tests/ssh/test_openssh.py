"""The system's own ssh as the way to a host: the same contract, the same verdicts, and what only it can do."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import openssh
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.transport import Transport
from ddtree_deploy.hosts.watch import Watch
from tests.hosts import contract
from tests.ssh.conftest import Keys, Sshd
from tests.ssh.test_transactions import SLOW, Box


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who runs the tests is asked nothing."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)


def over(server: Sshd, **changes: object) -> Target:
    return server.target(transport="openssh", **changes)


@pytest.fixture(scope="module")
def shared(sshd: Sshd) -> Iterator[Transport]:
    transport = connect(over(sshd))
    yield transport
    transport.close()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(shared: Transport, check: Callable[[Transport], None]) -> None:
    check(shared)


def test_a_reader_in_another_thread(shared: Transport) -> None:
    contract.check_a_reader_in_another_thread(shared)


def test_20_mb_arrive_whole(shared: Transport) -> None:
    process = shared.start(["head", "-c", "20000000", "/dev/zero"])
    assert len(contract.read_all(process)) == 20_000_000
    assert process.wait() == 0


def test_one_log_in_serves_every_command_and_nothing_is_left(sshd: Sshd) -> None:
    before = sshd.log().count("Accepted publickey")
    transport = connect(over(sshd))
    folder = transport._folder  # type: ignore[attr-defined]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [transport.start(["true"]).wait() for _ in range(3)] == [0, 0, 0]
    assert transport.user == getpass.getuser()
    assert sshd.log().count("Accepted publickey") == before + 1
    transport.close()
    assert not folder.exists()
    with pytest.raises(DeployError) as caught:
        transport.start(["true"])
    assert (caught.value.code, caught.value.exit_status) == ("DD308", 4)
    transport.close()


def test_a_connection_that_is_cut(start_sshd: Callable[..., Sshd]) -> None:
    server = start_sshd()
    transport = connect(over(server))
    process = transport.start(["/bin/sh", "-c", "printf x; exec cat"])
    assert process.read(1) == b"x"
    for pid in server.children():
        os.kill(pid, signal.SIGKILL)
    assert process.read(100) == b""
    assert process.wait() is None
    deadline = time.monotonic() + 10
    while transport.alive():  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = server.log().count("Accepted publickey")
    with pytest.raises(DeployError) as caught:
        transport.start(["true"])
    assert caught.value.code == "DD308"
    assert server.log().count("Accepted publickey") == before
    transport.close()


def test_a_client_without_its_master_never_connects_by_itself(sshd: Sshd) -> None:
    """The socket is there, and nobody behind it: no second log-in, and no status either."""
    transport = connect(over(sshd))
    before = sshd.log().count("Accepted publickey")
    socket = transport._socket  # type: ignore[attr-defined]
    transport._control("exit")  # type: ignore[attr-defined]
    socket.touch()
    assert transport.start(["true"]).wait() is None
    # Nor where its destination, which stands for nothing, would lead somewhere.
    command = transport._client("-p", str(sshd.port), "-i", str(sshd.keys["client"]))  # type: ignore[attr-defined]
    connections = sshd.log().count("Connection from")
    assert subprocess.run([*command[:-1], "127.0.0.1", "true"], capture_output=True, timeout=10).returncode == 255
    assert sshd.log().count("Connection from") == connections
    assert sshd.log().count("Accepted publickey") == before
    transport.close()


def test_a_master_that_lost_us_does_not_stay_for_ever(sshd: Sshd) -> None:
    transport = connect(over(sshd))
    asked = subprocess.run(transport._client("-O", "check"), capture_output=True, text=True)  # type: ignore[attr-defined]
    pid = int(asked.stderr.partition("pid=")[2].split(")")[0])
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"[mux]" in words or b"ControlPersist=900" in words
    transport.close()
    deadline = time.monotonic() + 10
    while contract.alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cut_during_a_commit_is_answered_by_the_host(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """As over the built-in client: a new connection, and the host tells what became of the transaction."""
    box = Box(start_sshd(), tmp_path)
    box.target = replace(box.target, transport="openssh")
    cutter = box.cut_when(lambda: (box.site / "sglang/srt/a.py").read_text() != "A = 1\n")
    applied = box.apply(SLOW, smoke=True)
    cutter.join()
    assert applied.result is not None
    assert "the host finished it" in applied.result["notes"][0]
    assert [item["set"] for item in box.status()["layers"]] == ["one"]


# --- whom to believe


def _refused(target: Target, code: str, *, accept_new: bool = False) -> DeployError:
    with pytest.raises(DeployError) as caught:
        connect(target, accept_new=accept_new)
    assert (caught.value.code, caught.value.exit_status) == (code, 4), caught.value.details
    assert "\n" not in caught.value.message
    return caught.value


def test_an_unknown_host_is_refused(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known hosts 100%"
    known.write_text("")
    before = sshd.log().count("Accepted publickey")
    error = _refused(over(sshd, known_hosts=str(known)), "DD302")
    assert "--accept-new" in str(error.hint)
    assert known.read_text() == ""
    assert sshd.log().count("Accepted publickey") == before
    notices: list[str] = []
    for _ in range(2):
        target = over(sshd, known_hosts=str(known))
        connect(target, accept_new=True, watch=Watch(notices.append)).close()
    assert known.read_text().split()[:3] == f"{sshd.name} {sshd.keys.public('host_ed25519')}".split()
    (notice,) = notices
    assert "Permanently added" in notice
    assert sshd.name in notice
    connect(over(sshd, known_hosts=str(known))).close()


def test_a_changed_key_is_never_accepted(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"{sshd.name} {keys.public('stranger')}\n")
    before = known.read_bytes()
    for accept_new in (False, True):
        assert "CHANGED" in _refused(over(sshd, known_hosts=str(known)), "DD303", accept_new=accept_new).message
    assert known.read_bytes() == before


def test_a_revoked_key_is_refused(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    key = keys.public("host_ed25519")
    (tmp_path / "known_hosts").write_text(f"{sshd.name} {key}\n@revoked * {key}\n")
    assert "revoked" in _refused(over(sshd, known_hosts=str(tmp_path / "known_hosts")), "DD303").message


def test_checking_cannot_be_switched_off_by_configuration(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile {tmp_path}/kh\n  BatchMode no\n")
    _refused(over(sshd, known_hosts=None, ssh_config=str(config)), "DD302")
    assert not (tmp_path / "kh").exists()


def _signed_host_key(sshd: Sshd, folder: Path) -> tuple[Path, str]:
    authority, key = folder / "ca", folder / "host"
    for path in (authority, key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "box", "-h", "-n", "127.0.0.1", f"{key}.pub"]
    subprocess.run(sign, check=True, capture_output=True)
    return key, " ".join((folder / "ca.pub").read_text().split()[:2])


def test_host_certificates(start_sshd: Callable[..., Sshd], sshd: Sshd, tmp_path: Path) -> None:
    """A host that only its certificate vouches for: the built-in client says where to go, this one goes."""
    key, authority = _signed_host_key(sshd, tmp_path)
    server = start_sshd(HostKey=str(key), HostCertificate=f"{key}-cert.pub")
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {authority}\n")
    built_in = _refused(server.target(known_hosts=str(known)), "DD302")
    assert any("transport = openssh" in line for line in built_in.details)
    connect(over(server, known_hosts=str(known))).close()
    known.write_text(f"@cert-authority *.elsewhere {authority}\n")
    _refused(over(server, known_hosts=str(known)), "DD302")


def test_a_command_that_knows_the_hosts(sshd: Sshd, tmp_path: Path) -> None:
    """KnownHostsCommand, which the built-in client does not run."""
    teller = tmp_path / "teller"
    teller.write_text(f"#!/bin/sh\necho '{sshd.name} {sshd.keys.public('host_ed25519')}'\n")
    teller.chmod(0o755)
    config = tmp_path / "config"
    empty = f"UserKnownHostsFile {tmp_path}/none\n  GlobalKnownHostsFile none"
    config.write_text(f"Host *\n  {empty}\n  KnownHostsCommand {teller} %H\n")
    connect(over(sshd, known_hosts=None, ssh_config=str(config))).close()
    config.write_text(f"Host *\n  {empty}\n")
    _refused(over(sshd, known_hosts=None, ssh_config=str(config)), "DD302")


# --- log-in


def test_the_wrong_key(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("IdentitiesOnly yes\n")
    error = _refused(over(sshd, identity_file=str(keys["stranger"]), ssh_config=str(config)), "DD304")
    assert "Permission denied" in error.message


def test_an_encrypted_key_needs_the_agent_or_a_terminal(sshd: Sshd, keys: Keys, agent: Callable[..., None]) -> None:
    target = over(sshd, identity_file=str(keys["locked"]))
    error = _refused(target, "DD304")
    assert "ssh-add" in str(error.hint)
    agent(keys["locked"])
    connect(target).close()


def test_a_second_factor_is_not_waited_for_without_a_terminal(start_sshd: Callable[..., Sshd]) -> None:
    server = start_sshd(PasswordAuthentication="yes", AuthenticationMethods="publickey,password")
    error = _refused(over(server), "DD304")
    assert "second factor" in str(error.hint)
    assert "Failed password" not in server.log()


# --- the way there


def _config(folder: Path, jump: Sshd, inner: Sshd, known: str) -> str:
    path = folder / "ssh config"
    path.write_text(
        "Host inner\n  ProxyJump jump\n"
        f"Host inner\n  Port {inner.port}\nHost jump\n  Port {jump.port}\n"
        f"Host *\n  HostName 127.0.0.1\n  User {getpass.getuser()}\n  IdentityFile {inner.keys['client']}\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n  GlobalKnownHostsFile none\n"
        "  RemoteCommand echo no\n  RequestTTY yes\n  StrictHostKeyChecking no\n"
    )
    return str(path)


def test_through_a_jump_host(start_sshd: Callable[..., Sshd], sshd: Sshd, tmp_path: Path) -> None:
    """Both hops are judged, although the configuration would switch that off; ours is what counts."""
    jump, known = start_sshd(), tmp_path / "kh"
    lines = [f"{each.name} {sshd.keys.public('host_ed25519')}\n" for each in (jump, sshd)]
    known.write_text("".join(lines))
    config = _config(tmp_path, jump, sshd, str(known))
    target = Target("inner", "ssh", ssh="inner", transport="openssh", ssh_config=config)
    before = jump.log().count("Accepted publickey"), sshd.log().count("Accepted publickey")
    transport = connect(target)
    process = transport.start(["cat"])
    process.write(b"z" * 1_000_000)
    process.close_stdin()
    assert len(contract.read_all(process)) == 1_000_000
    transport.close()
    after = jump.log().count("Accepted publickey"), sshd.log().count("Accepted publickey")
    assert after == (before[0] + 1, before[1] + 1)
    for unknown in (0, 1):
        known.write_text(lines[1 - unknown])
        _refused(target, "DD302")
        assert known.read_text() == lines[1 - unknown]


def test_hosts_that_are_not_there(sshd: Sshd) -> None:
    gone = _refused(over(sshd, ssh="127.0.0.1:1"), "DD301")
    assert "refused" in gone.message
    unknown = _refused(over(sshd, ssh="no-such-host.invalid", unresolved_hint="taken as an ssh name"), "DD301")
    assert unknown.hint == "taken as an ssh name"


def test_a_configuration_that_is_wrong(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n  NoSuchWord yes\n")
    error = _refused(over(sshd, ssh_config=str(config)), "DD305")
    assert "NoSuchWord" in error.message.lower() or "nosuchword" in error.message.lower()
    _refused(over(sshd, ssh_config=str(tmp_path / "absent")), "DD305")


def test_no_ssh_at_all(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no ssh" in _refused(over(sshd), "DD305").message


def test_a_log_in_that_never_ends_is_given_up(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openssh, "_LOGIN_LIMIT", 0.2)
    config = tmp_path / "config"
    config.write_text("Host *\n  ProxyCommand sleep 30\n")
    error = _refused(over(sshd, ssh_config=str(config), connect_timeout=0.3), "DD301")
    assert "no log-in after 0.5 s" in error.message


def test_a_busy_server_is_tried_again(start_sshd: Callable[..., Sshd], monkeypatch: pytest.MonkeyPatch) -> None:
    """MaxStartups is 1 and taken: two more tries, then one clear error."""
    import socket

    server = start_sshd(MaxStartups="1")
    holders: list[socket.socket] = []
    deadline = time.monotonic() + 10
    while True:  # until sshd has noticed that the connection before is over
        holders.append(socket.create_connection(("127.0.0.1", server.port)))
        if holders[-1].recv(100).startswith(b"SSH-2.0"):
            break
        assert time.monotonic() < deadline
    pauses: list[int] = []
    monkeypatch.setattr(openssh, "_pause", pauses.append)
    error = _refused(over(server), "DD301")
    assert "MaxStartups" in str(error.hint)
    assert pauses == [0, 1]

    def pause(_attempt: int) -> None:
        for holder in holders:
            holder.close()
        time.sleep(0.5)

    monkeypatch.setattr(openssh, "_pause", pause)
    connect(over(server)).close()


def test_no_more_sessions(start_sshd: Callable[..., Sshd]) -> None:
    target = over(start_sshd(MaxSessions="1"))
    transport = connect(target)
    first = transport.start(["cat"])
    first.write(b"x")
    assert first.read(1) == b"x"
    with HostSession(target, lambda: transport) as session, pytest.raises(DeployError) as caught:
        session.call("history", {})
    assert (caught.value.code, caught.value.exit_status) == ("DD306", 4)
    assert "MaxSessions" in str(caught.value.hint)
    first.kill()
