"""Every case leads to its findings and to no others; every code has a case that shows it."""

from __future__ import annotations

import re
from functools import cache

import pytest

from ddtree_deploy.doctor.codes import CODES
from ddtree_deploy.doctor.examine import examine
from ddtree_deploy.doctor.findings import CHECKS
from tests.doctor.cases import FOLDER, RECORDED, Case, cases, recorded

ALL = cases()


@cache
def of_base(name: str):
    return set(examine(recorded(name)))


def added(case: Case):
    before = of_base(case.base)
    return [finding for finding in examine(case.facts()) if finding not in before]


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.area}: {case.name}")
def test_case(case):
    found = added(case)
    seen = {(finding.code, finding.severity.word) for finding in found if finding.known}
    assert seen == {(code, severity) for code, severity, _says in case.finds}, found
    for code, severity, says in case.finds:
        assert any(f.code == code and f.severity.word == severity and says in f.message for f in found), found
    for finding in found:
        # Of what is wrong it is said what was seen or what to do, in one line each.
        assert not re.search(r"[\n\r]", finding.message + (finding.mend or "") + "".join(finding.evidence))
        assert finding.severity.word == "note" or finding.mend or ": " in finding.message


def test_every_code_is_shown():
    assert sorted({find[0] for case in ALL for find in case.finds}) == sorted(CODES) == sorted(CHECKS)


@pytest.mark.parametrize(("name", "errors"), RECORDED.items())
def test_recorded_facts_are_well(name, errors):
    """A recorded host has no errors but those that are known, and none of its GPUs."""
    found = [finding for finding in examine(recorded(name)) if finding.severity.word == "error"]
    assert sorted({finding.code for finding in found}) == errors
    assert [finding for finding in found if finding.area == "gpu"] == []


def test_every_file_is_used():
    files = {path.stem for path in FOLDER.glob("*.json")}
    assert files == {"recorded", *RECORDED, *(case.area for case in ALL)}


def test_readme_lists_every_case():
    listed = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted((area, name.strip()) for area, name, _row in listed) == sorted((c.area, c.name) for c in ALL)
    assert {(a, n.strip()): r.strip() for a, n, r in listed} == {(c.area, c.name): c.row for c in ALL}


def test_documentation_lists_every_code():
    text = (FOLDER.parents[2] / "docs" / "doctor.md").read_text()
    listed = re.findall(r"^\| (DD\d{3}) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    assert {code: (area, title) for code, area, title in listed} == CODES
