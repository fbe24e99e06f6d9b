"""DDTree's candidates, trees, order, masks and walks: the kernels, interpreted, against plain Python and torch."""

from __future__ import annotations

import math
import random

import pytest

from tests.engine.ddtree_sources import NEW, edited
from tests.engine.tree_reference import best_weight, dense_mask, fp32, grown, tables, walk

pytestmark = [pytest.mark.torch, pytest.mark.wheel]

MINUS_INFINITY = float("-inf")


def marginals(rng: random.Random, depth: int, k: int, *, ties: bool = False) -> list[list[float]]:
    """Log-probabilities of the best `k` tokens per position; with `ties`, many sums are equal."""
    rows = []
    for _ in range(depth):
        peak = rng.choice((0.5, 1, 4))
        weights = sorted((rng.random() ** peak + 1e-6 for _ in range(k + 1)), reverse=True)
        row = [math.log(weight / sum(weights)) for weight in weights[:k]]
        rows.append([fp32(round(2 * value) / 2 if ties else value) for value in row])
    return rows


def batch(rng: random.Random, trees: int, depth: int, k: int, window: int, spine: bool, **more) -> dict:
    """A job of that many requests, whose targets often follow the tree and often name the root's token."""
    job = {
        "do": "grow",
        "logp": [marginals(rng, depth, k, ties=rng.random() < 0.3) for _ in range(trees)],
        "ids": [[rng.sample(range(k + 3), k) for _ in range(depth)] for _ in range(trees)],
        "roots": [rng.randrange(k + 3) for _ in range(trees)],
        "seq_lens": [rng.randrange(1, 90) for _ in range(trees)],
        "window": window,
        "spine": spine,
        "max_depth": depth,
        **more,
    }
    job["targets"] = [targets(rng, job, request) for request in range(len(job["logp"]))]
    return job


def targets(rng: random.Random, job: dict, request: int) -> list[int]:
    logp, ids, root = job["logp"][request], job["ids"][request], job["roots"][request]
    tree = grown(logp, job["window"], job["spine"])
    tokens = []
    for node in range(job["window"]):
        children = tree.children(node) if node < len(tree) else []
        if children and rng.random() < 0.75:
            child = rng.choice(children)
            tokens.append(ids[tree.depths[child] - 1][tree.ranks[child]])
        else:
            tokens.append(rng.choice((root, rng.randrange(50))))
    return tokens


def check_job(job: dict, answer: dict) -> None:
    """Every table, mask and walk of a job is what plain Python makes of its numbers."""
    window = job["window"]
    mask = iter(answer.get("mask", ()))
    for request, logp in enumerate(job["logp"]):
        seq_len = job["seq_lens"][request]
        tree = grown(logp, window, job["spine"])
        got = {name: answer[name][request] for name in tables(tree, job["ids"][request], 0, 0, window)}
        assert got == tables(tree, job["ids"][request], job["roots"][request], seq_len, window)
        assert answer["walk"][request] == walk(got, job["targets"][request], job["max_depth"])
        if job.get("mask"):
            rows = dense_mask(tree, seq_len, window)
            assert [[next(mask) for _ in row] for row in rows] == rows
    if job.get("mask"):
        assert list(mask) == []
        assert (answer["guards"], answer["same as bool"]) == ([[7], [7]], True)


def check_structure(job: dict, answer: dict) -> None:
    """What mask, walk and recurrent kernels rely on, read from the tables alone."""
    window = job["window"]
    for request in range(len(job["logp"])):
        parents, moves = answer["parents"][request], answer["moves"][request]
        nodes = [node for node in range(window) if not node or parents[node] >= 0]
        assert nodes == list(range(len(nodes)))  # pads follow the nodes
        # A state is the path that it is of: in registers, and in the slots.
        register, slots = None, {}
        for node in nodes:
            assert parents[node] < node
            take, keep, leaf = (moves[node] & 255) - 1, (moves[node] >> 8 & 255) - 1, moves[node] >> 16
            if take >= 0:
                register = slots[take]
            assert register == (None if not node else parents[node])
            assert leaf == (node not in parents)
            if not leaf:
                register = node
            if keep >= 0:
                slots[keep] = node
        # As few slots as the smallest trees that need so many allow: 5, 11, 23, 47 nodes.
        assert len(slots) <= sum(len(nodes) >= size for size in (5, 11, 23, 47))


def small_jobs() -> list[dict]:
    rng = random.Random(6)
    jobs = []
    for index in range(40):
        depth, k = rng.randrange(1, 5), rng.randrange(1, 5)
        jobs.append(batch(rng, 50, depth, k, rng.randrange(2, 8), index % 2 == 0))
    return jobs


