"""The run of the rendered command, with a server that is none in the engine's place."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.resources import patches_dir
from tests.gpu import run, sites
from tests.launch import models

FAKE = Path(__file__).parent / "fake"
pytestmark = pytest.mark.wheel


@pytest.fixture
def place(tmp_path, wheel_site):
    """The stand-in's package with the patched sources that declare flags, and the fixture's configurations."""
    site = tmp_path / "site"
    shutil.copytree(FAKE, site)
    changes = sites.plan(
        sites.sets_of("patched", patches_dir()),
        sites.ENGINE,
        sites._images(sites.sets_of("patched", patches_dir()), wheel_site),
    ).changes
    for path in ("sglang/srt/server_args.py", "sglang/srt/models/dflash.py"):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(changes[path].after.data)
    for name, config in (("target", "tiny-hybrid"), ("draft", "tiny-hybrid-dflash")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(models.config(config)))
    return tmp_path


def harness(place, *arguments, **env):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.gpu.launch_tiny", "--kit", place / "site", "--site", place / "site"),
            *("--models", place, "--work", place / "work", "--out", place / "out.json", "--port", str(port)),
            *arguments,
        ],
        cwd=run.REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (place / "out.json").exists(), done.stderr
    return done.returncode, json.loads((place / "out.json").read_text())


@pytest.mark.parametrize("algorithm", ["DDTREE", "DFLASH"])
def test_the_rendered_command_is_run_and_asked(place, algorithm):
    status, result = harness(place, "--algorithm", algorithm)
    assert (status, [name for name, passed in result["checks"].items() if not passed]) == (0, [])
    assert result["argv"][1:3] == ["-m", "sglang.launch_server"]
    assert ("--speculative-ddtree-budget" in result["argv"]) == (algorithm == "DDTREE")
    assert result["chat"]["text"] == result["stream"]["text"] != ""


@pytest.mark.parametrize(("mode", "failed"), [("deaf", "drafts are accepted"), ("crash", "it became ready")])
def test_what_is_wrong_is_told(place, mode, failed):
    server = place / "site/sglang/launch_server.py"
    server.write_text(server.read_text().replace('MODE = ""', f"MODE = {mode!r}"))
    status, result = harness(place)
    assert status == 1
    assert [name for name, passed in result["checks"].items() if not passed] == [failed]
    assert mode != "crash" or "no GPU" in "\n".join(result["log"])
