from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddtree_deploy import resources
from ddtree_deploy.errors import DeployError

ROOT = Path(__file__).parents[2]
REPORT = """
import json
from ddtree_deploy import resources
from ddtree_deploy.hosts.inventory import load_inventory
print(json.dumps({
    "patches": sorted(str(p.relative_to(resources.patches_dir())) for p in resources.patches_dir().rglob("*")),
    "templates": sorted(p.name for p in resources.templates_dir().iterdir()),
    "inventory": resources.example_inventory().read_text("utf-8"),
    "shipped": load_inventory(resources.example_inventory()).shipped,
    "home": str(resources.__file__),
}))
"""


def _report(path: Path, cwd: Path) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def test_a_checkout_uses_the_folders_beside_the_package() -> None:
    assert resources.example_inventory() == ROOT / "inventories" / "example.toml"
    assert resources.patches_dir() == ROOT / "patches"
    assert resources.templates_dir() == ROOT / "templates"


def test_a_missing_folder_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "ddtree_deploy")
    with pytest.raises(DeployError, match="patches") as caught:
        resources.patches_dir()
    assert caught.value.code == "DD007"


def test_patch_sets_of_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(tmp_path / "a"))
    assert resources.patches_dir() == resources.own_patches_dir() == tmp_path / "a"
    assert resources.patches_dir(tmp_path / "b") == tmp_path / "b"
    with pytest.raises(DeployError, match=r"there is no folder .*/none of patch sets") as caught:
        resources.patches_dir(tmp_path / "none")
    assert caught.value.code == "DD007"
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", "")
    assert resources.own_patches_dir() == ROOT / "patches"


def test_the_sets_of_an_installed_package_are_not_edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = tmp_path / "site-packages" / "ddtree_deploy" / "_data" / "patches"
    shipped.mkdir(parents=True)
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "site-packages" / "ddtree_deploy")
    (tmp_path / "link").symlink_to(shipped)
    assert resources.patches_dir() == shipped
    for chosen in (None, shipped, tmp_path / "link"):
        with pytest.raises(DeployError, match="are not edited") as caught:
            resources.own_patches_dir(chosen)
        assert caught.value.code == "DD007"
        assert "--patches DIR" in str(caught.value.hint)


def test_the_wheel_carries_the_same_files(tmp_path: Path) -> None:
    """Built from a copy, unpacked elsewhere and imported from there, away from the checkout."""
    copy, site = tmp_path / "copy", tmp_path / "site"
    copy.mkdir()
    for name in ("ddtree_deploy", "patches", "templates", "inventories"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in ("README.md", "LICENSE", "NOTICE"):  # named by pyproject.toml; their text is not the matter here
        (copy / name).touch()
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(copy)
    from_wheel, from_checkout = _report(site, tmp_path), _report(ROOT, tmp_path)
    assert str(from_wheel.pop("home")).startswith(str(site))
    assert str(from_checkout.pop("home")).startswith(str(ROOT))
    assert from_wheel == from_checkout
    assert from_wheel["shipped"] is True
