"""Calls to the agent through hosts that misbehave: noise, no python, an old python, replies that lie."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from tests.agent.harness import make_site


def program(folder: Path, text: str) -> str:
    path = folder / "python3"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def session(site: Path, python: str = sys.executable, **options) -> HostSession:
    target = Target(name="box", kind="local", root=str(site), python=python, **options)
    return HostSession(target, LocalTransport)


@pytest.fixture
def site(tmp_path):
    return make_site(tmp_path)


def error_of(opened: HostSession, operation: str = "history") -> DeployError:
    with opened, pytest.raises(DeployError) as caught:
        opened.call(operation, {})
    return caught.value


def test_a_call(site):
    with session(site) as opened:
        assert opened.call("history", {})["root"]["version"] == "0.5.11"
        assert opened.call("facts", {})["executable"] == sys.executable


def test_noise_before_the_agent_is_skipped(site, tmp_path):
    noisy = program(tmp_path, f'#!/bin/sh\necho "Welcome to box"; echo "fortune" >&2\nexec {sys.executable} "$@"\n')
    with session(site, noisy) as opened:
        assert opened.call("history", {})["history"] == []


def test_endless_noise_is_cut_off(site, tmp_path):
    error = error_of(session(site, program(tmp_path, "#!/bin/sh\nwhile :; do echo noise noise noise; done\n")))
    assert error.code == "DD306"
    assert "noise" in error.message


def test_a_host_that_hangs_is_given_up(site, tmp_path, monkeypatch):
    from ddtree_deploy.hosts import session as session_module

    monkeypatch.setattr(session_module, "HANDSHAKE_LIMIT_S", 0.3)
    error = error_of(session(site, program(tmp_path, "#!/bin/sh\nexec cat\n")))
    assert error.code == "DD306"
    assert "no agent after 0.3 s" in error.message


def test_no_such_python(site):
    error = error_of(session(site, "/no/such/python"))
    assert error.code == "DD309"
    assert "python in the inventory" in error.hint


def test_a_python_that_is_too_old(site, tmp_path):
    old = program(
        tmp_path,
        f"#!{sys.executable}\nimport sys\nsys.version_info = (3, 7, 1)\n"
        "exec(sys.argv[sys.argv.index('-c') + 1], {'__name__': '__main__'})\n",
    )
    error = error_of(session(site, old))
    assert error.code == "DD309"
    assert "3.7 is too old" in error.message


def test_a_python_that_says_nothing(site, tmp_path):
    error = error_of(session(site, program(tmp_path, "#!/bin/sh\nexit 0\n")))
    assert error.code == "DD306"


def test_sudo_that_wants_a_password(site, tmp_path, monkeypatch):
    """T58: `sudo -n` fails at once; it is named, and never waited for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sudo").write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    (folder / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    error = error_of(session(site, sudo=True))
    assert error.code == "DD310"
    assert error.details == (f"{getpass.getuser()} ALL=(root) NOPASSWD: {sys.executable}",)


def test_sudo_that_works(site, tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sudo").write_text('#!/bin/sh\n[ "$1 $2" = "-n --" ] || exit 1\nshift 2\nexec "$@"\n')
    (folder / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with session(site, sudo=True) as opened:
        assert opened.call("history", {})["history"] == []


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("", "DD308"),
        ("Q\\0\\0\\0\\2{}", "DD308"),
        ("X\\0\\0\\0\\0", "DD307"),
        ("Q\\0\\0\\0\\2[]", "DD307"),
        ("Q\\0\\0\\0\\2{}Z\\0\\0\\0\\044" + "\\0" * 36, "DD307"),
    ],
)
def test_replies_that_are_cut_or_lie(site, tmp_path, reply, code):
    liar = program(
        tmp_path,
        f"#!{sys.executable}\nimport re, sys, zlib\nstream = sys.stdin.buffer\n"
        "source = zlib.decompress(stream.read(int(stream.readline()))).decode()\n"
        "nonce = re.search(\"NONCE = '(.*?)'\", source).group(1)\n"
        f"sys.stdout.buffer.write(b'\\x01ddtree-agent-1 ' + nonce.encode() + b'\\n' + b'{reply}')\n",
    )
    error = error_of(session(site, liar))
    assert error.code == code, error


def test_a_bug_in_the_agent_is_one_line(site, monkeypatch):
    from ddtree_deploy.agent import bundle

    real = bundle._source.__wrapped__
    docstring = '"""Every operation that this root has seen, oldest first."""'
    assert docstring in real("standing")
    monkeypatch.setattr(bundle, "_source", lambda name: real(name).replace(docstring, "1 // 0"))
    error = error_of(session(site))
    assert error.code == "DD901"
    assert "ZeroDivisionError" in error.message
