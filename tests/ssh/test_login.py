"""Logging in to a real sshd: which keys are offered, in which order, and what is said when none is taken."""

from __future__ import annotations

import base64
import getpass
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import sshauth
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.target import Target
from tests.ssh.conftest import PASSPHRASE, Keys, Sshd

AddKeys = Callable[..., None]


def _fails(target: Target) -> DeployError:
    with pytest.raises(DeployError) as caught:
        connect(target)
    assert (caught.value.code, caught.value.exit_status) == ("DD304", 4)
    assert "\n" not in caught.value.message
    assert PASSPHRASE not in repr(caught.value.args) + "".join(caught.value.details)
    return caught.value


def _logs_in(target: Target) -> None:
    transport = connect(target)
    assert transport.start(["true"]).wait() == 0
    transport.close()


def _config(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "ssh_config"
    file.write_text("Host *\n" + "".join(f"  {line}\n" for line in lines))
    return str(file)


@pytest.mark.parametrize("name", ["client", "client_rsa"])
def test_a_named_key(sshd: Sshd, keys: Keys, name: str) -> None:
    _logs_in(sshd.target(identity_file=str(keys[name])))


@pytest.mark.parametrize("form", ["PEM", "PKCS8", "RFC4716"])
def test_every_format_of_a_key_file(sshd: Sshd, keys: Keys, tmp_path: Path, form: str) -> None:
    copy = tmp_path / "key"
    shutil.copy(keys["client_rsa"], copy)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "", "-m", form, "-f", str(copy)], check=True, capture_output=True
    )
    _logs_in(sshd.target(identity_file=str(copy)))


def test_the_wrong_key(sshd: Sshd, keys: Keys) -> None:
    error = _fails(sshd.target(identity_file=str(keys["stranger"])))
    assert getpass.getuser() in error.message
    assert error.details == (f"offered: {keys['stranger']}",)
    assert "authorized_keys" in str(error.hint)
    assert "locked" in str(error.hint)


def test_a_user_that_is_not_there(sshd: Sshd) -> None:
    assert "nobody-here" in _fails(sshd.target(ssh=f"nobody-here@127.0.0.1:{sshd.port}")).message


def test_no_key_at_all(sshd: Sshd, tmp_path: Path) -> None:
    error = _fails(sshd.target(identity_file=None, ssh_config=_config(tmp_path, "IdentityFile /nowhere/key")))
    assert "no key to offer" in error.message
    assert "ssh-add" in str(error.hint)


