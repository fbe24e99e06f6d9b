"""``grep``: lines of the engine's sources, on a host or in a snapshot."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli import search as where
from ddtree_deploy.errors import ExitStatus


def grep(
    ctx: typer.Context,
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="A Python regular expression.")],
    host: opt.HostOption = None,
    snapshot: where.SnapshotOption = None,
    fixed: Annotated[bool, typer.Option("-F", "--fixed", help="PATTERN is plain text.")] = False,
    ignore_case: Annotated[bool, typer.Option("-i", "--ignore-case", help="Ignore case.")] = False,
    word: Annotated[bool, typer.Option("-w", "--word", help="Match whole words.")] = False,
    context: Annotated[int | None, typer.Option("-C", metavar="N", min=0, help="Lines of context.")] = None,
    after: Annotated[int | None, typer.Option("-A", metavar="N", min=0, help="Lines of context after.")] = None,
    before: Annotated[int | None, typer.Option("-B", metavar="N", min=0, help="Lines of context before.")] = None,
    files_only: Annotated[bool, typer.Option("-l", help="Only the names of matching files.")] = False,
    count: Annotated[bool, typer.Option("-c", help="Only the number of matching lines of each file.")] = False,
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
    """Search the engine's folders for lines; the host needs nothing but python3.

    Prints path:line:text, sorted by path. Exit status 0 with a match, 1 without.
    """
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.snapshots import search

    console = opt.console_of(ctx, json_mode)
    request: dict[str, Any] = {
        "pattern": pattern,
        "fixed": fixed,
        "ignore_case": ignore_case,
        "word": word,
        "before": before if before is not None else context,
        "after": after if after is not None else context,
        "files_only": files_only,
        "count": count,
    }
    search.check_grep(request)
    files = search.Where(tuple(include or ()), tuple(exclude or ()), under)
    choice = opt.HostChoice(None, host, inventory, python, root, None, accept_new, sudo)
    found = False
    with where.place(choice, snapshot, console) as searched:
        if isinstance(searched, HostSession):
            hits = search.grep_host(searched, request, files)
        else:
            hits = search.grep_snapshot(searched, request, files)
        if json_mode:
            listed = [hit._asdict() for hit in hits]
            console.document("grep", {"pattern": pattern, "hits": listed})
            found = bool(listed)
        else:
            for hit in hits:
                console.data(hit.render() + "\n")
                found = True
    return int(ExitStatus.OK if found else ExitStatus.FINDINGS)
