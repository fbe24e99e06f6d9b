"""Every failure as one line and a documented exit status; a trace only on request."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from ddtree_deploy.console import Console, OutputClosed
from ddtree_deploy.errors import DeployError, ExitStatus

# The base of everything that the argument parser raises for a user's mistake.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


def guarded(console: Console, call: Callable[[], Any]) -> int:
    """Run ``call`` and return its exit status: what it returns, or that of what it raises, which is printed."""
    try:
        console.status = int(ExitStatus.OK)
        result = call()
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
