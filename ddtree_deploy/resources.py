"""The data that ships with the program: patch sets, templates and the example inventory.

A checkout keeps them beside the package, where people edit them; a wheel carries the same folders inside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ddtree_deploy.errors import DeployError

_PACKAGE = Path(__file__).resolve().parent


def patches_dir(chosen: Path | None = None) -> Path:
    """The folder of patch sets: ``chosen``, else ``$DDTREE_DEPLOY_PATCHES``, else what ships with the program.

    Raises DeployError DD007 where the named one is no folder.
    """
    named = chosen or Path(os.environ.get("DDTREE_DEPLOY_PATCHES", ""))
    if named == Path():
        return _shipped("patches")
    if not named.is_dir():
        raise DeployError("DD007", f"there is no folder {named} of patch sets", "--patches or $DDTREE_DEPLOY_PATCHES")
    return named


def own_patches_dir(chosen: Path | None = None) -> Path:
    """:func:`patches_dir` to write in. Raises DeployError DD007 for the folder inside an installed package."""
    folder = patches_dir(chosen)
    if _PACKAGE / "_data" in folder.resolve().parents:
        raise DeployError(
            "DD007",
            "the patch sets inside the installed package are not edited: the next install would drop the edits",
            f"copy them and name the copy: `cp -r {folder} DIR`, then --patches DIR or $DDTREE_DEPLOY_PATCHES",
        )
    return folder.absolute()


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
