"""Finish or undo what a crash interrupted, before anything else changes the tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    sets = say_sets(result["history"])
    kind = result["history"].get("kind", "transaction")
    if result["action"] == "finished":
        return f"finished the interrupted {kind} of {sets}: every file had been written"
    count = len(result["paths"])
    restored = f"{count} file(s) restored" if count else "no file had been changed"
    return f"undid the interrupted {kind} of {sets}: {restored}"


def say_sets(entry: Mapping[str, Any]) -> str:
    """The sets of a line of the history: ``name version``, or ``name old -> new``."""
    said = []
    for item in entry.get("sets", []):
        before = f"{item['from']} -> " if item.get("from") not in (None, item["version"]) else ""
        undone = " undone" if item.get("undone") and entry.get("kind") != "rollback" else ""
        said.append(f"{item['name']} {before}{item['version']}{undone}")
    return ", ".join(said)


def after_recovery(session: HostSession, console: Console, action: Callable[[], T], *, wait: float = 0.0) -> T:
    """Run ``action``; where an earlier transaction waits for recovery, recover, say so, and run it again."""
    try:
        return action()
    except DeployError as error:
        if error.code != "DD503":
            raise
        console.note(f"{session.target.name}: {describe(recover(session, wait=wait))}")
        return action()
