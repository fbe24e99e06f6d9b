"""A real virtual environment with an install in it: which interpreter is the engine's, and what runs from it."""

from __future__ import annotations

import subprocess
import sys
import venv

import pytest

from tests.agent.harness import make_site
from tests.cli.harness import ENGINE, ONE


@pytest.fixture
def installed(cli):
    """The command line's user, with the small install in a virtual environment of its own."""
    prefix = cli.folder / "venv"
    venv.create(prefix, with_pip=False, symlinks=True)
    (site,) = prefix.glob("lib/python*/site-packages")
    made = make_site(cli.folder / "made", ENGINE)
    for path in made.iterdir():
        path.rename(site / path.name)
    cli.site, cli.python = site, prefix / "bin/python"
    return cli


def test_the_environments_own_interpreter_is_used(installed):
    status = installed.on_host("status", "--json").json
    assert status["root"]["python"]["prefix"] == str(installed.folder / "venv")
    assert status["root"]["foreign_python"] is None


def test_another_interpreter_may_look_but_not_apply(installed):
    patch = installed.patch("one.patch", ONE)
    assert installed.on_host("status", "--python", sys.executable).status == 0
    result = installed.on_host("apply", patch, "--python", sys.executable)
    assert result.status == 3
    assert "[DD312]" in result.err
    assert str(installed.folder / "venv") in result.err


def test_root_is_found_without_being_named(installed):
    inventory = installed.patch("hosts.toml", f'[hosts.here]\nlocal = "{installed.site}"\n')
    found = installed.run("status", "here", "--inventory", inventory, "--state-dir", str(installed.state), "--json")
    assert found.json["root"]["site"] == str(installed.site)


@pytest.mark.parametrize("start", ["import sglang.srt.a", "print('sglang')"])
def test_an_engine_of_this_environment_is_named(installed, start):
    patch = installed.patch("one.patch", ONE)
    program = f"{start}; import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([installed.python, "-c", program], stdout=subprocess.PIPE, env={"PATH": "/bin"}) as engine:
        while engine.stdout.readline() != b"up\n":
            pass
        result = installed.on_host("apply", patch)
        assert result.status == 3
        assert f"pid {engine.pid}" in result.err
        assert "--live" in result.err
        live = installed.on_host("apply", patch, "--live")
        assert live.status == 0
        assert f"pid {engine.pid} still runs the code from before" in live.err
        status = installed.on_host("status")
        assert f"pid {engine.pid} runs from here" in status.err
        assert installed.on_host("rollback", "one").status == 3
        engine.kill()
    assert installed.on_host("rollback", "one").status == 0


def test_a_process_of_another_environment_is_not(installed):
    program = "import time; 'sglang'; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"up\n"
        assert installed.on_host("apply", installed.patch("one.patch", ONE)).status == 0
        other.kill()


def test_every_command_of_the_table_is_there(cli, capsys):
    from ddtree_deploy.cli.table import COMMANDS

    assert cli.run("--help").status == 0
    overview = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"  {name} " in overview and entry.summary in overview
        status = cli.run(name, "--help").status
        assert (status, f"ddtree-deploy {name}" in capsys.readouterr().out) == (0, True), name
