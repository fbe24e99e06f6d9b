"""DDTree's kernels become machine code for the GPUs that it is for, on a machine that has none."""

from __future__ import annotations

import pytest

from tests.engine.ddtree_sources import NEW

pytestmark = pytest.mark.torch

PICKED = {
    "tokens": "*i64",
    "positions": "*i64",
    "ancestors": "*i64",
    "parents": "*i32",
    "depths": "*i32",
    "on_spine": "*i1",
}
BUILD = {
    **PICKED,
    "logp": "*fp32",
    "ids": "*i64",
    "roots": "*i64",
    "seq_lens": "*i64",
    "DEPTH": "i32",
    "K": "i32",
}
ORDER = {**PICKED, **{f"ordered_{name}": kind for name, kind in PICKED.items()}, "moves": "*i32"}
MASK = {"ancestors": "*i64", "seq_lens": "*i64", "size": "i32"}
WALK = {"tokens": "*i64", "parents": "*i32", "target_tokens": "*i64", "packed": "*i64"}
SHARD_SIZES = ("columns", "row_stride", "num_org", "num_org_padded", "num_added", "org_start", "added_start")
SHARD = {"records": "*i32", **dict.fromkeys(SHARD_SIZES, "i32")}
GATES = {"decays": "*fp32", "betas": "*fp32"}
CONVOLUTION = {
    **dict.fromkeys(("x", "a", "b", "weight", "bias", "history", "inputs", "mixed"), "*bf16"),
    **dict.fromkeys(("decay_log", "decay_bias"), "*fp32"),
    **dict.fromkeys(("slots", "parents"), "*i32"),
    **dict.fromkeys(("x_stride", "a_stride", "b_stride"), "i32"),
    **GATES,
}
COMMIT = {
    **dict.fromkeys(("slots", "steps", "targets"), "*i32"),
    **dict.fromkeys(("rows", "pool_rows"), "i32"),
}
RECURRENCE = {
    **COMMIT,
    **GATES,
    **dict.fromkeys(("mixed", "output"), "*bf16"),
    "branches": "*fp32",
    "moves": "*i32",
    "ancestors": "*i64",
    "scale": "fp32",
    "first_layer": "i32",
    "commits": "i32",
}
COMMIT_CONVOLUTION = {**COMMIT, "inputs": "*bf16", "history": "*bf16", "parents": "*i32"}
MERGE = {"records": "*i32", "merged": "*i32", "row_stride": "i32", "part_stride": "i32"}


def power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def builds(window: int):
    sizes = {"WINDOW": window, "BLOCK_W": power(window), "BLOCK_F": power(2 * window)}
    yield "build_tree_kernel", BUILD, {**sizes, "SPINE": True}, 1
    yield "build_tree_kernel", BUILD, {**sizes, "SPINE": False}, 1
    # Triton makes a constant of an integer argument that is 1.
    yield "build_tree_kernel", BUILD, {**sizes, "SPINE": True, "K": 1}, 1
    yield "build_tree_kernel", BUILD, {**sizes, "SPINE": False, "K": 1, "DEPTH": 1}, 1
    yield "walk_tree_kernel", WALK, {"WINDOW": window, "STEPS": 16, "BLOCK_W": power(window), "BLOCK_S": 16}, 1
    for kind in ("*i1", "*u8"):
        yield "tree_mask_kernel", {**MASK, "mask": kind}, {"WINDOW": window, "BLOCK_BS": 256, "BLOCK": 1024}, 4

    yield "order_tree_kernel", ORDER, {"WINDOW": window, "BLOCK_W": power(window)}, 8


def recurrent(window: int):
    """As for a target of 48 value heads of 128 x 128, 16 key heads."""
    conv = {"CHANNELS": 10240, "WINDOW": window, "WIDTH": 4, "BLOCK": 256}
    gates = {"VALUE_HEADS": 48, "HAS_BIAS": True, "SILU": True, "BLOCK_H": 64}
    yield "tree_convolution_kernel", CONVOLUTION, {**conv, **gates}, 4
    yield "commit_convolution_kernel", COMMIT_CONVOLUTION, conv, 4
    heads = {"WINDOW": window, "BRANCHES": 4, "HEADS": 16, "VALUE_HEADS": 48}
    state = {"K": 128, "V": 128, "BLOCK_V": 8}
    for kind in ("*fp32", "*bf16"):
        yield "tree_recurrence_kernel", {**RECURRENCE, "pool": kind}, {**heads, **state}, 1


def candidates(k: int, kind: str):
    sizes = {"K": k, "BLOCK_K": power(k)}
    yield "shard_candidates_kernel", {**SHARD, "logits": kind}, {**sizes, "BLOCK": 4096}, 4
    for final, parts in ((True, 61), (False, 61), (True, 8)):
        constants = {**sizes, "PARTS": parts, "FINAL": final, "BLOCK_C": power(parts * k), "BLOCK_P": power(parts)}
        outputs = {"logp": "*fp32", "ids": "*i64"} if final else {"logp": "*i32", "ids": "*i32"}
        yield "merge_candidates_kernel", {**MERGE, **outputs}, constants, 4


JOBS = [
    {
        "module": "ddtree_recurrent" if source is recurrent else "ddtree_kernels",
        "kernel": kernel,
        "arch": arch,
        "signature": signature,
        "constexprs": constexprs,
        "num_warps": warps,
    }
    for arch in (90, 120)
    for source, arguments in (
        *((builds, (window,)) for window in (16, 32, 64)),
        *((recurrent, (window,)) for window in (16, 64)),
        (candidates, (8, "*bf16")),
        (candidates, (32, "*fp32")),
    )
    for kernel, signature, constexprs, warps in source(*arguments)
]


@pytest.fixture(scope="module")
def compiled(run_child):
    return run_child("tree_compile.py", NEW, JOBS)


def test_every_kernel_compiles_without_spilling(compiled):
    assert len(compiled) == len(JOBS)
    assert [job for job, code in zip(JOBS, compiled, strict=True) if code["spilled"]] == []
