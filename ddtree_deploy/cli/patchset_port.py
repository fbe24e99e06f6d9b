"""``patchset port``: a set for another engine version."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli.patchset_edit import BumpOption, SetVersionOption
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.authoring.port import FilePort, Ported
    from ddtree_deploy.console import Console
    from ddtree_deploy.patching.patchset import PatchSet
    from ddtree_deploy.snapshots.pristine import PristineTree

#: Lines of each side of a conflict that are shown; all of them are in the scratch tree and in --json.
SHOWN = 10


def port_set(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    engine: Annotated[str, typer.Option("--from", metavar="VERSION", help="An engine version that the set serves.")],
    later: Annotated[str, typer.Option("--to", metavar="VERSION", help="The engine version that it is to serve.")],
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="Where the scratch tree goes if it is to be finished by hand."),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(
            "--leave-out",
            metavar="PATCH=WHY",
            help="A patch that this version does not need, and why; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--check", help="Only say how it would go; write nothing.")] = False,
    bump: BumpOption = None,
    version: SetVersionOption = None,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """Port a set to another engine version by three-way merges of each patch and file.

    What can move becomes a family for that version. Otherwise nothing is written into the set: what is left to do
    is told, and a scratch tree holds it with conflict markers, to be finished with `patchset refresh --from DIR`.
    Exit status 0 when the set now serves (or need not serve) the version, 1 when a person has to finish it.
    """
    from ddtree_deploy.authoring import port
    from ddtree_deploy.authoring.settle import bumped
    from ddtree_deploy.authoring.write import read_folder, write_sets
    from ddtree_deploy.patching.patchset import load_closure
    from ddtree_deploy.resources import own_patches_dir, patches_dir
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.wheels import find_wheels

    console = opt.console_of(ctx, json_mode)
    if engine == later:
        raise DeployError("DD001", f"--from and --to are both {engine}", "name two versions")
    if bump and version:
        raise DeployError("DD001", "--bump and --set-version exclude each other", "give one of them")
    without = {text.partition("=")[0]: text.partition("=")[2] for text in leave_out or ()}
    folder = patches_dir(patches) if dry_run else own_patches_dir(patches)
    closure = load_closure(name, folder)
    place = None if dry_run else read_folder(folder / name)
    wheels = find_wheels([engine, later], sources=opt.wheel_sources(console, wheelhouse, download=fetch))
    with contextlib.ExitStack() as stack:
        earlier_tree, later_tree = (stack.enter_context(PristineTree(wheels[key])) for key in (engine, later))
        with console.progress("porting"):
            ported = port.port_set(closure, engine, later, earlier_tree, later_tree, without)
        scratch = None
        if version or bump:
            new = version or bumped(closure[-1].version, str(bump))
            ported = dataclasses.replace(ported, patch_set=dataclasses.replace(ported.patch_set, version=new))
        if place is not None and ported.complete:
            write_sets([(place, ported.patch_set)])
        elif place is not None:
            scratch = _scratch(ported, later, later_tree, into, folder, place.digest)
    if json_mode:
        console.document("patchset-port", _document(ported, engine, later, scratch, dry_run))
    else:
        _print(console, ported, engine, later)
        _print_end(console, ported, closure[-1], later, scratch, dry_run)
    return int(ExitStatus.OK if ported.complete else ExitStatus.FINDINGS)


def _scratch(
    ported: Ported,
    later: str,
    tree: PristineTree,
    into: Path | None,
    patches: Path,
    digest: str | None,
) -> Path:
    """A scratch tree with what could be ported, and with the conflicts' markers in its files."""
    from ddtree_deploy.authoring.scratch import State, default_folder, make_scratch
    from ddtree_deploy.authoring.stack import Pristine, stack_of

    assert ported.stack is not None and ported.family is not None
    item = ported.patch_set
    folder = (into or default_folder(item.name, later)).absolute()
    pristine = Pristine(tree, {path: tree.mode(path) for path in tree})
    state = State(item.name, later, ported.family, str(patches), digest, True)
    stack = stack_of((*ported.stack.sets[:-1], item), later, pristine)
    scratch = make_scratch(folder, state, stack, pristine)
    for path, data in ported.marked.items():
        (scratch.folder / path).write_bytes(data)
    return scratch.folder