def large_jobs() -> list[dict]:
    rng = random.Random(7)
    shapes = [(7, 5, 24), (15, 3, 16), (15, 8, 17), (4, 6, 33), (15, 8, 64), (1, 7, 8), (63, 2, 64)]
    return [batch(rng, 1 + (shape[2] < 30), *shape, spine, mask=True) for shape in shapes for spine in (True, False)]


def brute_jobs() -> list[dict]:
    rng = random.Random(8)
    shapes = [(1, 3, 4), (2, 2, 4), (2, 3, 6), (3, 2, 6), (3, 3, 6), (4, 3, 7), (4, 2, 5), (3, 3, 3), (2, 2, 7)]
    return [batch(rng, 6, *shape, spine) for shape in shapes for spine in (True, False)]


def named(rng: random.Random, logp, *, window: int, spine: bool = False, **more) -> dict:
    depth, k = len(logp), len(logp[0])
    return batch(rng, 1, depth, k, window, spine, logp=[logp], mask=True, **more)


def special_jobs() -> dict[str, dict]:
    rng = random.Random(9)
    level = [fp32(-0.5)] * 3
    short = marginals(rng, 1, 2)
    return {
        "equal scores everywhere": named(rng, [level] * 4, window=20),
        "slots in slots": named(rng, [level[:2]] * 4, window=31),
        "equal scores, spine": named(rng, [level] * 4, window=20, spine=True),
        # Equal sums in exact numbers: which is greater depends on how single precision was added up.
        "scores in tenths": named(
            rng, [[fp32(x) for x in row] for row in ((-0.1, -0.2, -0.8), (-0.3, -0.7, -1.1))], window=6
        ),
        "certain tokens": named(rng, [[0.0, MINUS_INFINITY]] * 5, window=12),
        "one candidate": named(rng, marginals(rng, 6, 1), window=7),
        "one candidate, window short": named(rng, marginals(rng, 6, 1), window=4, spine=True),
        "no candidate at all": named(rng, [[MINUS_INFINITY] * 2] * 3, window=5),
        "no candidate but the spine": named(rng, [[MINUS_INFINITY] * 2] * 3, window=6, spine=True),
        "candidates run out": named(rng, marginals(rng, 2, 2), window=16),
        "candidates run out, spine": named(rng, marginals(rng, 2, 2), window=16, spine=True),
        "not a number": named(rng, [[float("nan"), float("nan")]] * 3, window=5),
        # The root's token is the target's everywhere: a pad must not be walked to.
        "pads have the target's token": batch(rng, 1, 1, 2, 6, False, logp=[short], ids=[[[5, 6]]], roots=[9])
        | {"targets": [[9] * 6]},
        "walk stops at the depth": named(rng, marginals(rng, 5, 1), window=6, max_depth=3),
        "three prefixes": batch(rng, 3, 3, 3, 9, False, seq_lens=[2, 1, 57], mask=True),
        "five requests": batch(rng, 5, 2, 2, 4, True, seq_lens=[1030, 1, 3, 1, 1500], mask=True),
    }


def company_jobs() -> list[dict]:
    """The same batch twice, then with its requests in the other order."""
    job = batch(random.Random(11), 3, 7, 5, 12, False)
    turned = {name: value[::-1] if isinstance(value, list) else value for name, value in job.items()}
    return [job, job, turned]


