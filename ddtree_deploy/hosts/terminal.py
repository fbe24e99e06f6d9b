"""Whether somebody can be asked for a passphrase or a second factor."""

from __future__ import annotations

import sys
import threading


def can_ask() -> bool:
    """Whether there is a terminal, and one host alone is at work: of several at once nobody could tell who asks."""
    alone = threading.current_thread() is threading.main_thread()
    return alone and sys.stdin.isatty() and sys.stderr.isatty()
