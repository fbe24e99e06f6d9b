"""Commands over a real sshd: the streams, the status, the noise, and the ends that come too early."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import ssh
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.transport import RemoteProcess, Transport
from tests.hosts import contract
from tests.ssh.conftest import Sshd


@pytest.fixture
def transport(sshd: Sshd) -> Iterator[Transport]:
    opened = connect(sshd.target())
    yield opened
    opened.close()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(transport: Transport, check: Callable[[Transport], None]) -> None:
    check(transport)


def test_a_reader_in_another_thread(transport: Transport) -> None:
    contract.check_a_reader_in_another_thread(transport)


def test_no_terminal_is_asked_for(transport: Transport) -> None:
    code = "import os, sys; print([os.isatty(n) for n in range(3)], 'SSH_TTY' in os.environ); print('é\\n')"
    process = transport.start([sys.executable, "-c", code])
    assert contract.read_all(process) == "[False, False, False] False\né\n\n".encode()


def test_20_mb_arrive_whole(transport: Transport) -> None:
    process = transport.start(["head", "-c", "20000000", "/dev/zero"])
    assert len(contract.read_all(process)) == 20_000_000
    assert process.wait() == 0


def _start_and_cut(server: Sshd, command: str, transport: Transport) -> RemoteProcess:
    """Start ``command``, wait for its first byte, then kill the process that serves the connection."""
    process = transport.start(["/bin/sh", "-c", command])
    assert process.read(1) == b"x"
    for pid in server.children():
        os.kill(pid, signal.SIGKILL)
    return process


def test_a_connection_that_is_cut(start_sshd: Callable[..., Sshd]) -> None:
    server = start_sshd()
    transport = connect(server.target())
    process = _start_and_cut(server, "printf x; exec cat", transport)
    assert process.read(100) == b""
    assert process.wait() is None
    with pytest.raises(BrokenPipeError):
        for _ in range(100):
            process.write(b"y" * 65536)
    process.close_stdin()
    process.kill()
    with pytest.raises(DeployError) as caught:
        transport.start(["true"])
    assert (caught.value.code, caught.value.exit_status) == ("DD308", 4)
    transport.close()
    transport.close()


def test_a_connection_that_is_cut_while_we_write(start_sshd: Callable[..., Sshd]) -> None:
    """A writer that waits for the window wakes up."""
    server = start_sshd()
    transport = connect(server.target())
    process = transport.start(["/bin/sh", "-c", "printf x; exec sleep 30"])
    assert process.read(1) == b"x"
    cutter = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGKILL) for pid in server.children()])
    cutter.start()
    with pytest.raises(BrokenPipeError):
        process.write(b"y" * (64 << 20))
    cutter.join()
    assert process.wait() is None
    transport.close()


def test_a_cut_in_the_middle_of_the_answer(start_sshd: Callable[..., Sshd]) -> None:
    server = start_sshd()
    transport = connect(server.target())
    process = _start_and_cut(server, "printf x; yes", transport)
    contract.read_all(process)
    assert process.wait() is None
    transport.close()


def test_a_signal_is_not_a_lost_connection(transport: Transport) -> None:
    process = transport.start(["/bin/sh", "-c", "kill -9 $$"])
    status = process.wait()
    assert status is not None
    assert status != 0
    assert transport.start(["true"]).wait() == 0


def test_noise_of_login_files_comes_first(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    shell = tmp_path / "login"
    shell.write_text('#!/bin/sh\necho "Welcome to the box"\necho "motd" >&2\nexec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n')
    shell.chmod(0o755)
    transport = connect(start_sshd(ForceCommand=str(shell)).target())
    process = transport.start(["printf", "%s", "data"])
    assert contract.read_all(process) == b"Welcome to the box\ndata"
    assert process.wait() == 0
    assert process.stderr() == "motd\n"
    transport.close()


def test_a_shell_that_runs_nothing(start_sshd: Callable[..., Sshd]) -> None:
    transport = connect(start_sshd(ForceCommand="/bin/false").target())
    process = transport.start(["true"])
    assert contract.read_all(process) == b""
    assert process.wait() == 1
    transport.close()


def test_no_more_sessions(start_sshd: Callable[..., Sshd]) -> None:
    transport = connect(start_sshd(MaxSessions="1").target())
    first = transport.start(["cat"])
    with pytest.raises(DeployError) as caught:
        transport.start(["true"])
    assert (caught.value.code, caught.value.exit_status) == ("DD306", 4)
    first.close_stdin()
    assert first.wait() == 0
    transport.close()


def test_an_answer_that_was_missed_is_not_waited_for(sshd: Sshd) -> None:
    """A channel that closed in the moment before paramiko began to wait: nothing would end that wait."""
    transport = connect(sshd.target())
    channel = transport._transport.open_session()  # type: ignore[attr-defined]
    channel.close()
    channel.event.clear()
    with ssh._bounded(channel, 0.1):
        assert channel.event.wait(20)
    transport.close()


def test_closing_leaves_no_thread(sshd: Sshd) -> None:
    before = set(threading.enumerate())
    transport = connect(sshd.target())
    process = transport.start(["cat"])
    transport.close()
    assert process.wait() is None
    left = [thread for thread in set(threading.enumerate()) - before if isinstance(thread, paramiko.Transport)]
    assert left == []


def test_sudo_that_wants_a_password_fails_at_once(transport: Transport, tmp_path: Path) -> None:
    """As `sudo -n` does: the command ends by itself and says why, nobody waits for a prompt."""
    stand_in = tmp_path / "sudo"
    stand_in.write_text(
        '#!/bin/sh\n[ "$1" = -n ] && { echo "sudo: a password is required" >&2; exit 1; }\n'
        "printf 'Password: ' >&2\nread -r answer </dev/tty\n"
    )
    stand_in.chmod(0o755)
    process = transport.start([str(stand_in), "-n", "--", "/usr/bin/python3", "-I"])
    assert process.read(10) == b""
    assert process.wait() == 1
    assert process.stderr() == "sudo: a password is required\n"


def test_sudo_that_wants_a_password_is_one_clear_error(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    (tmp_path / "sudo").write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    (tmp_path / "sudo").chmod(0o755)
    target = start_sshd(SetEnv=f"HOME={tmp_path} PATH={tmp_path}:/usr/bin:/bin").target(sudo=True)
    with HostSession(target, lambda: connect(target)) as session, pytest.raises(DeployError) as caught:
        session.call("status", {})
    assert (caught.value.code, caught.value.exit_status) == ("DD310", 4)
    assert caught.value.details == (f"{getpass.getuser()} ALL=(root) NOPASSWD: /usr/bin/python3",)


def test_a_peer_that_answers_nothing_is_given_up(sshd: Sshd) -> None:
    """The kernel is told how long unacknowledged data may wait."""
    transport = connect(sshd.target())
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        sock = transport._transport.sock  # type: ignore[attr-defined]
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, option) <= 120_000
    transport.close()


def test_stderr_of_ours_stays_clean(start_sshd: Callable[..., Sshd]) -> None:
    """No traceback of paramiko's on stderr when connections break in each phase."""
    server = start_sshd()
    target = server.target()
    code = f"""
import os, signal, socket, threading
from dataclasses import replace
from pathlib import Path
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import ssh
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.target import Target
target = {target!r}
transport = connect(target)
process = transport.start(["/bin/sh", "-c", "printf x; exec cat"])
process.read(1)
for pid in Path("/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split():
    os.kill(int(pid), signal.SIGKILL)
assert process.wait() is None
listener = socket.create_server(("127.0.0.1", 0))
def serve():
    for answer in (b"", b"nonsense\\r\\n" * 200, b"SSH-2.0-x\\r\\n", b"SSH-2.0-x\\r\\n" + b"\\xff" * 5000):
        connection, _ = listener.accept()
        connection.sendall(answer)
        connection.close()
threading.Thread(target=serve, daemon=True).start()
import ddtree_deploy.hosts.ssh as ssh
ssh._BUSY_RETRIES = 0
for _ in range(4):
    try:
        connect(replace(target, ssh=f"x@127.0.0.1:{{listener.getsockname()[1]}}", connect_timeout=2.0))
    except DeployError as error:
        assert error.code == "DD301", error.code
    else:
        raise SystemExit("connected")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
