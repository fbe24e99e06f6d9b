"""The services of the shipped example inventory, read as an inventory reads them."""

from __future__ import annotations

import tomllib

from ddtree_deploy import resources
from ddtree_deploy.launch.service import Service


def services() -> dict[str, Service]:
    """Every service of the example, by name."""
    table = tomllib.loads(resources.example_inventory().read_text(encoding="utf-8"))
    return {name: Service.from_table(name, keys) for name, keys in table["services"].items()}
