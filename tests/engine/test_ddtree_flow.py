"""DDTREE's whole way on the CPU: worker, verify input, scheduler, pools and radix cache over a toy hybrid model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheel, pytest.mark.torch]

CASES = json.loads((Path(__file__).parents[1] / "cases" / "ddtree-flow.json").read_text())["cases"]
by_name = {"ids": lambda case: case["name"].replace(" ", "-").replace(",", "")}
INFO = "sglang/srt/speculative/ddtree_info.py"
WORKER = "sglang/srt/speculative/ddtree_worker.py"
BASE_WORKER = "sglang/srt/speculative/dflash_worker.py"


def tree(case: dict, **changes) -> dict:
    return {"algorithm": "DDTREE", **case, **changes}


def check(report: dict) -> None:
    assert report["leaked"] == {"states": 0, "kv": 0}
    for turn in report["turns"]:
        assert set(turn["wrong"].values()) == {0}, turn["wrong"]


def random_case(seed: int) -> dict:
    rng = random.Random(seed)
    block, topk = rng.randint(2, 6), rng.randint(1, 4)
    return {
        "seed": seed,
        "ping_pong": rng.choice((1, 2)),
        "block": block,
        "budget": block - 1 + rng.randint(0, 8),
        "topk": topk,
        "spine": rng.random() < 0.5,
        "ranks": [0, *(rng.randint(0, topk) for _ in range(3))],
        "temperature": rng.choice((0, 0.7)),
        "waves": [[[rng.randint(1, 70), rng.randint(1, 40)] for _ in range(rng.choice((0, 1, 2)))] for _ in range(4)],
        "retract": rng.sample(range(2, 12), 1),
    }


RANDOM = {f"random {seed}": tree(random_case(seed)) for seed in range(5)}
CHAIN = {**CASES[0], "ranks": [0, 0, 0, 1], "budget": CASES[0]["block"] - 1, "spine": True}
SCENARIOS = {
    **{case["name"]: tree(case) for case in CASES},
    **RANDOM,
    "spine": tree(CHAIN),
    "chain": tree(CHAIN, algorithm="DFLASH"),
    "shadow": tree(CASES[0], shadow=True),
    "shadow that logs": tree(CASES[0], shadow=True, log_interval=20),
    "shadowed": tree(CASES[0], algorithm="DFLASH"),
}


@pytest.fixture(scope="module")
def reports(ddtree_site, run_child) -> dict[str, dict]:
    return dict(zip(SCENARIOS, run_child("tree_flow.py", ddtree_site, list(SCENARIOS.values())), strict=True))


@pytest.mark.parametrize("case", CASES, **by_name)
def test_what_is_committed_is_the_path(case, reports):
    report = reports[case["name"]]
    check(report)
    first, second = report["turns"]
    assert first["crossings"] > 0
    assert second["prefix_hits"] > 0
    assert (first["retractions"] > 0) == ("retract" in case)
    if case["topk"] > 1:
        # Else the checks would hold for a chain's bookkeeping too.
        assert report["branched"] > len(report["rounds"]) / 4
    else:
        assert report["branched"] == 0


@pytest.mark.parametrize("name", RANDOM)
def test_random_schedules(name, reports):
    check(reports[name])


def test_spine_within_the_blocks_budget_is_dflash(reports):
    """Round by round the same tokens committed, and the same states, as by stock DFLASH with the same drafter."""
    spine, chain = reports["spine"], reports["chain"]
    check(spine)
    assert spine == chain
    assert max(max(committed) for committed in spine["rounds"]) == CHAIN["block"]


def test_shadow_serves_the_chain_as_dflash(reports):
    shadow, dflash = dict(reports["shadow"]), dict(reports["shadowed"])
    check(shadow)
    verifies, chain, accepted, caught, lines = shadow.pop("shadow")
    assert lines == []
    assert dflash.pop("shadow") is None
    assert shadow == dflash
    assert verifies == sum(map(len, dflash["rounds"]))
    assert chain == sum(map(sum, dflash["rounds"])) - verifies
    assert chain < accepted <= chain + caught


def test_shadow_logs_every_interval(reports):
    verifies, *_, lines = reports["shadow that logs"]["shadow"]
    assert len(lines) == len(reports["shadow"]["rounds"]) // 20
    logged = [int(re.match(r"DDTREE shadow: (\d+) verifies, accept len: ", line)[1]) for line in lines]
    assert sum(logged) + verifies == reports["shadow"]["shadow"][0]


def test_a_tree_needs_fewer_rounds_than_its_chain(reports):
    tree_rounds, chain_rounds = (reports[name]["rounds"] for name in (CASES[0]["name"], "shadowed"))
    assert sum(map(len, tree_rounds)) < sum(map(len, chain_rounds))


MUTATIONS = {
    "commit the step that a chain would": (
        INFO,
        "[path[-1] for path in paths]",
        "[len(path) - 1 for path in paths]",
        "live",
    ),
    "track the step that a chain would": (BASE_WORKER, "if accepted_path is not None:\n", "if False:\n", "tracked"),
    "slots in window order": (INFO, "for node in path]", "for node in range(len(path))]", "slots"),
    "hidden states by prefix": (
        INFO,
        "hidden[keep_index]",
        "torch.cat([rows[:n] for rows, n in zip(hidden.view(bs, window, -1), commit_lens_cpu)])",
        "draft_kv",
    ),
    "positions by slot": (INFO, "positions=tree.positions", "positions=batch_order(tree.positions)", "positions"),
    "every slot freed": (INFO, "if slot not in kept]", "]", "leak"),
    "no slot freed": (INFO, ".free(slots[free_index])", ".free(slots[:0])", "leak"),
    "a path goes on after its request has ended": (
        INFO,
        "paths.append(row[:appended])",
        "paths.append(row[: row[-1]])",
        "any",
    ),
    "a RoPE table for the last request": (
        WORKER,
        "int(batch.seq_lens_cpu.max()) - 1",
        "int(batch.seq_lens_cpu[-1]) - 1",
        "max_position",
    ),
    "a causal mask": (INFO, "tree_mask(self.tree,", "tree_mask(chained(self.tree),", "mask"),
    "the draft cache written where it was": (
        WORKER,
        "verified.append_positions, batch.out_cache_loc",
        "verified.append_positions, batch.out_cache_loc.flip(0)",
        "draft_kv",
    ),
}
# What two of the mutations call.
HELPERS = """

