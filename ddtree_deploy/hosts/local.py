"""This machine as a host: the same commands, started here."""

from __future__ import annotations

import contextlib
import getpass
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Sequence

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.stderr import StderrTail

_CHUNK = 64 * 1024
_GRACE = 0.2  # seconds


class LocalProcess:
    """A child process. It leads a session of its own, so that Ctrl-C at the terminal reaches only us."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        streams = self._process.stdin, self._process.stdout, self._process.stderr
        self._stdin, self._stdout, stderr = (stream for stream in streams if stream is not None)
        os.set_blocking(self._stdin.fileno(), False)
        self._ahead = bytearray()

        def read_stderr(size: int) -> bytes:
            piece: bytes = stderr.read(size)
            if not piece:
                stderr.close()
            return piece

        self._stderr = StderrTail(read_stderr)

    def write(self, data: bytes) -> None:
        """Write all of ``data`` to stdin; what the child prints meanwhile is kept for :meth:`read`.

        A child that answers before it has read everything would otherwise wait for us, and we for it.
        """
        if self._stdin.closed:
            raise BrokenPipeError("stdin is closed")
        rest = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            selector.register(self._stdout, selectors.EVENT_READ)
            while rest:
                for key, _events in selector.select():
                    if key.fileobj is self._stdin:
                        with contextlib.suppress(BlockingIOError):
                            rest = rest[os.write(key.fd, rest[:_CHUNK]) :]
                    elif piece := os.read(key.fd, _CHUNK):
                        self._ahead += piece
                    else:
                        selector.unregister(self._stdout)

    def close_stdin(self) -> None:
        """Send the end of stdin."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes of stdout; ``b""`` at its end."""
        if self._ahead:
            piece = bytes(self._ahead[:size])
            del self._ahead[:size]
            return piece
        return b"" if self._stdout.closed else os.read(self._stdout.fileno(), size)

    def stderr(self) -> str:
        """What came on stderr so far, at most the last 64 KiB, undecodable bytes replaced."""
        return self._stderr.text()

    def wait(self) -> int | None:
        """End stdin, drop unread stdout, then the exit status; negative when a signal ended the child."""
        self.close_stdin()
        while self.read(_CHUNK):
            pass
        status = self._process.wait()
        self._stderr.finish(1.0)
        return status

    def kill(self) -> None:
        """Hang up as a lost connection would: closed pipes and, if that does not end it, SIGHUP. Never raises."""
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGHUP)
            # It may be in the middle of a commit and finish that first: leave a thread to collect it.
            threading.Thread(target=self._process.wait, daemon=True).start()


class LocalTransport:
    """Starts commands on this machine."""

    @property
    def user(self) -> str:
        """Whoever runs this program."""
        try:
            return getpass.getuser()
        except (KeyError, OSError):  # no such account
            return f"#{os.getuid()}"

    def start(self, argv: Sequence[str]) -> LocalProcess:
        """Start ``argv`` directly, without a shell. Raises DeployError DD309 when there is no such program."""
        try:
            return LocalProcess(argv)
        except OSError as error:
            raise DeployError(
                "DD309",
                f"{argv[0]} cannot be started on this machine: {error.strerror}",
                hint="name the engine's interpreter: python in the inventory",
            ) from None

    def close(self) -> None:
        """Nothing is held open."""
