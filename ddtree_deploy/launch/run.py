"""Which service an inventory means, who runs it, and its rendering. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.render import Rendering, render
from ddtree_deploy.launch.service import Service

if TYPE_CHECKING:
    from ddtree_deploy.hosts.inventory import Inventory


def find_service(inventory: Inventory, name: str | None) -> Service:
    """The service of that name; without one, the first of the inventory. Raises DeployError ``DD006``."""
    known = ", ".join(inventory.services)
    if not inventory.services:
        raise DeployError("DD006", f"{inventory.path} has no services", hint="add a [services.NAME] table")
    if name is None:
        return next(iter(inventory.services.values()))
    if name not in inventory.services:
        raise DeployError("DD006", f"{inventory.path} has no service {name!a}", hint=f"it has {known}")
    return inventory.services[name]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A service, the name of the host that it runs on, and the interpreter that runs it there, where known."""

    service: Service
    host: str | None
    interpreter: str | None


def resolve(inventory: Inventory, service_name: str | None = None, *, python: str | None = None) -> Chosen:
    """The service of that name, with its host's interpreter; ``python`` goes before what the inventory says.

    Raises DeployError ``DD006``.
    """
    service = find_service(inventory, service_name)
    name = service.host or inventory.default_host
    host = None if name is None else inventory.hosts.get(name)
    return Chosen(service, name, python or service.python or (None if host is None else host.python))


def run_launch(
    inventory: Inventory,
    service_name: str | None = None,
    *,
    tp: int | None = None,
    engine: str | None = None,
    python: str | None = None,
    known: Known | None = None,
) -> Rendering:
    """Render a service of the inventory; ``tp``, ``engine`` and ``python`` go before what the inventory says.

    Raises DeployError: ``DD006`` no such service, ``DD601`` or ``DD602`` if it cannot be rendered.
    """
    chosen = resolve(inventory, service_name, python=python)
    return render(chosen.service, tp, engine=engine, python=chosen.interpreter, known=known)
