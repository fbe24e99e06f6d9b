"""The command line: every command under one entry, every failure as one line and a documented exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from ddtree_deploy import __version__
from ddtree_deploy.cli import (
    apply,
    demo,
    find_def,
    grep,
    history,
    inventory,
    launch,
    patchset,
    recover,
    rollback,
    snapshot,
    status,
)
from ddtree_deploy.console import Console, OutputClosed
from ddtree_deploy.errors import DeployError, ExitStatus

# The base of everything that the argument parser raises for a user's mistake.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]

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


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("snapshot")(snapshot.snapshot)
app.command("snapshots")(snapshot.snapshots)
app.command("diff")(snapshot.diff)
app.command("grep")(grep.grep)
app.command("find-def")(find_def.find_def)
app.command("apply")(apply.apply)
app.command("status")(status.status)
app.command("rollback")(rollback.rollback)
app.command("recover")(recover.recover)
app.command("history")(history.history)
app.command("launch")(launch.launch)
app.add_typer(patchset.app, name="patchset")
app.add_typer(inventory.app, name="inventory")
app.command("demo")(demo.demo)


def run(arguments: Sequence[str], console: Console) -> int:
    """Run one command line on ``console``; returns the exit status. Never raises for a user's mistake."""
    command = typer.main.get_command(app)
    try:
        console.status = int(ExitStatus.OK)
        result = command.main(list(arguments), prog_name="ddtree-deploy", standalone_mode=False, obj=console)
        console.flush()
    except DeployError as error:
        console.error(error)
        return int(error.exit_status)
    except _ParserError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "ddtree-deploy"
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        console.error(DeployError("DD001", message.strip() or "no command given", f"see `{where} --help`"))
        return int(ExitStatus.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        console.note("interrupted")
        return int(ExitStatus.INTERRUPTED)
    except (OutputClosed, BrokenPipeError):
        # The reader has seen enough (`| head`); what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return console.status
    except Exception as error:  # noqa: BLE001 - the last resort: one line, the trace only on request
        if os.environ.get("DDTREE_DEPLOY_DEBUG"):
            traceback.print_exc(file=console.stderr)
        text = str(error).splitlines()[0] if str(error) else ""
        console.error(
            DeployError(
                "DD901",
                f"{type(error).__name__}: {text}",
                "this is a bug: set DDTREE_DEPLOY_DEBUG=1 for its trace, and report it",
            )
        )
        return int(ExitStatus.INTERNAL)
    return result if isinstance(result, int) else int(ExitStatus.OK)


def main() -> None:
    """The console script."""
    raise SystemExit(run(sys.argv[1:], Console()))
