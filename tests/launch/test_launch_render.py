"""Rendered files: snapshots of the shipped example, and what holds for every rendering.

After a wanted change, ``DDTREE_DEPLOY_UPDATE_CASES=1 pytest tests/launch`` writes the snapshots anew; read the diff.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from jinja2 import nodes

from ddtree_deploy import resources
from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import quoting, render
from ddtree_deploy.launch.render import Rendering
from ddtree_deploy.launch.service import Service
from tests.launch import examples, strategies

CASES = Path(__file__).parent.parent / "cases" / "launch"
PYTHON = "/opt/sglang/venv/bin/python"
TEMPLATES = ("launch.service.j2", "launch.env.j2", "launch.sh.j2", "launch.slurm.j2", "launch.k8s.j2")


def rendered(name: str, tp: int, **changes: object) -> Rendering:
    service = dataclasses.replace(examples.services()[name], **changes)
    return render.render(service, tp, python=PYTHON)


def everything(rendering: Rendering) -> dict[str, str]:
    """All texts that a rendering leads to, by the name of their snapshot."""
    texts = {file.name: file.text for file in rendering.files}
    texts["command.txt"] = rendering.shell_command
    texts["argv.json"] = json.dumps(rendering.argv, indent=1) + "\n"
    texts["notes.txt"] = "".join(f"{note}\n" for note in rendering.notes)
    texts["notes.txt"] += "".join(f"not checked: {item}\n" for item in rendering.command.unchecked)
    return texts


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen-ddtree", 8),
        ("qwen-ddtree", 4),
        ("qwen-ddtree", 2),
        ("qwen-ddtree", 1),
        ("qwen-dflash", 2),
        ("qwen-dflash", 1),
    ],
)
def test_snapshots(name: str, tp: int) -> None:
    folder = CASES / f"{name}-tp{tp}"
    texts = everything(rendered(name, tp))
    if os.environ.get("DDTREE_DEPLOY_UPDATE_CASES"):
        folder.mkdir(exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == texts


def test_names_permissions_and_places() -> None:
    rendering = rendered("qwen-ddtree", 8)
    assert [(file.name, file.mode, file.install_path) for file in rendering.files] == [
        ("qwen-ddtree.env", 0o600, "/etc/sglang/qwen-ddtree.env"),
        ("sglang-qwen-ddtree.service", 0o644, "/etc/systemd/system/sglang-qwen-ddtree.service"),
        ("qwen-ddtree.sh", 0o755, None),
    ]


def section(unit: str, name: str) -> list[str]:
    body = unit.split(f"[{name}]\n")[1].split("\n[")[0]
    return [line for line in body.split("\n") if line and not line.startswith("#")]


def test_start_limits_are_where_systemd_reads_them() -> None:
    unit = rendered("qwen-ddtree", 8).unit.text
    assert {"StartLimitIntervalSec=7200", "StartLimitBurst=4"} <= set(section(unit, "Unit"))
    assert not [line for line in section(unit, "Service") if line.startswith("StartLimit")]
    assert "Environment=" not in "".join(section(unit, "Unit"))


def test_a_stop_is_no_failure_and_a_crash_is_restarted() -> None:
    """The engine ends itself by SIGKILL in both cases: without all of these one of the two goes wrong."""
    wanted = {"Restart=always", "SuccessExitStatus=SIGKILL", "KillMode=mixed"}
    assert wanted <= set(section(rendered("qwen-ddtree", 8).unit.text, "Service"))


def test_secrets_are_names_only() -> None:
    rendering = rendered("qwen-ddtree", 8, secrets=("HF_TOKEN", "OTHER_KEY"))
    unit = rendering.unit.text
    assert section(unit, "Service").count("EnvironmentFile=/etc/sglang/qwen-ddtree.secrets.env") == 1
    assert "HF_TOKEN" not in unit
    assert rendering.environment_file.text.count("HF_TOKEN") == 1
    assert "#   HF_TOKEN\n" in rendering.environment_file.text
    assert rendering.secrets_path == "/etc/sglang/qwen-ddtree.secrets.env"
    assert rendering.secrets_path not in [file.install_path for file in rendering.files]
    assert "HF_TOKEN, OTHER_KEY" in rendering.notes[-1]
    assert "HF_TOKEN" not in rendering.env


def test_a_secret_of_this_process_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    rendering = rendered("qwen-ddtree", 8, secrets=("HF_TOKEN",))
    assert "hunter2" not in repr(rendering) + "".join(everything(rendering).values())


def test_no_user_means_no_line() -> None:
    unit = rendered("qwen-ddtree", 8, user=None, group=None).unit.text
    assert not [line for line in section(unit, "Service") if line.startswith(("User=", "Group="))]


@settings(max_examples=60, deadline=None)
@given(strategies.nonempty_values, strategies.values, strategies.environments)
def test_every_file_ends_with_one_newline_and_has_no_stray_line(
    model: str, extra: str, environment: dict[str, str]
) -> None:
    plain = render.render(Service(name="s", model="m", extra_args=("x",)), python=PYTHON)
    service = Service(name="s", model=model, extra_args=(extra,), environment=environment)
    hostile = render.render(service, python=PYTHON)
    for file in hostile.files:
        assert file.text.endswith("\n")
        assert not file.text.endswith("\n\n")
    assert len(hostile.unit.text.split("\n")) == len(plain.unit.text.split("\n"))
    assert "\t" not in hostile.unit.text


@pytest.mark.parametrize("bad", strategies.REFUSED, ids=ascii)
@pytest.mark.parametrize("field", ["model", "served_name", "working_directory", "user", "environment_directory"])
def test_a_line_break_is_refused_even_past_the_inventory(field: str, bad: str) -> None:
    service = dataclasses.replace(Service(name="s", model="m"), **{field: f"/x{bad}ExecStartPost=/bin/evil"})
    with pytest.raises(DeployError):
        render.render(service, python=PYTHON)


def test_the_script_runs_the_argv_in_the_environment(tmp_path: Path) -> None:
    program = tmp_path / "it is 100%" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\npwd\nprintenv T_A T_B HF_TOKEN\nprintf '<%s>\\n' \"$@\"\n")
    program.chmod(0o755)
    (tmp_path / "work dir").mkdir()
    service = Service(
        name="s",
        model="/models/it's $HOME `x` %h",
        environment={"T_A": 'a "b" $c', "T_B": "\\"},
        secrets=("HF_TOKEN",),
        working_directory=str(tmp_path / "work dir"),
        extra_args=("", '{"a": 1}'),
    )
    rendering = render.render(service, python=str(program))
    script = tmp_path / "run.sh"
    script.write_text(rendering.script.text, encoding="utf-8")
    script.chmod(0o755)
    run = subprocess.run([script], env={"HF_TOKEN": "t", "PATH": "/bin"}, capture_output=True, text=True, check=True)
    place, a, b, token, *arguments = run.stdout.split("\n")[:-1]
    assert (place, a, b, token) == (service.working_directory, 'a "b" $c', "\\", "t")
    assert [word[1:-1] for word in arguments] == list(rendering.argv[1:])
    refused = subprocess.run([script], env={"PATH": "/bin"}, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "HF_TOKEN" in refused.stderr
    assert refused.stdout == ""


def unquoted(source: str) -> list[str]:
    """Interpolations of a template that do not end in one of its quoting filters."""
    tree = render.environment().parse(source)
    found = []
    for output in tree.find_all(nodes.Output):
        for part in output.nodes:
            if isinstance(part, nodes.TemplateData):
                continue
            if not (isinstance(part, nodes.Filter) and part.name in render.environment().filters):
                found.append(f"line {part.lineno}: {part}")
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_interpolation_is_quoted(template: str) -> None:
    source = (resources.templates_dir() / template).read_text(encoding="utf-8")
    assert unquoted(source) == []
    assert "{{" in source


@pytest.mark.parametrize(
    "raw", ["{{ user }}", "{{ user ~ 'x' }}", "{% if user %}{{ 'a' }}{% endif %}", "{{ user | unit_value ~ x }}"]
)
def test_the_check_on_interpolations_can_fail(raw: str) -> None:
    assert unquoted(raw) != []


def test_all_templates_are_checked() -> None:
    assert sorted(path.name for path in resources.templates_dir().glob("launch*")) == sorted(TEMPLATES)


def test_only_quoting_filters_exist() -> None:
    assert set(render.environment().filters) <= {
        "comment", "unit_value", "unit_path", "environment_assignment", "environment_file_path",
        "environment_file_line", "exec_program", "exec_words", "shell_word", "shell_words", "shell_assignment",
        "shell_require", "sbatch_word", "batch_words", "yaml_string", "yaml_integer", "pod_string", "rendered",
    }  # fmt: skip
    with pytest.raises(jinja2.TemplateAssertionError):
        render.environment().from_string("{{ x | safe }}")


def test_what_is_undefined_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render.environment().from_string("{{ nothing | unit_value }}").render()
    with pytest.raises(jinja2.UndefinedError):
        render.environment().from_string("{% if nothing %}x{% endif %}").render()


def test_comments_cannot_continue_a_line() -> None:
    with pytest.raises(DeployError):
        quoting.comment("x\\")
