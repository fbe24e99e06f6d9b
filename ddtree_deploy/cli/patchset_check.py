"""``patchset check``: whether sets hold on every engine version that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.authoring.check import Checked
    from ddtree_deploy.console import Console


def check_sets(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="The sets.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every set.")] = False,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="VERSION", help="Only this engine version; may be given again."),
    ] = None,
    patches: opt.PatchesOption = None,
    wheelhouse: opt.WheelhouseOption = None,
    fetch: opt.FetchOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """Check sets in memory on the pristine wheels of every version that they name.

    Each is applied, byte-compiled, held against its hashes and undone, and what its lines use of the engine must be
    there. Exit status 1 with findings.
    """
    from ddtree_deploy.authoring.check import CHECKS, check_set
    from ddtree_deploy.patching.patchset import load_closure, survey_sets
    from ddtree_deploy.resources import patches_dir
    from ddtree_deploy.snapshots.pins import version_key
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.wheels import find_wheels

    console = opt.console_of(ctx, json_mode)
    folder = patches_dir(patches)
    if bool(names) == every:
        raise DeployError(
            "DD001", "name the sets to check, or give --all" if not names else "NAME and --all exclude each other"
        )
    if every:
        sound, broken = survey_sets(folder)
        if broken:
            details = [problem.text for problems in broken.values() for problem in problems]
            raise DeployError("DD108", f"{len(broken)} of the patch sets are not valid", details=details)
        names = list(sound)
    closures = [load_closure(name, folder) for name in dict.fromkeys(names or ())]
    wanted = [
        (engine, closure)
        for closure in closures
        for engine in (*closure[-1].engines, *closure[-1].unneeded)
        if not engines or engine in engines
    ]
    known = {engine for engine, _ in wanted}
    odd = [engine for engine in engines or () if engine not in known]
    if odd:
        raise DeployError(
            "DD109", f"none of these sets names sglang {', '.join(odd)}", "see `ddtree-deploy patchset list`"
        )
    needed = sorted({engine for engine, closure in wanted if engine not in closure[-1].unneeded}, key=version_key)
    files = find_wheels(needed, sources=opt.wheel_sources(console, wheelhouse, download=fetch))
    found: dict[tuple[str, str], Checked] = {}
    with console.progress("checking") as update:
        for engine in sorted(known, key=version_key):
            update(len(found), len(wanted), f"checking on {engine}")
            here = [closure for version, closure in wanted if version == engine]
            if engine in files:
                with PristineTree(files[engine]) as tree:
                    checked = [check_set(closure, engine, tree) for closure in here]
            else:
                checked = [check_set(closure, engine, {}) for closure in here]
            found.update({(item.patch_set.name, engine): item for item in checked})
    results = sorted(found.values(), key=lambda item: (item.patch_set.name, version_key(item.engine)))
    good = all(item.good for item in results)
    if json_mode:
        console.document("patchset-check", {"clean": good, "checks": [_document(item) for item in results]})
    else:
        _print(console, results, CHECKS)
    return int(ExitStatus.OK if good else ExitStatus.FINDINGS)


def _print(console: Console, results: list[Checked], checks: tuple[str, ...]) -> None:
    rows = [("SET", "ENGINE", *(name.upper() for name in checks))]
    for item in results:
        if item.unneeded is not None:
            rows.append((item.patch_set.name, item.engine, f"not needed: {item.unneeded}"))
            continue
        rows.append((item.patch_set.name, item.engine, *(_cell(item, name) for name in checks)))
    console.rows(rows)
    for item in results:
        for name, lines in item.problems.items():
            for line in lines:
                console.line(f"{item.patch_set.name} on {item.engine}: {name}: {line}")


def _cell(item: Checked, name: str) -> str:
    lines = item.problems.get(name)
    if lines is None:
        return "-"
    return f"{len(lines)} wrong" if lines else "ok"


def _document(item: Checked) -> dict[str, object]:
    return {
        "set": item.patch_set.name,
        "version": item.patch_set.version,
        "engine": item.engine,
        "good": item.good,
        "unneeded": item.unneeded,
        "problems": {name: list(lines) for name, lines in item.problems.items()},
    }
