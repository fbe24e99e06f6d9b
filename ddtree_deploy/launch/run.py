"""Which service an inventory means, and its rendering. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.render import Rendering, render

if TYPE_CHECKING:
    from ddtree_deploy.hosts.inventory import Inventory
    from ddtree_deploy.launch.service import Service


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


def run_launch(
    inventory: Inventory,
    service_name: str | None = None,
    *,
    tp: int | None = None,
    engine: str | None = None,
    python: str | None = None,
) -> Rendering:
    """Render a service of the inventory; ``tp``, ``engine`` and ``python`` go before what the inventory says.

    Raises DeployError: ``DD006`` no such service, ``DD004`` its host is not in the inventory, ``DD601`` or
    ``DD602`` if it cannot be rendered.
    """
    service = find_service(inventory, service_name)
    host_name = service.host or inventory.default_host
    if service.host is not None and service.host not in inventory.hosts:
        raise DeployError(
            "DD004",
            f"services.{service.name}.host: there is no [hosts.{service.host}]",
            hint=f"the inventory is {inventory.path}",
        )
    host = None if host_name is None else inventory.hosts[host_name]
    interpreter = python or service.python or (None if host is None else host.python)
    return render(service, tp, engine=engine, python=interpreter)
