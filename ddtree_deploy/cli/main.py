"""The command line: every command under one entry, every failure as one line and a documented exit status."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ddtree_deploy import __version__
from ddtree_deploy.cli import (
    apply,
    demo,
    doctor,
    find_def,
    grep,
    history,
    impact,
    inventory,
    launch,
    patchset,
    recover,
    rollback,
    serving,
    snapshot,
    status,
    wheel,
)
from ddtree_deploy.cli.fleet import over_hosts
from ddtree_deploy.cli.guard import guarded
from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError

app = typer.Typer(
    name="ddtree-deploy",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Snapshot, search and patch a remote sglang install safely, and render its launch units.",
)


def _print_version(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.obj.line(f"ddtree-deploy {__version__}")
        raise typer.Exit


def _be_verbose(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.obj.verbose = True


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            callback=_be_verbose,
            expose_value=False,
            help="Show each remote step with its time, on stderr.",
        ),
    ] = False,
) -> None:
    pass


app.command("snapshot")(over_hosts(snapshot.snapshot, changes=False))
app.command("snapshots")(snapshot.snapshots)
app.command("diff")(snapshot.diff)
app.command("grep")(grep.grep)
app.command("find-def")(find_def.find_def)
app.command("apply")(over_hosts(apply.apply, changes=True))
app.command("status")(over_hosts(status.status, changes=False))
app.command("rollback")(over_hosts(rollback.rollback, changes=True))
app.command("recover")(over_hosts(recover.recover, changes=True))
app.command("history")(over_hosts(history.history, changes=False))
app.command("launch")(launch.launch)
app.command("doctor")(over_hosts(doctor.doctor, changes=False))
app.command("logs")(serving.logs)
app.add_typer(patchset.app, name="patchset")
app.command("impact")(impact.impact)
app.add_typer(wheel.app, name="wheel")
app.add_typer(inventory.app, name="inventory")
app.command("demo")(demo.demo)


@functools.cache
def _command() -> Any:
    """The whole command line; every command that contacts a host takes ``-v`` as the program itself does."""
    command: Any = typer.main.get_command(app)
    verbose = next(item for item in command.params if item.name == "verbose")
    groups = [command]
    while groups:
        for item in groups.pop().commands.values():
            if hasattr(item, "commands"):
                groups.append(item)
            elif any(param.name == "accept_new" for param in item.params):
                item.params.append(verbose)
    return command


def run(arguments: Sequence[str], console: Console) -> int:
    """Run one command line on ``console``; returns the exit status. Never raises for a user's mistake."""

    def command_line() -> Any:
        if sys.platform == "win32":
            raise DeployError("DD011", "Windows itself is not supported: run this inside WSL, where it is at home")
        result = _command().main(list(arguments), prog_name="ddtree-deploy", standalone_mode=False, obj=console)
        console.flush()
        return result

    return guarded(console, command_line)


def main() -> None:
    """The console script."""
    raise SystemExit(run(sys.argv[1:], Console()))
