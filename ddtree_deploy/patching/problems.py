"""Collecting every problem of an input before refusing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_deploy.errors import DeployError

SHOWN, LISTED = 100, 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason to refuse: a code of :data:`ddtree_deploy.errors.CODES` and one line that names the place."""

    code: str
    text: str


class RefusedError(Exception):
    """Carries problems, and a hint about them, from one step to the one that collects them.

    It never reaches a user.
    """

    def __init__(self, problems: Sequence[Problem], hint: str | None = None) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = tuple(problems)
        self.hint = hint


def as_error(problems: Sequence[Problem], subject: str, hint: str | None = None) -> DeployError:
    """One error for all problems: the only problem's line, or a count with a line of details for each of the
    first ``LISTED``.

    The code is the first problem's. ``problems`` is not empty.
    """
    unique = list(dict.fromkeys(problems))
    first = unique[0]
    if len(unique) == 1:
        return DeployError(first.code, first.text, hint)
    details = [problem.text for problem in unique[:LISTED]]
    if len(unique) > LISTED:
        details.append(f"and {len(unique) - LISTED} more")
    return DeployError(first.code, f"{subject}: {len(unique)} problems", hint, details)


def printable(data: bytes) -> str:
    """``data`` quoted on one line, control characters escaped, at most about ``SHOWN`` characters of it."""
    cut = data[: SHOWN * 4]
    try:
        text = cut.decode("utf-8")
    except UnicodeDecodeError:
        shown = repr(cut[:SHOWN])
        return shown + "..." if len(data) > SHOWN else shown
    shown = repr(text[:SHOWN])
    return shown + "..." if len(text) > SHOWN or len(data) > len(cut) else shown
