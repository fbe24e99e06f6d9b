"""``recover``: finish or undo an interrupted transaction."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_deploy.cli import options as opt


def recover(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Undo over files that were edited since; their bytes are saved first.")
    ] = False,
    wait: opt.WaitOption = 0.0,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Finish or undo a transaction that a crash interrupted, and say which."""
    from ddtree_deploy.deploy import recover as recovery
    from ddtree_deploy.serve.install import describe, recover_units

    console = opt.console_of(ctx, json_mode)
    choice = opt.HostChoice(host, host_option, inventory, python, root, state_dir, accept_new, sudo)
    with opt.open_session(choice, console) as session:
        result = recovery.recover(session, force=force, wait=wait)
        units = recover_units(session, force=force, wait=wait)
    if json_mode:
        console.document("recover", {"host": session.target.name, **result, "services": units})
        return
    console.line(f"{session.target.name}: {recovery.describe(result)}")
    for path in result["paths"]:
        console.line(f"  restored {path}")
    for note in result["notes"]:
        console.note(f"  {note}")
    for unit in units:
        console.line(f"{session.target.name}: {describe(unit)}")
        for path in unit["paths"]:
            console.line(f"  restored {path}")
        for note in unit["notes"]:
            console.note(f"  {note}")
