"""Exit status, stdout and stderr together, from data: what a person sees for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CASES = json.loads((Path(__file__).parent.parent / "cases/cli/messages.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_message(cli, case):
    places = {"SITE": str(cli.site), "STATE": str(cli.state)}

    def fill(text: str) -> str:
        for word, value in places.items():
            text = text.replace(word, value)
        return text

    result = cli.run(*(fill(word) for word in case["args"]))
    assert result.status in case.get("status_in", [case.get("status")]), result
    if "err" in case:
        assert result.err == fill(case["err"])
    for text in case.get("err_has", ()):
        assert fill(text) in result.err
    assert result.out == case.get("out", "")
    assert "Traceback" not in result.err
    # One line says it; what follows is details and the hint.
    assert all(line == "" or line.startswith(("error[", "hint: ", "  ", "note: ")) for line in result.err.splitlines())
