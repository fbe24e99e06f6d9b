"""Run DDTree's candidates, trees, masks and walks, and its shadow counts, with Triton interpreted.

    tree_tables.py SITE < '[{"new": FOLDER, "jobs": [{"do": "grow", ...}, {"do": "candidates", ...}, ...]}, ...]'

SITE is an engine's site, FOLDER what the patch set adds to one, or an edited copy of that. Prints, for each folder, the
answer to each job, in order; see the functions named after them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bootstrap

bootstrap.install(Path(sys.argv[1]))

import torch  # noqa: E402
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding, pad_vocab_size  # noqa: E402

FIELDS = ("tokens", "positions", "parents", "depths", "ancestors", "on_spine", "moves")
# The modules under test of the folder at hand.
subject = SimpleNamespace()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def whole(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def grow(job: dict) -> dict:
    """A batch's tree tables, its packed mask with guard bytes behind it, and the walk of given target tokens."""
    lens = whole(job["seq_lens"])
    tree = subject.tree.build_tree(
        torch.tensor(job["logp"], dtype=torch.float32),
        whole(job["ids"]),
        whole(job["roots"]),
        lens,
        job["window"],
        job["spine"],
    )
    answer: dict = {name: getattr(tree, name).tolist() for name in FIELDS}
    if job.get("mask"):
        window = job["window"]
        total = sum(window * (length + window) for length in job["seq_lens"])
        store = torch.full((total + 64,), 7, dtype=torch.uint8)
        short = torch.full((total + 64,), 7, dtype=torch.uint8)
        subject.tree.tree_mask(tree, lens, store[:total])
        subject.tree.tree_mask(tree, lens, short[: total - 5])
        boolean = subject.tree.tree_mask(tree, lens, torch.zeros(total, dtype=torch.bool))
        answer["mask"] = store[:total].tolist()
        answer["guards"] = [store[total:].unique().tolist(), short[total - 5 :].unique().tolist()]
        answer["same as bool"] = torch.equal(boolean.to(torch.uint8), store[:total])
    if "targets" in job:
        answer["walk"] = subject.tree.walk_tree(tree, whole(job["targets"]), job["max_depth"]).tolist()
    return answer


