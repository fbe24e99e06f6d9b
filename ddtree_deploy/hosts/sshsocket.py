"""The byte stream under an ssh connection: a TCP socket, or the two ends of a ProxyCommand."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.sshconfig import SshConfig

_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
# A peer that acknowledges nothing for this long is gone. Keepalives make sure that there is something to
# acknowledge; without the limit TCP would try on for a quarter of an hour.
_DEAD_AFTER = 60.0  # seconds


def connect_tcp(config: SshConfig, timeout: float, unresolved_hint: str | None = None) -> socket.socket:
    """A connected socket; the addresses of a name share ``timeout`` seconds.

    Raises DeployError DD301 for a name that is unknown, and for a host that refuses or does not answer.
    """
    name, port = config.hostname, config.port
    try:
        addresses = socket.getaddrinfo(
            name, port, _FAMILIES.get(config.address_family, socket.AF_UNSPEC), socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise DeployError("DD301", f"{name}: the name is unknown ({reason})", hint=unresolved_hint) from None
    deadline = time.monotonic() + timeout
    reason = "no address"
    for left, (family, kind, protocol, _name, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(max((deadline - time.monotonic()) / left, 0.1))
        try:
            connection.connect(address)
        except TimeoutError:
            reason = f"no answer in {timeout:g} s"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        else:
            _tune(connection)
            return connection
        connection.close()
    raise DeployError("DD301", f"{name} port {port}: {reason}")


def _tune(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_DEAD_AFTER * 1000))


class ProxyCommand:
    """A command whose stdin and stdout are the connection; ``socket`` is our end.

    paramiko has a class for this, which starts no shell, reads no stderr and has no socket to wait on.
    """

    def __init__(self, command: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """The last line on the command's stderr."""
        self._stderr.seek(0)
        lines = self._stderr.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Close our end; a command that does not end by itself is terminated."""
        self.socket.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)
        self._stderr.close()
