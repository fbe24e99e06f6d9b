"""``impact``: before an upgrade of the engine, what it changes of that which the patch sets change."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.authoring.impact import FileImpact, SetImpact
    from ddtree_deploy.console import Console


def impact(
    ctx: typer.Context,
    engine: Annotated[str, typer.Option("--from", metavar="VERSION", help="The engine version that the sets are for.")],
    later: Annotated[str, typer.Option("--to", metavar="VERSION", help="The engine version to compare it with.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SET]...", help="The sets; without any, all that serve the first.")
    ] = None,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """Which files and functions of the patch sets changed upstream between two engine versions.

    Exit status 0 when none of the sets' files changed, 1 when some did.
    """
    from ddtree_deploy.authoring.impact import impact_of
    from ddtree_deploy.patching.patchset import load_closure, survey_sets
    from ddtree_deploy.resources import patches_dir
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.wheels import find_wheels

    console = opt.console_of(ctx, json_mode)
    if engine == later:
        raise DeployError("DD001", f"--from and --to are both {engine}", "name two versions")
    folder = patches_dir(patches)
    if not names:
        sound, broken = survey_sets(folder)
        opt.say_broken(console, broken)
        names = [name for name, item in sound.items() if item.family_for(engine) is not None]
        if not names:
            raise DeployError("DD109", f"no patch set serves sglang {engine}", "see `ddtree-deploy patchset list`")
    closures = [load_closure(name, folder) for name in names]
    sources = opt.wheel_sources(console, wheelhouse, download=fetch)
    files = find_wheels([engine, later], sources=sources)
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(PristineTree(file)) for file in files.values())
        with console.progress("comparing the engines"):
            found = [impact_of(closure, engine, one, two) for closure in closures]
    clean = all(item.clean for item in found)
    if json_mode:
        document = {"from": engine, "to": later, "clean": clean, "sets": [_document(item) for item in found]}
        console.document("impact", document)
    else:
        for item in found:
            _print(console, item, engine, later)
    return int(ExitStatus.OK if clean else ExitStatus.FINDINGS)


def _print(console: Console, item: SetImpact, engine: str, later: str) -> None:
    console.line((f"{item.patch_set.name} {item.patch_set.version}", "bold"), f": sglang {engine} -> {later}")
    for file in item.files:
        change = file.change
        if change.fate == "absent":  # the set adds it, and upstream has nothing there
            continue
        console.line(f"  {change.fate:9}  {change.path}", f" -> {change.now}" if change.fate == "moved" else "")
        if change.candidates:
            console.line(f"             of that name now: {', '.join(change.candidates)}")
        if change.functions.problem:
            console.line(f"             {change.functions.problem}")
        for touched in file.touched:
            console.line(f"    {touched.how:7}  {touched.name}  ({', '.join(touched.patches)})")
            if touched.now:
                console.line(f"             of that name now: {', '.join(touched.now)}")
        if file.others:
            console.line(f"             {file.others} other{'s' if file.others > 1 else ''} changed or removed")
    changed = sum(not file.clean for file in item.files)
    met = sum(len(file.touched) for file in item.files)
    console.line(f"  {changed} of {len(item.files)} files changed, and in them {met} functions that the set changes")


def _document(item: SetImpact) -> dict[str, object]:
    return {
        "name": item.patch_set.name,
        "version": item.patch_set.version,
        "family": item.family,
        "clean": item.clean,
        "files": [_file(file) for file in item.files],
    }


def _file(file: FileImpact) -> dict[str, object]:
    functions = file.change.functions
    return {
        "path": file.change.path,
        "now": file.change.now,
        "state": str(file.change.fate),
        "candidates": list(file.change.candidates),
        "problem": functions.problem,
        "patches": list(file.patches),
        "touched": [
            {"function": item.name, "how": item.how, "patches": list(item.patches), "now": list(item.now)}
            for item in file.touched
        ],
        "changed": [before.name for before, _ in functions.changed],
        "removed": [function.name for function in functions.removed],
        "added": [function.name for function in functions.added],
    }
