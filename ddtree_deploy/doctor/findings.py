"""What a check says: a severity, one line, the evidence for it, and the mend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from ddtree_deploy.doctor.facts import Facts


class Severity(IntEnum):
    """How bad a finding is; the worst comes first."""

    ERROR = 0
    WARNING = 1
    NOTE = 2

    @property
    def word(self) -> str:
        """The name in lower case."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Saying:
    """A finding before it carries its check's code."""

    severity: Severity
    message: str
    evidence: tuple[str, ...] = ()
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: ``code`` and ``area`` are its check's, ``evidence`` what was seen, ``mend`` what to do.

    ``known`` is False where the facts that the check needs are missing; ``evidence`` then says which and why.
    """

    code: str
    area: str
    severity: Severity
    message: str
    evidence: tuple[str, ...]
    mend: str | None
    known: bool = True


CheckFunction = Callable[[Facts], Iterator[Saying]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its code and the function from facts to sayings."""

    code: str
    function: CheckFunction


CHECKS: dict[str, Check] = {}


def check(code: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as the check of ``code``."""

    def register(function: CheckFunction) -> CheckFunction:
        if code in CHECKS:
            raise ValueError(f"two checks of {code}")
        CHECKS[code] = Check(code, function)
        return function

    return register


def error(message: str, *evidence: str, mend: str | None = None) -> Saying:
    """The engine will not start, or will not serve rightly."""
    return Saying(Severity.ERROR, message, evidence, mend)


def warning(message: str, *evidence: str, mend: str | None = None) -> Saying:
    """The engine may start and then fail, or be slow."""
    return Saying(Severity.WARNING, message, evidence, mend)


def note(message: str, *evidence: str, mend: str | None = None) -> Saying:
    """Worth knowing."""
    return Saying(Severity.NOTE, message, evidence, mend)
