"""Odd hosts behind a real sshd: login shells, rc files and banners, missing and old interpreters, containers."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree_deploy.agent import protocol
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from tests.agent.harness import make_site
from tests.cli.harness import ENGINE, Cli
from tests.hosts.standins import write_docker
from tests.ssh.conftest import PASSPHRASE, Keys, Sshd
from tests.ssh.shells import as_login_shell, installed, plain_shell


def call(target: Target, operation: str = "facts") -> dict:
    with HostSession(target, lambda: connect(target)) as session:
        return session.call(operation, {})


def fails(target: Target, operation: str = "facts") -> DeployError:
    with pytest.raises(DeployError) as caught:
        call(target, operation)
    assert caught.value.exit_status == 4
    assert "\n" not in caught.value.message
    return caught.value


# --- login shells


@pytest.fixture(scope="module", params=[*installed(), "plain"])
def shell(request: pytest.FixtureRequest, start_sshd: Callable[..., Sshd], tmp_path_factory) -> Sshd:
    folder = tmp_path_factory.mktemp("shell")
    program = str(plain_shell(folder)) if request.param == "plain" else request.param
    return start_sshd(ForceCommand=as_login_shell(folder, program))


@pytest.fixture(scope="module")
def odd_python(tmp_path_factory) -> str:
    """An interpreter in a folder with a name that needs quoting, in every way that is allowed."""
    folder = tmp_path_factory.mktemp("odd") / "a b*$(id)~é"
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    return str(folder / "python")


def test_every_login_shell_passes_the_command_on(shell: Sshd, odd_python: str) -> None:
    assert call(shell.target(python=sys.executable))["executable"] == sys.executable
    assert call(shell.target(python=odd_python))["executable"] == sys.executable


def test_no_such_python_in_every_login_shell(shell: Sshd) -> None:
    error = fails(shell.target(python="/no/such/python"))
    assert error.code == "DD309", error
    assert "--python" in str(error.hint)


def test_the_plain_shell_is_strict(tmp_path: Path) -> None:
    """The stand-in refuses what the shells do not share."""
    shell = str(plain_shell(tmp_path))
    for line in ("a && b", "a; b", "A=1 b", "a $(b)", 'a "b"', "a 'b!c'", "a 'b\\c'", "a > b", "a 'b'\"'\"'c'", "a\nb"):
        if line == "A=1 b":
            continue  # a word like any other here; sh alone takes it for an assignment
        done = subprocess.run([shell, "-c", line], capture_output=True, text=True)
        assert "syntax error" in done.stderr, line
    fine = shlex.join(["printf", "%s", protocol.LOADER])
    assert subprocess.run([shell, "-c", fine], capture_output=True, text=True).stdout == protocol.LOADER


# --- what comes before and beside the agent


def test_rc_files_that_talk(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """Text, control characters and a half line on stdout, more on stderr, as real rc files print them."""
    talk = tmp_path / "talk"
    talk.write_text(
        "#!/bin/sh\nprintf 'Welcome\\033[2J\\001ddtree-agent-1 nonsense\\nprompt> '\necho 'motd' >&2\n"
        'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    talk.chmod(0o755)
    server = start_sshd(ForceCommand=str(talk))
    for transport in ("paramiko", "openssh"):
        assert call(server.target(python=sys.executable, transport=transport))["executable"] == sys.executable


def test_a_banner_before_the_log_in(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    banner = tmp_path / "banner"
    banner.write_text("=" * 3000 + "\nsudo: a password is required\nPermission denied\n")
    server = start_sshd(Banner=str(banner))
    for transport in ("paramiko", "openssh"):
        assert call(server.target(python=sys.executable, transport=transport))["executable"] == sys.executable
        assert fails(server.target(python="/no/such/python", transport=transport)).code == "DD309"


# --- interpreters


def _as_python(folder: Path, body: str) -> str:
    path = folder / "python3"
    path.write_text(body)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("#!/bin/sh\necho 'Unknown option: -I' >&2\necho 'usage: python' >&2\nexit 2\n", "Unknown option"),
        ("#!/bin/sh\necho \"AttributeError: 'file' object has no attribute 'buffer'\" >&2\nexit 1\n", "buffer"),
        ("#!/no/such/interpreter\n", "no such python"),
    ],
    ids=["python 2", "an old python", "a broken environment"],
)
def test_interpreters_that_cannot(sshd: Sshd, tmp_path: Path, body: str, words: str) -> None:
    error = fails(sshd.target(python=_as_python(tmp_path, body)))
    assert error.code == "DD309"
    assert words in error.message


# --- containers over ssh


@pytest.mark.parametrize("transport", ["paramiko", "openssh"])
def test_a_container_on_a_host(start_sshd: Callable[..., Sshd], tmp_path: Path, transport: str) -> None:
    log = write_docker(tmp_path / "engine", "podman")
    server = start_sshd(SetEnv=f"HOME={tmp_path} PATH={log.parent}:/usr/bin:/bin")
    site = make_site(tmp_path / "image", ENGINE)
    target = server.target(container="podman:sgl", python=sys.executable, root=str(site), transport=transport)
    assert call(target, "history")["root"]["site"] == str(site)
    assert "podman exec -i sgl" in log.read_text()
    assert fails(server.target(container="podman:gone", transport=transport)).code == "DD313"
    # No docker there; or there is one, and it knows no such container.
    assert fails(server.target(container="docker:no-such-one", transport=transport)).code == "DD313"


# --- as a person sees it


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    folder = tmp_path / "user"
    folder.mkdir()
    return Cli(folder, monkeypatch)


def inventory(cli: Cli, server: Sshd, **changes: object) -> list[str]:
    """The command line's words that lead to the server, by an inventory."""
    target = server.target(python=sys.executable, root=str(cli.site), **changes)
    words = ("ssh", "python", "root", "identity_file", "known_hosts", "ssh_config", "transport", "connect_timeout")
    lines = [f"{word} = {getattr(target, word)!r}" for word in words if getattr(target, word)]
    return ["--host", "box", "--inventory", cli.patch("hosts.toml", "\n".join(["[hosts.box]", *lines, ""]))]


