"""Finish or undo what a crash interrupted, before anything else changes the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ddtree_deploy.console import Console
from ddtree_deploy.deploy.transaction import transact
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession

T = TypeVar("T")


def recover(session: HostSession, *, force: bool = False, wait: float = 0.0) -> dict[str, Any]:
    """Ask the host to recover: ``{"action": "nothing" | "finished" | "undone", "paths", "notes", ...}``."""
    return transact(session, "recover", {"force": force, "wait": wait})


def describe(result: dict[str, Any]) -> str:
    """The recovery in one line for a person."""
    if result["action"] == "nothing":
        return "nothing to recover: no transaction was interrupted"
    sets = ", ".join(f"{item['name']} {item['version']}" for item in result["history"].get("sets", []))
    kind = result["history"].get("kind", "transaction")
    if result["action"] == "finished":
        return f"finished the interrupted {kind} of {sets}: every file had been written"
    count = len(result["paths"])
    restored = f"{count} file(s) restored" if count else "no file had been changed"
    return f"undid the interrupted {kind} of {sets}: {restored}"


def after_recovery(session: HostSession, console: Console, action: Callable[[], T], *, wait: float = 0.0) -> T:
    """Run ``action``; where an earlier transaction waits for recovery, recover, say so, and run it again."""
    try:
        return action()
    except DeployError as error:
        if error.code != "DD503":
            raise
        console.note(f"{session.target.name}: {describe(recover(session, wait=wait))}")
        return action()
