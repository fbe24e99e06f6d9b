"""What a failed start's log is said to mean."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.serve.causes import find_cause, telling_lines

CASES = tomllib.loads((Path(__file__).parents[1] / "cases/serve/causes.toml").read_text())["case"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_known_causes(case):
    noise = ["Load weight begin.", "", "x" * 300]
    cause = find_cause([*noise, *case["log"], *noise])
    if not case["cause"]:
        assert cause is None
        return
    assert cause is not None
    assert case["cause"] in cause.what
    assert cause.mend
    assert cause.line in case["log"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=80), max_size=30))
def test_any_log_can_be_read(log):
    cause = find_cause(log)
    assert cause is None or cause.line in [line.strip() for line in log]
    assert len(telling_lines(log)) <= 13


def test_the_lines_to_show():
    log = ["start", "ValueError: the reason", *[f"File {number}" for number in range(20)], ""]
    shown = telling_lines(log, limit=5)
    assert shown == ["ValueError: the reason", *[f"File {number}" for number in range(15, 20)]]
