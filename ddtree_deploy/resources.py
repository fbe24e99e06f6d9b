"""The data that ships with the program: patch sets, templates and the example inventory.

A checkout keeps them beside the package, where people edit them; a wheel carries the same folders inside it.
"""

from __future__ import annotations

from pathlib import Path

from ddtree_deploy.errors import DeployError

_PACKAGE = Path(__file__).resolve().parent


def patches_dir() -> Path:
    """The folder of patch sets."""
    return _shipped("patches")


def templates_dir() -> Path:
    """The folder of jinja2 templates."""
    return _shipped("templates")


def example_inventory() -> Path:
    """The commented example inventory."""
    return _shipped("inventories") / "example.toml"


def _shipped(name: str) -> Path:
    checkout = _PACKAGE.parent
    base = checkout if (checkout / "pyproject.toml").is_file() else _PACKAGE / "_data"
    if (base / name).is_dir():
        return base / name
    raise DeployError("DD007", f"the installed package lacks its {name} folder", hint="reinstall ddtree-deploy")
