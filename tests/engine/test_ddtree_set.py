"""The ddtree set against the published wheel: it applies after what it requires, reverses, compiles, and is typed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.filediff import reverse
from ddtree_deploy.patching.images import FileImage, sha256
from ddtree_deploy.resources import patches_dir
from tests.engine.conftest import ENGINE
from tests.engine.test_dflash_fixes import TOOLS

pytestmark = pytest.mark.wheel

NEW = patches_dir() / "ddtree" / "new"
ADDED_FOLDER = "sglang/srt/speculative/ddtree_"


@pytest.fixture(scope="module")
def family(ddtree_set):
    return ddtree_set.family_for(ENGINE)


@pytest.fixture(scope="module")
def before(fixes, wheel_site, patched_files, family) -> dict[str, bytes]:
    """What the set's patches are made for: the wheel with dflash-fixes."""
    return {
        path: patched_files.get(path) or (wheel_site / path).read_bytes()
        for path in family.paths
        if (wheel_site / path).exists()
    }


def test_hashes_are_of_what_is_there_before_and_after(family, before, ddtree_files):
    hashes = family.hashes[ENGINE]
    assert {path: item.before for path, item in hashes.items()} == {
        path: sha256(before[path]) if path in before else None for path in hashes
    }
    assert {path: item.after for path, item in hashes.items()} == {path: sha256(ddtree_files[path]) for path in hashes}


def test_every_hunk_is_where_it_says_and_reverses(family, before, ddtree_files):
    diffs = [diff for patch in family.patches for diff in patch.diffs]
    images = {path: FileImage(data) for path, data in before.items()}
    assert apply_diffs(images, diffs).offsets == ()
    patched = {path: FileImage(ddtree_files[path]) for path in before}
    assert apply_diffs(patched, reverse(diffs)).images == images


def test_patched_and_added_source_compiles(family, ddtree_files):
    for path in family.paths:
        compile(ddtree_files[path], path, "exec")


def test_all_new_code_is_in_modules_of_its_own(family, before):
    added = set(family.paths) - set(before)
    assert {path for path in family.paths if path.startswith(ADDED_FOLDER)} == added
    assert added == {str(path.relative_to(NEW)) for path in NEW.rglob("*.py")}


@pytest.mark.parametrize("tool", [name for name in TOOLS if shutil.which(name)])
def test_other_tools_make_the_same_files(tool, family, before, ddtree_files, tmp_path):
    for path, data in before.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    for patch in family.patches:
        file = patches_dir() / "ddtree" / ENGINE / patch.name
        subprocess.run([*TOOLS[tool], file], cwd=tmp_path, check=True, capture_output=True)
    assert {path: (tmp_path / path).read_bytes() for path in before} == {path: ddtree_files[path] for path in before}


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_added_modules_are_typed_against_the_engine(ddtree_site, tmp_path):
    """Strict, but for what the engine and Triton leave untyped."""
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\n"
        "python_version = 3.11\n"
        "strict = true\n"
        "disallow_untyped_calls = false\n"
        "disallow_untyped_decorators = false\n"
        "namespace_packages = true\n"
        "explicit_package_bases = true\n"
        f"mypy_path = {ddtree_site}\n"
        f"cache_dir = {tmp_path / 'cache'}\n"
        "[mypy-sglang.*]\n"
        "follow_imports = silent\n"
        "[mypy-sgl_kernel.*,triton.*]\n"
        "ignore_missing_imports = true\n"
    )
    modules = sorted(Path(ddtree_site).glob(f"{ADDED_FOLDER}*.py"))
    command = [sys.executable, "-m", "mypy", "--config-file", config, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