@pytest.mark.parametrize(
    ("content", "words"),
    [("garbage\n", "not a private key"), ("", "not a private key"), (None, "No such file")],
)
def test_a_key_file_that_is_none(sshd: Sshd, tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    error = _fails(sshd.target(identity_file=str(file)))
    (line,) = error.details
    assert str(file) in line
    assert words in line


def test_keys_of_the_configuration(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    config = _config(tmp_path, f"IdentityFile {keys['stranger']}", f"IdentityFile {keys['client']}")
    _logs_in(sshd.target(identity_file=None, ssh_config=config))


def test_a_named_key_goes_alone(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    """The configuration's files are not looked at when a key is named."""
    config = _config(tmp_path, f"IdentityFile {keys['client']}")
    error = _fails(sshd.target(identity_file=str(keys["stranger"]), ssh_config=config))
    assert len(error.details) == 1


# --- the agent ---


def test_the_agent_s_key(sshd: Sshd, keys: Keys, tmp_path: Path, agent: AddKeys) -> None:
    agent(keys["stranger"], keys["client"])
    _logs_in(sshd.target(identity_file=None, ssh_config=_config(tmp_path, "IdentityFile /nowhere/key")))


def test_an_rsa_key_in_the_agent(sshd: Sshd, keys: Keys, tmp_path: Path, agent: AddKeys) -> None:
    agent(keys["client_rsa"])
    _logs_in(sshd.target(identity_file=None, ssh_config=_config(tmp_path, "IdentityFile /nowhere/key")))


def test_identities_only_keeps_the_agent_s_other_keys_back(
    sshd: Sshd, keys: Keys, tmp_path: Path, agent: AddKeys
) -> None:
    agent(keys["client"])
    config = _config(tmp_path, "IdentitiesOnly yes", f"IdentityFile {keys['stranger']}")
    error = _fails(sshd.target(identity_file=None, ssh_config=config))
    assert error.details == (f"offered: {keys['stranger']}",)
    config = _config(tmp_path, "IdentitiesOnly yes", f"IdentityFile {keys['client']}")
    _logs_in(sshd.target(identity_file=None, ssh_config=config))


def test_a_public_key_names_the_one_in_the_agent(sshd: Sshd, keys: Keys, tmp_path: Path, agent: AddKeys) -> None:
    agent(keys["stranger"], keys["client"])
    public = tmp_path / "id.pub"
    shutil.copy(keys["client.pub"], public)
    _logs_in(
        sshd.target(identity_file=None, ssh_config=_config(tmp_path, "IdentitiesOnly yes", f"IdentityFile {public}"))
    )
    shutil.copy(keys["client.pub"], tmp_path / "only.pub")
    _logs_in(
        sshd.target(
            identity_file=None, ssh_config=_config(tmp_path, "IdentitiesOnly yes", f"IdentityFile {tmp_path}/only")
        )
    )


def test_no_agent_when_the_configuration_says_none(sshd: Sshd, keys: Keys, tmp_path: Path, agent: AddKeys) -> None:
    agent(keys["client"])
    config = _config(tmp_path, "IdentityAgent none", "IdentityFile /nowhere/key")
    assert "no key to offer" in _fails(sshd.target(identity_file=None, ssh_config=config)).message


@pytest.mark.parametrize("text", ["/nowhere/agent.sock", "/dev/null"])
def test_an_agent_that_is_gone(sshd: Sshd, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", text)
    _logs_in(sshd.target())


def test_too_many_keys(start_sshd: Callable[..., Sshd], keys: Keys, tmp_path: Path, agent: AddKeys) -> None:
    """A host that hangs up after two keys: the error says so, and that one key can be named."""
    server = start_sshd(MaxAuthTries="2")
    paths = []
    for number in range(4):
        path = tmp_path / f"k{number}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        paths.append(path)
    agent(*paths)
    error = _fails(server.target(identity_file=None, ssh_config="none"))
    assert "hung up after" in error.message
    assert "IdentitiesOnly" in str(error.hint)
    _logs_in(server.target())  # a named key is offered before the agent's


def test_an_agent_that_does_not_sign(sshd: Sshd, keys: Keys, tmp_path: Path, agent: AddKeys) -> None:
    agent("-c", keys["client"])  # each use has to be confirmed
    error = _fails(sshd.target(identity_file=None, ssh_config=_config(tmp_path, "IdentityFile /nowhere/key")))
    assert "the agent did not sign" in error.message


def test_an_agent_that_says_nothing(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Keys) -> None:
    """Silent from the start, or when it should sign: both end, and closing does not hang either."""
    monkeypatch.setattr(sshauth, "_CONFIRM", 0.3)
    path = tmp_path / "silent.sock"
    blob = base64.b64decode(keys.public("client").split()[1])
    listing = b"\x0c\x00\x00\x00\x01" + struct.pack(">I", len(blob)) + blob + struct.pack(">I", 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        config = _config(tmp_path, "IdentityFile /nowhere/key", "ConnectTimeout 1")
        target = sshd.target(identity_file=None, ssh_config=config)
        assert "no key to offer" in _fails(target).message

        def list_one_key() -> None:
            listener.accept()[0].close()  # the connection of before
            connection, _address = listener.accept()
            connection.recv(100)
            connection.sendall(struct.pack(">I", len(listing)) + listing)
            held.append(connection)

        held: list[socket.socket] = []
        threading.Thread(target=list_one_key, daemon=True).start()
        assert "the agent did not sign" in _fails(target).message
        held[0].close()


# --- encrypted keys ---


def test_an_encrypted_key_without_a_terminal(sshd: Sshd, keys: Keys) -> None:
    error = _fails(sshd.target(identity_file=str(keys["locked"])))
    assert any("encrypted" in line and "no terminal" in line for line in error.details)
    assert str(error.hint) == f"load the key into the agent: ssh-add {keys['locked']}"


def test_an_encrypted_key_in_the_agent(sshd: Sshd, keys: Keys, agent: AddKeys) -> None:
    agent(keys["locked"])
    _logs_in(sshd.target(identity_file=str(keys["locked"])))


def test_an_encrypted_key_does_not_stand_in_the_way(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    config = _config(tmp_path, f"IdentityFile {keys['locked']}", f"IdentityFile {keys['client']}")
    _logs_in(sshd.target(identity_file=None, ssh_config=config))


@pytest.mark.parametrize("form", ["PEM", "PKCS8", "RFC4716"])
def test_at_a_terminal_the_passphrase_is_asked_for(
    sshd: Sshd, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    copy = tmp_path / "key"
    shutil.copy(keys["client_rsa"], copy)
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", PASSPHRASE, "-m", form, "-f", str(copy)]
    subprocess.run(change, check=True, capture_output=True)
    asked = []

    def answer(prompt: str, stream: object) -> str:
        asked.append(prompt)
        return PASSPHRASE

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sshauth.getpass, "getpass", answer)
    _logs_in(sshd.target(identity_file=str(copy)))
    assert asked == [f"Passphrase for {copy}: "]
    monkeypatch.setattr(sshauth.getpass, "getpass", lambda prompt, stream: "not it")
    error = _fails(sshd.target(identity_file=str(copy)))
    assert any("wrong passphrase" in line for line in error.details)


def test_passwords_are_never_used(start_sshd: Callable[..., Sshd], keys: Keys) -> None:
    server = start_sshd(PasswordAuthentication="yes", KbdInteractiveAuthentication="yes", PubkeyAuthentication="no")
    error = _fails(server.target())
    assert re.search(r"takes no public key, only .*password", error.message)
    assert "Failed password" not in server.log()


def test_a_host_that_wants_more_than_a_key(start_sshd: Callable[..., Sshd], keys: Keys) -> None:
    server = start_sshd(PasswordAuthentication="yes", AuthenticationMethods="publickey,password")
    error = _fails(server.target())
    assert "after the key the host also wants password" in error.message
    assert "openssh" in str(error.hint)


def test_certificates_of_users(start_sshd: Callable[..., Sshd], keys: Keys, tmp_path: Path) -> None:
    """A key that no authorized_keys lists, vouched for by a certificate beside it."""
    authority = tmp_path / "ca"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
    server = start_sshd(TrustedUserCAKeys=f"{authority}.pub")
    key = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    _fails(server.target(identity_file=str(key)))
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", getpass.getuser(), f"{key}.pub"]
    subprocess.run(sign, check=True, capture_output=True)
    _logs_in(server.target(identity_file=str(key)))
    os.truncate(f"{key}-cert.pub", 30)
    error = _fails(server.target(identity_file=str(key)))
    assert any("cert.pub" in line for line in error.details)
