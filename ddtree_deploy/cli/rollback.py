"""``rollback``: undo a patch set, or go back to its version before, from the host's own memory of it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ddtree_deploy.cli import options as opt


def rollback(
    ctx: typer.Context,
    patchset: Annotated[str, typer.Argument(metavar="PATCHSET", help="Name of an applied set.")],
    host: opt.HostOption = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="VERSION", help="Go back to this version, which the present one replaced."),
    ] = None,
    with_dependents: Annotated[
        bool,
        typer.Option(
            "--with-dependents",
            help="Also undo the sets that build on it; with --to, take them back to how they were on that version.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Discard later edits of its files; their bytes are saved on the host first.")
    ] = False,
    live: opt.LiveOption = False,
    wait: opt.WaitOption = 0.0,
    reason: opt.ReasonOption = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Restore the files of a set to what they were before it, or in its version before. All or nothing.

    What the set requires stays.
    """
    from ddtree_deploy.deploy.rollback import roll_back

    console = opt.console_of(ctx, json_mode)
    # `apply x.patch` records the set x: the same words undo it.
    patchset = re.sub(r"\.(patch|diff)$", "", patchset.rstrip("/").rpartition("/")[2]) or patchset
    choice = opt.HostChoice(None, host, inventory, python, root, state_dir, accept_new, sudo)
    with opt.open_session(choice, console) as session:
        result = roll_back(
            session,
            patchset,
            console,
            to=to,
            with_dependents=with_dependents,
            force=force,
            live=live,
            wait=wait,
            reason=reason,
        )
    if json_mode:
        console.document("rollback", {"host": session.target.name, **result})
        return
    for item in result.get("back", []):
        change = f"back from {item['from']} to" if item["from"] != item["version"] else "stays at"
        console.line(f"{item['name']} {change} {item['version']}")
    for item in result.get("removed", []):
        console.line(f"rolled back {item['name']} {item['version']}")
    for path in sorted(result["files"]):
        console.line(f"  {path}: {'restored' if result['files'][path] else 'removed'}")
    for path in result.get("saved", []):
        console.note(f"saved what was discarded: {path}")
    for note in result["notes"]:
        console.note(f"note: {note}")
    left = ", ".join(f"{item['name']} {item['version']}" for item in result.get("left", []))
    console.line(f"{session.target.name}: now {'at ' + left if left else 'without any set'}")
    opt.say_restart(console, result["processes"])
