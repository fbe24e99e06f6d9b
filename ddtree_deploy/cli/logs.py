"""``logs``: an installed service's log."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError


def logs(
    ctx: typer.Context,
    service: Annotated[
        str | None, typer.Argument(metavar="SERVICE", help="A service; without it, the inventory's first.")
    ] = None,
    host: opt.HostOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, max=100_000, help="Begin with the last N lines.")
    ] = 100,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Print an installed service's log, with its secrets masked."""
    from ddtree_deploy.launch.run import find_service
    from ddtree_deploy.serve.files import unit_of
    from ddtree_deploy.serve.logs import log_lines

    console = opt.console_of(ctx, json_mode)
    if json_mode and follow:
        raise DeployError("DD001", "--follow has no end, and so no JSON document", "leave one of the two out")
    meant = find_service(opt.load(opt.HostChoice(inventory=inventory)), service)
    choice = opt.HostChoice(None, host or meant.host, inventory, python, None, state_dir, accept_new, sudo)
    with opt.open_session(choice, console) as session:
        found = log_lines(session, unit_of(meant), lines=lines, follow=follow)
        if json_mode:
            console.document("logs", {"host": session.target.name, "service": meant.name, "lines": list(found)})
            return
        for line in found:
            console.line(line)
            console.flush()
