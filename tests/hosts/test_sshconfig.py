from __future__ import annotations

import os
import pwd
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import sshconfig
from ddtree_deploy.hosts.hostkeys import KnownHosts, PublicKey, verify
from ddtree_deploy.hosts.sshconfig import SshConfig, effective_config
from ddtree_deploy.hosts.target import Destination

needs_openssh = pytest.mark.skipif(not shutil.which("ssh"), reason="OpenSSH's ssh is not installed")


@pytest.fixture(params=["openssh", "paramiko"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs with `ssh -G` and with the fallback."""
    if request.param == "openssh":
        if not shutil.which("ssh"):
            pytest.skip("OpenSSH's ssh is not installed")
    else:
        monkeypatch.setattr(sshconfig.shutil, "which", lambda _name: None)
    return str(request.param)


def _config(tmp_path: Path, text: str, destination: Destination | None = None) -> SshConfig:
    file = tmp_path / "ssh_config"
    file.write_text(text)
    return effective_config(destination or Destination("rtx"), str(file))


def test_options_arrive_expanded(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("id_ops", "id_only_public.pub", "kh", "agent"):
        (tmp_path / name).touch()
    monkeypatch.setenv("FOLDER", str(tmp_path))
    config = _config(
        tmp_path,
        f"""
        Host rtx
            HostName 192.0.2.7
            Port 2222
            User ops
            IdentityFile {tmp_path}/id_%r
            IdentityFile {tmp_path}/absent
            IdentityFile ${{FOLDER}}/id_only_public
            IdentitiesOnly yes
            IdentityAgent {tmp_path}/agent
            UserKnownHostsFile {tmp_path}/kh {tmp_path}/kh2
            GlobalKnownHostsFile none
            HostKeyAlias cluster
            HashKnownHosts yes
            RevokedHostKeys {tmp_path}/revoked
            ProxyCommand nc -X 5 %h %p
            ConnectTimeout 7
            AddressFamily inet
        """,
    )
    assert config == SshConfig(
        original="rtx",
        hostname="192.0.2.7",
        port=2222,
        user="ops",
        identity_files=(tmp_path / "id_ops", tmp_path / "id_only_public"),
        identities_only=True,
        identity_agent=str(tmp_path / "agent"),
        user_known_hosts_files=(tmp_path / "kh", tmp_path / "kh2"),
        global_known_hosts_files=(),
        revoked_host_keys=tmp_path / "revoked",
        host_key_alias="cluster",
        hash_known_hosts=True,
        proxy_jump=(),
        proxy_command="nc -X 5 192.0.2.7 2222",
        connect_timeout=7.0,
        address_family="inet",
    )


def test_the_destination_wins_over_the_file(tmp_path: Path, reader: str) -> None:
    config = _config(tmp_path, "Host *\n Port 2222\n User file\n", Destination("rtx", "me", 22))
    assert (config.user, config.port, config.hostname) == ("me", 22, "rtx")


def test_jumps(tmp_path: Path, reader: str) -> None:
    assert _config(tmp_path, "ProxyJump a@one:2222,two\n").proxy_jump == ("a@one:2222", "two")
    for text in ("ProxyJump none\n", "ProxyCommand none\n", "ProxyCommand none\nProxyJump two\n"):
        config = _config(tmp_path, text)
        assert (config.proxy_jump, config.proxy_command) == ((), None)
    first = _config(tmp_path, "ProxyCommand nc x\nProxyJump two\n")
    assert (first.proxy_jump, first.proxy_command) == ((), "nc x")
    first = _config(tmp_path, "ProxyJump two\nProxyCommand nc x\n")
    assert (first.proxy_jump, first.proxy_command) == (("two",), None)


def test_no_file_is_read(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    config = effective_config(Destination("rtx", "ops"), "none")
    assert (config.hostname, config.port, config.user) == ("rtx", 22, "ops")
    assert config.identity_agent == "/run/agent"
    assert config.user_known_hosts_files[0].name == "known_hosts"
    assert config.global_known_hosts_files[0] == Path("/etc/ssh/ssh_known_hosts")


def test_the_agent(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "/run/other")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for value, wanted in (
        ("none", None),
        ("$OTHER", "/run/other"),
        ("SSH_AUTH_SOCK", None),
        ("~/a", str(Path("~/a").expanduser())),
    ):
        assert _config(tmp_path, f"IdentityAgent {value}\n").identity_agent == wanted


def test_a_file_that_is_not_there(tmp_path: Path, reader: str) -> None:
    with pytest.raises(DeployError, match="absent") as caught:
        effective_config(Destination("rtx"), str(tmp_path / "absent"))
    assert (caught.value.code, caught.value.exit_status) == ("DD305", 4)


def test_what_is_not_supported_is_said(tmp_path: Path, reader: str) -> None:
    for text in ("ProxyCommand nc\nProxyUseFdpass yes\n", "IdentityFile /x/%C\n", "IdentityFile /x/${NOT_SET}\n"):
        with pytest.raises(DeployError) as caught:
            _config(tmp_path, text)
        assert caught.value.code == "DD305"


def test_file_names_with_spaces(tmp_path: Path, reader: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "known hosts").touch()
    config = _config(tmp_path, f'UserKnownHostsFile "{folder}/known hosts" /two\n')
    assert config.user_known_hosts_files == (folder / "known hosts", Path("/two"))


@needs_openssh
def test_a_configuration_that_openssh_refuses(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="bogus") as caught:
        _config(tmp_path, "Host *\n  Bogus yes\n")
    assert caught.value.code == "DD305"
    assert "line 2" in caught.value.message


@needs_openssh
def test_include_and_match_are_openssh_s(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host rtx\n  HostName 192.0.2.9\n")
    text = f"Include {tmp_path}/more\nHost *\n  ProxyJump none\n"
    config = _config(tmp_path, text + "Match !exec true\n  User wrong\n")
    assert (config.hostname, config.proxy_jump) == ("192.0.2.9", ())
    assert config.user != "wrong"
    try:
        config = _config(tmp_path, text + "Match localnetwork 203.0.113.0/24\n  User wrong\n")
    except DeployError as error:  # before OpenSSH 9.4
        assert "Unsupported Match attribute localnetwork" in error.message
    else:
        assert config.user != "wrong"


@needs_openssh
def test_an_answer_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "ssh"
    stand_in.write_text("#!/bin/sh\nexec sleep 60\n")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sshconfig, "_TIMEOUT", 0.2)
    with pytest.raises(DeployError, match="no answer") as caught:
        effective_config(Destination("rtx"))
    assert caught.value.code == "DD305"


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("Include other\n", 1, "Include"),
        ("# c\n\nHost a\n  include=other\n", 4, "include"),
        ("Match localnetwork 10.0.0.0/8\n  User x\n", 1, "Match localnetwork"),
        ("Host a\nMatch originalhost a exec true\n", 2, "Match exec"),
        ("Match !final originalhost x\n", 1, "Match !final"),
        ("Match canonical all\n", 1, "Match canonical"),
        ("Match tagged x\n", 1, "Match tagged"),
        ("CanonicalizeHostname yes\n", 1, "CanonicalizeHostname"),
        ("User ops # me\n", 1, "a comment"),
        ("Host a[1]\n", 1, "a bracket"),
        ("Match host a\n", 1, "Match host"),
        ("Match all\nMatch originalhost a user b\n", 2, "Match user"),
        ('UserKnownHostsFile "/a b" "/c"\n', 1, "several quoted words"),
    ],
)
def test_the_fallback_refuses_what_it_would_get_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int, word: str
) -> None:
    monkeypatch.setattr(sshconfig.shutil, "which", lambda _name: None)
    with pytest.raises(DeployError) as caught:
        _config(tmp_path, text)
    assert caught.value.code == "DD305"
    assert caught.value.message.startswith(f"{tmp_path}/ssh_config:{line}: {word}")


_words = st.sampled_from(["rtx", "other", "*", "r?x", "!rtx", "r*", "!other"])
_directives = st.sampled_from(
    [
        "HostName 192.0.2.1",
        "HostName %h.example",
        "Port 2200",
        "port=2201",
        "User ops",
        "user me",
        "ProxyJump none",
        "ProxyJump j@hop:22,hop2",
        "ProxyCommand none",
        'IdentityFile "/etc/hostname"',
        'User "me"',
        "ProxyCommand nc %h %p",
        "ProxyCommand printf 100%% ~ %n",
        "IdentitiesOnly yes",
        "IdentitiesOnly no",
        "IdentityFile ~/.ssh/id_%r",
        "IdentityFile /etc/hostname",
        "UserKnownHostsFile /a ~/b",
        "UserKnownHostsFile none",
        "ConnectTimeout 3",
        "HostKeyAlias Alias",
        "HashKnownHosts yes",
        "IdentityAgent none",
        "AddressFamily inet6",
        "ServerAliveInterval 5",
    ]
)
_heads = st.lists(_words, min_size=1, max_size=3).map(lambda words: "Host " + " ".join(words)) | st.sampled_from(
    [
        "Match all",
        "Match host rtx",
        "Match originalhost rtx",
        "Match user ops",
        "Match !host other",
        "Match originalhost r* localuser root",
        "Match !originalhost other",
        "Match host *.example",
        "Match exec true",
        "Include /x",
    ]
)


@needs_openssh
@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(st.tuples(_heads, st.lists(_directives, max_size=4)), max_size=4),
    first=st.lists(_directives, max_size=3),
    user=st.sampled_from([None, "ops"]),
)
def test_the_fallback_agrees_with_openssh_or_refuses(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[str, list[str]]], first: list[str], user: str | None
) -> None:
    lines = list(first)
    for head, directives in blocks:
        lines += [head, *(f"  {directive}" for directive in directives)]
    folder = tmp_path_factory.mktemp("cfg")
    text = "\n".join(lines) + "\n"
    destination = Destination("rtx", user)
    ours = _config(folder, text, destination)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sshconfig.shutil, "which", lambda _name: None)
        try:
            fallback = _config(folder, text, destination)
        except DeployError as error:
            assert error.code == "DD305"
            assert "not supported without OpenSSH" in error.message
            return
    assert replace(fallback, host_key_alias=(fallback.host_key_alias or "").lower() or None) == ours


def test_home_is_the_account_s_as_for_ssh_itself(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh asks the account database for `~`, not $HOME; so do we, and say so where it matters."""
    (tmp_path / ".ssh").mkdir()
    for name in ("id_ed25519", "id_ed25519.pub", "known_hosts"):
        (tmp_path / ".ssh" / name).touch()
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.setenv("HOME", str(account))
    assert sshconfig.home_note() == ()
    monkeypatch.setenv("HOME", str(tmp_path))
    found = effective_config(Destination("h"), "none")
    assert found.user_known_hosts_files[0] == account / ".ssh/known_hosts"
    assert not any(path.is_relative_to(tmp_path) for path in found.identity_files)
    (note,) = sshconfig.home_note()
    assert str(account / ".ssh") in note
    with pytest.raises(DeployError) as caught:
        verify(found, KnownHosts([]), PublicKey("ssh-ed25519", b"x"))
    assert note in caught.value.details
