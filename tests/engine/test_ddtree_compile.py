"""DDTree's kernels become machine code for the GPUs that it is for, on a machine that has none."""

from __future__ import annotations

import pytest

from tests.engine.ddtree_sources import NEW

pytestmark = pytest.mark.torch

TABLES = dict.fromkeys(("tokens", "positions", "next_token", "next_sibling", "ancestors"), "*i64")
BUILD = {
    **TABLES,
    "logp": "*fp32",
    "ids": "*i64",
    "roots": "*i64",
    "seq_lens": "*i64",
    "parents": "*i32",
    "depths": "*i32",
    "on_spine": "*i1",
    "DEPTH": "i32",
    "K": "i32",
}
MASK = {"ancestors": "*i64", "seq_lens": "*i64", "size": "i32"}
WALK = {"tokens": "*i64", "parents": "*i32", "target_tokens": "*i64", "packed": "*i64"}
SHARD_SIZES = ("columns", "row_stride", "num_org", "num_org_padded", "num_added", "org_start", "added_start")
SHARD = {"records": "*i32", **dict.fromkeys(SHARD_SIZES, "i32")}
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


def candidates(k: int, kind: str):
    sizes = {"K": k, "BLOCK_K": power(k)}
    yield "shard_candidates_kernel", {**SHARD, "logits": kind}, {**sizes, "BLOCK": 4096}, 4
    for final, parts in ((True, 61), (False, 61), (True, 8)):
        constants = {**sizes, "PARTS": parts, "FINAL": final, "BLOCK_C": power(parts * k), "BLOCK_P": power(parts)}
        outputs = {"logp": "*fp32", "ids": "*i64"} if final else {"logp": "*i32", "ids": "*i32"}
        yield "merge_candidates_kernel", {**MERGE, **outputs}, constants, 4


JOBS = [
    {"kernel": kernel, "arch": arch, "signature": signature, "constexprs": constexprs, "num_warps": warps}
    for arch in (90, 120)
    for source in (
        *(builds(window) for window in (16, 32, 64)),
        candidates(8, "*bf16"),
        candidates(32, "*fp32"),
    )
    for kernel, signature, constexprs, warps in source
]


@pytest.fixture(scope="module")
def compiled(run_child):
    return run_child("tree_compile.py", NEW, JOBS)


def test_every_kernel_compiles_without_spilling(compiled):
    assert len(compiled) == len(JOBS)
    assert [job for job, code in zip(JOBS, compiled, strict=True) if code["spilled"]] == []
