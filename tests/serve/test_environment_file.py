"""The reader of environment files against systemd's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent.supervisor import assignments
from ddtree_deploy.launch import quoting
from tests.launch import strategies
from tests.launch.systemd_parser import load_environment_file, require_systemd

CASES = [
    ("", {}),
    ("A=1", {"A": "1"}),
    ("A=1\nA=2\n", {"A": "2"}),
    ("# A=1\n; B=2\nC=3\n", {"C": "3"}),
    ("export A=1\nB=2\n", {"B": "2"}),
    ("A=\nB=2", {"A": "", "B": "2"}),
    (" A = x y  \n", {"A": "x y"}),
    ("A='x y'\"z\"w\n", {"A": "x yzw"}),
    ("A=x'y'\n", {"A": "x'y'"}),
    ("A='it\\'\nB=2\n", {"A": "it\\", "B": "2"}),
    ('A="a\\"b\\\\c\\$d\\qe"\n', {"A": 'a"b\\c$d\\qe'}),
    ("A=a\\ b\\\nc\n", {"A": "a bc"}),
    ('A="two\nlines"\n', {"A": "two\nlines"}),
    ("A=x # no comment\n", {"A": "x # no comment"}),
    ("A='  kept  '  \n", {"A": "  kept  "}),
    ("1A=x\nA-B=y\n", {}),
    ("A='open ", {"A": "open "}),
    ("A=x ", {"A": "x"}),
    ("A=x \\", {"A": "x "}),
    ("A", {}),
]


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_cases(text, wanted):
    assert assignments(text) == wanted


@pytest.mark.systemd
@pytest.mark.parametrize("text", [text for text, _wanted in CASES])
def test_cases_as_systemd_has_them(text, tmp_path: Path):
    require_systemd()
    path = tmp_path / "file"
    path.write_text(text)
    assert assignments(text) == load_environment_file(path)


quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
lines = st.lists(
    st.sampled_from(["A", "B_1", "=", "x", " ", "'", '"', "\\", "\n", "#", ";", "$", "`", "\t", "é"]), max_size=30
)


@pytest.mark.systemd
@quick
@given(lines.map("".join))
def test_any_file_is_read_as_systemd_reads_it(tmp_path: Path, text):
    require_systemd()
    path = tmp_path / "file"
    path.write_text(text)
    assert assignments(text) == load_environment_file(path)


@quick
@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), strategies.values, max_size=6))
def test_what_we_write_is_read_back(environment):
    text = "".join(quoting.environment_file_line(*pair) + "\n" for pair in environment.items())
    assert assignments(text) == environment
