"""Whom we believe, against a real sshd: unknown, changed, revoked, hashed, wildcard, accept-new."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.connect import connect
from tests.ssh.conftest import Keys, Sshd


def _known(tmp_path: Path, text: str) -> str:
    file = tmp_path / "known_hosts"
    file.write_bytes(text.encode())
    return str(file)


def _refused(server: Sshd, known: str, code: str, *, accept_new: bool = False) -> DeployError:
    """Connecting is refused with ``code``; the server saw no login and the file is as before."""
    before = Path(known).read_bytes()
    logins = server.log().count("Accepted publickey")
    with pytest.raises(DeployError) as caught:
        connect(server.target(known_hosts=known), accept_new=accept_new)
    assert (caught.value.code, caught.value.exit_status) == (code, 4)
    assert "\n" not in caught.value.message
    assert Path(known).read_bytes() == before
    assert server.log().count("Accepted publickey") == logins
    return caught.value


def _connects(server: Sshd, known: str) -> None:
    before = Path(known).read_bytes()
    transport = connect(server.target(known_hosts=known))
    assert transport.start(["true"]).wait() == 0
    transport.close()
    assert Path(known).read_bytes() == before


def test_an_unknown_host_is_refused_and_told_how_to_add(sshd: Sshd, tmp_path: Path) -> None:
    known = _known(tmp_path, "# nobody\nother.example ssh-ed25519 AAAA\n")
    error = _refused(sshd, known, "DD302")
    done = subprocess.run(["ssh-keygen", "-lf", str(sshd.keys["host_ed25519.pub"])], capture_output=True, text=True)
    assert any(done.stdout.split()[1] in line for line in error.details)
    (line,) = [line for line in error.details if line.startswith(sshd.name)]
    _connects(sshd, _known(tmp_path, Path(known).read_text() + line + "\n"))


def test_a_changed_key_is_never_accepted(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    known = _known(tmp_path, f"# keep\n{sshd.name} {keys.public('stranger')}\n")
    for accept_new in (False, True):
        error = _refused(sshd, known, "DD303", accept_new=accept_new)
        assert "CHANGED" in error.message
        assert any(f"{known}:2" in line for line in error.details)


@pytest.mark.parametrize("pattern", ["{name}", "*", "[127.0.0.?]:*,!other"])
def test_a_revoked_key_is_refused_although_known(sshd: Sshd, keys: Keys, tmp_path: Path, pattern: str) -> None:
    key = keys.public("host_ed25519")
    known = _known(tmp_path, f"{sshd.name} {key}\n@revoked {pattern.format(name=sshd.name)} {key}\n")
    for accept_new in (False, True):
        assert "revoked" in _refused(sshd, known, "DD303", accept_new=accept_new).message


def test_a_revoked_key_that_is_not_this_one_changes_nothing(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    _connects(
        sshd, _known(tmp_path, f"@revoked * {keys.public('stranger')}\n{sshd.name} {keys.public('host_ed25519')}\n")
    )


def test_hashed_wildcard_and_noise_lines(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    key = keys.public("host_ed25519")
    known = _known(tmp_path, f"{sshd.name} {key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "127.0.0.1" not in Path(known).read_text()
    _connects(sshd, known)
    _connects(sshd, _known(tmp_path, f"[127.0.*]:* {key}\n"))
    noise = f"\x00\xff garbage\n@cert-authority * {key}\nx y z\n@what {key}\n\r\n|1|x|y {key}\nfoo unknown-type AAAA\n"
    _connects(sshd, _known(tmp_path, noise + f"{sshd.name} {key}"))


def test_a_certificate_authority_does_not_vouch_but_is_mentioned(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    known = _known(tmp_path, f"@cert-authority * {keys.public('stranger')}\n")
    error = _refused(sshd, known, "DD302")
    assert any("host certificates are understood with transport = openssh" in line for line in error.details)


def test_a_host_is_judged_by_the_key_it_is_known_by(
    start_sshd: Callable[..., Sshd], keys: Keys, tmp_path: Path
) -> None:
    """The server has three keys; whichever one is known, that one is asked for."""
    server = start_sshd(HostKey="\n".join(str(keys[f"host_{kind}"]) for kind in ("ed25519", "rsa", "ecdsa")))
    for kind in ("ed25519", "rsa", "ecdsa"):
        _connects(server, _known(tmp_path, f"{server.name} {keys.public(f'host_{kind}')}\n"))


def test_a_host_that_lost_its_known_key_type_is_not_accepted(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    known = _known(tmp_path, f"{sshd.name} {keys.public('host_rsa')}\n")
    for accept_new in (False, True):
        error = _refused(sshd, known, "DD303", accept_new=accept_new)
        assert "known by another type" in error.message


def test_accept_new_remembers_once(sshd: Sshd, tmp_path: Path) -> None:
    before = "# mine\nother.example ssh-ed25519 AAAA trailing  blanks \n\n@revoked x y\nno newline at the end"
    known = _known(tmp_path, before)
    for _ in range(2):
        transport = connect(sshd.target(known_hosts=known), accept_new=True)
        transport.close()
        assert Path(known).read_text() == f"{before}\n{sshd.name} {sshd.keys.public('host_ed25519')}\n"
    _connects(sshd, known)
    found = subprocess.run(["ssh-keygen", "-F", sshd.name, "-f", known], capture_output=True, text=True)
    assert sshd.keys.public("host_ed25519") in found.stdout


def test_the_key_is_judged_before_any_login(sshd: Sshd, tmp_path: Path) -> None:
    """A host that is not believed sees neither user name nor public key."""
    before = len(sshd.log())
    _refused(sshd, _known(tmp_path, ""), "DD302")
    transport = connect(sshd.target())
    transport.close()
    assert "Postponed" not in sshd.log()[before:]


def test_the_ssh_configuration_s_files_and_alias_count(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "kh").write_text(f"cluster {sshd.keys.public('host_ed25519')}\n")
    config = tmp_path / "config"
    config.write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {sshd.port}\n  HostKeyAlias cluster\n"
        f"  UserKnownHostsFile {tmp_path}/kh\n  GlobalKnownHostsFile none\n"
    )
    target = sshd.target(ssh="box", known_hosts=None, ssh_config=str(config))
    connect(target).close()
    (tmp_path / "kh").write_text(f"other {sshd.keys.public('host_ed25519')}\n")
    with pytest.raises(DeployError) as caught:
        connect(target)
    assert caught.value.code == "DD302"
    assert any(line.startswith("cluster ") for line in caught.value.details)


def test_strict_checking_cannot_be_switched_off_by_configuration(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile {tmp_path}/kh\n  GlobalKnownHostsFile none\n"
    )
    with pytest.raises(DeployError) as caught:
        connect(sshd.target(known_hosts=None, ssh_config=str(config)))
    assert caught.value.code == "DD302"
    assert not (tmp_path / "kh").exists()


def test_a_revocation_list_of_the_configuration(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "revoked").write_text(sshd.keys.public("host_ed25519") + "\n")
    config = tmp_path / "config"
    config.write_text(f"Host *\n  RevokedHostKeys {tmp_path}/revoked\n")
    with pytest.raises(DeployError) as caught:
        connect(sshd.target(ssh_config=str(config)))
    assert caught.value.code == "DD303"
