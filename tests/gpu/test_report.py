"""Each check of the report can fail: synthetic results that are right, and one thing changed."""

import copy

import pytest

from tests.gpu import catalog, report

DIGEST = "0123"


def record(engine, step, result):
    key = catalog.result_key(catalog.ENGINES[engine], step, DIGEST)
    return {"key": key, "engine": engine, "step": step, "result": result}


def step_of(engine, name):
    return next(step for spec, step in catalog.every_step() if (spec.name, step["name"]) == (engine, name))


def outputs(first, verifies=80):
    outs = [[first, number % 7, *range(126)] for number in range(16)]
    return {"outs": outs, "verifies": [verifies] * 16, "pools": [{"slots": 9}, {"slots": 9}]}


GENERATE = "generate/draft-weak/graphs/8"
LEAKED = f"{GENERATE}/leak=True"
STATE = {"length": 9, "ssm": 0.01, "conv": 0.01, "one_off_ssm": 1.2, "one_off_conv": 1.2}


@pytest.fixture
def results():
    """By engine and step, what a good run would give."""
    prompts = [[number] for number in range(16)]
    samples = {f"1,{token},{token % 3},0": 300 for token in range(10)}
    cold = {f"1,{token},{token % 3},0": 100 + 90 * token for token in range(10)}
    leaked = outputs(5)
    for output in leaked["outs"][10:13]:
        output[2] = 99
    turns = {
        "prompts": [[number, 5] for number in range(8)],
        "first_prompts": [[number] for number in range(8)],
        "hot": {"outs": [[1, 2]] * 8},
        "cold": {"outs": [[1, 2]] * 8},
        "cached": [2] * 8,
    }
    waits = {"rounds": 9, "waits": {}, "fused": True}
    rounds = [[size, 1.0 * number, 1.0 * number + 0.5] for size in (1, 8) for number in range(4)]
    found = {
        ("plain", "prompts"): {"prompts": prompts},
        ("plain", "generate/none/graphs/8"): outputs(5, 0),
        ("chain", GENERATE): outputs(5, 80),
        ("tree15", GENERATE): outputs(5, 59),
        ("tree15", LEAKED): leaked,
        ("shadow31", "generate/draft-weak/graphs/1"): outputs(5),
        ("chain", "generate/draft-weak/graphs/1"): outputs(5),
        ("radix15", "turns"): turns,
        ("tree15", "stops"): {"full": [[1, 2, 3]], "stops": [2], "cut": [[1, 2]]},
        ("plain", "sample/none/1.0"): {"counts": dict(samples)},
        ("plain", "sample/none/0.7"): {"counts": cold},
        ("tree15", "sample/draft-weak/1.0"): {"counts": dict(samples)},
        ("tree15", "mixed"): {**outputs(5), "sampled": [[9]] * 16},
        ("chain", "state/draft-weak"): {"states": [STATE]},
        ("tree15", "state/draft-weak"): {"states": [STATE]},
        ("tree15", "state/draft-weak/leak=True"): {"states": [{**STATE, "ssm": 1.3}]},
        ("bf16-chain", "state/draft-weak"): {"states": [{**STATE, "ssm": 0.02}]},
        ("bf16-tree31", "state/draft-weak"): {"states": [{**STATE, "ssm": 0.03}]},
        ("tree15", "sync"): {"warn": waits, "error": waits},
        ("timed-chain", "clock/draft-weak/8"): {"batch": 8, "parts": [rounds], "memory": {}},
        ("timed-tree15", "clock/draft-weak/8"): {"batch": 8, "parts": [rounds], "memory": {}},
        ("timed-tree15", "oracle/8"): {**outputs(5, 20), "passes": [outputs(5, 60), outputs(5, 20)]},
    }
    return copy.deepcopy(found)


def build(results, *, near=()):
    """`near`: prompts at whose difference the two tokens are a near-tie."""
    records = [record(engine, step_of(engine, name), result) for (engine, name), result in results.items()]
    asked = {}
    for comparison in report.comparisons(report.runs(records, DIGEST)):
        for difference in comparison.found:
            gap = 0.05 if difference.prompt in near else 2.0
            asked[difference.key] = [[-0.1, difference.tokens[0]], [-0.1 - gap, difference.tokens[1]]]
    gaps = record("plain", step_of("plain", "gaps"), {"answers": asked})
    return report.build([*records, {**gaps, "key": "gaps-1"}], DIGEST)


def failed(written):
    return [check["name"] for check in written["checks"] if not check["passed"]]


