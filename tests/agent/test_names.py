"""Names from requests, replies and records: none with a line end at its end, which ``$`` in a pattern lets through."""

from __future__ import annotations

import pytest

from ddtree_deploy.agent import discovery, doctor_units, root
from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.records import check_entry
from ddtree_deploy.agent.state import check_id
from ddtree_deploy.agent.tree import check_path


@pytest.mark.parametrize("value", ["t\n", "t\n\n", "", "-t", "../t", "a/b", "t" * 102, None, 3])
def test_what_is_no_transaction_id(value):
    assert check_id("20260101T000000Z-0a1b2c3d") == "20260101T000000Z-0a1b2c3d"
    with pytest.raises(AgentError) as caught:
        check_id(value)
    assert caught.value.code == "DD307"


@pytest.mark.parametrize("value", ["0" * 64 + "\n", "0" * 63, "0" * 65, "A" * 64, "", None])
def test_what_is_no_sha256(value):
    entry = {"kind": "file", "sha256": "0" * 64, "size": 1, "mode": 0o644}
    check_entry(entry)
    with pytest.raises(ValueError, match="sha256"):
        check_entry({**entry, "sha256": value})


@pytest.mark.parametrize("path", ["sglang/a.py\n", "sglang/a\n/b.py", "sglang/\n", "sglang/a\tb", "sglang/a\\b"])
def test_paths_that_hold_a_line_end(path):
    with pytest.raises(AgentError) as caught:
        check_path(path, "sglang")
    assert (caught.value.code, "control characters" in caught.value.message) == ("DD105", True)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (root._LIB, "python3.12"),
        (discovery._PYTHON_FOLDER, "python3.12"),
        (doctor_units._OURS, "sglang-qwen.service"),
    ],
)
def test_names_of_files_on_the_host(pattern, name):
    assert pattern.match(name)
    for odd in (name + "\n", name + "x", "x" + name, "\n" + name):
        assert not pattern.match(odd)
