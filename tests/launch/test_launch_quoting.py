"""Quoting without systemd: refusals, and round trips through the system's own /bin/sh."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import quoting
from tests.launch import strategies

TEXT_CONTEXTS = (
    quoting.exec_word,
    quoting.shell_word,
    quoting.unit_value,
    quoting.comment,
    lambda value: quoting.environment_assignment("A", value),
    lambda value: quoting.environment_file_line("A", value),
    lambda value: quoting.shell_assignment("A", value),
    lambda value: quoting.exec_program("/x" + value),
    lambda value: quoting.unit_path("/x" + value),
    lambda value: quoting.environment_file_path("/x" + value),
)


@pytest.mark.parametrize("bad", strategies.REFUSED, ids=ascii)
@pytest.mark.parametrize("place", ["{}x", "x{}", "x{}x"])
@pytest.mark.parametrize("context", range(len(TEXT_CONTEXTS)))
def test_control_characters_are_refused_everywhere(bad: str, place: str, context: int) -> None:
    with pytest.raises(DeployError) as caught:
        TEXT_CONTEXTS[context](place.format(bad))
    assert caught.value.code == "DD601"
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A\n"])
def test_names_of_variables(name: str) -> None:
    for function in (quoting.environment_assignment, quoting.environment_file_line, quoting.shell_assignment):
        with pytest.raises(DeployError):
            function(name, "x")
    with pytest.raises(DeployError):
        quoting.shell_require(name)


def test_a_refused_variable_is_named_but_its_value_is_not_shown() -> None:
    with pytest.raises(DeployError) as caught:
        quoting.environment_file_line("PLAIN", "hunter2\n")
    assert "PLAIN" in caught.value.message
    assert "hunter2" not in caught.value.message


PROGRAMS = """python|bin/python||-/bin/x|@/bin/x|:/bin/x|!/bin/x|+/bin/x|//bin/x|/bin/../x|/bin/x/|/bin/./x|/bin/a'b
/bin/a"b|/bin/a\\b|/bin/$x|/bin/a\tb|${VENV}/bin/python"""


@pytest.mark.parametrize("program", PROGRAMS.replace("\n", "|").split("|"))
def test_programs_that_systemd_would_read_otherwise(program: str) -> None:
    with pytest.raises(DeployError) as caught:
        quoting.exec_program(program)
    assert caught.value.code == "DD601"


@pytest.mark.parametrize(
    "path", ["x.env", "-/etc/x", "/etc/*.env", "/etc/{a,b}", "/etc/[x]", "/etc/a?", "/etc/a\\b", "/etc/x "]
)
def test_environment_file_paths_that_systemd_would_read_otherwise(path: str) -> None:
    with pytest.raises(DeployError):
        quoting.environment_file_path(path)


@pytest.mark.parametrize("value", ["", " a", "a ", "\ta", "a\\"])
def test_plain_values_that_systemd_would_alter(value: str) -> None:
    with pytest.raises(DeployError):
        quoting.unit_value(value)


@settings(max_examples=40, deadline=None)
@given(st.lists(strategies.values, min_size=1, max_size=20))
def test_words_survive_the_shell(values: list[str]) -> None:
    script = "printf '%s\\0' " + " ".join(quoting.shell_word(value) for value in values)
    run = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True)
    assert run.stdout.decode().split("\0")[:-1] == values


@settings(max_examples=40, deadline=None)
@given(strategies.environments.filter(bool), st.booleans())
def test_variables_survive_the_shell(environment: dict[str, str], as_file: bool) -> None:
    environment = {f"T_{name}": value for name, value in environment.items()}
    write = quoting.environment_file_line if as_file else quoting.shell_assignment
    lines = [write(name, value) for name, value in environment.items()]
    lines += ["printf '%s\\0' " + " ".join(f'"${name}"' for name in environment)]
    run = subprocess.run(["/bin/sh", "-c", "\n".join(lines)], capture_output=True, check=True)
    assert run.stdout.decode().split("\0")[:-1] == list(environment.values())


@pytest.mark.parametrize(("value", "status"), [("x", 0), ("", 2), (None, 2)])
def test_a_required_variable(value: str | None, status: int) -> None:
    script = "set -eu\n" + quoting.shell_require("T_REQUIRED") + "\nexec printenv T_REQUIRED\n"
    env = {"PATH": "/usr/bin:/bin"} | ({} if value is None else {"T_REQUIRED": value})
    run = subprocess.run(["/bin/sh", "-c", script], env=env, capture_output=True, text=True)
    assert run.returncode == status
    assert run.stdout == ("x\n" if status == 0 else "")
    if status:
        assert "T_REQUIRED" in run.stderr
