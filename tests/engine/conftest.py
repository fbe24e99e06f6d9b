"""The engine's source as published, with dflash-fixes and with ddtree applied, and ways to run it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_deploy.patching.images import FileImage
from ddtree_deploy.patching.patchset import load_set
from ddtree_deploy.patching.plan import plan
from ddtree_deploy.resources import patches_dir

ENGINE = "0.5.11"
CHILD = Path(__file__).parent / "child"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="needs CPU torch: make test-engine"))


@pytest.fixture(scope="session")
def fixes_set():
    """The dflash-fixes set."""
    return load_set(patches_dir() / "dflash-fixes")


@pytest.fixture(scope="session")
def fixes(fixes_set):
    """Its family for the engine version under test."""
    return fixes_set.family_for(ENGINE)


@pytest.fixture(scope="session")
def patched_files(fixes_set, fixes, wheel_site) -> dict[str, bytes]:
    """Path -> content of every file that the set changes, after it, as `apply` plans it."""
    pristine = {path: FileImage((wheel_site / path).read_bytes()) for path in fixes.paths}
    changes = plan([fixes_set], ENGINE, pristine).changes
    return {path: change.after.data for path, change in changes.items()}


@pytest.fixture(scope="session")
def ddtree_set():
    """The ddtree set."""
    return load_set(patches_dir() / "ddtree")


@pytest.fixture(scope="session")
def ddtree_files(fixes_set, ddtree_set, wheel_site) -> dict[str, bytes]:
    """Path -> content of every file that ddtree and what it requires change or add, after both."""
    sets = [fixes_set, ddtree_set]
    files = {path: wheel_site / path for item in sets for path in item.family_for(ENGINE).paths}
    images = {path: FileImage(file.read_bytes()) if file.exists() else None for path, file in files.items()}
    return {path: change.after.data for path, change in plan(sets, ENGINE, images).changes.items()}


@pytest.fixture(scope="session")
def ddtree_site(site_with, ddtree_files) -> Path:
    return site_with(ddtree_files)


@pytest.fixture(scope="session")
def site_with(wheel_site, tmp_path_factory) -> Callable[[dict[str, bytes]], Path]:
    """Make a site that is the pristine one but for the given files."""

    def make(files: dict[str, bytes]) -> Path:
        site = tmp_path_factory.mktemp("site")
        shutil.copytree(wheel_site / "sglang", site / "sglang", copy_function=link)
        for path, data in files.items():
            (site / path).unlink(missing_ok=True)  # it may share its bytes with the pristine site
            (site / path).write_bytes(data)
        return site

    return make


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def patched_site(site_with, patched_files) -> Path:
    return site_with(patched_files)


@pytest.fixture(scope="session")
def trees(wheel_site, patched_site) -> dict[str, Path]:
    return {"stock": wheel_site, "patched": patched_site}


@pytest.fixture(scope="session")
def run_child(tmp_path_factory) -> Callable[[str, Path, object], list]:
    """Run a script of child/ on a site's engine, one process for the whole list of inputs."""
    bytecode = tmp_path_factory.mktemp("bytecode")  # the pristine site stays as it is

    def run(script: str, site: Path, inputs: object) -> list:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", CHILD / script, site],
            env={**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)},
            input=json.dumps(inputs),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
