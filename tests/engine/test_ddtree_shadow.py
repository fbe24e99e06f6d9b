"""Shadow-linear's counts: what the tree would have caught, from what the chain's verify saw."""

from __future__ import annotations

import random

import pytest

from tests.engine.ddtree_sources import NEW, edited
from tests.engine.test_ddtree_kernels import batch
from tests.engine.tree_reference import grown, tables, walk

pytestmark = [pytest.mark.torch, pytest.mark.wheel]

BEYOND, NONE = -1, -2


def job(
    rng: random.Random, requests: int, depth: int, k: int, window: int, spine: bool
) -> tuple[dict, list[list[int]]]:
    """Chain verifies of a batch, and what each request is to count."""
    made = batch(rng, requests, depth, k, window, spine, do="shadow", commit_lens=[], last_tokens=[])
    outcomes = []
    for logp, ids, root in zip(made["logp"], made["ids"], made["roots"], strict=True):
        # What the target says after the root and after each draft of the chain.
        said = [row[0] if rng.random() < 0.7 else rng.choice([*row, root, k + 9]) for row in ids] + [
            rng.randrange(k + 3)
        ]
        chain = next((level for level in range(depth) if said[level] != ids[level][0]), depth)
        committed = chain + 1 if rng.random() < 0.8 else rng.randrange(1, chain + 2)
        made["commit_lens"].append(committed)
        made["last_tokens"].append(said[committed - 1])

        # The tree's own walk, where the target answers at the nodes that the chain has too.
        tree = grown(logp, window, spine)
        answers = tables(tree, ids, root, 0, window)
        targets = [
            said[depth] if seen else -5 for depth, seen in zip(answers["depths"], answers["on_spine"], strict=True)
        ]
        walked = walk(answers, targets, depth)[-1] - 1
        stopped = committed <= chain
        broke = not stopped and chain < depth
        rank = ids[chain].index(said[chain]) if broke and said[chain] in ids[chain] else BEYOND
        outcomes.append([committed - 1, min(walked, committed - 1) if stopped else walked, rank if broke else NONE])
    return made, outcomes


def jobs() -> list[tuple[dict, list[list[int]]]]:
    rng = random.Random(13)
    # The last windows are too small for the whole chain: such a tree can also accept less than the chain.
    windows = [(6, 4, 14, True), (6, 4, 14, False), (4, 1, 5, True), (7, 3, 6, False), (7, 3, 4, True)]
    # Pads have the root's token, which the target may say too.
    shapes = [*windows, (1, 2, 9, False)]
    return [job(rng, 60 if shape[0] == 1 else 8, *shape) for shape in shapes]


JOBS = jobs()
BROKEN = JOBS[-2:]
LINES = {
    "do": "tally",
    "lines": [
        [],
        [[[3, 4, 1], [3, 3, BEYOND]], [[0, 1, 2], [7, 7, NONE]]],
        [],
        [[[7, 7, NONE]]],
        [[[5, 2, 1]]],
    ],
}
EXPECTED_LINES = [
    None,
    "DDTREE shadow: 4 verifies, accept len: 4.25 (chain), >= 4.75 (tree), 3 mismatches, caught: 66.7%, "
    "by rank: 1: 33.3% 2: 33.3% beyond: 33.3%",
    None,
    "DDTREE shadow: 1 verifies, accept len: 8.00 (chain), >= 8.00 (tree)",
    "DDTREE shadow: 1 verifies, accept len: 6.00 (chain), >= 3.00 (tree), 1 mismatches, caught: 0.0%, "
    "by rank: 1: 100.0%",
]
MUTATIONS = {
    "stopped requests are mismatches": ("(accepted < depth) & (rank != 0)", "accepted < depth"),
    "pads are nodes": ("below_spine & here", "here"),
    "caught a level too late": ("accepted.unsqueeze(1) + 1)", "accepted.unsqueeze(1) + 2)"),
    "the chain is always in the tree": (
        "torch.minimum(accepted, tree.on_spine.sum(dim=1) - 1)",
        "accepted.clone()",
    ),
}


@pytest.fixture(scope="module")
def answers(wheel_site, run_child, tmp_path_factory):
    """What the modules as they are, and each mutation of them, count."""
    asked = [made for made, _ in JOBS]
    few = [made for made, _ in BROKEN]
    folders = [edited(tmp_path_factory.mktemp("mutant"), "ddtree_shadow", edit) for edit in MUTATIONS.values()]
    items = [{"new": str(NEW), "jobs": [*asked, LINES]}, *({"new": str(folder), "jobs": few} for folder in folders)]
    return run_child("tree_tables.py", wheel_site, items)


def test_outcomes_are_those_of_the_tree_s_own_walk(answers):
    assert answers[0][:-1] == [outcomes for _, outcomes in JOBS]


def test_outcomes_of_every_kind_occurred():
    rows = [row for _, outcomes in JOBS for row in outcomes]
    assert {row[2] for row in rows} >= {BEYOND, NONE, 1, 2}
    assert any(tree > chain for chain, tree, _ in rows)
    assert any(tree < chain for chain, tree, _ in rows)
    # A token of the top-k that the tree had no room for.
    assert any(tree == chain and rank > 0 for chain, tree, rank in rows)


def test_log_lines(answers):
    assert answers[0][-1] == EXPECTED_LINES


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_counts_are_noticed(name, answers):
    assert answers[1 + list(MUTATIONS).index(name)] != [outcomes for _, outcomes in BROKEN]
