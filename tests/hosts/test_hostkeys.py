from __future__ import annotations

import base64
import hashlib
import hmac
import re
import shutil
import stat
import struct
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.hostkeys import (
    KnownHosts,
    PublicKey,
    known_types,
    lookup_name,
    parse_key,
    parse_known_hosts,
    verify,
)
from ddtree_deploy.hosts.sshconfig import SshConfig

CASES = Path(__file__).parents[1] / "cases" / "known_hosts"
VERDICTS = {"unknown": "DD302", "changed": "DD303", "revoked": "DD303"}


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def make_key(name: str) -> PublicKey:
    """A well-formed public key for ``TYPE-ANYTHING``; the same name is the same key."""
    kind, _, _rest = name.partition("-")
    seed = hashlib.sha256(name.encode()).digest()
    if kind == "ed25519":
        return PublicKey("ssh-ed25519", _string(b"ssh-ed25519") + _string(seed))
    if kind == "rsa":
        modulus = b"\x00\xc1" + seed * 8
        return PublicKey("ssh-rsa", _string(b"ssh-rsa") + _string(b"\x01\x00\x01") + _string(modulus))
    # The point is on the curve, as ssh-keygen wants it; generated once by ssh-keygen -t ecdsa.
    point = base64.b64decode("BGsX0fLhLEJH+Lzm5WOkQPJ3A32BLeszoPShOUXYmMKWT+NC4v4af5uO5+tKfA+eFivOM1drMV7Oy7ZAaDe/UfU=")
    blob = _string(b"ecdsa-sha2-nistp256") + _string(b"nistp256") + _string(point)
    return PublicKey("ecdsa-sha2-nistp256", blob)


def _hash(name: str) -> str:
    salt = hashlib.sha1(name.encode()).digest()
    digest = hmac.new(salt, name.encode(), "sha1").digest()
    return "|1|" + "|".join(base64.b64encode(part).decode() for part in (salt, digest))


def _fill(text: str) -> str:
    def fill(found: re.Match[str]) -> str:
        word = found[1]
        if word.startswith("hash:"):
            return _hash(word.removeprefix("hash:"))
        key = make_key(word.removeprefix("blob:"))
        encoded = base64.b64encode(key.blob).decode()
        return encoded if word.startswith("blob:") else f"{key.type} {encoded}"

    return re.sub(r"\{([^{}]+)\}", fill, text)


def _config(host: str, port: int = 22, **changes: Any) -> SshConfig:
    return SshConfig(original=host, hostname=host, port=port, user="ops", **changes)


def _verdict(config: SshConfig, known: KnownHosts, key: PublicKey) -> str:
    try:
        verify(config, known, key)
    except DeployError as error:
        assert error.exit_status == 4
        if error.code == "DD302":
            return "unknown"
        assert error.code == "DD303"
        return "revoked" if "revoke" in error.message else "changed"
    return "known"


def _checks() -> list[Any]:
    found = []
    for path in sorted(CASES.glob("*.toml")):
        case = tomllib.loads(path.read_text("utf-8"))
        for check in case["check"]:
            name = f"{path.stem}-{check['host']}-{check.get('port', 22)}-{check['key']}"
            found.append(pytest.param(_fill(case["text"]), check, id=name))
    return found


@pytest.mark.parametrize(("text", "check"), _checks())
def test_verdicts(text: str, check: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_bytes(text.encode())
    config = _config(check["host"], check.get("port", 22), user_known_hosts_files=(file,))
    key = make_key(check["key"])
    assert _verdict(config, KnownHosts.load([file]), key) == check["verdict"]
    assert file.read_bytes() == text.encode()
    if check.get("keygen", True) and shutil.which("ssh-keygen"):
        assert _keygen_verdict(file, config, key) == check["verdict"]


def _keygen_lines(file: Path, name: str) -> list[str]:
    """The lines that ssh-keygen finds for a name (as its match with patterns and hashes says)."""
    done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, text=True, errors="replace")
    return [line for line in done.stdout.splitlines() if line and not line.startswith("#")]


def _keygen_verdict(file: Path, config: SshConfig, key: PublicKey) -> str:
    lines = [line for line in _keygen_lines(file, lookup_name(config)) if not line.startswith("@")]
    shown = base64.b64encode(key.blob).decode()
    if not lines:
        return "unknown"
    return "known" if any(shown in line for line in lines) else "changed"


