"""``snapshot``, ``snapshots``, ``diff``: bring a host's engine here, list what was brought, compare."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.snapshots.store import Snapshot

PRISTINE = "pristine"


def snapshot(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    into: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Also lay the tree out here.")] = None,
    binaries: Annotated[
        bool, typer.Option("--binaries", help="Bring built objects and files above 8 MiB, too.")
    ] = False,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Bring the installed engine's source folders here, exactly, in one exec. Earlier snapshots stay."""
    from ddtree_deploy.snapshots.export import export
    from ddtree_deploy.snapshots.pull import pull
    from ddtree_deploy.snapshots.store import Store

    console = opt.console_of(ctx, json_mode)
    store = Store.default()
    choice = opt.HostChoice(host, host_option, inventory, python, root, None, accept_new, sudo)
    with opt.open_session(choice, console) as session, console.progress(f"reading {session.target.name}") as progress:
        pulled = pull(session, store, binaries=binaries, progress=progress)
    taken = pulled.snapshot
    if into is not None:
        export(taken, into)
    facts = taken.header.facts
    if json_mode:
        console.document(
            "snapshot",
            {
                "host": session.target.name,
                "snapshot": taken.id,
                "same": pulled.same,
                "earlier": pulled.earlier.id if pulled.earlier else None,
                "tree": taken.header.tree,
                "files": taken.header.count,
                "root": facts["root"],
                "record": facts["record"],
                "added": list(pulled.added),
                "changed": list(pulled.changed),
                "removed": list(pulled.removed),
                "files_fetched": pulled.files_fetched,
                "bytes_received": pulled.bytes_received,
                "bytes_sent": pulled.bytes_sent,
                "into": str(into) if into else None,
            },
        )
        return
    found = facts["root"]
    console.line(
        f"{session.target.name}: sglang {found['version'] or '(unknown version)'} at {found['site']} "
        f"(python {found['python']['version']}, installed by {found['installer'] or 'nobody known'})"
    )
    console.line(f"  {', '.join(found['parts'])}: {taken.header.count} files, tree {taken.header.tree[:16]}")
    console.line(f"  RECORD: {_record(facts['record'])}")
    wire = f"{pulled.bytes_received / 1e6:.2f} MB received"
    if pulled.same:
        console.line(f"  unchanged since {taken.id} ({wire})")
    elif pulled.earlier is None:
        console.line(f"  new snapshot {taken.id} ({wire})")
    else:
        console.line(
            f"  new snapshot {taken.id}: {len(pulled.added)} added, {len(pulled.changed)} changed, "
            f"{len(pulled.removed)} removed since {pulled.earlier.id} ({wire})"
        )
    if into is not None:
        console.line(f"  laid out in {into}")


def _record(record: dict[str, object]) -> str:
    if record["state"] != "present":
        return f"{record['state']}" + (f" ({record['problem']})" if record.get("problem") else "")
    counts = record["counts"]
    assert isinstance(counts, dict)
    missing = record["missing"]
    assert isinstance(missing, list)
    words = {"ok": "as installed", "differs": "changed", "unlisted": "not listed", "unhashed": "without a hash"}
    parts = [f"{counts[key]} {word}" for key, word in words.items() if counts.get(key)]
    return ", ".join(parts + ([f"{len(missing)} missing"] if missing else [])) or "lists nothing here"


def snapshots(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    json_mode: opt.JsonOption = False,
) -> None:
    """List the stored snapshots, oldest first."""
    from ddtree_deploy.snapshots.store import Store

    console = opt.console_of(ctx, json_mode)
    found = Store.default().snapshots(opt.HostChoice(host, host_option).host)
    if json_mode:
        console.document("snapshots", {"snapshots": [_row(item) for item in found]})
        return
    rows = [("SNAPSHOT", "ENGINE", "FILES", "ROOT")]
    for item in found:
        row = _row(item)
        rows.append((item.id, str(row["version"]), str(row["files"]), str(row["site"])))
    console.rows(rows)


def _row(item: Snapshot) -> dict[str, object]:
    header = item.header
    return {
        "id": item.id,
        "host": header.host,
        "taken": header.taken.isoformat(),
        "version": header.version,
        "files": header.count,
        "tree": header.tree,
        "site": header.facts["root"]["site"],
    }


def diff(
    ctx: typer.Context,
    one: Annotated[str, typer.Argument(metavar="A", help="A snapshot: id, host, prefix or `latest`.")],
    other: Annotated[
        str, typer.Argument(metavar="B", help="Another snapshot, or `pristine`: the published wheel.")
    ] = "pristine",
    stat: Annotated[bool, typer.Option("--stat", help="Only which files differ, and how.")] = False,
    wheel: Annotated[Path | None, typer.Option("--wheel", metavar="FILE", help="The pristine wheel to use.")] = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """What differs between two snapshots, or between a snapshot and the pristine wheel (which comes first then).

    Exit status 0 when nothing differs, 1 when something does.
    """
    from ddtree_deploy.snapshots.compare import compare, unified
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.store import Store
    from ddtree_deploy.snapshots.wheels import brought, find_wheel, tags_of

    console = opt.console_of(ctx, json_mode)
    store = Store.default()
    new: Snapshot = store.find(one)
    with contextlib.ExitStack() as stack:
        old: Snapshot | PristineTree
        if other == PRISTINE:
            facts = new.header.facts["root"]
            if new.header.version is None:
                raise DeployError("DD404", f"{new.id} does not say which sglang version it is", "name two snapshots")
            version, sources = new.header.version, opt.wheel_sources(console, wheelhouse, download=fetch)
            with console.progress("finding the pristine wheel"):
                file = brought(wheel, version) if wheel else find_wheel(version, *tags_of(facts), sources=sources)
            old = stack.enter_context(PristineTree(file))
        else:
            old, new = new, store.find(other)
        found = compare(old, new, exact_modes=other != PRISTINE)
        console.status = int(ExitStatus.FINDINGS if found else ExitStatus.OK)
        if json_mode:
            files = [{"path": item.path, "status": item.status} for item in found]
            console.document("diff", {"from": PRISTINE if other == PRISTINE else one, "to": new.id, "files": files})
        elif stat:
            console.rows([(item.status, item.path) for item in found])
        else:
            for item in found:
                console.data(unified(item, old, new).decode("utf-8", "surrogateescape"))
    return int(ExitStatus.FINDINGS if found else ExitStatus.OK)
