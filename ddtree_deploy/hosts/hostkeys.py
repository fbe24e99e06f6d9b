"""Whom to believe: known_hosts files, read as OpenSSH reads them, and the verdict on the key a host shows.

A known_hosts file is never rewritten. The one write there is appends one line, and only when the caller says
``accept_new`` and the host has no key of any type yet.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.sshconfig import SshConfig, home_note

_KEY_TYPE = re.compile(r"(sk-)?(ssh|ecdsa-sha2)-(?!.*-cert-v)[A-Za-z0-9@._-]+\Z")


@dataclass(frozen=True)
class PublicKey:
    """A public key: its type (``ssh-ed25519``) and its wire form."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """The fingerprint as OpenSSH prints it: ``SHA256:`` and base64 without padding."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode("ascii").rstrip("=")

    def line(self, name: str) -> str:
        """The known_hosts line that says that ``name`` has this key."""
        return f"{name} {self.type} {base64.b64encode(self.blob).decode('ascii')}"


@dataclass(frozen=True)
class Entry:
    """One usable line of a known_hosts file; ``marker`` is "", "@revoked" or "@cert-authority"."""

    path: Path
    number: int
    marker: str
    patterns: str
    key: PublicKey

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"

    def matches(self, name: str) -> bool:
        """Whether the line is about ``name`` (lower case; ``[host]:port`` where the port is not 22)."""
        if self.patterns.startswith("|"):
            return _hash_matches(self.patterns, name)
        verdict = False
        for pattern in self.patterns.lower().split(","):
            if _wildcard(pattern.removeprefix("!"), name):
                if pattern.startswith("!"):
                    return False
                verdict = True
        return verdict


class KnownHosts:
    """The entries of several known_hosts files, in their order. Lines that say nothing to us are passed over."""

    def __init__(self, entries: Iterable[Entry], unreadable: Iterable[str] = ()) -> None:
        self._entries = list(entries)
        #: Files that exist but could not be read, with the reason.
        self.unreadable = list(unreadable)

    @classmethod
    def load(cls, paths: Iterable[Path]) -> KnownHosts:
        """Read the files; one that is not there is an empty one."""
        entries: list[Entry] = []
        unreadable = []
        for path in paths:
            try:
                entries += parse_known_hosts(path.read_bytes(), path)
            except FileNotFoundError:
                continue
            except OSError as error:
                unreadable.append(f"{path} cannot be read: {error.strerror}")
        return cls(entries, unreadable)

    def about(self, name: str) -> list[Entry]:
        """All entries that match ``name``, whatever their marker."""
        return [entry for entry in self._entries if entry.matches(name)]

    def types(self, name: str) -> list[str]:
        """The key types known for ``name``, in the files' order."""
        return [entry.key.type for entry in self.about(name) if not entry.marker]


def parse_known_hosts(data: bytes, path: Path) -> Iterator[Entry]:
    """The usable lines of a file's bytes; comments, damaged lines and unknown key types are passed over."""
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        fields = re.split(r"[ \t]+", line.strip(" \t\r"))
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if marker not in ("", "@revoked", "@cert-authority") or len(fields) < 3 or fields[0].startswith("#"):
            continue
        key = parse_key(fields[1], fields[2])
        if key is not None:
            yield Entry(path, number, marker, fields[0], key)


def parse_key(key_type: str, encoded: str) -> PublicKey | None:
    """A public key as its type and base64; None when they are damaged or do not belong together."""
    if not _KEY_TYPE.match(key_type):
        return None
    try:
        blob = base64.b64decode(encoded, validate=True)
        (length,) = struct.unpack_from(">I", blob)
    except (binascii.Error, ValueError, struct.error):
        return None
    return PublicKey(key_type, blob) if blob[4 : 4 + length] == key_type.encode() else None


def known_types(config: SshConfig, known: KnownHosts) -> list[str]:
    """The key types by which the host is known. Asking for these first keeps it from being judged by another."""
    return list(dict.fromkeys(known.types(lookup_name(config)) + known.types(config.hostname.lower())))


def lookup_name(config: SshConfig) -> str:
    """The name a host is known by: its alias, its name, or ``[name]:port`` where the port is not 22."""
    if config.host_key_alias:
        return config.host_key_alias.lower()
    name = config.hostname.lower()
    return name if config.port == 22 else f"[{name}]:{config.port}"


def verify(config: SshConfig, known: KnownHosts, key: PublicKey, *, accept_new: bool = False) -> Path | None:
    """Return if ``key`` is the host's; with ``accept_new`` also remember the key of a host that has none.

    Returns the file that a new key was added to, else None. Raises DeployError DD302 for an unknown host, DD303 for
    a key that changed or is revoked.
    """
    name = lookup_name(config)
    entries = known.about(name)
    _refuse_revoked(config, entries, key)
    trusted = [entry for entry in entries if not entry.marker]
    if any(entry.key == key for entry in trusted):
        return None
    if trusted:
        raise _changed(config, trusted, key)
    if name.startswith("[") and not config.host_key_alias:
        # As OpenSSH: a key that is known for the host on port 22 vouches for it on another port.
        plain = known.about(config.hostname.lower())
        _refuse_revoked(config, plain, key)
        if any(entry.key == key and not entry.marker for entry in plain):
            return None
    if not accept_new:
        raise _unknown(config, known, entries, key)
    return _remember(config, key)


