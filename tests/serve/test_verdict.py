"""Whether an engine that answers does what it was installed for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ddtree_deploy.serve.verdict import judge

DATA = tomllib.loads((Path(__file__).parents[1] / "cases/serve/verdicts.toml").read_text())


@pytest.mark.parametrize("case", DATA["case"], ids=lambda case: case["name"])
def test_verdicts(case):
    service = {**DATA["sound"]["service"], **case.get("service", {})}
    proof = {**DATA["sound"]["proof"], **case.get("proof", {})}
    # TOML has no null: an empty table is "no completion".
    proof["completion"] = proof["completion"] or None
    verdict = judge(service, proof)
    found = [("!" if item.severity == "error" else "") + item.what for item in verdict.findings]
    assert len(found) == len(case["findings"])
    for said, wanted in zip(found, case["findings"], strict=True):
        assert said.startswith("!") == wanted.startswith("!")
        assert wanted.removeprefix("!") in said
    assert verdict.sound == (not any(item.startswith("!") for item in case["findings"]))
    if "accept_length" in case:
        assert verdict.accept_length == case["accept_length"]
