"""The processes of the deep checks, with a real torch on the CPU."""

from __future__ import annotations

import pytest

from ddtree_deploy.agent import doctor_deep

NOBODY = {"devices": [], "holders": []}


@pytest.mark.torch
def test_an_all_reduce_between_two_processes():
    ranks = doctor_deep._all_reduce([0, 1], "gloo", 120.0, 1 << 20, [], doctor_deep._environment({}))["ranks"]
    assert {name: (rank["right"], rank["error"]) for name, rank in ranks.items()} == {
        "0": (True, None),
        "1": (True, None),
    }


@pytest.mark.torch
def test_a_rank_that_never_comes_is_not_waited_for_without_end():
    environment = {**doctor_deep._environment({}), "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(doctor_deep._free_port())
    settings = {"what": "all_reduce", "backend": "gloo", "bytes": 1024, "seconds": 8.0, "path": []}
    rank = doctor_deep._rank(settings, environment)
    assert rank["right"] is None
    assert rank["error"]


def test_without_gpus_nothing_is_run():
    facts = doctor_deep.gather({"deep": {}}, {"devices": {"error": "nvidia-smi: not found"}, "holders": []}, [])
    assert facts == {"skipped": "no GPU is known", "all_reduce": None, "imports": {}}


def test_a_process_that_says_nothing_is_named_by_its_end():
    rank = doctor_deep._rank({"what": "imports", "module": "antigravity_none", "seconds": 20.0, "path": []}, {})
    assert "antigravity_none" in rank["error"] or "torch" in rank["error"]
