"""``patchset``: which sets there are, and what they would do."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

app = typer.Typer(no_args_is_help=True, help="List and show patch sets.")


@app.command("list")
def list_sets(ctx: typer.Context, json_mode: opt.JsonOption = False) -> None:
    """The known patch sets: name, version, engines served, what they require."""
    from ddtree_deploy.patching.patchset import load_sets
    from ddtree_deploy.resources import patches_dir

    console = opt.console_of(ctx, json_mode)
    sets = load_sets(patches_dir())
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
                        "digest": item.digest,
                    }
                    for item in sets.values()
                ]
            },
        )
        return
    rows = [("NAME", "VERSION", "ENGINES", "REQUIRES", "SUMMARY")]
    rows += [
        (item.name, item.version, ", ".join(item.engines), ", ".join(item.requires) or "-", item.summary)
        for item in sets.values()
    ]
    console.rows(rows)


@app.command("show")
def show_set(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="VERSION", help="Engine version; needed if the set serves several."),
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="The set alone, without what it requires.")] = False,
) -> None:
    """Print a set and all that it requires, in apply order, as plain unified diffs (`git apply -p1` takes them)."""
    from ddtree_deploy.patching.patchset import find_sets
    from ddtree_deploy.patching.show import show
    from ddtree_deploy.resources import patches_dir

    console = opt.console_of(ctx)
    sets = find_sets(name, patches_dir())
    engines = sets[-1].engines
    if engine is None and len(engines) > 1:
        raise DeployError("DD001", f"{name} serves {', '.join(engines)}", "name one: --engine VERSION")
    text = show(sets, engine or (engines[0] if engines else ""), only=only)
    console.data(text.decode("utf-8", "surrogateescape"))
