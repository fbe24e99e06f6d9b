"""``explain``: what an error's or a finding's code means, what usually causes it, and what to do."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.explanations import Explanation

_WIDTH = 100


def explain(
    ctx: typer.Context,
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="Such as DD101; without one, all are listed.")
    ] = None,
    json_mode: opt.JsonOption = False,
) -> None:
    """Say what a code means, what usually causes it, and what to do: errors and the doctor's findings."""
    from ddtree_deploy.explanations import explanation, explanations

    console = opt.console_of(ctx, json_mode)
    if code is None:
        every = list(explanations().values())
        if json_mode:
            console.document("explain-list", {"codes": [dataclasses.asdict(item) for item in every]})
            return
        console.rows([("CODE", "EXIT", "TITLE"), *((item.code, _brief(item), item.title) for item in every)])
        return
    found = explanation(code)
    if json_mode:
        console.document("explain", dataclasses.asdict(found))
        return
    _print(console, found)


def _brief(item: Explanation) -> str:
    return "doctor" if item.exit_status is None else str(item.exit_status)


def _print(console: Console, item: Explanation) -> None:
    from ddtree_deploy.errors import ExitStatus

    console.line((item.code, "bold"), f"  {item.title}")
    if item.exit_status is None:
        console.line(f"a check of the doctor ({item.area}); the exit status is 1 where a check finds an error")
    else:
        word = ExitStatus(item.exit_status).name.lower().replace("_", " ")
        console.line(f"exit status {item.exit_status} ({word})")
    console.line("")
    for line in textwrap.wrap(item.means, _WIDTH):
        console.line(line)
    for title, points in (("usual causes", item.causes), ("what to do", item.mends)):
        console.line("")
        console.line((f"{title}:", "bold"))
        for point in points:
            lines = textwrap.wrap(point, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
            for line in lines:
                console.line(line)