@pytest.mark.parametrize("transport", ["paramiko", "openssh"])
def test_v_shows_each_step_with_its_time(sshd: Sshd, person: Cli, transport: str) -> None:
    where = inventory(person, sshd, transport=transport)
    quiet = person.run("history", *where)
    assert "ms" not in quiet.err
    for arguments in (["-v", "history"], ["history", "-v"]):
        shown = person.run(*arguments, *where)
        assert shown.status == 0
        assert shown.out == quiet.out
        steps = [line.removeprefix("box: ") for line in shown.err.splitlines() if line.endswith(" ms")]
        names = {
            "paramiko": [
                r"connect to 127\.0\.0\.1 port \d+",
                r"key exchange with 127\.0\.0\.1",
                r"log in to .* as \w+",
            ],
            "openssh": [r"connect and log in to .* by ssh"],
        }[transport]
        names.append(r"exec history: [1-9]\d+ bytes sent, [1-9]\d+ received")
        assert len(steps) == len(names), steps
        for step, name in zip(steps, names, strict=True):
            assert re.fullmatch(name + r": \d+ ms", step), step


def test_v_shows_a_step_that_failed(sshd: Sshd, person: Cli) -> None:
    shown = person.run("status", "-v", *inventory(person, sshd, identity_file=str(sshd.keys["stranger"])))
    assert shown.status == 4
    assert re.search(r"log in to 127\.0\.0\.1 as \w+: \d+ ms, failed\n", shown.err)


def test_an_added_key_is_announced(sshd: Sshd, person: Cli) -> None:
    known = person.folder / "known"
    known.touch()
    where = inventory(person, sshd, known_hosts=str(known))
    refused = person.run("history", *where)
    assert (refused.status, known.read_text()) == (4, "")
    added = person.run("history", "--accept-new", *where)
    assert added.status == 0
    assert re.search(rf"its ssh-ed25519 key SHA256:\S+ was added to {known}\n", added.err)
    assert "added" not in person.run("history", "--accept-new", *where).err


# --- at a terminal, and without one


@contextlib.contextmanager
def at_a_terminal(cli: Cli, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command with a terminal of its own as controlling terminal; yields it and the terminal's other end."""
    ours, theirs = pty.openpty()
    take = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    program = [sys.executable, "-c", f"{take}; from ddtree_deploy.cli.main import main; main()", *arguments]
    process = subprocess.Popen(program, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, words: bytes) -> bytes:
    seen = b""
    deadline = time.monotonic() + 30
    while words not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError as error:  # the other end is closed
                assert error.errno == errno.EIO, error
                assert words in seen, seen
    return seen


@pytest.mark.parametrize(
    ("transport", "prompt"), [("paramiko", b"Passphrase for "), ("openssh", b"Enter passphrase for key")]
)
def test_a_passphrase_is_asked_for_at_a_terminal_only(
    sshd: Sshd, keys: Keys, person: Cli, transport: str, prompt: bytes
) -> None:
    where = inventory(person, sshd, transport=transport, identity_file=str(keys["locked"]))
    without = person.run("history", *where)
    assert without.status == 4
    assert f"ssh-add {keys['locked']}" in without.err or "ssh-add" in without.err
    with at_a_terminal(person, "history", "--json", *where) as (process, terminal):
        read_until(terminal, prompt)
        time.sleep(0.1)  # until the echo is off
        os.write(terminal, PASSPHRASE.encode() + b"\n")
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(30) == 0
    assert b'"history": []' in said
    assert PASSPHRASE.encode() not in said


def test_the_sudoers_line_is_exact(start_sshd: Callable[..., Sshd], tmp_path: Path, person: Cli) -> None:
    (tmp_path / "sudo").write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    (tmp_path / "sudo").chmod(0o755)
    server = start_sshd(SetEnv=f"HOME={tmp_path} PATH={tmp_path}:/usr/bin:/bin")
    for transport in ("paramiko", "openssh"):
        result = person.run("status", "--sudo", *inventory(person, server, transport=transport))
        assert result.status == 4
        assert f"  {getpass.getuser()} ALL=(root) NOPASSWD: {sys.executable}\n" in result.err
        assert "visudo" in result.err
