"""The commands: where each one lives, and the line that ``--help`` has for it. A module is loaded when it is called."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class Entry:
    """``module`` of this package and its function (or its Typer app: a group). ``summary``: for the overview.

    ``fleet``: whether it runs on several hosts at once, as a command that "reads" or "changes" them.
    """

    module: str
    attribute: str
    summary: str
    fleet: str | None = None


COMMANDS = {
    "snapshot": Entry("snapshot", "snapshot", "Bring the engine's sources of a host here, exactly.", "reads"),
    "snapshots": Entry("snapshot", "snapshots", "The snapshots that were taken."),
    "diff": Entry("snapshot", "diff", "Compare two snapshots, or one with the published wheel."),
    "grep": Entry("grep", "grep", "Search the engine, here or on the host."),
    "find-def": Entry("find_def", "find_def", "Where a symbol is defined, with its body."),
    "apply": Entry("apply", "apply", "Apply patch sets and all that they require, or nothing.", "changes"),
    "status": Entry("status", "status", "How a host's tree and services stand.", "reads"),
    "rollback": Entry("rollback", "rollback", "Undo a set, or go back to its version before.", "changes"),
    "recover": Entry("recover", "recover", "Finish or undo a transaction that a crash interrupted.", "changes"),
    "history": Entry("history", "history", "Who changed a host's tree: when, what and why.", "reads"),
    "launch": Entry("launch", "launch", "Render, install, start and stop a service."),
    "doctor": Entry("doctor", "doctor", "Whether a host can serve: findings, with what to do.", "reads"),
    "logs": Entry("logs", "logs", "What a service has logged."),
    "patchset": Entry("patchset", "app", "List, show, check, edit and port patch sets."),
    "impact": Entry("impact", "impact", "What an engine upgrade means for the sets."),
    "wheel": Entry("wheel", "app", "The published wheels: pinned, cached, added."),
    "inventory": Entry("inventory", "app", "The hosts and services in use."),
    "support-bundle": Entry("support_bundle", "support_bundle", "One file for a bug report, without secrets."),
    "explain": Entry("explain", "explain", "What a code such as DD101 means, and what to do."),
    "demo": Entry("demo", "demo", "The main job, on a host of its own."),
}


class CommandTable(TyperGroup):
    """The program's commands, each built when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # The names alone: "did you mean" looks there.
        self.commands.update(dict.fromkeys(COMMANDS))  # type: ignore[arg-type]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """The names, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command, or None. One that contacts a host takes ``-v``, as the program itself does."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            command = build(cmd_name, COMMANDS[cmd_name])
            verbose = next(item for item in self.params if item.name == "verbose")
            for item in getattr(command, "commands", {"": command}).values():
                if any(param.name == "accept_new" for param in item.params):
                    item.params.append(verbose)
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """The overview, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def build(name: str, entry: Entry) -> Any:
    """Load the command's module and make the command of it."""
    found = getattr(import_module(f"ddtree_deploy.cli.{entry.module}"), entry.attribute)
    holder = typer.Typer(add_completion=False, rich_markup_mode=None, callback=lambda: None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        if entry.fleet:
            from ddtree_deploy.cli.fleet import over_hosts

            found = over_hosts(found, changes=entry.fleet == "changes")
        holder.command(name)(found)
    group: Any = typer.main.get_command(holder)
    return group.commands[name]
