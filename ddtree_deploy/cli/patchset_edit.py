"""``patchset new``, ``edit``, ``refresh``, ``reorder`` and ``drop``: writing patch sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from ddtree_deploy.authoring.desk import Desk, Report, Versioning
    from ddtree_deploy.authoring.scratch import Scratch
    from ddtree_deploy.authoring.stack import Pristine
    from ddtree_deploy.console import Console
    from ddtree_deploy.snapshots.wheels import Sources


class Bump(StrEnum):
    """Which number of a version goes up."""

    PATCH = "patch"
    MINOR = "minor"
    MAJOR = "major"


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The set.")]
EngineOption = Annotated[
    str | None, typer.Option("--engine", metavar="VERSION", help="Engine version; needed if the set serves several.")
]
BumpOption = Annotated[Bump | None, typer.Option("--bump", help="Raise this number of the set's version.")]
SetVersionOption = Annotated[str | None, typer.Option("--set-version", metavar="X", help="The set's new version.")]
SplitOption = Annotated[
    str | None,
    typer.Option(
        "--split", metavar="FAMILY", help="Where some versions do not take the change: a family of those that do."
    ),
]
DependentsOption = Annotated[
    bool, typer.Option("--with-dependents", help="Make the hashes of sets that require this one anew, too.")
]


def new_set(
    ctx: typer.Context,
    name: NameArgument,
    engine: Annotated[
        list[str], typer.Option("--engine", metavar="VERSION", help="Engine version to serve; may be given again.")
    ],
    summary: Annotated[str, typer.Option("--summary", metavar="TEXT", help="What the set is for, in one line.")],
    requires: Annotated[
        str | None, typer.Option("--requires", metavar="A,B", help="Sets that are applied before it, in order.")
    ] = None,
    patches: opt.PatchesOption = None,
    json_mode: opt.JsonOption = False,
) -> None:
    """Begin a patch set: a folder with a patchset.toml and an empty series."""
    console = opt.console_of(ctx, json_mode)
    below = [item.strip() for item in (requires or "").split(",") if item.strip()]
    with _desk(patches, None) as desk:
        made = desk.begin(name, list(dict.fromkeys(engine)), summary, below)
        folder = desk.patches / made.name
    if json_mode:
        document = {"name": made.name, "version": made.version, "engines": list(made.engines), "folder": str(folder)}
        console.document("patchset-new", {**document, "requires": list(made.requires)})
    else:
        console.line(str(folder))
    console.note(f"{name} {', '.join(made.engines)}: no patches yet; next: `patchset edit {name}`")


def edit_set(
    ctx: typer.Context,
    name: NameArgument,
    engine: EngineOption = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Where to put the tree; default: the data folder.")
    ] = None,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    offline: opt.OfflineOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Unpack the engine with the set applied, as a git repository to edit with anything; prints its folder.

    `patchset refresh` takes the edits up again. Commits there are yours: refresh goes by the files.
    """
    console = opt.console_of(ctx, json_mode)
    sources = opt.wheel_sources(console, wheelhouse, download=fetch, offline=offline)
    with _desk(patches, sources) as desk:
        version = _engine(desk, name, engine)
        with console.progress(f"unpacking sglang {version}"):
            scratch, kept = desk.edit(name, version, into)
        count = len(desk.closure(name)[-1].families[scratch.state.family].patches)
    if json_mode:
        console.document(
            "patchset-edit", {"name": name, "engine": version, "folder": str(scratch.folder), "kept_commits": kept}
        )
    else:
        console.line(str(scratch.folder))
    if kept:
        console.note(f"note: your commits are on the branch {kept}")
    _say_where(console, name, version, count, "scratch clean")


def refresh_set(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The set; else the only scratch tree's.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="The scratch tree; else the one here, or of NAME.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="VERSION", help="Which of NAME's scratch trees.")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="PATCH", help="For edits of nobody's lines: a patch, by number or name."),
    ] = None,
    new: Annotated[
        str | None, typer.Option("--new", metavar="NAME", help="For edits of nobody's lines: a new patch at the end.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="With --into or --new: take every edit, whosever the lines are.")
    ] = False,
    message: Annotated[
        str, typer.Option("-m", "--message", metavar="TEXT", help="With --new: the text at the head of the patch.")
    ] = "",
    bump: BumpOption = None,
    set_version: SetVersionOption = None,
    split: SplitOption = None,
    with_dependents: DependentsOption = False,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="No scratch tree: hashes from the patches and new/ as they stand.")
    ] = False,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    offline: opt.OfflineOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Write the edits of a scratch tree back: each into the patch that owns the lines, and the hashes anew."""
    from ddtree_deploy.authoring.desk import Spread
    from ddtree_deploy.authoring.refresh import Wishes

    console = opt.console_of(ctx, json_mode)
    sources = opt.wheel_sources(console, wheelhouse, download=fetch, offline=offline)
    versioning, spread = _versioning(bump, set_version), Spread(split, with_dependents)
    wishes = Wishes(into, new, message, everything)
    if rehash:
        if name is None or source is not None or wishes != Wishes():
            raise DeployError("DD001", "--rehash needs NAME, and takes nothing from a scratch tree")
        with _desk(patches, sources) as desk, console.progress(f"rehashing {name}"):
            report = desk.rehash(name, versioning, spread)
        _report(console, "refresh", report, json_mode)
        return
    scratch = _scratch(name, source, engine, patches)
    with (
        _desk(Path(scratch.state.patches), sources) as desk,
        console.progress(f"refreshing {scratch.name}"),
    ):
        report = desk.refresh(scratch, wishes, versioning, spread)
    _report(console, "refresh", report, json_mode)


def reorder_set(
    ctx: typer.Context,
    name: NameArgument,
    order: Annotated[
        list[str] | None, typer.Argument(metavar="[PATCH]...", help="All patches in the new order.")
    ] = None,
    engine: EngineOption = None,
    move: Annotated[str | None, typer.Option("--move", metavar="PATCH", help="Move this one instead ...")] = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="PATCH", help="... before this one; else to the end.")
    ] = None,
    bump: BumpOption = None,
    set_version: SetVersionOption = None,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    offline: opt.OfflineOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Put a family's patches into another order, where that gives the same files."""
    from ddtree_deploy.authoring.order import moved

    console = opt.console_of(ctx, json_mode)
    if bool(order) == bool(move) or (before and not move):
        raise DeployError("DD001", "say the new order: all patches, or --move PATCH [--before PATCH]")
    sources = opt.wheel_sources(console, wheelhouse, download=fetch, offline=offline)
    with _desk(patches, sources) as desk, console.progress(f"reordering {name}"):
        version = _engine(desk, name, engine)
        names = desk.patch_names(name, version)
        wanted = moved(names, move, before) if move else list(order or ())
        report = desk.reorder(name, version, wanted, _versioning(bump, set_version))
    _report(console, "reorder", report, json_mode)