_labels = st.text("ab.*?!|[]:2", min_size=1, max_size=8)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="OpenSSH's ssh-keygen is not installed")
@settings(max_examples=60, deadline=None)
@given(
    patterns=st.lists(st.lists(_labels, min_size=1, max_size=3), min_size=1, max_size=4),
    name=st.text("ab.2", min_size=1, max_size=6),
    data=st.data(),
)
def test_patterns_match_as_ssh_keygen_says(
    tmp_path_factory: pytest.TempPathFactory, patterns: list[list[str]], name: str, data: st.DataObject
) -> None:
    fields = [",".join(words) for words in patterns]
    if data.draw(st.booleans()):
        fields.append(_hash(name))
    text = "".join(f"{field} {_fill('{ed25519-' + str(n) + '}')}\n" for n, field in enumerate(fields))
    file = tmp_path_factory.mktemp("kh") / "known_hosts"
    file.write_text(text)
    ours = {entry.key.line("") for entry in KnownHosts.load([file]).about(name)}
    theirs = {" " + " ".join(line.split(" ")[1:3]) for line in _keygen_lines(file, name)}
    assert ours == theirs


@given(st.binary(max_size=200))
def test_any_bytes_are_read(data: bytes) -> None:
    for entry in parse_known_hosts(data, Path("x")):
        entry.matches("host.example")


def test_long_patterns_do_not_take_forever() -> None:
    line = f"{'*a' * 200}b {_fill('{ed25519-a}')}\n".encode()
    (entry,) = parse_known_hosts(line, Path("x"))
    assert not entry.matches("a" * 255)


def test_fingerprints_are_those_of_openssh(tmp_path: Path) -> None:
    if not shutil.which("ssh-keygen"):
        pytest.skip("OpenSSH's ssh-keygen is not installed")
    for name in ("ed25519-a", "rsa-a", "ecdsa-a"):
        key = make_key(name)
        file = tmp_path / name
        file.write_text(key.line("").lstrip() + "\n")
        done = subprocess.run(["ssh-keygen", "-lf", str(file)], capture_output=True, text=True, check=True)
        assert done.stdout.split()[1] == key.fingerprint


def test_keys_whose_parts_do_not_belong_together() -> None:
    key = make_key("ed25519-a")
    encoded = base64.b64encode(key.blob).decode()
    assert parse_key("ssh-ed25519", encoded) == key
    for kind, text in (
        ("ssh-rsa", encoded),
        ("ssh-ed25519", encoded[:-1]),
        ("ssh-ed25519", ""),
        ("nonsense", encoded),
        ("ssh-ed25519-cert-v01@openssh.com", encoded),
    ):
        assert parse_key(kind, text) is None


def test_an_unknown_host_is_told_how_to_add_it() -> None:
    key = make_key("ed25519-a")
    ca = next(iter(parse_known_hosts(_fill("@cert-authority *.example {ed25519-ca}").encode(), Path("x"))))
    config = _config("h.example", 2222, user_known_hosts_files=(Path("/home/me/.ssh/known_hosts"),))
    with pytest.raises(DeployError) as caught:
        verify(config, KnownHosts([]), key)
    assert key.fingerprint in caught.value.details[0]
    assert key.line("[h.example]:2222") in caught.value.details
    assert "--accept-new" in str(caught.value.hint)
    assert "/home/me/.ssh/known_hosts" in " ".join(caught.value.details)
    with pytest.raises(DeployError, match="not known") as caught:
        verify(_config("h.example"), KnownHosts([ca]), key)
    assert any("host certificates are understood with transport = openssh" in line for line in caught.value.details)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    known = KnownHosts.load([tmp_path, tmp_path / "absent"])
    with pytest.raises(DeployError) as caught:
        verify(_config("a.example"), known, make_key("ed25519-a"))
    assert any(str(tmp_path) in line for line in caught.value.details)


def test_the_known_types_come_first() -> None:
    text = _fill("[a.example]:2222 {rsa-a}\na.example {ed25519-a}\n@revoked a.example {ecdsa-a}\n")
    known = KnownHosts(parse_known_hosts(text.encode(), Path("x")))
    assert known_types(_config("a.example", 2222), known) == ["ssh-rsa", "ssh-ed25519"]
    assert known_types(_config("a.example"), known) == ["ssh-ed25519"]


