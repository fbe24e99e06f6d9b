"""Hearing what happens on the way to a host: notices for a person, and every remote step with its time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: (what was done, seconds, whether it worked)
Step = Callable[[str, float, bool], None]


def _unheard(_text: str) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """``notice`` gets lines that a person should read; ``step``, where there is one, every remote step."""

    notice: Callable[[str], None] = _unheard
    step: Step | None = None

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Report the block as one step, also when it fails."""
        begun, worked = time.monotonic(), False
        try:
            yield
            worked = True
        finally:
            self.done(what, begun, worked)

    def done(self, what: str, begun: float, worked: bool = True) -> None:
        """Report a step that began at the monotonic time ``begun`` and ends now."""
        if self.step:
            self.step(what, time.monotonic() - begun, worked)


SILENT = Watch()