def drop_patch(
    ctx: typer.Context,
    name: NameArgument,
    patch: Annotated[str, typer.Argument(metavar="PATCH", help="The patch to drop.")],
    engine: EngineOption = None,
    because: Annotated[
        str | None,
        typer.Option("--because", metavar="TEXT", help="Why this family does without a patch that others have."),
    ] = None,
    bump: BumpOption = None,
    set_version: SetVersionOption = None,
    split: SplitOption = None,
    with_dependents: DependentsOption = False,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    offline: opt.OfflineOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Take a patch out of a family, where no later one builds on it."""
    from ddtree_deploy.authoring.desk import Spread

    console = opt.console_of(ctx, json_mode)
    sources = opt.wheel_sources(console, wheelhouse, download=fetch, offline=offline)
    with _desk(patches, sources) as desk, console.progress(f"dropping {patch}"):
        version = _engine(desk, name, engine)
        versioning, spread = _versioning(bump, set_version), Spread(split, with_dependents)
        report = desk.drop(name, version, patch, versioning, spread, because)
    _report(console, "drop", report, json_mode)


# -- what they share ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _desk(patches: Path | None, sources: Sources | None) -> Iterator[Desk]:
    """The folder of patch sets, open for writing, with the wheels that it needs."""
    from ddtree_deploy.authoring.desk import Desk
    from ddtree_deploy.authoring.stack import Pristine
    from ddtree_deploy.resources import own_patches_dir
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.wheels import find_wheel

    with contextlib.ExitStack() as stack:
        trees: dict[str, Pristine] = {}

        def pristine_of(engine: str) -> Pristine:
            if engine not in trees:
                assert sources is not None
                wheel = find_wheel(engine, sources=sources, any_tags=True)
                tree = stack.enter_context(PristineTree(wheel))
                trees[engine] = Pristine(tree, {path: tree.mode(path) for path in tree}, tree.sha256)
            return trees[engine]

        yield Desk(own_patches_dir(patches), pristine_of)


def _engine(desk: Desk, name: str, engine: str | None) -> str:
    """The engine version that is meant: the only one that the set serves, if none is named."""
    engines = desk.closure(name)[-1].engines
    if engine is None and len(engines) > 1:
        raise DeployError("DD001", f"{name} serves {', '.join(engines)}", "name one: --engine VERSION")
    return engine or engines[0]


def _scratch(name: str | None, source: Path | None, engine: str | None, patches: Path | None) -> Scratch:
    """The scratch tree that is meant: ``--from``, the one around the working folder, or the only one that fits."""
    from ddtree_deploy.authoring.scratch import open_scratch, scratch_around, the_scratch

    found = open_scratch(source.absolute()) if source else scratch_around(Path.cwd())
    if found is not None and name is not None and found.state.set != name:
        if source is not None:
            raise DeployError("DD118", f"{source} is a scratch tree of {found.name}, not of {name}")
        found = None
    if found is not None and patches is not None and not found.is_from(patches):
        raise DeployError(
            "DD118", f"{found.folder} is of the patch sets in {found.state.patches}", "leave out --patches"
        )
    return found or the_scratch(name, engine, patches)


def _versioning(bump: Bump | None, exact: str | None) -> Versioning:
    from ddtree_deploy.authoring.desk import Versioning

    if bump and exact:
        raise DeployError("DD001", "--bump and --set-version exclude one another", "name one")
    return Versioning(bump.value if bump else None, exact)


def _report(console: Console, command: str, report: Report, json_mode: bool) -> None:
    top = report.written[0] if report.written else None
    if json_mode:
        console.document(
            f"patchset-{command}",
            {
                "name": report.name,
                "engine": report.engine,
                "written": [{"name": item.name, "version": item.version} for item in report.written],
                "changes": list(report.lines),
                "notices": list(report.notices),
                "patches": list(report.patches),
            },
        )
    else:
        for line in report.lines:
            console.line(line)
    for notice in report.notices:
        console.note(f"note: {notice}")
    state = f"version {top.version} written" if top else "nothing to write"
    _say_where(console, report.name, report.engine, len(report.patches), state)


def _say_where(console: Console, name: str, engine: str, count: int, state: str) -> None:
    console.note(f"{name} {engine}: {count} patch{'' if count == 1 else 'es'}, {state}")