def test_an_alias_stands_for_name_and_port() -> None:
    config = _config("192.0.2.1", 2222, host_key_alias="Cluster")
    assert lookup_name(config) == "cluster"
    known = KnownHosts(parse_known_hosts(_fill("cluster {ed25519-a}").encode(), Path("x")))
    verify(config, known, make_key("ed25519-a"))


# --- accepting a new key ---


@pytest.mark.parametrize("before", [b"", b"x {ed25519-b}\n", b"no newline", b"\xff\xfe\r\n\x00 junk", b"# c\n\n\n"])
def test_accept_new_appends_one_line_and_keeps_every_byte(tmp_path: Path, before: bytes) -> None:
    file = tmp_path / "known_hosts"
    file.write_bytes(before)
    file.chmod(0o644)
    config = _config("new.example", 2222, user_known_hosts_files=(file, tmp_path / "other"))
    key = make_key("ed25519-a")
    verify(config, KnownHosts.load([file]), key, accept_new=True)
    gap = b"" if not before or before.endswith(b"\n") else b"\n"
    assert file.read_bytes() == before + gap + key.line("[new.example]:2222").encode() + b"\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert not (tmp_path / "other").exists()
    verify(config, KnownHosts.load([file]), key)


def test_accept_new_makes_a_private_file_in_a_private_folder(tmp_path: Path) -> None:
    file = tmp_path / ".ssh" / "known_hosts"
    config = _config("new.example", user_known_hosts_files=(file,), hash_known_hosts=True)
    key = make_key("ed25519-a")
    verify(config, KnownHosts([]), key, accept_new=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text().startswith("|1|")
    assert "new.example" not in file.read_text()
    verify(config, KnownHosts.load([file]), key)
    if shutil.which("ssh-keygen"):
        assert _keygen_verdict(file, config, key) == "known"


@pytest.mark.parametrize(
    "line",
    [
        "a.example {ed25519-b}",
        "a.example {rsa-a}",
        "*.example {ed25519-b}",
        "@revoked * {ed25519-a}",
        "{hash:a.example} {ed25519-b}",
    ],
)
def test_accept_new_never_accepts_a_changed_or_revoked_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(_fill(line) + "\n")
    before = file.read_bytes()
    config = _config("a.example", user_known_hosts_files=(file,))
    with pytest.raises(DeployError) as caught:
        verify(config, KnownHosts.load([file]), make_key("ed25519-a"), accept_new=True)
    assert caught.value.code == "DD303"
    assert file.read_bytes() == before


def test_accept_new_needs_a_file_that_remembers(tmp_path: Path) -> None:
    for files in ((), (Path("/dev/null"),), (tmp_path,), (tmp_path / "file" / "below",)):
        (tmp_path / "file").touch()
        with pytest.raises(DeployError) as caught:
            verify(
                _config("a.example", user_known_hosts_files=files),
                KnownHosts([]),
                make_key("ed25519-a"),
                accept_new=True,
            )
        assert caught.value.code == "DD302"


@pytest.mark.parametrize("binary", [False, True])
def test_a_revocation_list_is_honoured(tmp_path: Path, binary: bool) -> None:
    if binary and not shutil.which("ssh-keygen"):
        pytest.skip("OpenSSH's ssh-keygen is not installed")
    key, other = make_key("ed25519-a"), make_key("ed25519-b")
    text = _fill("a.example {ed25519-a}\na.example {ed25519-b}")
    known = KnownHosts(parse_known_hosts(text.encode(), Path("x")))
    revoked = tmp_path / "revoked"
    revoked.write_text("# compromised\n" + key.line("").lstrip() + " comment\n")
    if binary:
        (tmp_path / "keys").write_bytes(revoked.read_bytes())
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(revoked), str(tmp_path / "keys")], check=True)
        assert revoked.read_bytes().startswith(b"SSHKRL")
    with pytest.raises(DeployError) as caught:
        verify(_config("a.example", revoked_host_keys=revoked), known, key)
    assert caught.value.code == "DD303"
    verify(_config("a.example", revoked_host_keys=revoked), known, other)
    with pytest.raises(DeployError, match="revokes"):
        verify(_config("a.example", revoked_host_keys=tmp_path / "absent"), known, other)
