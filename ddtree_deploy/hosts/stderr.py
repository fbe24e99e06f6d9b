"""Draining a command's stderr while its stdout is read: the other order deadlocks once a pipe is full."""

from __future__ import annotations

import threading
from collections.abc import Callable

KEPT = 64 * 1024


class StderrTail:
    """Reads a stream to its end in a thread of its own and keeps the last 64 KiB."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, name="stderr", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while True:
            try:
                piece = self._read(32 * 1024)
            except (OSError, ValueError):
                return  # closed under us
            if not piece:
                return
            with self._lock:
                self._tail = (self._tail + piece)[-KEPT:]

    def text(self) -> str:
        """What is kept so far, undecodable bytes replaced."""
        with self._lock:
            return self._tail.decode("utf-8", "replace")

    def finish(self, seconds: float) -> None:
        """Wait for the stream's end, at most ``seconds``."""
        self._thread.join(seconds)
