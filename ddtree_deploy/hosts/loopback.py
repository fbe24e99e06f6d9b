"""An ssh server inside this process: a real host for the demo and the tests, reachable from this machine only.

It has throw-away keys, lets in the one client key it made, and runs commands as a login shell would. Everything
it needs on disk lies in a private temporary folder that goes away with it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
)

from ddtree_deploy.hosts.hostkeys import PublicKey
from ddtree_deploy.hosts.sshconfig import NO_CONFIG
from ddtree_deploy.hosts.target import Target

USER = "demo"
_ADDRESS = "127.0.0.1"
_WINDOW = 32 * 1024 * 1024  # bytes
_CHUNK = 32 * 1024  # bytes; what one packet carries


class LoopbackServer:
    """Listens on a free port of 127.0.0.1 from :meth:`start` (or ``with``) to :meth:`stop`."""

    def __init__(self) -> None:
        self._stopping = False
        self._lock = threading.Lock()
        self._commands: set[_Command] = set()
        self._transports: set[paramiko.Transport] = set()
        self._host_key, _private = _new_key()

    def __enter__(self) -> LoopbackServer:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Open the port and write the files that a client needs."""
        self._listener = socket.create_server((_ADDRESS, 0))
        self.port: int = self._listener.getsockname()[1]
        self.folder = Path(tempfile.mkdtemp(prefix="ddtree-loopback-"))
        self.identity_file = self.folder / "identity"
        self.known_hosts_file = self.folder / "known_hosts"
        self._client_key, private = _new_key()
        _write_private(self.identity_file, private)
        known = PublicKey(self._host_key.get_name(), self._host_key.asbytes())
        _write_private(self.known_hosts_file, known.line(f"[{_ADDRESS}]:{self.port}") + "\n")
        self._acceptor = threading.Thread(target=self._accept, name="loopback-accept", daemon=True)
        self._acceptor.start()

    def target(self, *, name: str = "loopback", root: str | None = None, python: str | None = None) -> Target:
        """The target that reaches this server."""
        return Target(
            name=name,
            kind="ssh",
            ssh=f"{USER}@{_ADDRESS}:{self.port}",
            root=root,
            python=python,
            identity_file=str(self.identity_file),
            known_hosts=str(self.known_hosts_file),
            ssh_config=NO_CONFIG,
        )

    def stop(self) -> None:
        """Close the port, end the commands that still run, drop the connections, remove the folder."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            commands, transports = list(self._commands), list(self._transports)
        for command in commands:
            command.end()
        for transport in transports:
            transport.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _address = self._listener.accept()
            except OSError:
                return  # stopped
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport = paramiko.Transport(connection, default_window_size=_WINDOW)
            transport.add_server_key(self._host_key)
            with self._lock:
                self._transports = {known for known in self._transports if known.is_active()} | {transport}
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.start_server(event=threading.Event(), server=_Gate(self))

    def admits(self, key: paramiko.PKey) -> bool:
        """Whether ``key`` is the one client key."""
        return key.asbytes() == self._client_key.asbytes()

    def run(self, command: str, channel: paramiko.Channel, connection_lock: threading.Lock) -> None:
        """Start ``command`` for ``channel``."""
        with self._lock:
            if not self._stopping:
                self._commands = {known for known in self._commands if known.running}
                self._commands.add(_Command(command, channel, connection_lock))


class _Gate(paramiko.ServerInterface):
    """What a client may do: log in with the one key, and execute commands."""

    def __init__(self, server: LoopbackServer) -> None:
        self._server = server
        self._connection_lock = threading.Lock()

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        admitted = username == USER and self._server.admits(key)
        return AUTH_SUCCESSFUL if admitted else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002
        if kind == "session":
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._server.run(os.fsdecode(command), channel, self._connection_lock)
        return True


class _Command:
    """One command and the threads that carry its three streams."""

    def __init__(self, command: str, channel: paramiko.Channel, connection_lock: threading.Lock) -> None:
        self._channel = channel
        self._connection_lock = connection_lock
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            # A home folder that is not there is no obstacle, as with sshd.
            cwd=Path.home() if Path.home().is_dir() else "/",
            env=_login_environment(),
        )
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        stdin, stdout, stderr = (stream for stream in streams if stream is not None)
        outputs = [_thread(_pump, stdout, channel.sendall), _thread(_pump, stderr, channel.sendall_stderr)]
        feeder = _thread(_feed, channel, stdin)
        self._closer = _thread(self._finish, outputs)
        self._threads = [*outputs, feeder, self._closer]

    @property
    def running(self) -> bool:
        """Whether the command or what it started still holds its streams."""
        return self._closer.is_alive()

    def end(self) -> None:
        """Terminate the command's process group, by force after a second."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._closer.join(1.0)
            if not self.running:
                break
        for thread in self._threads:
            thread.join(1.0)

    def _finish(self, outputs: list[threading.Thread]) -> None:
        for thread in outputs:
            thread.join()
        status = self._process.wait()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            # The answer to this comes through the thread that said yes to the command: so the client has that
            # yes before the end of a command that was faster.
            with self._connection_lock:
                self._channel.get_transport().global_request("keepalive@openssh.com", wait=True)
            self._channel.send_exit_status(status if status >= 0 else 128 - status)
            self._channel.close()


def _pump(stream: IO[bytes], send: Callable[[bytes], object]) -> None:
    """Carry one of the command's outputs; a client that went away closes the pipe."""
    with stream, contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while piece := stream.read(_CHUNK):
            send(piece)


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    """Carry the client's input; what comes after the command closed its end is dropped."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        with stdin, contextlib.suppress(BrokenPipeError):
            while piece := channel.recv(_WINDOW):
                rest = memoryview(piece)
                while rest:
                    rest = rest[stdin.write(rest) :]
        while channel.recv(_WINDOW):
            pass


def _thread(run: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=args, daemon=True)
    thread.start()
    return thread


def _login_environment() -> dict[str, str]:
    """What sshd would set: nothing of this process's own settings reaches the command."""
    home = str(Path.home())
    return {"HOME": home, "USER": USER, "LOGNAME": USER, "SHELL": "/bin/sh", "PATH": os.environ.get("PATH", os.defpath)}


def _new_key() -> tuple[paramiko.PKey, str]:
    """A fresh ed25519 key and its private text in OpenSSH's format."""
    text = (
        ed25519.Ed25519PrivateKey.generate()
        .private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
        .decode("ascii")
    )
    return paramiko.Ed25519Key.from_private_key(io.StringIO(text)), text


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text, "ascii")
