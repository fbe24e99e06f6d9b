"""``find-def``: where a symbol is defined, with its body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli import search as where
from ddtree_deploy.errors import ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.agent.definitions import Definition, Findings
    from ddtree_deploy.console import Console


def find_def(
    ctx: typer.Context,
    symbol: Annotated[str, typer.Argument(metavar="SYMBOL", help="A name, Class.method or module.path.name.")],
    host: opt.HostOption = None,
    snapshot: where.SnapshotOption = None,
    before: Annotated[int, typer.Option("--before", "-B", metavar="N", min=0, help="Lines before the def line.")] = 20,
    after: Annotated[int, typer.Option("--after", "-A", metavar="N", min=0, help="Lines after the def line.")] = 80,
    whole: Annotated[bool, typer.Option("--whole", help="The whole definition instead of a window.")] = False,
    brief: Annotated[bool, typer.Option("--list", "-l", help="No bodies.")] = False,
    refs: Annotated[bool, typer.Option("--refs", help="List the references, too.")] = False,
    include: where.IncludeOption = None,
    exclude: where.ExcludeOption = None,
    under: where.UnderOption = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """Every definition of SYMBOL, by syntax tree: functions, methods, classes, assigned names, re-exports.

    A file that holds the symbol and does not parse is listed. Exit status 0 with a definition, 1 without.
    """
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.snapshots import search

    console = opt.console_of(ctx, json_mode)
    request: dict[str, Any] = {
        "symbol": symbol,
        "before": 0 if brief else before,
        "after": 0 if brief else after,
        "whole": whole,
        "refs": refs,
    }
    search.check_find(request)
    files = search.Where(tuple(include or ()), tuple(exclude or ()), under)
    choice = opt.HostChoice(None, host, inventory, python, root, None, accept_new, sudo)
    with where.place(choice, snapshot, console) as searched:
        if isinstance(searched, HostSession):
            found = search.find_host(searched, request, files)
        else:
            found = search.find_snapshot(searched, request, files)
    if json_mode:
        console.document(
            "find-def",
            {
                "symbol": symbol,
                "definitions": [item._asdict() for item in found.definitions],
                "references": [item._asdict() for item in found.references],
                "unparsed": [item._asdict() for item in found.unparsed],
            },
        )
    else:
        _print(console, found, brief)
    return int(ExitStatus.OK if found.definitions else ExitStatus.FINDINGS)


def _print(console: Console, found: Findings, brief: bool) -> None:
    for item in found.definitions:
        console.line((f"{item.path}:{item.line}-{item.end}", "bold"), f"  {item.kind} {item.name}{_decorators(item)}")
        if brief:
            continue
        for number, line in enumerate(item.body, item.body_line):
            mark = ">" if number == item.line else " "
            console.line(f"{mark}{number:>6}  {line}")
        console.line("")
    if found.references:
        console.line(f"{len(found.references)} reference(s):")
        for reference in found.references:
            where_in = f"[{reference.label} in {reference.scope or 'module'}]"
            console.line(f"{reference.path}:{reference.line}:{reference.text}  {where_in}")
    for unparsed in found.unparsed:
        place = f"{unparsed.path}:{unparsed.line}" if unparsed.line else unparsed.path
        console.note(f"could not be parsed, and holds the symbol: {place}: {unparsed.reason}")


def _decorators(item: Definition) -> str:
    return "".join(f"  {decorator}" for decorator in item.decorators)
