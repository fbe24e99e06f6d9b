"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import pristine, wheels

ENGINE = "0.5.11"
SOURCES = wheels.Sources(
    wheels.wheelhouses_by_environment(), download=True, offline=wheels.offline_by_environment(), announce=print
)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The published wheel: $DDTREE_DEPLOY_WHEEL, the user's cache, or a download; skipped when there is none."""
    brought = os.environ.get("DDTREE_DEPLOY_WHEEL")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    try:
        if brought:
            return wheels.brought(Path(brought), ENGINE)
        return wheels.find_wheel(ENGINE, tag, sources=SOURCES)
    except DeployError as error:
        if error.code == "DD404":
            pytest.skip(f"the sglang {ENGINE} wheel is not to be had: {error.message}")
        raise


#: The engines that patch sets are written, checked and ported for: about 100 MB of wheels, downloaded once.
ENGINES = ("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.18")


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a published wheel of each of ``ENGINES``; skipped when one is not to be had."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    wheels.wheels_folder().mkdir(parents=True, exist_ok=True)
    try:
        with (wheels.wheels_folder() / ".tests").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one worker downloads for all
            found = wheels.find_wheels(ENGINES, sources=SOURCES)
        for file in found.values():
            (folder / file.name).symlink_to(file.absolute())
    except DeployError as error:
        if error.code == "DD404":
            pytest.skip(f"the sglang wheels are not to be had: {error.message}")
        raise
    return folder


@pytest.fixture(scope="session")
def engine_tree(wheelhouse: Path) -> Iterator[Callable[[str], pristine.PristineTree]]:
    """The pristine files of one of ``ENGINES``, by version."""
    opened: dict[str, pristine.PristineTree] = {}

    def tree(version: str) -> pristine.PristineTree:
        if version not in opened:
            (file,) = wheelhouse.glob(f"sglang-{version}-*.whl")
            opened[version] = pristine.PristineTree(file)
        return opened[version]

    yield tree
    for item in opened.values():
        item.__exit__()


@pytest.fixture(scope="session")
def wheel_site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as a site-packages, once for all workers. Nothing may write below it."""
    base = tmp_path_factory.getbasetemp()
    site = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel-site"
    if not site.exists():
        try:
            pristine.unpack(wheel, site)
        except DeployError:
            # Another worker was faster; what it put there is whole.
            if not site.exists():
                raise
    return site


@pytest.fixture
def copy_site(wheel_site: Path, tmp_path: Path) -> Iterator[Path]:
    """A private copy of the engine's folders, the package's own modules and the dist-info.

    Sources are copied. What no test edits (tuning tables, CUDA sources) shares its bytes with ``wheel_site``.
    """
    site = tmp_path / "site-packages"

    def place(source: str, target: str) -> None:
        if source.endswith((".py", "/RECORD", "/METADATA", "/WHEEL", "/INSTALLER")):
            shutil.copy(source, target)
        else:
            os.link(source, target)

    (site / "sglang").mkdir(parents=True)
    for path in sorted((wheel_site / "sglang").glob("*.py")):
        shutil.copy(path, site / "sglang")
    for name in ("sglang/srt", "sglang/kernels", "sglang/jit_kernel", f"sglang-{ENGINE}.dist-info"):
        if (wheel_site / name).exists():
            shutil.copytree(wheel_site / name, site / name, copy_function=place)
    yield site
    shutil.rmtree(site)
