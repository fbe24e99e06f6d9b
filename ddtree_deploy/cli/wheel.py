"""``wheel``: the published wheels that count as pristine, and those of them that are here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from ddtree_deploy.snapshots.pins import Pin

app = typer.Typer(no_args_is_help=True, help="The pristine wheels: list, add, fetch, pin.")


@app.command("list")
def list_wheels(
    ctx: typer.Context,
    here: Annotated[bool, typer.Option("--here", help="Only the versions that a wheel is here for.")] = False,
    wheelhouse: opt.WheelhouseOption = None,
    json_mode: opt.JsonOption = False,
) -> None:
    """The pinned versions, and where a wheel of each is."""
    from ddtree_deploy.snapshots.pins import pins, user_pins
    from ddtree_deploy.snapshots.wheels import find_here, wheels_folder

    console = opt.console_of(ctx, json_mode)
    sources = opt.wheel_sources(console, wheelhouse)
    own = set(user_pins())
    versions: dict[str, list[Pin]] = {}
    for pin in pins():
        versions.setdefault(pin.version, []).append(pin)
    found = {
        version: [(pin, find_here(pin, sources.wheelhouses)) for pin in known] for version, known in versions.items()
    }
    if here:
        found = {version: wheels for version, wheels in found.items() if any(file for _, file in wheels)}
    if json_mode:
        console.document(
            "wheels",
            {
                "cache": str(wheels_folder()),
                "wheels": [
                    {**_row(pin, file), "pinned_by": "user" if pin in own else "program"}
                    for wheels in found.values()
                    for pin, file in wheels
                ],
            },
        )
        return
    rows = [("VERSION", "PINNED", "HERE")]
    for version, wheels in found.items():
        count = f"{len(wheels)} wheel{'s' if len(wheels) > 1 else ''}"
        if any(pin in own for pin, _ in wheels):
            count += " (yours)" if all(pin in own for pin, _ in wheels) else " (some yours)"
        rows.append((version, count, ", ".join(_place(pin, file) for pin, file in wheels if file) or "-"))
    console.rows(rows)
    console.note(f"the cache is {wheels_folder()}")


@app.command("add")
def add_wheel(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Wheel files.")],
    pin: Annotated[
        bool, typer.Option("--pin", help="Vouch for a wheel that is not pinned: its sha256 goes to your own pins.")
    ] = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Put wheels into the cache, every file in them checked; each must be a pinned one, or `--pin` makes it one."""
    from ddtree_deploy.snapshots.pins import add_pins, user_file
    from ddtree_deploy.snapshots.wheels import examine, keep

    console = opt.console_of(ctx, json_mode)
    with console.progress("reading the wheels"):
        found = [(file, *examine(file)) for file in files]
    unknown = [(file, wheel) for file, wheel, pinned in found if not pinned]
    if unknown and not pin:
        raise DeployError(
            "DD405",
            "; ".join(
                f"{file} is a sound wheel of sglang {wheel.version}, but none that is pinned" for file, wheel in unknown
            ),
            f"if you know that it is as published, vouch for it with --pin; it is recorded in {user_file()}",
            [f"sha256 {wheel.sha256}  {file}" for file, wheel in unknown],
        )
    if unknown:
        add_pins(user_file(), [wheel for _, wheel in unknown])
    kept = [(wheel, keep(file, wheel), pinned) for file, wheel, pinned in found]
    if json_mode:
        console.document(
            "wheel-add", {"wheels": [{**_row(wheel, file), "new_pin": not old} for wheel, file, old in kept]}
        )
        return
    console.rows(
        [(wheel.version, wheel.sha256, "pinned" if old else "newly pinned", str(file)) for wheel, file, old in kept]
    )


@app.command("fetch")
def fetch_wheels(
    ctx: typer.Context,
    versions: Annotated[list[str], typer.Argument(metavar="VERSION...", help="Engine versions.")],
    tags: Annotated[
        str | None,
        typer.Option("--tags", metavar="TAGS", help="This wheel, as `cp311-cp311-manylinux_2_34_aarch64`."),
    ] = None,
    wheelhouse: opt.WheelhouseOption = None,
    offline: opt.OfflineOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Download pinned wheels with pip, checked by hash. The sources in all wheels of one version are the same."""
    from ddtree_deploy.snapshots.wheels import find_wheel, published

    console = opt.console_of(ctx, json_mode)
    sources = opt.wheel_sources(console, wheelhouse, download=True, offline=offline)
    wanted = [next((pin for pin in published(version) if pin.tags == tags), None) for version in versions]
    if tags is not None and None in wanted:
        known = published(versions[wanted.index(None)])
        raise DeployError(
            "DD404",
            f"sglang {known[0].version} has no pinned wheel {tags}",
            f"pinned are {', '.join(pin.tags for pin in known)}",
        )
    found = []
    with console.progress("fetching") as update:
        for number, (version, pin) in enumerate(zip(versions, wanted, strict=True)):
            update(number, len(versions), f"fetching {version}")
            exact = (pin.python, pin.platform) if pin else ()
            found.append((version, find_wheel(version, *exact, sources=sources, any_tags=pin is None)))
    if json_mode:
        console.document(
            "wheel-fetch", {"wheels": [{"version": version, "file": str(file)} for version, file in found]}
        )
        return
    console.rows([(version, str(file)) for version, file in found])


@app.command("pin")
def pin_version(
    ctx: typer.Context,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="A released engine version.")],
    index: Annotated[
        str | None, typer.Option("--index", metavar="URL", help="The package index to ask; else pip's, else PyPI.")
    ] = None,
    offline: opt.OfflineOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Pin a release: take the sha256 of its wheels from the index into this checkout's pins (else into yours).

    The index is believed this once; what it says is shown, so that it can be compared and committed.
    """
    from ddtree_deploy.snapshots.index import configured_index, published_wheels
    from ddtree_deploy.snapshots.pins import add_pins, checkout_file, user_file

    console = opt.console_of(ctx, json_mode)
    if opt.wheel_sources(console, offline=offline).offline:
        raise DeployError(
            "DD404", f"the index is not asked for sglang {version} (offline)", "`wheel add --pin FILE` does without"
        )
    with console.progress("asking the index"):
        wheels = published_wheels(version, index or configured_index())
    file = checkout_file() or user_file()
    added = add_pins(file, wheels)
    if json_mode:
        console.document(
            "wheel-pin", {"file": str(file), "wheels": [{**_row(pin, None), "new_pin": pin in added} for pin in wheels]}
        )
        return
    for pin in wheels:
        console.line(f"{pin.sha256}  {pin.filename}{'' if pin in added else '  (was pinned)'}")
    console.note(f"{len(added)} of {len(wheels)} wheels newly pinned in {file}" if added else "all of them were pinned")


def _place(pin: Pin, file: Path) -> str:
    from ddtree_deploy.snapshots.wheels import wheels_folder

    return pin.tags if file.parent == wheels_folder() else str(file)


def _row(pin: Pin, file: Path | None) -> dict[str, object]:
    return {
        "version": pin.version,
        "tags": pin.tags,
        "filename": pin.filename,
        "sha256": pin.sha256,
        "size": pin.size,
        "file": str(file) if file else None,
    }
