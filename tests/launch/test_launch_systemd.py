"""What systemd's own parsers make of the quoting functions and of the rendered unit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import quoting
from ddtree_deploy.launch.render import render
from ddtree_deploy.launch.service import Service
from tests.launch import examples, strategies
from tests.launch.systemd_parser import (
    load_environment_file,
    parse_units,
    replace_variables,
    require_systemd,
    verify,
)

pytestmark = pytest.mark.systemd

# A batch is one run of systemd; the failing assertion names the unit, so nothing is gained by shrinking.
quick = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(autouse=True, scope="module")
def _systemd() -> None:
    require_systemd()


def accepted(function, *values: str) -> bool:
    try:
        function(*values)
    except DeployError:
        return False
    return True


def absolute_paths(function) -> st.SearchStrategy[str]:
    """Paths with hostile parts that the quoting function takes."""
    return strategies.nonempty_values.map(lambda tail: "/x/" + tail.replace("/", "_")).filter(
        lambda path: accepted(function, path)
    )


@quick
@given(
    st.lists(
        st.tuples(absolute_paths(quoting.exec_program), st.lists(strategies.values, max_size=8)),
        min_size=1,
        max_size=25,
    )
)
def test_argv_reaches_the_program_as_it_was(commands: list[tuple[str, list[str]]]) -> None:
    units = {
        f"u{number}.service": "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart="
        + " ".join([quoting.exec_program(program), *map(quoting.exec_word, arguments)])
        + "\n"
        for number, (program, arguments) in enumerate(commands)
    }
    parsed, complaints = parse_units(units)
    for number, (program, arguments) in enumerate(commands):
        (argv,) = parsed[f"u{number}.service"].argv
        assert replace_variables(argv, ["HOME=/wrong"]) == [program, *arguments], units[f"u{number}.service"]
    assert "/units/" not in complaints, complaints


@quick
@given(
    st.lists(
        st.tuples(
            strategies.environments,
            absolute_paths(quoting.environment_file_path),
            strategies.values.filter(lambda value: accepted(quoting.unit_value, value)),
            absolute_paths(quoting.unit_path),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_settings_reach_systemd_as_they_were(units: list[tuple[dict[str, str], str, str, str]]) -> None:
    texts = {}
    for number, (environment, path, value, folder) in enumerate(units):
        lines = ["[Unit]", "DefaultDependencies=no", f"Description={quoting.unit_value(value)}"]
        lines += ["[Service]", "ExecStart=/bin/true", f"EnvironmentFile={quoting.environment_file_path(path)}"]
        lines += [f"WorkingDirectory={quoting.unit_path(folder)}"]
        lines += [f"Environment={quoting.environment_assignment(*pair)}" for pair in environment.items()]
        texts[f"u{number}.service"] = "\n".join(lines) + "\n"
    parsed, complaints = parse_units(texts)
    for number, (environment, path, value, folder) in enumerate(units):
        unit = parsed[f"u{number}.service"]
        assert unit.environment == [f"{name}={value}" for name, value in environment.items()]
        assert unit.environment_files == [path]
        assert unit.properties["Description"] == value
        assert unit.properties["WorkingDirectory"] == folder
    assert "/units/" not in complaints, complaints


@quick
@given(strategies.environments)
def test_environment_file_is_read_as_it_was(tmp_path_factory, environment: dict[str, str]) -> None:
    path = tmp_path_factory.mktemp("env") / "x.env"
    lines = [quoting.environment_file_line(*pair) for pair in environment.items()]
    path.write_text("# comment\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert load_environment_file(path) == environment


def test_environment_file_of_many_values(tmp_path: Path) -> None:
    environment = {f"V{number}": value for number, value in enumerate(strategies.FRAGMENTS)}
    path = tmp_path / "x.env"
    path.write_text(
        "".join(quoting.environment_file_line(*pair) + "\n" for pair in environment.items()), encoding="utf-8"
    )
    assert load_environment_file(path) == environment


services = st.builds(
    lambda model, drafter, name, extra, environment, folder, program: Service(
        name="hostile",
        model=model,
        drafter=drafter,
        served_name=name,
        algorithm="DFLASH",
        extra_args=tuple(extra),
        environment=environment,
        working_directory=folder,
        environment_directory="/etc/with space/100%",
        python=program,
    ),
    strategies.nonempty_values,
    strategies.nonempty_values,
    strategies.nonempty_values,
    st.lists(strategies.values, max_size=4),
    strategies.environments,
    absolute_paths(quoting.unit_path),
    absolute_paths(quoting.exec_program).filter(lambda path: ":" not in path),
)


@quick
@given(st.lists(services, min_size=1, max_size=15))
def test_a_rendered_unit_says_what_the_command_says(tmp_path_factory, hostile: list[Service]) -> None:
    renderings = [render(service, 4) for service in hostile]
    parsed, complaints = parse_units({f"u{n}.service": r.unit.text for n, r in enumerate(renderings)})
    folder = tmp_path_factory.mktemp("rendered")
    for number, rendering in enumerate(renderings):
        unit = parsed[f"u{number}.service"]
        (argv,) = unit.argv
        assert replace_variables(argv) == list(rendering.argv)
        assert unit.environment_files == ["/etc/with space/100%/hostile.env"]
        assert unit.properties["WorkingDirectory"] == rendering.command.service.working_directory
        path = folder / f"{number}.env"
        path.write_text(rendering.environment_file.text, encoding="utf-8")
        assert load_environment_file(path) == rendering.env
    assert "/units/" not in complaints, complaints


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_verify_has_nothing_to_say(tp: int) -> None:
    service = dataclasses.replace(examples.services()["qwen-ddtree"], python="/bin/sh", secrets=("HF_TOKEN",))
    unit = render(service, tp).unit
    assert verify(unit.name, unit.text) == (0, "")


def test_verify_would_notice() -> None:
    """The check above can fail: a key in the wrong section is no more than a warning."""
    service = dataclasses.replace(examples.services()["qwen-ddtree"], python="/bin/sh")
    unit = render(service, 8).unit
    misplaced = unit.text.replace("StartLimitIntervalSec=7200\n", "").replace(
        "[Service]\n", "[Service]\nStartLimitIntervalSec=7200\n"
    )
    _, said = verify(unit.name, misplaced)
    assert "StartLimitIntervalSec" in said


def test_the_values_that_eight_gpus_need() -> None:
    unit = render(examples.services()["qwen-ddtree"], 8, python="/bin/sh").unit
    parsed, complaints = parse_units({unit.name: unit.text})
    properties = parsed[unit.name].properties
    assert "/units/" not in complaints, complaints
    infinity = str(2**64 - 1)
    wanted = {
        "Type": "exec",
        "KillMode": "mixed",
        "SendSIGKILL": "yes",
        "Restart": "always",
        "RestartSec": "30s",
        "TimeoutStopSec": "3min",
        "LimitMEMLOCK": infinity,
        "LimitCORE": "0",
        "TasksMax": infinity,
        "UMask": "0077",
    }
    assert {key: properties[key] for key in wanted} == wanted