SPECIAL = special_jobs()
# Both ways round the engine lays a vocabulary out: the last rank's part short, rows added behind the padding.
CANDIDATES = [
    {"do": "candidates", "seed": 1, "rows": 3, "scale": 3, "dtype": "bfloat16"} | job
    for job in (
        {"vocab": 9000, "added": 0, "ranks": 1, "k": 8},
        {"vocab": 9000, "added": 0, "ranks": 2, "k": 8},
        {"vocab": 9000, "added": 0, "ranks": 4, "k": 8, "dtype": "float32"},
        {"vocab": 5000, "added": 70, "ranks": 1, "k": 7, "dtype": "float32"},
        {"vocab": 5000, "added": 70, "ranks": 2, "k": 7, "dtype": "float32"},
        {"vocab": 5000, "added": 70, "ranks": 4, "k": 32, "dtype": "float32"},
        {"vocab": 1000, "added": 0, "ranks": 4, "k": 1, "levels": 1},
        {"vocab": 9000, "added": 0, "ranks": 1, "k": 16, "levels": 1},
        {"vocab": 9000, "added": 0, "ranks": 4, "k": 16, "levels": 1},
        {"vocab": 60, "added": 0, "ranks": 2, "k": 3},
        {"vocab": 100, "added": 3, "ranks": 4, "k": 5, "dtype": "float32", "set": [[0, 101, 20], [1, 102, 20]]},
        {"vocab": 4097, "added": 0, "ranks": 1, "k": 4, "set": [[0, 4096, 90], [1, 4095, 90], [2, 0, 90]]},
        {"vocab": 200, "added": 0, "ranks": 2, "k": 4, "set": [[0, 150, -3e38], [1, 7, "-inf"]], "dtype": "float32"},
    )
]
# Where nothing compares: not a number, or fewer tokens than candidates.
ODD_CANDIDATES = [
    {"do": "candidates", "seed": 2, "rows": 2, "scale": 3, "dtype": "float32", "added": 0} | job
    for job in (
        {"vocab": 80, "ranks": 1, "k": 3, "set": [[0, column, "nan"] for column in range(80)] + [[1, 9, "nan"]]},
        {"vocab": 80, "ranks": 2, "k": 3, "set": [[0, column, "nan"] for column in range(80)] + [[1, 9, "nan"]]},
        {"vocab": 5, "ranks": 1, "k": 8},
        {"vocab": 5, "ranks": 2, "k": 8},
    )
]
REFUSALS = {
    "window of 65": ({"window": 65}, "2 to 64 nodes, not 65"),
    "window of 1": ({"window": 1}, "2 to 64 nodes, not 1"),
    "33 candidates": ({"k": 33}, "1 to 32 candidates"),
    "64 positions": ({"depth": 64}, "1 to 63 drafted positions, not 64"),
    "ids of another shape": ({"narrow": True}, "contiguous and of one shape"),
    "33 candidates of logits": ({"k": 33, "candidates": True}, "1 to 32 candidates"),
    "columns apart": ({"transposed": True, "candidates": True}, "adjacent columns"),
}


JOBS = {
    "small": small_jobs(),
    "large": large_jobs(),
    "brute": brute_jobs(),
    "special": list(SPECIAL.values()),
    "chain": [batch(random.Random(10), 4, 7, 6, 8, True)],
    "company": company_jobs(),
    "candidates": CANDIDATES,
    "odd candidates": ODD_CANDIDATES,
    "refusals": [
        {"do": "refuse", "sizes": sizes, "candidates": sizes.get("candidates", False)} for sizes, _ in REFUSALS.values()
    ],
}


@pytest.fixture(scope="module")
def answers(wheel_site, run_child):
    """The answers to all of JOBS, of one process."""
    asked = [{"new": str(NEW), "jobs": [job for jobs in JOBS.values() for job in jobs]}]
    (answered,) = run_child("tree_tables.py", wheel_site, asked)
    flat = iter(answered)
    return {name: [next(flat) for _ in jobs] for name, jobs in JOBS.items()}


def test_thousands_of_trees_are_the_heap_s(answers):
    trees = 0
    for job, answer in zip(JOBS["small"], answers["small"], strict=True):
        check_job(job, answer)
        check_structure(job, answer)
        trees += len(job["logp"])
    assert trees == 2000


def test_large_trees_are_the_heap_s(answers):
    for job, answer in zip(JOBS["large"], answers["large"], strict=True):
        check_job(job, answer)
        check_structure(job, answer)


def test_no_tree_weighs_more(answers):
    for job, answer in zip(JOBS["brute"], answers["brute"], strict=True):
        check_job(job, answer)
        for request, logp in enumerate(job["logp"]):
            parents, depths = answer["parents"][request], answer["depths"][request]
            score = [0.0]
            for node in range(1, job["window"]):
                if parents[node] >= 0:
                    rank = job["ids"][request][depths[node] - 1].index(answer["tokens"][request][node])
                    score.append(score[parents[node]] + logp[depths[node] - 1][rank])
            best = best_weight(logp, job["window"] - 1, job["spine"])
            assert sum(map(math.exp, score[1:])) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_trees(name, answers):
    job = SPECIAL[name]
    answer = answers["special"][list(SPECIAL).index(name)]
    check_job(job, answer)
    check_structure(job, answer)


def test_special_trees_are_what_their_names_say(answers):
    given = dict(zip(SPECIAL, answers["special"], strict=True))
    chain = list(range(-1, 6))
    assert given["one candidate"]["parents"] == [chain]
    assert given["one candidate"]["on_spine"] == [[True] * 7]
    assert given["certain tokens"]["parents"] == [[-1, 0, 1, 2, 3, 4] + [-1] * 6]
    assert given["no candidate at all"]["parents"] == [[-1] * 5]
    assert given["no candidate but the spine"]["parents"] == [[-1, 0, 1, 2, -1, -1]]
    assert given["candidates run out"]["parents"][0].count(-1) == 1 + 16 - 7
    assert given["pads have the target's token"]["tokens"] == [[9, 5, 6, 9, 9, 9]]
    assert given["pads have the target's token"]["walk"] == [[0, -1, 9, -1, 1]]
    assert given["walk stops at the depth"]["walk"][0][-1] <= 4


