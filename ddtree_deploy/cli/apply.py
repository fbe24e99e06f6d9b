"""``apply``: bring a patch set, and all that it requires, onto a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.deploy.apply import Applied


def apply(
    ctx: typer.Context,
    patchset: Annotated[
        str, typer.Argument(metavar="PATCHSET", help="A set's name, a .patch file, or a folder with a series.")
    ],
    host: opt.HostOption = None,
    check: Annotated[bool, typer.Option("--check", help="Plan only: say what would be done, write nothing.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Import the changed modules on the host before the change is final.")
    ] = False,
    live: opt.LiveOption = False,
    break_links: Annotated[
        bool, typer.Option("--break-links", help="Replace symlinked files (into a package cache) by patched copies.")
    ] = False,
    strip: Annotated[
        int, typer.Option("--strip", "-p", metavar="N", min=0, help="Folders to strip from an ad-hoc diff's paths.")
    ] = 1,
    any_suffix: Annotated[
        bool, typer.Option("--any-suffix", help="Let an ad-hoc diff touch files of unusual kinds.")
    ] = False,
    wait: opt.WaitOption = 0.0,
    reason: opt.ReasonOption = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Apply a set and all that it requires: all files of all of them, or none."""
    from ddtree_deploy.deploy.apply import apply_sets
    from ddtree_deploy.patching.patchset import find_sets
    from ddtree_deploy.resources import patches_dir

    console = opt.console_of(ctx, json_mode)
    sets = find_sets(patchset, patches_dir(), strip=strip, any_suffix=any_suffix)
    choice = opt.HostChoice(None, host, inventory, python, root, state_dir, accept_new, sudo)
    with opt.open_session(choice, console) as session:
        applied = apply_sets(
            session,
            sets,
            console,
            check=check,
            smoke=smoke,
            live=live,
            break_links=break_links,
            wait=wait,
            reason=reason,
        )
    if json_mode:
        console.document("apply", _document(applied, check))
    else:
        _print(console, applied, check)


def _document(applied: Applied, check: bool) -> dict[str, object]:
    from ddtree_deploy.deploy.facts import entry_of

    return {
        "host": applied.facts.host,
        "engine": applied.facts.engine,
        "site": applied.facts.status["root"]["site"],
        "check": check,
        "changed": applied.result is not None,
        "transaction": applied.result["transaction"] if applied.result else None,
        "sets": [
            {
                "name": layer.patch_set.name,
                "version": layer.patch_set.version,
                "family": layer.status.family.name,
                "state": _state(bool(layer.changes), check),
                "files": {path: entry_of(change.after) for path, change in layer.changes.items()},
            }
            for layer in applied.plan.layers
        ],
        "files": dict(applied.result["files"]) if applied.result else {},
        "notices": [*applied.plan.notices, *(applied.result["notes"] if applied.result else [])],
        "processes": applied.result["processes"] if applied.result else applied.facts.status["processes"],
        "forgotten": list(applied.forgotten),
    }


def _state(changes: bool, check: bool) -> str:
    if not changes:
        return "already applied"
    return "would be applied" if check else "applied"


def _print(console: Console, applied: Applied, check: bool) -> None:
    host, result = applied.facts.host, applied.result
    console.line(f"{host}: sglang {applied.facts.engine} at {applied.facts.status['root']['site']}")
    for layer in applied.plan.layers:
        item = layer.patch_set
        state = _state(bool(layer.changes), check)
        count = f"  {len(layer.changes)} file(s), family {layer.status.family.name}" if layer.changes else ""
        console.line(f"{item.name} {item.version}  ", (state, "green"), count)
        for path, change in layer.changes.items():
            verb = "add" if change.before is None else "delete" if change.after is None else "change"
            console.line(f"  {verb:<6} {path}")
    for notice in (*applied.plan.notices, *(result["notes"] if result else ())):
        console.note(f"note: {notice}")
    for name in applied.forgotten:
        console.note(f"note: {name} had been lost in a reinstall; its old record was replaced")
    if result:
        console.line(f"{host}: {len(result['files'])} file(s) read back, each with the planned sha256")
        opt.say_restart(console, result["processes"])
        return
    if not applied.plan.to_apply:
        console.line(f"{host}: already applied, nothing was written")
    else:
        console.line(f"{host}: checked only, nothing was written")
        for process in applied.facts.status["processes"]:
            console.note(f"note: pid {process['pid']} runs from here; `apply` will want it stopped, or --live")
