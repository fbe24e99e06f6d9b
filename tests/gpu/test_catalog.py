import json

import pytest

from tests.gpu import catalog


def test_every_shard_runs_on_known_engines_and_its_steps_are_named_once():
    for shard, engines in catalog.SHARDS.items():
        for engine, steps in engines.items():
            assert engine in catalog.ENGINES, shard
            names = [step["name"] for step in steps]
            assert len(names) == len(set(names)), (shard, engine)


def test_a_name_means_one_step():
    seen = {}
    for engines in catalog.SHARDS.values():
        for engine, steps in engines.items():
            for step in steps:
                assert seen.setdefault((engine, step["name"]), step) == step


def test_shards_together_start_an_engine_once_with_each_step_once():
    jobs = catalog.jobs(["exact", "leak", "gain"])
    assert len({job.engine.name for job in jobs}) == len(jobs)
    (tree15,) = (job for job in jobs if job.engine.name == "tree15")
    names = [step["name"] for step in tree15.steps]
    assert len(names) == len(set(names))
    assert "generate/draft/graphs/8/leak=True" in names


def test_steps_that_need_the_gpu_alone_come_after_those_that_do_not():
    for job in catalog.jobs(list(catalog.SHARDS)):
        exclusive = [step.get("exclusive", False) for step in job.steps if step["kind"] not in ("gaps", "sync")]
        assert exclusive == sorted(exclusive)
        gaps = [step["kind"] for step in job.steps]
        assert "gaps" not in gaps[:-1]


def test_what_keeps_a_result_valid():
    engine, step = catalog.ENGINES["tree15"], catalog.generation("draft", 8)
    key = catalog.result_key(engine, step, "one")
    assert key == catalog.result_key(engine, json.loads(json.dumps(step)), "one")
    assert key != catalog.result_key(engine, step, "two")
    assert key != catalog.result_key(engine, catalog.generation("draft", 8, spine=True), "one")
    assert key != catalog.result_key(catalog.ENGINES["tree31"], step, "one")
    chain = catalog.ENGINES["chain"]
    assert catalog.result_key(chain, step, "one") == catalog.result_key(chain, step, "two")


def test_the_matrix_of_exactness():
    tree = catalog.SHARDS["exact"]["tree31"]
    assert {(s["drafter"], s["eager"], s["arrival"]) for s in tree} == {
        (drafter, eager, arrival)
        for drafter in ("draft", "draft-weak")
        for eager in (False, True)
        for arrival in (1, 2, 8, "staggered")
    }
    assert any(step.get("spine") for step in catalog.SHARDS["exact"]["tree15"])


def test_unknown_shards_are_an_error():
    with pytest.raises(KeyError):
        catalog.jobs(["no such shard"])