def batch_order(positions):
    first = positions[:, :1]
    return first + torch.arange(positions.shape[1])


def chained(tree):
    from dataclasses import replace

    window = tree.tokens.shape[1]
    return replace(tree, ancestors=((torch.ones_like(tree.ancestors) << torch.arange(1, window + 1)) - 1))
"""


@pytest.mark.parametrize(
    "mutation", MUTATIONS.values(), ids=[name.replace(" ", "-").replace("'", "") for name in MUTATIONS]
)
def test_the_flow_notices(mutation, site_with, ddtree_files, run_child):
    path, old, new, kind = mutation
    source = ddtree_files[path].decode()
    assert source.count(old) == 1
    site = site_with({**ddtree_files, path: (source.replace(old, new) + HELPERS).encode()})
    try:
        (report,) = run_child("tree_flow.py", site, [tree(CASES[0], waves=[[[61, 16], [56, 16]]])])
    except AssertionError:
        assert kind in ("leak", "any")  # the engine's own checks stopped it
        return
    if kind == "leak":
        assert report["leaked"]["kv"] or sum(turn["wrong"]["slots"] for turn in report["turns"])
    elif kind == "any":
        with pytest.raises(AssertionError):
            check(report)
    else:
        assert sum(turn["wrong"][kind] for turn in report["turns"]) > 0
