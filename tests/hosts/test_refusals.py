"""Hosts that do not start the agent: each kind of no becomes the one error that says what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.errors import CODES
from ddtree_deploy.hosts.refusals import NoAgent, explain
from ddtree_deploy.hosts.target import Target

FILE = Path(__file__).parents[1] / "cases" / "refusals" / "hosts.toml"
CASES = [(code, case) for code, cases in tomllib.loads(FILE.read_text("utf-8")).items() for case in cases]


@pytest.mark.parametrize(("code", "case"), CASES, ids=[case["name"] for _code, case in CASES])
def test_a_host_that_says_no(code, case):
    options = {word: case[word] for word in ("python", "sudo", "container") if word in case}
    seen = NoAgent(case.get("status"), case.get("stderr", "").strip(), case.get("noise", ""), lambda: "ops")
    error = explain(Target("box", "ssh", ssh="box", **options), seen)
    assert error.code == code, error
    assert error.message.startswith("box: ")
    assert "\n" not in error.message
    assert case.get("hint", "") in str(error.hint)
    assert case.get("details", "") in " ".join(error.details)


@given(
    st.one_of(st.none(), st.integers(-64, 255)),
    st.text(max_size=80),
    st.booleans(),
    st.sampled_from([None, "docker:a", "podman:b"]),
    st.sampled_from(["", "sudo: ", "sudo: sudo: ", "not found", "docker: ", "tty"]),
)
def test_whatever_a_host_says_is_one_error(status, text, sudo, container, prefix):
    target = Target("box", "ssh", ssh="box", sudo=sudo, container=container)
    error = explain(target, NoAgent(status, (prefix + text).strip(), text, lambda: ""))
    assert error.code in CODES
    assert error.exit_status == 4
