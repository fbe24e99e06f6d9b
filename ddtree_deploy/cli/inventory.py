"""``inventory``: which hosts and services are known, and whether the files are right."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from ddtree_deploy.hosts.inventory import Inventory

app = typer.Typer(no_args_is_help=True, help="List, show and check the inventory.")


def _load(inventory: Any) -> Inventory:
    return opt.load(opt.HostChoice(inventory=inventory))


@app.command("list")
def list_entries(ctx: typer.Context, inventory: opt.InventoryOption = None, json_mode: opt.JsonOption = False) -> None:
    """The hosts and services of the inventory in use."""
    console = opt.console_of(ctx, json_mode)
    loaded = _load(inventory)
    if json_mode:
        console.document("inventory-list", _document(loaded))
        return
    console.note(f"inventory: {loaded.path}{' (the shipped example)' if loaded.shipped else ''}")
    rows = [("KIND", "NAME", "WHERE / WHAT")]
    for host in loaded.hosts.values():
        where = host.place
        default = "  (default)" if host.name == loaded.default_host else ""
        labels = " ".join(f"{key}={value}" for key, value in host.labels.items())
        rows.append(("host", host.name, f"{where}{default}  {labels}".rstrip()))
    for name, service in loaded.services.items():
        rows.append(("service", name, f"{service.algorithm} {service.model}"))
    console.rows(rows)


@app.command("show")
def show_entry(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A host or a service.")],
    inventory: opt.InventoryOption = None,
    json_mode: opt.JsonOption = False,
) -> None:
    """One host or service with every value that is set."""
    console = opt.console_of(ctx, json_mode)
    loaded = _load(inventory)
    found = [("host", loaded.hosts.get(name)), ("service", loaded.services.get(name))]
    entries = [(kind, dataclasses.asdict(item)) for kind, item in found if item is not None]
    if not entries:
        known = ", ".join([*loaded.hosts, *loaded.services]) or "nothing"
        raise DeployError("DD001", f"{loaded.path} has no host or service {name}", f"it has: {known}")
    if json_mode:
        console.document("inventory-show", {"path": str(loaded.path), **dict(entries)})
        return
    for kind, values in entries:
        console.line(f"[{kind}s.{name}]")
        console.rows([(key, "=", str(value)) for key, value in values.items() if value not in (None, "", (), {})])


@app.command("check")
def check(ctx: typer.Context, inventory: opt.InventoryOption = None, json_mode: opt.JsonOption = False) -> None:
    """Read the inventory and report every fault with file, line and key."""
    console = opt.console_of(ctx, json_mode)
    loaded = _load(inventory)
    if json_mode:
        console.document("inventory-check", {**_document(loaded), "ok": True})
        return
    console.line(f"{loaded.path}: {len(loaded.hosts)} host(s), {len(loaded.services)} service(s), no faults")
    if loaded.shipped:
        console.note("note: this is the shipped example; commands that contact a host do not use it")


def _document(loaded: Inventory) -> dict[str, Any]:
    return {
        "path": str(loaded.path),
        "shipped": loaded.shipped,
        "default_host": loaded.default_host,
        "hosts": {name: dataclasses.asdict(host) for name, host in loaded.hosts.items()},
        "services": {name: dataclasses.asdict(service) for name, service in loaded.services.items()},
    }
