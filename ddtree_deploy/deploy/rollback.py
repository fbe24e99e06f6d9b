"""Undo a set on a host, or what one `apply` did: the host's record alone decides what that means."""

from __future__ import annotations

from typing import Any

from ddtree_deploy.console import Console
from ddtree_deploy.deploy.apply import Applied
from ddtree_deploy.deploy.recover import after_recovery
from ddtree_deploy.deploy.transaction import transact
from ddtree_deploy.hosts.session import HostSession


def roll_back(
    session: HostSession,
    name: str,
    console: Console,
    *,
    to: str | None = None,
    with_dependents: bool = False,
    force: bool = False,
    live: bool = False,
    wait: float = 0.0,
    reason: str | None = None,
) -> dict[str, Any]:
    """Roll the set ``name`` back, or back ``to`` an earlier version that the host keeps; an interrupted
    transaction is recovered first, and said.

    Returns what the host read back: ``files`` (path -> entry or None), ``back`` (sets that went back to an earlier
    version), ``removed``, ``left``, ``saved``, ``notes``. Raises DeployError.
    """
    args = {
        "set": name,
        "to": to,
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


def undo_apply(
    session: HostSession, applied: Applied, console: Console, *, wait: float = 0.0, reason: str | None = None
) -> list[str]:
    """Take back what ``applied`` did: sets that it brought go, sets that it replaced go back to their version before.

    Returns what was done, ``name version`` for each set that it had applied. Raises DeployError; each step is a
    transaction of its own, so that what it could take back until then is taken back.
    """
    old = applied.ground.replaced
    brought = {layer.patch_set.name: layer.patch_set.version for layer in applied.plan.to_apply}
    waiting = [name for name in reversed(brought) if name not in old] + [name for name in old if name in brought]
    while waiting:
        name = waiting[0]
        result = roll_back(session, name, console, to=old.get(name), with_dependents=True, wait=wait, reason=reason)
        moved = {name, *(item["name"] for key in ("back", "removed") for item in result.get(key, []))}
        waiting = [other for other in waiting if other not in moved]
    return [f"{name} {version}" for name, version in brought.items()]
