"""``patchset``: which sets there are, and what they would do."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli import patchset_check, patchset_edit, patchset_port
from ddtree_deploy.errors import DeployError, ExitStatus

app = typer.Typer(no_args_is_help=True, help="Patch sets: list, show, write, check, port.")


@app.command("list")
def list_sets(ctx: typer.Context, patches: opt.PatchesOption = None, json_mode: opt.JsonOption = False) -> int:
    """The known patch sets: name, version, engines served, what they require.

    Exit status 2 when one of them is not valid; the others can be used all the same.
    """
    from ddtree_deploy.authoring.swap import unfinished
    from ddtree_deploy.patching.patchset import survey_sets
    from ddtree_deploy.resources import patches_dir

    console = opt.console_of(ctx, json_mode)
    folder = patches_dir(patches)
    sets, broken = survey_sets(folder)
    console.status = int(ExitStatus.USAGE if broken else ExitStatus.OK)
    if json_mode:
        console.document(
            "patchset-list",
            {
                "sets": [
                    {
                        "name": item.name,
                        "version": item.version,
                        "summary": item.summary,
                        "engines": list(item.engines),
                        "requires": list(item.requires),
                        "unneeded": dict(item.unneeded),
                        "digest": item.digest,
                    }
                    for item in sets.values()
                ],
                "invalid": [
                    {"name": name, "problems": [problem.text for problem in problems]}
                    for name, problems in broken.items()
                ],
            },
        )
        return console.status
    rows = [("NAME", "VERSION", "ENGINES", "REQUIRES", "SUMMARY")]
    rows += [
        (item.name, item.version, ", ".join(item.engines), ", ".join(item.requires) or "-", item.summary)
        for item in sets.values()
    ]
    rows += [(name, "not valid", "-", "-", problems[0].text) for name, problems in broken.items()]
    console.rows(rows)
    for name, problems in broken.items():
        console.note(f"{name} is not valid:")
        for problem in problems:
            console.note(f"  {problem.text}")
    if unfinished(folder):
        console.note(f"an interrupted write waits in {folder}: `patchset edit`, `new` or `refresh` ends it")
    for item in sets.values():
        for version, why in item.unneeded.items():
            console.note(f"note: {item.name} is not needed on {version}: {why}")
    return console.status


@app.command("show")
def show_set(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="VERSION", help="Engine version; needed if the set serves several."),
    ] = None,
    patches: opt.PatchesOption = None,
    only: Annotated[bool, typer.Option("--only", help="The set alone, without what it requires.")] = False,
) -> None:
    """Print a set and all that it requires, in apply order, as plain unified diffs (`git apply -p1` takes them)."""
    from ddtree_deploy.patching.patchset import find_sets
    from ddtree_deploy.patching.show import show
    from ddtree_deploy.resources import patches_dir

    console = opt.console_of(ctx)
    sets = find_sets(name, patches_dir(patches))
    engines = sets[-1].engines
    if engine is None and len(engines) > 1:
        raise DeployError("DD001", f"{name} serves {', '.join(engines)}", "name one: --engine VERSION")
    text = show(sets, engine or (engines[0] if engines else ""), only=only)
    console.data(text.decode("utf-8", "surrogateescape"))


app.command("new")(patchset_edit.new_set)
app.command("edit")(patchset_edit.edit_set)
app.command("refresh")(patchset_edit.refresh_set)
app.command("reorder")(patchset_edit.reorder_set)
app.command("drop")(patchset_edit.drop_patch)
app.command("check")(patchset_check.check_sets)
app.command("port")(patchset_port.port_set)
