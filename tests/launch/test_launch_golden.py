"""Whole commands for published models, each with the rules that it must obey: tests/cases/launch/golden."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.argv import Command
from ddtree_deploy.launch.known import Engine, Known
from ddtree_deploy.launch.render import render
from ddtree_deploy.launch.service import Service
from tests.launch import models

FOLDER = Path(__file__).parent.parent / "cases" / "launch" / "golden"
CASES = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))["case"]
PYTHON = "/opt/sglang/venv/bin/python"
RUNS = [pytest.param(case, tp, id=f"{case['name']}-tp{tp}") for case in CASES for tp in case["tp"]]


def known(case: dict[str, Any], engine_of: Callable[..., Engine]) -> Known:
    drafter = models.drafter(case["draft"]) if "draft" in case else None
    engine = engine_of(case["engine"], case.get("patched", False))
    tree = dataclasses.replace(engine.tree, compact_states=case.get("compact_states", False))
    return Known(dataclasses.replace(engine, tree=tree), models.target(case["model"]), drafter)


def service(case: dict[str, Any]) -> Service:
    keys = {"model": f"/models/{case['model']}", **case["service"]}
    if "draft" in case:
        keys["drafter"] = f"/models/{case['draft']}"
    return Service.from_table(case["name"].replace(".", "-"), keys)


def text_of(command: Command, shell: str, notes: tuple[str, ...]) -> str:
    """All that a person would be shown."""
    lines = ["# command", shell.rstrip("\n"), "", "# explain"]
    for argument in command.arguments:
        lines.append(f"{' '.join(argument.words)} | {argument.reason} | {argument.change}")
    for setting in command.environment:
        lines.append(f"{setting.name}={setting.value} | {setting.reason} | {setting.change}")
    assert command.plan is not None
    lines += ["", "# memory of one GPU"]
    lines += [f"{row.bytes / 2**30:7.2f} GiB  {row.what} | {row.how}" for row in command.plan.rows]
    lines.append(
        f"{command.plan.effective} of {command.plan.running} requests at once, {command.plan.tokens} tokens of KV cache"
    )
    lines += ["", "# notes", *notes, "", "# not checked", *command.unchecked]
    return "\n".join(lines) + "\n"


@pytest.mark.wheel
@pytest.mark.parametrize(("case", "tp"), RUNS)
def test_golden(case: dict[str, Any], tp: int, engine_of: Callable[..., Engine]) -> None:
    path = FOLDER / f"{case['name']}-tp{tp}.txt"
    if "refused" in case:
        with pytest.raises(DeployError) as caught:
            render(service(case), tp, python=PYTHON, known=known(case, engine_of))
        assert caught.value.code == "DD602"
        reasons = [caught.value.message, *caught.value.details]
        for text in case["refused"]:
            # Each in a reason of its own.
            reasons.remove(next(reason for reason in reasons if text in reason))
        text = "".join(f"{line}\n" for line in (caught.value.message, *caught.value.details))
    else:
        rendering = render(service(case), tp, python=PYTHON, known=known(case, engine_of))
        check_rules(case, tp, rendering.command)
        for wanted in case.get("notes", []):
            assert any(wanted in note for note in rendering.notes), wanted
        text = text_of(rendering.command, rendering.shell_command, rendering.notes)
    if os.environ.get("DDTREE_DEPLOY_UPDATE_CASES"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def check_rules(case: dict[str, Any], tp: int, command: Command) -> None:
    given = {argument.words[0]: " ".join(argument.words[1:]) for argument in command.arguments}
    environment = {setting.name: setting.value for setting in command.environment}
    assert all(each.reason and each.change for each in (*command.arguments, *command.environment))
    for rule in case["rules"]:
        if tp not in rule.get("tp", case["tp"]):
            continue
        for flag, value in rule.get("has", {}).items():
            assert given.get(flag) == value, (rule["rule"], flag, given.get(flag))
        for flag in rule.get("lacks", []):
            assert flag not in given, (rule["rule"], flag)
        for name, value in rule.get("env", {}).items():
            assert environment.get(name) == value, (rule["rule"], name)
        for name in rule.get("lacks_env", []):
            assert name not in environment, (rule["rule"], name)


def test_every_file_belongs_to_a_case() -> None:
    names = {f"{case['name']}-tp{tp}.txt" for case in CASES for tp in case["tp"]}
    assert {path.name for path in FOLDER.glob("*.txt")} == names


def test_a_rule_that_is_broken_is_noticed(engine_of: Callable[..., Engine]) -> None:
    case = next(case for case in CASES if case["name"] == "27b-dflash")
    command = render(service(case), 8, python=PYTHON, known=known(case, engine_of)).command
    for rule in (
        {"has": {"--max-running-requests": "48"}},
        {"lacks": ["--disable-custom-all-reduce"]},
        {"env": {"NCCL_IB_DISABLE": "0"}},
        {"lacks_env": ["NCCL_IB_DISABLE"]},
    ):
        with pytest.raises(AssertionError):
            check_rules({**case, "rules": [{"rule": "broken", **rule}]}, 8, command)
