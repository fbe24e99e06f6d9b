"""``history``: what was done to a host's tree, by whom and why."""

from __future__ import annotations

import typer

from ddtree_deploy.cli import options as opt


def history(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Who changed the tree: when, which set and version, the reason, the outcome. Oldest first."""
    from ddtree_deploy.deploy.recover import say_sets

    console = opt.console_of(ctx, json_mode)
    choice = opt.HostChoice(host, host_option, inventory, python, root, state_dir, accept_new, sudo)
    with opt.open_session(choice, console) as session:
        result = session.call("history", {})
    if json_mode:
        console.document("history", {"host": session.target.name, **result})
        return
    if not result["history"]:
        console.line(f"{session.target.name}: nothing was ever changed here")
        return
    rows = [("TIME", "WHAT", "SETS", "ENGINE", "WHO", "OUTCOME", "REASON")]
    for item in result["history"]:
        rows.append(
            (
                str(item.get("time")),
                str(item.get("kind")),
                say_sets(item),
                str(item.get("engine")),
                str(item.get("who")),
                str(item.get("outcome")),
                item.get("reason") or "-",
            )
        )
    console.rows(rows)