def _refuse_revoked(config: SshConfig, entries: Iterable[Entry], key: PublicKey) -> None:
    for entry in entries:
        if entry.marker == "@revoked" and entry.key == key:
            raise DeployError(
                "DD303",
                f"{config.original}: the host shows a revoked key ({entry.where}), not connecting",
                hint="the host was compromised or mixed up: ask who runs it; this cannot be overridden here",
                details=[f"{key.type} {key.fingerprint}"],
            )
    if config.revoked_host_keys and _in_revocation_list(config.revoked_host_keys, key):
        raise DeployError(
            "DD303",
            f"{config.original}: the host shows a key that {config.revoked_host_keys} revokes, not connecting",
            hint="ask who runs the host; this cannot be overridden here",
            details=[f"{key.type} {key.fingerprint}"],
        )


def _in_revocation_list(path: Path, key: PublicKey) -> bool:
    """Whether RevokedHostKeys lists ``key``; as in OpenSSH, a list that cannot be read revokes every key.

    It is either a text with a key a line or a binary list, which ssh-keygen reads.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return True
    if not data.startswith(b"SSHKRL\n"):
        lines = (line.split(maxsplit=2) for line in data.decode("utf-8", "replace").splitlines())
        return any(parse_key(*words[:2]) == key for words in lines if len(words) > 1)
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as public:
        public.write(key.line("").lstrip() + "\n")
        public.flush()
        command = ["ssh-keygen", "-Q", "-f", str(path), public.name]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return True
    return done.returncode != 0


def _changed(config: SshConfig, trusted: list[Entry], key: PublicKey) -> DeployError:
    shown = [f"shown: {key.type} {key.fingerprint}"]
    known = [f"known: {entry.key.type} {entry.key.fingerprint} ({entry.where})" for entry in trusted]
    if all(entry.key.type != key.type for entry in trusted):
        return DeployError(
            "DD303",
            f"{config.original}: the host shows a {key.type} key and is known by another type, not connecting",
            hint="if who runs it confirms the new fingerprint, add the line; no flag accepts it",
            details=[*shown, *known, key.line(lookup_name(config))],
        )
    return DeployError(
        "DD303",
        f"{config.original}: THE HOST KEY CHANGED, not connecting: someone may be in the middle",
        hint="if the host was reinstalled, get its new fingerprint from who runs it, then remove the old line with "
        f"`ssh-keygen -R '{lookup_name(config)}' -f {trusted[0].path}`; no flag accepts a changed key",
        details=[*shown, *known],
    )


def _unknown(config: SshConfig, known: KnownHosts, entries: list[Entry], key: PublicKey) -> DeployError:
    files = config.user_known_hosts_files
    where = str(files[0]) if files else "a known_hosts file"
    details = [f"{key.type} {key.fingerprint}", f"the line for {where}:", key.line(lookup_name(config))]
    if any(entry.marker == "@cert-authority" for entry in entries):
        details.append(
            "a @cert-authority line names this host: host certificates are understood with transport = openssh only"
        )
    return DeployError(
        "DD302",
        f"{config.original}: the host key is not known, not connecting",
        hint="compare the fingerprint with the host's own (there: ssh-keygen -lf /etc/ssh/ssh_host_"
        f"{_short_type(key.type)}_key.pub), then add the line, or run again with --accept-new",
        details=[*details, *known.unreadable, *home_note()],
    )


def _short_type(key_type: str) -> str:
    return key_type.removeprefix("ssh-") if key_type.startswith("ssh-") else "ecdsa"


def _remember(config: SshConfig, key: PublicKey) -> Path:
    """Append the key to the first user file: one write, behind whatever the file holds, byte for byte."""
    if not config.user_known_hosts_files:
        raise DeployError("DD302", f"{config.original}: there is no known_hosts file to add the new key to")
    path = config.user_known_hosts_files[0]
    name = lookup_name(config)
    line = key.line(_hashed(name) if config.hash_known_hosts else name).encode() + b"\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DeployError("DD302", f"{path} is no file: the new key could not be remembered")
            if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
                line = b"\n" + line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DeployError(
            "DD302", f"{config.original}: the new key could not be added to {path}: {error.strerror}"
        ) from None
    return path


def _hashed(name: str) -> str:
    salt = secrets.token_bytes(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return "|1|" + "|".join(base64.b64encode(part).decode("ascii") for part in (salt, digest))


def _hash_matches(field: str, name: str) -> bool:
    parts = field.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in parts[2:])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def _wildcard(pattern: str, name: str) -> bool:
    """Whether ``*`` and ``?`` of ``pattern`` can stand for all of ``name``; linear in both for each star."""
    at = here = 0
    star, retry = -1, 0
    while here < len(name):
        if pattern[at : at + 1] == "*":
            star, retry = at, here
            at += 1
        elif pattern[at : at + 1] in ("?", name[here]):
            at += 1
            here += 1
        elif star >= 0:
            retry += 1
            at, here = star + 1, retry
        else:
            return False
    return not pattern[at:].strip("*")
