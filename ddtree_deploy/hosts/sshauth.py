"""Public-key authentication: which keys are offered, in which order, and what to say when none is taken."""

from __future__ import annotations

import contextlib
import getpass
import io
import socket
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.agent import AgentKey, AgentSSH

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.hostkeys import PublicKey, parse_key
from ddtree_deploy.hosts.sshconfig import SshConfig, home_note
from ddtree_deploy.hosts.terminal import can_ask

_CONFIRM = 60.0  # seconds for a person to touch the key or to confirm its use
_MORE = (
    'only the system\'s own ssh can do that: transport = "openssh" in the inventory (or --host openssh:HOST), '
    "and a terminal for what it asks"
)
_HINT = "is the public key in the account's authorized_keys? (a locked account refuses the right key, too)"


@dataclass
class _Attempts:
    """What was offered and what was left out, in words."""

    offered: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)


def authenticate(transport: paramiko.Transport, config: SshConfig, identity: Path | None, timeout: float) -> None:
    """Log in with a key: the named ``identity``, the agent's keys, the configuration's files. Never a password.

    A file that is encrypted and not in the agent is unlocked at the terminal, if there is one, after all else.
    Raises DeployError DD304 with what was tried, DD301 when the host does not answer within ``timeout`` seconds.
    """
    attempts = _Attempts()
    with contextlib.closing(_Agent(config.identity_agent, timeout)) as agent:
        for label, key in _offers(config, identity, agent, attempts):
            attempts.offered.append(label)
            transport.auth_timeout = timeout + (_CONFIRM if isinstance(key, AgentKey) else 0)
            try:
                wanted = transport.auth_publickey(config.user, key)
            except paramiko.BadAuthenticationType as error:
                what = f"the host takes no public key, only {', '.join(error.allowed_types)}"
                raise _failed(config, attempts, what, _MORE) from None
            except (paramiko.SSHException, EOFError, OSError) as error:
                if "timeout" in str(error).lower():
                    raise DeployError(
                        "DD301", f"{config.original}: no answer to authentication in {timeout:g} s"
                    ) from None
                if not transport.is_active():
                    raise _hung_up(config, attempts, error) from None
                continue
            if wanted:
                raise _failed(config, attempts, f"after the key the host also wants {', '.join(wanted)}", _MORE)
            return
    raise _failed(config, attempts, "no key was accepted" if attempts.offered else "there is no key to offer")


def _offers(
    config: SshConfig, identity: Path | None, agent: _Agent, attempts: _Attempts
) -> Iterator[tuple[str, paramiko.PKey]]:
    """(label, key) in the order to offer.

    A named file comes first. Then, as in OpenSSH: the configured files that the agent holds, its other keys
    (not with IdentitiesOnly), the files that it does not hold; encrypted ones last.
    """
    files = [identity] if identity else list(config.identity_files)
    offered: set[bytes] = set()
    if identity and (key := _load(identity, attempts)):
        offered.add(key.asbytes())
        files.remove(identity)
        yield str(identity), key
    held = {key.blob: key for key in agent.get_keys() if key.blob not in offered}
    for path in list(files):
        public = _public_half(path)
        if public and public.blob in held:
            files.remove(path)
            yield f"{path} (held by the agent)", held.pop(public.blob)
    if not config.identities_only:
        for key in held.values():
            yield f"agent key {PublicKey(key.get_name(), key.blob).fingerprint} {key.comment}".rstrip(), key
    for path in files:
        if path != identity and (key := _load(path, attempts)):
            yield str(path), key
    for path in attempts.locked:
        if path in files and (key := _unlock(path, attempts)):
            yield str(path), key


