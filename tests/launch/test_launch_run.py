"""Which service and interpreter an inventory leads to, and the command on top."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ddtree_deploy import resources
from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.inventory import Inventory, load_inventory
from ddtree_deploy.launch.run import find_service, run_launch

HOSTS = """
default_host = "two"
[hosts.one]
ssh = "ops@one.example"
python = "/one/bin/python"
[hosts.two]
ssh = "ops@two.example"
python = "/two/bin/python"
[hosts.bare]
ssh = "ops@bare.example"
[services.of-one]
host = "one"
model = "/m"
[services.of-default]
model = "/m"
[services.own]
host = "one"
python = "/own/bin/python"
model = "/m"
tp = 4
engine = "0.5.14"
[services.of-bare]
host = "bare"
model = "/m"
"""


def inventory(tmp_path: Path, text: str = HOSTS) -> Inventory:
    path = tmp_path / "inventory.toml"
    path.write_text(text, encoding="utf-8")
    return load_inventory(path)


@pytest.mark.parametrize(
    ("service", "options", "python"),
    [
        ("of-one", {}, "/one/bin/python"),
        ("of-default", {}, "/two/bin/python"),
        ("own", {}, "/own/bin/python"),
        ("own", {"python": "/flag/bin/python"}, "/flag/bin/python"),
        ("of-bare", {"python": "/flag/bin/python"}, "/flag/bin/python"),
        (None, {}, "/one/bin/python"),
    ],
)
def test_interpreter(tmp_path: Path, service: str | None, options: dict, python: str) -> None:
    assert run_launch(inventory(tmp_path), service, **options).argv[0] == python


def test_the_command_line_goes_before_the_inventory(tmp_path: Path) -> None:
    loaded = inventory(tmp_path)
    kept, changed = run_launch(loaded, "own").command, run_launch(loaded, "own", tp=2, engine="0.5.11").command
    assert (kept.service.tp, str(kept.engine)) == (4, "0.5.14")
    assert (changed.service.tp, str(changed.engine)) == (2, "0.5.11")


def test_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as caught:
        run_launch(inventory(tmp_path), "of-bare")
    assert caught.value.code == "DD601"


def test_unknown_service_and_host(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as caught:
        find_service(inventory(tmp_path), "nope")
    assert caught.value.code == "DD006"
    assert "of-one, of-default, own" in str(caught.value.hint)
    with pytest.raises(DeployError) as caught:
        find_service(inventory(tmp_path, HOSTS.split("[services.of-one]")[0]), None)
    assert caught.value.code == "DD006"


def launch(*arguments: str) -> tuple[int, str, str]:
    from ddtree_deploy.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    status = run(["launch", *arguments], Console(out, err))
    return status, out.getvalue(), err.getvalue()


def example(*arguments: str) -> tuple[int, str, str]:
    return launch("--inventory", str(resources.example_inventory()), *arguments)


def test_the_example_renders_and_says_so_on_stderr() -> None:
    status, out, err = example("--tp", "8")
    assert status == 0
    assert "shipped example inventory" in err
    assert "service qwen-ddtree" in err
    assert "note:" not in out
    rendering = run_launch(load_inventory(resources.example_inventory()), tp=8)
    assert rendering.shell_command in out
    assert rendering.unit.text in out
    assert rendering.environment_file.text in out


def test_one_part_is_the_file_itself() -> None:
    rendering = run_launch(load_inventory(resources.example_inventory()), "qwen-dflash")
    parts = {"unit": rendering.unit.text, "env": rendering.environment_file.text, "script": rendering.script.text}
    parts["command"] = rendering.shell_command
    for part, text in parts.items():
        assert example("--service", "qwen-dflash", "--format", part)[:2] == (0, text)


def test_out_writes_and_prints_only_where(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    status, out, _ = example("--tp", "8", "--out", str(folder))
    names = ["qwen-ddtree.env", "sglang-qwen-ddtree.service", "qwen-ddtree.sh"]
    assert (status, out) == (0, "".join(f"written {folder / name}\n" for name in names))
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    status, out, err = example("--tp", "4", "--out", str(folder))
    assert (status, out) == (3, "")
    assert "DD603" in err
    assert example("--tp", "4", "--out", str(folder), "--force")[0] == 0


def test_json_is_one_document() -> None:
    status, out, _ = example("--tp", "2", "--json")
    document = json.loads(out)
    assert status == 0
    assert document["schema"] == "ddtree-deploy.launch/1"
    assert document["argv"][:3] == ["/opt/sglang/venv/bin/python", "-m", "sglang.launch_server"]
    assert [file["mode"] for file in document["files"]] == ["0600", "0644", "0755"]


def test_explain_says_why_for_every_flag_and_variable() -> None:
    command = run_launch(load_inventory(resources.example_inventory()), tp=8).command
    _, out, _ = example("--tp", "8", "--explain")
    lines = out.splitlines()
    assert len(lines) == 2 * (len(command.arguments) + len(command.environment))
    for argument in command.arguments:
        why = lines[lines.index(" ".join(argument.words)) + 1]
        assert why == f"    {argument.reason} (changed by {argument.change})"


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (("--tp", "3"), 3, "DD602"),
        (("--tp", "x"), 2, "DD001"),
        (("--service", "nope"), 2, "DD006"),
        (("--engine", "0.5.9"), 3, "DD602"),
        (("--force",), 2, "DD001"),
        (("--format", "nope"), 2, "DD001"),
        (("--nodes", "2", "--tp", "16"), 2, "DD601"),
        (("--format", "k8s"), 2, "DD601"),
        (("--engine", "0.5.11", "--snapshot", "latest"), 2, "DD001"),
        (("--snapshot", "nope"), 2, "DD401"),
        (("--model-config", "/nowhere/config.json"), 2, "DD007"),
        (("--strict",), 3, "DD612"),
    ],
)
def test_refusals(arguments: tuple[str, ...], status: int, code: str) -> None:
    found, out, err = example(*arguments)
    assert (found, out) == (status, "")
    assert f"error[{code}]" in err
    assert "Traceback" not in err