class Ranks:
    """A tensor-parallel group whose ranks run one after another: once to send, once more to receive."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.receiving = False

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.receiving:
            self.sent.append(tensor.clone())
        return torch.stack(self.sent if self.receiving else [tensor])


def candidates(job: dict) -> dict:
    """Top-k of logits over an engine-made sharding of a vocabulary, per rank, and torch's own of the whole.

    Padding holds the largest logit of all, so that reading it shows.
    """
    vocab, added, ranks, k = job["vocab"], job["added"], job["ranks"], job["k"]
    generator = torch.Generator().manual_seed(job["seed"])
    logits = torch.randn((job["rows"], vocab + added), generator=generator) * job["scale"]
    if job.get("levels"):
        logits = (logits * job["levels"]).round() / job["levels"]
    logits = logits.to(DTYPES[job["dtype"]])
    for row, column, value in job.get("set", []):
        logits[row, column] = float(value)

    padded_org = pad_vocab_size(vocab, 64)
    padded = pad_vocab_size(padded_org + added, 64)
    shards = []
    for rank in range(ranks):
        shard = VocabParallelEmbedding._get_indices(padded, padded_org, vocab + added, vocab, rank, ranks)
        columns = shard.num_elements_padded if shard.num_added_elements else shard.num_org_elements
        local = torch.full((job["rows"], columns), 1e4, dtype=logits.dtype)
        org, org_padded, extra = shard.num_org_elements, shard.num_org_elements_padded, shard.num_added_elements
        local[:, :org] = logits[:, shard.org_vocab_start_index : shard.org_vocab_end_index]
        if extra:
            local[:, org_padded : org_padded + extra] = logits[
                :, shard.added_vocab_start_index : shard.added_vocab_end_index
            ]
        shards.append((local, shard))

    group = Ranks() if ranks > 1 else None
    for group_receives in (False, True):
        if group:
            group.receiving = group_receives
        results = [
            subject.tree.topk_log_probs(
                local,
                k,
                num_org=shard.num_org_elements,
                num_org_padded=shard.num_org_elements_padded,
                num_added=shard.num_added_elements,
                org_start=shard.org_vocab_start_index,
                added_start=shard.added_vocab_start_index,
                group=group,
            )
            for local, shard in shards
        ]
    exact = logits.to(torch.float64)
    # A stable sort keeps equal logits in order of id, which torch.topk does not promise.
    values, order = torch.sort(exact, dim=1, descending=True, stable=True)
    expected = values[:, :k] - torch.logsumexp(exact, dim=1, keepdim=True)
    top = torch.topk(exact, min(k, exact.shape[1]), dim=1).values
    logp, ids = results[0]
    return {
        "same on all ranks": all(torch.equal(logp, other[0]) and torch.equal(ids, other[1]) for other in results),
        "logp": logp.tolist(),
        "ids": ids.tolist(),
        "expected logp": expected.tolist(),
        "expected ids": order[:, :k].tolist(),
        "sort agrees with topk": torch.equal(values[:, : top.shape[1]], top),
        "argmax": torch.argmax(logits, dim=1).tolist(),
        "padding": [
            shard.num_elements_padded - shard.num_org_elements - shard.num_added_elements for _, shard in shards
        ],
        "added": [shard.num_added_elements for _, shard in shards],
        "dtypes": [str(logp.dtype), str(ids.dtype)],
    }


def refuse(job: dict) -> str:
    """The message of the ValueError that sizes beyond the kernels' raise."""
    sizes = {"depth": 3, "k": 2, "window": 8} | job["sizes"]
    shape = (1, sizes["depth"], sizes["k"])
    one = torch.zeros(1, dtype=torch.int64)
    try:
        if job.get("candidates"):
            layout = {"num_org": 9, "num_org_padded": 9, "num_added": 0, "org_start": 0, "added_start": 0}
            logits = torch.zeros(9, 2).T if sizes.get("transposed") else torch.zeros(2, 9)
            subject.tree.topk_log_probs(logits, sizes["k"], **layout)
        else:
            ids = torch.zeros(shape, dtype=torch.int64)
            ids = ids[..., :1] if sizes.get("narrow") else ids
            subject.tree.build_tree(torch.zeros(shape), ids, one, one, sizes["window"], True)
    except ValueError as error:
        return str(error)
    return ""


def shadow(job: dict) -> list:
    """Outcomes of chain verifies over a grown tree."""
    tree = subject.tree.build_tree(
        torch.tensor(job["logp"], dtype=torch.float32),
        whole(job["ids"]),
        whole(job["roots"]),
        whole(job["seq_lens"]),
        job["window"],
        job["spine"],
    )
    commit_lens = torch.tensor(job["commit_lens"], dtype=torch.int32)
    return subject.shadow.chain_outcomes(tree, whole(job["ids"]), commit_lens, whole(job["last_tokens"])).tolist()


def tally(job: dict) -> list:
    """Log lines of ShadowStats: one after each list of rounds."""
    stats = subject.shadow.ShadowStats()
    lines = []
    for rounds in job["lines"]:
        for outcomes in rounds:
            stats.record(outcomes)
        lines.append(stats.take_line())
    return lines


JOBS = {job.__name__: job for job in (grow, candidates, refuse, shadow, tally)}


def answers(folder: Path, jobs: list[dict]) -> list:
    """Do the jobs with the modules of a folder."""
    bootstrap.add_modules(folder)
    subject.tree = importlib.import_module("sglang.srt.speculative.ddtree_tree")
    subject.shadow = importlib.import_module("sglang.srt.speculative.ddtree_shadow")
    return [JOBS[job["do"]](job) for job in jobs]


if __name__ == "__main__":
    print(json.dumps([answers(Path(item["new"]), item["jobs"]) for item in json.load(sys.stdin)]))
