"""Which machines this program runs on: where POSIX is missing it says so in one line, and nothing breaks before."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What no Windows has, and no Python there can import.
POSIX_ONLY = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
WALK = f"""
import sys
# The standard library was built for this system: what it has loaded by itself stays.
import asyncio, getpass, multiprocessing.util, pathlib, platform, shutil, subprocess, tarfile, tempfile, uuid, zipfile
import rich.console, rich.progress, typer, typer.main, paramiko, cryptography.hazmat.primitives.asymmetric.ec, jinja2
for name in {POSIX_ONLY!r}:
    sys.modules[name] = None  # an import of it fails
import importlib, pkgutil
import ddtree_deploy
seen = []
for module in pkgutil.walk_packages(ddtree_deploy.__path__, "ddtree_deploy."):
    if not module.name.startswith("ddtree_deploy.agent"):
        seen.append(module.name)
        importlib.import_module(module.name)
print(len(seen))
"""


def test_nothing_outside_the_agent_needs_posix_to_be_imported():
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.mark.parametrize("arguments", [["--help"], ["status", "gpu1"], ["launch", "--tp", "8"], []])
def test_windows_is_refused_in_one_line(cli, monkeypatch, arguments):
    monkeypatch.setattr(sys, "platform", "win32")
    result = cli.run(*arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "[DD011]" in result.err
    assert "WSL" in result.err
