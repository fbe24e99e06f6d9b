"""Engines of several published versions, as the launch model reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from packaging.version import Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.known import Engine, engine_of_wheel
from ddtree_deploy.launch.legality import Tree
from ddtree_deploy.launch.parser import read_parser
from ddtree_deploy.patching.images import FileImage
from ddtree_deploy.patching.patchset import load_set
from ddtree_deploy.patching.plan import plan
from ddtree_deploy.resources import patches_dir
from ddtree_deploy.snapshots import wheels
from ddtree_deploy.snapshots.pristine import PristineTree
from tests.conftest import SOURCES

#: The releases between which flags were renamed, moved or dropped.
VERSIONS = ("0.5.11", "0.5.14", "0.5.18", "0.5.20", "0.5.23")


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No snapshot of the user's has a say."""
    monkeypatch.setenv("DDTREE_DEPLOY_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="session")
def published() -> Iterator[Callable[[str], PristineTree]]:
    """The published wheel of a version, open; the test is skipped where it is not to be had."""
    with ExitStack() as stack:

        @functools.cache
        def tree(version: str) -> PristineTree | str:
            try:
                return stack.enter_context(PristineTree(wheels.find_wheel(version, sources=SOURCES, any_tags=True)))
            except DeployError as error:
                if error.code == "DD404":
                    return f"the sglang {version} wheel is not to be had: {error.message}"
                raise

        def get(version: str) -> PristineTree:
            found = tree(version)
            if isinstance(found, str):
                pytest.skip(found)
            return found

        yield get


@pytest.fixture(scope="session")
def wheel_of(published: Callable[[str], PristineTree]) -> Callable[[str], Path]:
    """The path of a version's wheel."""
    return lambda version: Path(published(version).wheel)


@pytest.fixture(scope="session")
def engine_of(published: Callable[[str], PristineTree]) -> Callable[..., Engine]:
    """The engine of a version; ``patched``: with ddtree and what it requires applied, as a host has it."""

    @functools.cache
    def engine(version: str, patched: bool = False) -> Engine:
        tree = published(version)
        if not patched:
            return engine_of_wheel(tree)
        sets = [load_set(patches_dir() / name) for name in ("dflash-fixes", "ddtree")]
        paths = {path for each in sets for path in each.family_for(version).paths}
        images = {path: FileImage(tree[path]) if path in tree else None for path in paths}
        after = {path: change.after.data for path, change in plan(sets, version, images).changes.items()}

        def read(path: str) -> bytes | None:
            return after[path] if path in after else tree.get(path)

        known = Version(version)
        return Engine(known, read_parser(read), Tree.of_source(read, known), "snapshot box/1", True, True)

    return engine
