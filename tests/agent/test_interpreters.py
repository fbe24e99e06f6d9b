"""The agent on every Python from 3.8 on that this machine has: one whole round on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.harness import tree_of
from tests.cli.harness import ONE, TWO, Cli


def interpreters() -> list[str]:
    """Paths of the interpreters found, one for each minor version, this one among them."""
    found = {f"3.{sys.version_info[1]}": sys.executable}
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python3.{minor}") for minor in range(8, 20)]
    candidates += [str(path) for path in sorted(roots.glob("3.*/bin/python3"))]
    for path in candidates:
        if path is None:
            continue
        asked = [path, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        if version and tuple(map(int, version.split("."))) >= (3, 8):
            found.setdefault(version, path)
    return [found[version] for version in sorted(found, key=lambda text: tuple(map(int, text.split("."))))]


INTERPRETERS = interpreters()


@pytest.mark.parametrize("python", INTERPRETERS)
def test_one_round(python, tmp_path, monkeypatch):
    cli = Cli(tmp_path, monkeypatch)
    old = tree_of(cli.site)
    host = ["--host", f"local:{cli.site}", "--python", python]
    state = ["--state-dir", str(cli.state)]
    assert cli.run("snapshot", *host).status == 0
    assert cli.run("grep", "A = ", *host).out == "sglang/srt/a.py:1:A = 1\n"
    assert cli.run("find-def", "A", "--list", *host).out == "sglang/srt/a.py:1-1  name A\n"
    for name, text in (("one", ONE), ("two", TWO)):
        result = cli.run("apply", cli.patch(f"{name}.patch", text), "--smoke", *host, *state)
        assert result.status == 0, result.err
    assert cli.run("status", *host, *state).status == 0
    assert cli.run("recover", *host, *state).status == 0
    for name in ("two", "one"):
        assert cli.run("rollback", name, *host, *state).status == 0
    assert tree_of(cli.site) == old
    assert len(cli.run("history", "--json", *host, *state).json["history"]) == 4


def older() -> list[str]:
    """Interpreters of this machine that cannot run the agent."""
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name) for name in ("python2", "python2.7", "python3.5", "python3.6", "python3.7")]
    candidates += [str(path) for minor in ("2.7", "3.5", "3.6", "3.7") for path in roots.glob(f"{minor}.*/bin/python")]
    # Not every name is an interpreter: there are shims of ones that are not there.
    return [
        path for path in candidates if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode
    ]


def test_older_ones_are_refused_in_one_line(tmp_path, monkeypatch):
    """The real ones of this machine, however many there are; tests/hosts has stand-ins for what they say."""
    cli = Cli(tmp_path, monkeypatch)
    for python in older():
        result = cli.run("status", "--host", f"local:{cli.site}", "--python", python)
        assert result.status == 4, python
        assert result.err.startswith("error[DD309]: "), result.err
        assert "3.8 or later" in result.err
