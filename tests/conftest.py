"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import pristine

ENGINE = "0.5.11"


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The published wheel: $DDTREE_DEPLOY_WHEEL, the user's cache, or a download; skipped when there is none."""
    brought = os.environ.get("DDTREE_DEPLOY_WHEEL")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    try:
        return pristine.fetch(ENGINE, tag, wheel=Path(brought) if brought else None)
    except DeployError as error:
        if error.code == "DD404":
            pytest.skip(f"the sglang {ENGINE} wheel is not to be had: {error.message}")
        raise


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