def test_good_results_pass(results):
    written = build(results)
    assert failed(written) == []
    assert len(written["checks"]) >= 16
    assert written["passed"]


def change_output(results, engine, name, prompts, key="outs"):
    for number in prompts:
        results[engine, name][key][number][3] = 77


def test_a_difference_at_a_near_tie_is_allowed(results):
    change_output(results, "tree15", GENERATE, [1])
    assert failed(build(results, near=[1])) == []


def test_a_difference_elsewhere_is_not(results):
    change_output(results, "tree15", GENERATE, [1])
    assert failed(build(results)) == ["near-ties"]


def test_more_differences_than_the_chains_and_two_are_not(results):
    change_output(results, "chain", GENERATE, [8])
    change_output(results, "tree15", GENERATE, [8, 1, 2])
    assert failed(build(results, near=range(10))) == []
    change_output(results, "tree15", GENERATE, [3])
    assert failed(build(results, near=range(10))) == ["differences"]


def test_a_difference_that_was_not_looked_up_fails(results):
    change_output(results, "tree15", GENERATE, [1])
    records = [record(engine, step_of(engine, name), result) for (engine, name), result in results.items()]
    assert "near-ties" in failed(report.build(records, DIGEST))


def test_a_leak_must_be_seen(results):
    results["tree15", LEAKED] = outputs(5)
    assert failed(build(results)) == ["leak is seen"]


BREAK = {
    "shadow generate/draft-weak/graphs/1": lambda r: change_output(r, "shadow31", "generate/draft-weak/graphs/1", [0]),
    "prefix cache": lambda r: r["radix15", "turns"]["cached"].__setitem__(0, 1),
    "stop tokens tree15": lambda r: r["tree15", "stops"]["cut"].__setitem__(0, [1, 2, 3]),
    "sampling tree15": lambda r: r["tree15", "sample/draft-weak/1.0"]["counts"].update({"1,3,0,0": 800}),
    "sampling test can fail": lambda r: r["plain", "sample/none/0.7"].update(r["plain", "sample/none/1.0"]),
    "sampled is sampled tree15": lambda r: r["tree15", "mixed"]["sampled"].__setitem__(
        0, r["tree15", "mixed"]["outs"][0]
    ),
    "state bf16-tree31 state/draft-weak": lambda r: r["bf16-tree31", "state/draft-weak"]["states"].append(
        {**STATE, "ssm": 0.05}
    ),
    "state tree15 state/draft-weak": lambda r: r["tree15", "state/draft-weak"]["states"].append({**STATE, "conv": 0.5}),
    "state test can fail: tree15 state/draft-weak/leak=True": lambda r: r[
        "tree15", "state/draft-weak/leak=True"
    ].update(states=[STATE]),
    "pools": lambda r: r["tree15", GENERATE].update(pools=[{"slots": 9}, {"slots": 8}]),
    "no wait but the read-back tree15": lambda r: r["tree15", "sync"]["error"].update(waits={"x": 1}),
    f"gain tree15 {GENERATE}": lambda r: r["tree15", GENERATE].update(verifies=[70] * 16),
    "step time timed-tree15 clock/draft-weak/8": lambda r: r["timed-chain", "clock/draft-weak/8"].update(
        parts=[[[8, 0.5 * number, 0.0] for number in range(4)]]
    ),
    "long paths timed-tree15 oracle/8": lambda r: r["timed-tree15", "oracle/8"]["passes"].append(outputs(5, 60)),
}


@pytest.mark.parametrize("name", BREAK)
def test_each_check_can_fail(name, results):
    BREAK[name](results)
    written = build(results)
    assert name in failed(written)
    assert written["passed"] == name.startswith("step time")  # an aim


def test_a_fused_append_that_was_given_up_is_a_wait(results):
    results["tree15", "sync"]["error"]["fused"] = False
    assert "no wait but the read-back tree15" in failed(build(results))


def test_results_of_another_patch_set_do_not_count(results):
    records = [record(engine, step_of(engine, name), result) for (engine, name), result in results.items()]
    written = report.build(records, "another")
    assert not any("tree15" in label for label in written["exactness"])
    assert f"tree15 {GENERATE}" in written["not_run"]
    assert f"chain {GENERATE}" not in written["not_run"]


def test_parts_of_a_round_are_medians_over_full_batches():
    spans = [[0, 8, "draft", 1.0, 2.0], [0, 8, "draft", 1.0, 1.0], [1, 8, "draft", 4.0, 5.0], [2, 3, "draft", 9.0, 9.0]]
    assert report._parts({"batch": 8, "spans": spans}) == {"draft": [3.0, 4.0]}
