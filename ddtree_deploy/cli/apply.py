"""``apply``: bring patch sets, and all that they require, onto a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli import serving
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.deploy.apply import Applied
    from ddtree_deploy.patching.plan import Layer


def apply(
    ctx: typer.Context,
    patchset: Annotated[
        list[str],
        typer.Argument(
            metavar="PATCHSET...",
            help="A set's name, a .patch file, or a folder with a series; of several, the first lies lowest.",
        ),
    ],
    host: opt.HostOption = None,
    check: Annotated[bool, typer.Option("--check", help="Plan only: say what would be done, write nothing.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Import the changed modules on the host before the change is final.")
    ] = False,
    downgrade: Annotated[
        bool, typer.Option("--downgrade", help="Let an older version of a set replace the newer one that is applied.")
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
    restart: serving.ServiceOption = None,
    undo: serving.UndoOption = False,
    deadline: serving.DeadlineOption = 1800.0,
    patches: opt.PatchesOption = None,
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
    """Apply sets and all that they require: all files of all of them, or none.

    Another version that is applied is replaced in the same transaction, and what builds on it comes along.
    """
    from ddtree_deploy.deploy.apply import apply_sets
    from ddtree_deploy.patching.patchset import find_together, survey_sets
    from ddtree_deploy.resources import patches_dir

    console = opt.console_of(ctx, json_mode)
    if check and restart is not None:
        raise DeployError("DD001", "--check changes nothing, so nothing is restarted", "leave --restart out")
    if undo and restart is None:
        raise DeployError("DD001", "--undo is for --restart", "name the service: --restart SERVICE")
    folder = patches_dir(patches)
    sets = find_together(patchset, folder, strip=strip, any_suffix=any_suffix)
    choice = opt.HostChoice(None, host, inventory, python, root, state_dir, accept_new, sudo)
    around = None
    with opt.open_session(choice, console) as session:

        def run(only_check: bool) -> Applied:
            return apply_sets(
                session,
                sets,
                console,
                known=lambda: survey_sets(folder)[0],
                downgrade=downgrade,
                check=only_check,
                smoke=smoke,
                live=live,
                break_links=break_links,
                wait=wait,
                reason=reason,
            )

        if restart is None:
            applied = run(check)
        else:
            around = serving.apply_around(
                session, restart, inventory, console, run, undo=undo, deadline_s=deadline, wait=wait, reason=reason
            )
            applied = around.applied
    if not json_mode:
        _print(console, applied, check)
        if around is not None:
            serving.print_around(console, applied.facts.host, around)
    restarted = {} if around is None else {"restart": serving.around_document(around)}
    error = around.error(applied.facts.host) if around and around.failed else None
    console.outcome("apply", {**_document(applied, check), **restarted}, error)


def _document(applied: Applied, check: bool) -> dict[str, object]:
    result = applied.result
    return {
        "host": applied.facts.host,
        "engine": applied.facts.engine,
        "site": applied.facts.status["root"]["site"],
        "check": check,
        "changed": result is not None,
        "transaction": result["transaction"] if result else None,
        "sets": [
            {
                "name": layer.patch_set.name,
                "version": layer.patch_set.version,
                "from": applied.ground.replaced.get(layer.patch_set.name),
                "family": layer.status.family.name,
                "state": _state(layer, check),
                "files": _entries(layer),
            }
            for layer in applied.plan.layers
        ],
        "undone": _undone(applied),
        "files": dict(result["files"]) if result else {},
        "notices": _notices(applied),
        "processes": result["processes"] if result else applied.facts.status["processes"],
        "forgotten": list(applied.ground.lost),
    }


def _entries(layer: Layer) -> dict[str, object]:
    from ddtree_deploy.deploy.facts import entry_of

    return {path: entry_of(change.after) for path, change in layer.changes.items()}


def _undone(applied: Applied) -> list[dict[str, str]]:
    """Sets that go, and that nothing takes the place of."""
    new = {layer.patch_set.name for layer in applied.plan.to_apply}
    return [{"name": name, "version": old} for name, old in applied.ground.replaced.items() if name not in new]


def _notices(applied: Applied) -> list[str]:
    ground = applied.ground
    new = {layer.patch_set.name for layer in applied.plan.to_apply}
    along = [f"{name} comes along: it builds on what is replaced" for name in ground.along]
    lost = [
        f"{name} had been lost in a reinstall; "
        + (
            "its old record is replaced"
            if name in new
            else "it is forgotten and what it added is removed: apply it again"
        )
        for name in (ground.lost if applied.to_do else ())
    ]
    return [*ground.notices, *along, *applied.plan.notices, *(applied.result["notes"] if applied.result else []), *lost]


def _state(layer: Layer, check: bool) -> str:
    from ddtree_deploy.patching.classify import State

    if layer.status.state is State.UNNEEDED:
        return "not needed"
    if not layer.changes:
        return "already applied"
    return "would be applied" if check else "applied"


def _print(console: Console, applied: Applied, check: bool) -> None:
    host, result, old = applied.facts.host, applied.result, applied.ground.replaced
    console.line(f"{host}: sglang {applied.facts.engine} at {applied.facts.status['root']['site']}")
    for layer in applied.plan.layers:
        item = layer.patch_set
        before = old.get(item.name) if layer.changes else None
        version = f"{before} -> {item.version}" if before not in (None, item.version) else item.version
        many = f"  {len(layer.changes)} file(s), family {layer.status.family.name}" if layer.changes else ""
        console.line(f"{item.name} {version}  ", (_state(layer, check), "green"), many)
        for path, change in layer.changes.items() if not applied.ground.taken else ():
            console.line(f"  {_verb(change.before, change.after)} {path}")
    for gone in _undone(applied):
        console.line(f"{gone['name']} {gone['version']}  ", ("would be undone" if check else "undone", "green"))
    if applied.ground.taken:
        # What an old layer did and what the new one does meet in the same files: each is written once.
        for path, (now, then) in applied.changes.items():
            console.line(f"  {_verb(now, then)} {path}")
    for notice in _notices(applied):
        console.note(f"note: {notice}")
    if result:
        count = len(result["files"])
        read = f"{count} file(s) read back, each with the planned sha256" if count else "recorded; no file differs"
        console.line(f"{host}: {read}")
        opt.say_restart(console, result["processes"])
    elif not applied.to_do:
        console.line(f"{host}: already applied, nothing was written")
    else:
        console.line(f"{host}: checked only, nothing was written")
        for process in applied.facts.status["processes"]:
            console.note(f"note: pid {process['pid']} runs from here; `apply` will want it stopped, or --live")


def _verb(before: object, after: object) -> str:
    return f"{'add' if before is None else 'delete' if after is None else 'change':<6}"