def _print(console: Console, ported: Ported, engine: str, later: str) -> None:
    console.line((f"{ported.patch_set.name} {ported.patch_set.version}", "bold"), f": sglang {engine} -> {later}")
    for patch in ported.patches:
        console.line(f"  {patch.name}: {patch.how}{f' ({patch.why})' if patch.why else ''}")
        for file in patch.files:
            moved = f" -> {file.now}" if file.now not in (file.path, None) else ""
            console.line(f"    {file.how:16}  {file.path}{moved}")
            _print_file(console, file, later, engine, patch.name)
    for problem in ported.problems:
        console.line(f"  {problem}")


def _print_file(console: Console, file: FilePort, later: str, engine: str, patch: str) -> None:
    if file.problem:
        console.line(f"      {file.problem}")
    if file.look:
        console.line(f"      look at: {', '.join(file.look)} (sglang {later} changed it too)")
    for clash in file.clashes:
        by = f"; upstream changed {', '.join(clash.functions)}" if clash.functions else ""
        console.line(f"      conflict at line {clash.conflict.line}{by}")
        sides = (
            (f"sglang {later}", clash.conflict.ours),
            (f"sglang {engine}", clash.conflict.base),
            (patch, clash.conflict.theirs),
        )
        for label, text in sides:
            console.line(f"        --- {label}")
            lines = text.decode("utf-8", "replace").splitlines()
            for line in lines[:SHOWN]:
                console.line(f"        {line}")
            if len(lines) > SHOWN:
                console.line(f"        ({len(lines) - SHOWN} more lines)")


def _print_end(
    console: Console, ported: Ported, old: PatchSet, later: str, scratch: Path | None, dry_run: bool
) -> None:
    name = ported.patch_set.name
    if not ported.complete:
        lost = [patch.name for patch in ported.patches if patch.how == "conflict" and patch.patch is None]
        for patch in lost:
            console.note(f"nothing of {patch} could be ported: put it back with `refresh --new {patch}`")
        if scratch is not None:
            torn = [patch.name for patch in ported.patches if patch.how == "conflict" and patch.patch is not None]
            owner = f" --into {torn[0]}" if len(torn) == 1 else ""
            console.note(f"finish it in {scratch}, then: ddtree-deploy patchset refresh --from {scratch}{owner}")
        console.note(f"{name} {later}: not ported, nothing was written into the set")
        return
    if ported.patch_set.version == old.version and not dry_run:
        console.note(
            f"the content of {name} changed and its version did not: still {old.version} (--bump, --set-version)"
        )
    would = "would be" if dry_run else "is"
    if ported.family is None:
        console.note(f"{name} {later}: {would} declared as not needed: {ported.patch_set.unneeded[later]}")
    elif ported.joined:
        console.note(f"{name} {later}: {would} one more version of the family {ported.family}, with hashes of its own")
    else:
        count = len(ported.patch_set.families[ported.family].patches)
        console.note(f"{name} {later}: {would} a new family of {count} patch{'es' if count != 1 else ''}")


def _document(ported: Ported, engine: str, later: str, scratch: Path | None, dry_run: bool) -> dict[str, object]:
    return {
        "name": ported.patch_set.name,
        "version": ported.patch_set.version,
        "from": engine,
        "to": later,
        "complete": ported.complete,
        "written": ported.complete and not dry_run,
        "family": ported.family,
        "joined": ported.joined,
        "unneeded": ported.patch_set.unneeded.get(later),
        "scratch": str(scratch) if scratch else None,
        "problems": list(ported.problems),
        "patches": [
            {"name": patch.name, "how": patch.how, "why": patch.why, "files": [_file(file) for file in patch.files]}
            for patch in ported.patches
        ],
    }


def _file(file: FilePort) -> dict[str, object]:
    return {
        "path": file.path,
        "now": file.now,
        "how": file.how,
        "problem": file.problem,
        "look": list(file.look),
        "conflicts": [
            {
                "line": clash.conflict.line,
                "functions": list(clash.functions),
                "ours": clash.conflict.ours.decode("utf-8", "replace"),
                "base": clash.conflict.base.decode("utf-8", "replace"),
                "theirs": clash.conflict.theirs.decode("utf-8", "replace"),
            }
            for clash in file.clashes
        ],
    }