class _Agent(AgentSSH):
    """The keys of the ssh agent behind a socket; none where there is no agent."""

    def __init__(self, path: str | None, timeout: float) -> None:
        super().__init__()
        if path is None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except (OSError, paramiko.SSHException):
            connection.close()
        else:
            connection.settimeout(_CONFIRM)

    def _send_message(self, message: object) -> object:
        try:
            return super()._send_message(message)  # type: ignore[misc]
        except OSError as error:  # in paramiko's thread, which takes no OSError without a number
            raise paramiko.SSHException(f"ssh-agent: {error}") from None

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def _public_half(path: Path) -> PublicKey | None:
    """The public key of an identity file: ``PATH.pub``, or the file itself where it is a public key."""
    for public in (Path(f"{path}.pub"), path):
        try:
            words = public.read_text("utf-8").split(maxsplit=2)
        except (OSError, UnicodeDecodeError):
            continue
        if len(words) > 1 and (key := parse_key(words[0], words[1])):
            return key
    return None


def _load(path: Path, attempts: _Attempts, passphrase: bytes | None = None) -> paramiko.PKey | None:
    """The private key in a file of any format that OpenSSH writes; notes why when it cannot be used."""
    try:
        data = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a key's type is out of date is said below
            private: object
            try:
                private = serialization.load_ssh_private_key(data, passphrase)
            except ValueError:
                private = serialization.load_pem_private_key(data, passphrase)
    except TypeError:
        attempts.locked.append(path)
        return None
    except OSError as error:
        attempts.left_out.append(f"{path}: {error.strerror}")
        return None
    except (ValueError, UnsupportedAlgorithm):
        what = "not a private key, or of a type for the agent or transport = openssh only"
        attempts.left_out.append(f"{path}: {'wrong passphrase' if passphrase else what}")
        return None
    kinds = (
        (ed25519.Ed25519PrivateKey, paramiko.Ed25519Key),
        (ec.EllipticCurvePrivateKey, paramiko.ECDSAKey),
        (rsa.RSAPrivateKey, paramiko.RSAKey),
    )
    for kind, ours in kinds:
        if isinstance(private, kind):
            plain = private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            )
            key = ours.from_private_key(io.StringIO(plain.decode("ascii")))
            _add_certificate(key, Path(f"{path}-cert.pub"), attempts)
            return key
    attempts.left_out.append(f"{path}: its key type is not supported")
    return None


def _add_certificate(key: paramiko.PKey, path: Path, attempts: _Attempts) -> None:
    if path.is_file():
        try:
            key.load_certificate(str(path))
        except (ValueError, OSError, paramiko.SSHException) as error:
            attempts.left_out.append(f"{path}: {error}")


def _unlock(path: Path, attempts: _Attempts) -> paramiko.PKey | None:
    if not can_ask():
        attempts.left_out.append(f"{path}: encrypted, and there is no terminal to ask for its passphrase")
        return None
    passphrase = getpass.getpass(f"Passphrase for {path}: ", stream=sys.stderr)
    return _load(path, attempts, passphrase.encode()) if passphrase else None


def _failed(config: SshConfig, attempts: _Attempts, what: str, instead: str | None = None) -> DeployError:
    details = [f"offered: {label}" for label in attempts.offered]
    details += [f"left out: {reason}" for reason in attempts.left_out]
    hint = instead or _HINT
    if instead is None and attempts.locked:
        hint = f"load the key into the agent: ssh-add {attempts.locked[0]}"
    elif instead is None and not attempts.offered:
        hint = "start an ssh agent with a key (ssh-add), or name a key file: identity_file in the inventory"
    message = f"{config.original}: could not log in as {config.user}: {what}"
    return DeployError("DD304", message, hint=hint, details=[*details, *home_note()])


def _hung_up(config: SshConfig, attempts: _Attempts, error: Exception) -> DeployError:
    if "signing" in str(error) or "ssh-agent" in str(error):
        return _failed(config, attempts, "the agent did not sign")
    many = len(attempts.offered)
    failure = _failed(config, attempts, f"the host hung up after {many} key{'s' if many > 1 else ''}")
    failure.hint = (
        "a host allows a few keys only (MaxAuthTries): name the right one with identity_file, or IdentitiesOnly"
    )
    return failure
