"""What every way to a host offers: start one command with its own stdin, stdout and stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RemoteProcess(Protocol):
    """A command started on a host. stderr is drained at the same time as stdout is read."""

    def write(self, data: bytes) -> None:
        """Write all of ``data`` to stdin. Raises BrokenPipeError when the command or connection is gone."""

    def close_stdin(self) -> None:
        """Send the end of stdin."""

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes of stdout; ``b""`` at its end, also when the connection was lost."""

    def stderr(self) -> str:
        """What came on stderr so far, at most the last 64 KiB, undecodable bytes replaced."""

    def wait(self) -> int | None:
        """End stdin, drop unread stdout, then the exit status: negative when a signal ended the command.

        None when the connection was lost before a status came. Waits as long as the command runs.
        """

    def kill(self) -> None:
        """Drop the command's channel; the host's process gets SIGHUP or end-of-file. Never raises."""


class Transport(Protocol):
    """An open way to one host."""

    @property
    def user(self) -> str:
        """The account that commands run as, before any sudo."""

    def start(self, argv: Sequence[str]) -> RemoteProcess:
        """Start ``argv`` (quoted for the login shell where there is one). Raises DeployError DD3xx."""

    def close(self) -> None:
        """Close the connection. Never raises."""