def test_a_spine_of_the_whole_window_is_the_chain(answers):
    (job,), (answer,) = JOBS["chain"], answers["chain"]
    for request in range(4):
        assert answer["tokens"][request] == [job["roots"][request], *(row[0] for row in job["ids"][request])]
        assert answer["parents"][request] == list(range(-1, 7))
        assert answer["moves"][request] == [0] * 7 + [1 << 16]
        assert all(answer["on_spine"][request])


def test_the_same_trees_each_time_and_in_any_company(answers):
    first, again, turned = answers["company"]
    assert first == again
    assert first == {name: rows[::-1] for name, rows in turned.items()}


def check_candidates(answer: dict) -> None:
    assert answer["same on all ranks"]
    assert answer["dtypes"] == ["torch.float32", "torch.int64"]
    assert answer["sort agrees with topk"]
    assert answer["ids"] == answer["expected ids"]
    assert [row[0] for row in answer["ids"]] == answer["argmax"]
    for row, expected in zip(answer["logp"], answer["expected logp"], strict=True):
        assert row == pytest.approx(expected, abs=2e-5, rel=1e-6)


@pytest.mark.parametrize("job", CANDIDATES, ids=lambda job: f"{job['vocab']}+{job['added']}x{job['ranks']}-k{job['k']}")
def test_candidates_are_torch_s(job, answers):
    check_candidates(answers["candidates"][CANDIDATES.index(job)])


def test_candidates_were_tried_with_padding_and_added_rows(answers):
    got = answers["candidates"]
    assert {len(answer["added"]) for answer in got if sum(answer["added"])} == {1, 2, 4}
    assert {len(answer["padding"]) for answer in got if sum(answer["padding"])} == {1, 2, 4}


def check_odd_candidates(job: dict, answer: dict) -> None:
    assert answer["same on all ranks"]
    for ids, logp in zip(answer["ids"], answer["logp"], strict=True):
        real = [value > MINUS_INFINITY for value in logp]
        assert real == sorted(real, reverse=True)
        assert not any(math.isnan(value) for value in logp)
        assert all(0 <= token < job["vocab"] for token in ids)
        assert len({token for token, here in zip(ids, real, strict=True) if here}) == sum(real)
    if job["vocab"] == 5:
        assert [sum(value > MINUS_INFINITY for value in row) for row in answer["logp"]] == [5, 5]
    else:
        assert [sum(value > MINUS_INFINITY for value in row) for row in answer["logp"]] == [0, 3]
        assert 9 not in answer["ids"][1]


@pytest.mark.parametrize("job", ODD_CANDIDATES, ids=lambda job: f"{job['vocab']}x{job['ranks']}")
def test_candidates_that_do_not_exist_are_never_nodes(job, answers):
    check_odd_candidates(job, answers["odd candidates"][ODD_CANDIDATES.index(job)])


@pytest.mark.parametrize("name", REFUSALS)
def test_sizes_beyond_the_kernels_are_refused(name, answers):
    assert REFUSALS[name][1] in answers["refusals"][list(REFUSALS).index(name)]


