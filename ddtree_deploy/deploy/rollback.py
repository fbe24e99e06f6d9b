"""Undo a set on a host: the host's record alone decides what that means."""

from __future__ import annotations

from typing import Any

from ddtree_deploy.console import Console
from ddtree_deploy.deploy.recover import after_recovery
from ddtree_deploy.deploy.transaction import transact
from ddtree_deploy.hosts.session import HostSession


def roll_back(
    session: HostSession,
    name: str,
    console: Console,
    *,
    with_dependents: bool = False,
    force: bool = False,
    live: bool = False,
    wait: float = 0.0,
    reason: str | None = None,
) -> dict[str, Any]:
    """Roll the set ``name`` back; an interrupted transaction is recovered first, and said.

    Returns what the host read back: ``files`` (path -> entry or None), ``removed``, ``left``, ``saved``, ``notes``.
    """
    args = {
        "set": name,
        "with_dependents": with_dependents,
        "force": force,
        "live": live,
        "wait": wait,
        "reason": reason,
    }
    with console.progress(f"rolling back {name}") as progress:
        return after_recovery(
            session, console, lambda: transact(session, "rollback", args, progress=progress), wait=wait
        )
