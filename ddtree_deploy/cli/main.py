"""The command line: every command under one entry, every failure as one line and a documented exit status."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ddtree_deploy import __version__
from ddtree_deploy.cli.guard import guarded
from ddtree_deploy.cli.table import CommandTable
from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError

app = typer.Typer(
    name="ddtree-deploy",
    cls=CommandTable,
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


@functools.cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(arguments: Sequence[str], console: Console) -> int:
    """Run one command line on ``console``; returns the exit status. Never raises for a user's mistake."""

    def command_line() -> Any:
        if sys.platform == "win32":
            raise DeployError("DD011", "Windows itself is not supported: run this inside WSL, where it is at home")
        result = _command().main(list(arguments), prog_name="ddtree-deploy", standalone_mode=False, obj=console)
        console.flush()
        return result

    # What fails before a command has set its console, as a command line that cannot be parsed, is a document too.
    console.json_mode = "--json" in itertools.takewhile(lambda word: word != "--", arguments)
    return guarded(console, command_line)


def main() -> None:
    """The console script."""
    raise SystemExit(run(sys.argv[1:], Console()))