# Edit -> what it breaks: a special tree by name, or candidates by number.
MUTATIONS = {
    "pads are children of the root": (
        "tl.where(drawn, word_of & 127, -1)",
        "tl.where(drawn, word_of & 127, 0)",
        "pads have the target's token",
    ),
    "positions by node, not by depth": (".to(tl.int64) + depth_of", ".to(tl.int64) + node", "three prefixes"),
    "the largest child first": ("key[None, :] < key[:, None]", "key[None, :] > key[:, None]", "candidates run out"),
    "children by number alone": ("key = size * BLOCK_W + node", "key = node", "equal scores everywhere"),
    "parents keep their picked numbers": (
        "tl.where(parent >= 0, placed, -1)",
        "tl.where(parent >= 0, parent, -1)",
        "equal scores everywhere",
    ),
    "ancestors keep their picked numbers": (
        "tl.store(ordered_ancestors + out, bits, live)",
        "tl.store(ordered_ancestors + out, above, live)",
        "equal scores everywhere",
    ),
    "a register state taken across siblings": ("tl.where(left > 0, ", "tl.where(left > 9, ", "equal scores everywhere"),
    "a leaf's state goes on": ("(leaf.to(tl.int32) << 16)", "0", "candidates run out"),
    "pads are children": ("tl.where(drawn[:, None], below, 0)", "below", "no candidate at all"),
    "a branch state not kept": (
        "tl.where(inner > 1, slot, -1)",
        "tl.where(inner > 2, slot, -1)",
        "equal scores everywhere",
    ),
    "one slot for all branches": ("tl.sum(below * waits[None, :], axis=1)", "0 * node", "slots in slots"),
    "every node sees all before it": (
        "above | bit, ancestors_of",
        "above | bit | (bit - 1), ancestors_of",
        "candidates run out",
    ),
    "nodes do not see themselves": (
        "tl.where(node == i, above | bit, ",
        "tl.where(node == i, above, ",
        "three prefixes",
    ),
    "a sibling's score from its elder's": (
        "base + tl.load(lp + (depth - 1) * K + rank + 1)",
        "best - tl.load(lp + (depth - 1) * K + rank) + tl.load(lp + (depth - 1) * K + rank + 1)",
        "scores in tenths",
    ),
    "children before siblings": (
        "tl.max(score, axis=0, return_indices=True)\n        if best",
        "tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=False)\n"
        "        pick = tl.max(tl.where(score == best, slot, 0), axis=0)\n        if best",
        "equal scores everywhere",
    ),
    "no sibling of the last choice but one": (
        "            if rank + 1 < K:\n",
        "            if rank + 2 < K:\n",
        "candidates run out",
    ),
    "siblings of the spine count as spine": (
        "candidate_word(of - 1, 0, of, 1)",
        "candidate_word(of - 1, 1, of, 1)",
        "candidates run out, spine",
    ),
    "no spine": ("    if SPINE:\n", "    if False:\n", "no candidate but the spine"),
    "requests of the mask overlap": ("(lens + WINDOW) * WINDOW, 0)", "lens * WINDOW, 0)", "three prefixes"),
    "the mask hides the prefix": ("tl.maximum(column - prefix, 0)", "tl.maximum(column - prefix, 1)", "three prefixes"),
    "the mask writes past its end": (" & (start + column < size)", "", "three prefixes"),
    "walk to any node with the token": (
        "(parent == current) & (token == wanted)",
        "(node > 0) & (token == wanted)",
        "pads have the target's token",
    ),
    "walk without the target's own token": (
        "            count += 1\n",
        "            count += d > 0\n",
        "walk stops at the depth",
    ),
    "padding counts": ("real & (column < columns), other", "column < columns, other", 4),
    "ids of added rows by column": ("added_start + chosen - num_org_padded", "org_start + chosen", 10),
    "ids local to the rank": ("tl.where(chosen < num_org, org_start + chosen", "tl.where(chosen < num_org, chosen", 6),
    "sums of parts not on one scale": ("tl.sum(weight * tl.exp(", "tl.sum(weight + 0 * tl.exp(", 11),
    "normalised over the first part": (
        "tl.load(tail + 1, part < PARTS, other=0)",
        "tl.load(tail + 1, part < 1, other=0)",
        9,
    ),
    "not a number is a candidate": ("tl.where(logit == logit, logit, ", "tl.where(logit == logit, logit, logit + ", 13),
    "absent candidates have any id": ('tl.where(best > float("-inf"), chosen, 0)\n', "chosen + 1\n", 15),
}
EVERY_CANDIDATE = [*CANDIDATES, *ODD_CANDIDATES]


def broken(name: str) -> dict:
    where = MUTATIONS[name][2]
    return SPECIAL[where] if isinstance(where, str) else EVERY_CANDIDATE[where]


def check(job: dict, answer: dict) -> None:
    if job["do"] == "grow":
        check_job(job, answer)
    elif job in CANDIDATES:
        check_candidates(answer)
    else:
        check_odd_candidates(job, answer)


@pytest.fixture(scope="module")
def mutants(wheel_site, run_child, tmp_path_factory):
    """The answer of each mutation's kernels to the job that it breaks, of one process."""
    asked = [
        {
            "new": str(edited(tmp_path_factory.mktemp("mutant"), "ddtree_kernels", (old, new))),
            "jobs": [broken(name)],
        }
        for name, (old, new, _) in MUTATIONS.items()
    ]
    answered = run_child("tree_tables.py", wheel_site, asked)
    return {name: answer for name, (answer,) in zip(MUTATIONS, answered, strict=True)}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name, mutants):
    with pytest.raises(AssertionError):
        check(broken(name), mutants[name])
