"""Triton kernels of DDTree: candidates, tree, mask and walk, each one launch for the whole batch.

Shapes: `bs` requests, `depth` drafted positions, `k` candidates per position, `window` nodes per request
of which node 0 is the root. No kernel needs a length, a count or a token on the host.

A *record* carries a row's best `k` candidates and what its full log-partition needs: int32
`[2 * k + 2]` of the bits of k fp32 logits, descending, k token ids, and the bits of the largest logit and
of the sum of `exp(logit - largest)`. Records of parts of a vocabulary merge into one record, so the parts
can be blocks of columns or ranks of a tensor-parallel group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_WINDOW = 64  # an ancestor set is one int64
MAX_TOPK = 32
COLUMN_BLOCK = 4096
MASK_BLOCK = 1024
# One build of the mask's kernel serves every batch up to this; it masks what is not there.
MASK_REQUESTS = 256


@triton.jit
def shard_candidates_kernel(
    logits: tl.tensor,
    records: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    num_org: tl.tensor,
    num_org_padded: tl.tensor,
    num_added: tl.tensor,
    org_start: tl.tensor,
    added_start: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (rows, column blocks): the record of one block of one row of a vocabulary shard."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    column = part * BLOCK + lane
    real = (column < num_org) | ((column >= num_org_padded) & (column < num_org_padded + num_added))
    logit = tl.load(logits + row * row_stride + column, real & (column < columns), other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))  # noqa: PLR0124 (not a number)

    largest = tl.max(logit, axis=0)
    # exp(-inf - -inf) is not a number; a part without any candidate contributes nothing.
    total = tl.sum(tl.exp(logit - tl.where(largest > float("-inf"), largest, 0.0)), axis=0)

    place = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for k in range(0, K):
        value, at = tl.max(logit, axis=0, return_indices=True)
        best = tl.where(place == k, value, best)
        chosen = tl.where(place == k, part * BLOCK + at, chosen)
        logit = tl.where(lane == at, float("-inf"), logit)
    token = tl.where(chosen < num_org, org_start + chosen, added_start + chosen - num_org_padded)

    out = records + (row * tl.num_programs(1) + part) * (2 * K + 2)
    tl.store(out + place, best.to(tl.int32, bitcast=True), place < K)
    tl.store(out + K + place, token, place < K)
    tl.store(out + 2 * K, largest.to(tl.int32, bitcast=True))
    tl.store(out + 2 * K + 1, total.to(tl.int32, bitcast=True))


@triton.jit
def merge_candidates_kernel(
    records: tl.tensor,
    merged: tl.tensor,
    logp: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.tensor,
    part_stride: tl.tensor,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Grid (rows,): merge a row's records into one, or when `FINAL` into log-probabilities and ids.

    Among equal logits the earlier part goes first, within a part the earlier candidate.
    """
    row = tl.program_id(0).to(tl.int64)
    source = records + row * row_stride
    entry = tl.arange(0, BLOCK_C)
    there = entry < PARTS * K
    slot = source + (entry // K) * part_stride + entry % K
    logit = tl.load(slot, there, other=0).to(tl.float32, bitcast=True)
    logit = tl.where(there, logit, float("-inf"))
    token = tl.load(slot + K, there, other=0)

    part = tl.arange(0, BLOCK_P)
    tail = source + part * part_stride + 2 * K
    partial = tl.load(tail, part < PARTS, other=0).to(tl.float32, bitcast=True)
    partial = tl.where(part < PARTS, partial, float("-inf"))
    weight = tl.load(tail + 1, part < PARTS, other=0).to(tl.float32, bitcast=True)
    largest = tl.max(partial, axis=0)
    total = tl.sum(weight * tl.exp(partial - tl.where(largest > float("-inf"), largest, 0.0)), axis=0)

    place = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for k in range(0, K):
        value, at = tl.max(logit, axis=0, return_indices=True)
        best = tl.where(place == k, value, best)
        chosen = tl.where(place == k, tl.sum(tl.where(entry == at, token, 0), axis=0), chosen)
        logit = tl.where(entry == at, float("-inf"), logit)
    # Where candidates run out the id is one that every embedding table has.
    chosen = tl.where(best > float("-inf"), chosen, 0)

    if FINAL:
        out = row * K + place
        log_total = largest + tl.log(total)
        tl.store(logp + out, tl.where(best > float("-inf"), best - log_total, float("-inf")), place < K)
        tl.store(ids + out, chosen.to(tl.int64), place < K)
    else:
        out = merged + row * (2 * K + 2)
        tl.store(out + place, best.to(tl.int32, bitcast=True), place < K)
        tl.store(out + K + place, chosen, place < K)
        tl.store(out + 2 * K, largest.to(tl.int32, bitcast=True))
        tl.store(out + 2 * K + 1, total.to(tl.int32, bitcast=True))


@triton.jit
def candidate_word(parent: tl.tensor, spine: tl.tensor, depth: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """A candidate node as one int32: parent, path all first choices, depth, rank."""
    return parent | (spine << 7) | (depth << 8) | (rank << 16)


@triton.jit
def build_tree_kernel(
    logp: tl.tensor,
    ids: tl.tensor,
    roots: tl.tensor,
    seq_lens: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    ancestors: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    on_spine: tl.tensor,
    DEPTH: tl.tensor,
    K: tl.tensor,
    WINDOW: tl.constexpr,
    SPINE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """Grid (bs,), one warp: best-first selection of a request's nodes (see `ddtree_tree.build_tree`).

    Everything stays in registers and each table is written once: a scalar store after another lane's
    store of the same address would need a barrier.
    """
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_W)
    lp = logp + request * DEPTH * K

    # Per node: its word (-1: the root, or no node), score and ancestor set (as if below the root).
    one = tl.full([BLOCK_W], 1, tl.int64)
    bit = one << node.to(tl.int64)
    word_of = tl.full([BLOCK_W], -1, tl.int32)
    score_of = tl.zeros([BLOCK_W], tl.float32)
    ancestors_of = bit | 1

    # The frontier: slot 2i is the next sibling of node i, slot 2i + 1 its first child. An entry made earlier
    # has a lower slot, and the lowest of equal scores is picked.
    slot = tl.arange(0, BLOCK_F)
    score = tl.full([BLOCK_F], float("-inf"), tl.float32)
    word = tl.zeros([BLOCK_F], tl.int32)

    first = 1
    if SPINE:
        length = tl.minimum(DEPTH, WINDOW - 1)
        chain = (node > 0) & (node <= length)
        word_of = tl.where(chain, candidate_word(node - 1, 1, node, 0), word_of)
        ancestors_of = tl.where(chain, bit | (bit - 1), ancestors_of)
        of = slot // 2
        word = tl.where(slot % 2 == 0, candidate_word(of - 1, 0, of, 1), word)
        along = 0.0
        for d in range(0, length):
            if K > 1:
                score = tl.where(slot == 2 * (d + 1), along + tl.load(lp + d * K + 1), score)
            along += tl.load(lp + d * K)
            score_of = tl.where(node == d + 1, along, score_of)
        first = length + 1
    else:
        score = tl.where(slot == 1, tl.load(lp), score)
        word = tl.where(slot == 1, candidate_word(0, 1, 1, 0), word)

    for i in range(first, WINDOW):
        best, pick = tl.max(score, axis=0, return_indices=True)
        if best > float("-inf"):
            picked = tl.sum(tl.where(slot == pick, word, 0), axis=0)
            score = tl.where(slot == pick, float("-inf"), score)
            parent = picked & 127
            spine = (picked >> 7) & 1
            depth = (picked >> 8) & 255
            rank = (picked >> 16) & 255
            word_of = tl.where(node == i, picked, word_of)
            score_of = tl.where(node == i, best, score_of)
            above = tl.sum(tl.where(node == parent, ancestors_of, 0), axis=0)
            ancestors_of = tl.where(node == i, above | bit, ancestors_of)
            if rank + 1 < K:
                base = tl.sum(tl.where(node == parent, score_of, 0.0), axis=0)
                score = tl.where(slot == 2 * i, base + tl.load(lp + (depth - 1) * K + rank + 1), score)
                word = tl.where(slot == 2 * i, candidate_word(parent, 0, depth, rank + 1), word)
            if depth < DEPTH:
                score = tl.where(slot == 2 * i + 1, best + tl.load(lp + depth * K), score)
                word = tl.where(slot == 2 * i + 1, candidate_word(i, spine, depth + 1, 0), word)

    live = node < WINDOW
    drawn = live & (word_of >= 0)
    depth_of = tl.where(drawn, (word_of >> 8) & 255, tl.where(node == 0, 0, 1))
    drafted = ids + request * DEPTH * K + (depth_of - 1) * K + ((word_of >> 16) & 255)
    token = tl.where(drawn, tl.load(drafted, drawn, other=0), tl.load(roots + request))
    position = tl.load(seq_lens + request).to(tl.int64) + depth_of
    out = request * WINDOW + node
    tl.store(tokens + out, token, live)
    tl.store(positions + out, position, live)
    tl.store(ancestors + out, ancestors_of, live)
    tl.store(parents + out, tl.where(drawn, word_of & 127, -1), live)
    tl.store(depths + out, depth_of, live)
    tl.store(on_spine + out, tl.where(drawn, (word_of >> 7) & 1, node == 0) != 0, live)


@triton.jit
def order_tree_kernel(
    tokens: tl.tensor,
    positions: tl.tensor,
    ancestors: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    on_spine: tl.tensor,
    ordered_tokens: tl.tensor,
    ordered_positions: tl.tensor,
    ordered_ancestors: tl.tensor,
    ordered_parents: tl.tensor,
    ordered_depths: tl.tensor,
    moves: tl.tensor,
    ordered_on_spine: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Grid (bs,): the nodes depth first, each node's children in order of the size of what is below them.

    All by comparison of every node (rows) with every other (columns).
    """
    request = tl.program_id(0).to(tl.int64) * WINDOW
    node = tl.arange(0, BLOCK_W)
    live = node < WINDOW
    parent = tl.load(parents + request + node, live, other=-1)
    above = tl.load(ancestors + request + node, live, other=0)
    drawn = (parent >= 0) | (node == 0)
    below = (((above[:, None] >> node[None, :].to(tl.int64)) & 1) == 1).to(tl.int32)

    size = tl.sum(tl.where(drawn[:, None], below, 0), axis=0)
    leaf = size <= 1
    key = size * BLOCK_W + node
    siblings = (parent[:, None] == parent[None, :]) & (parent >= 0)[:, None]
    earlier = siblings & (key[None, :] < key[:, None])
    later = siblings & (key[None, :] > key[:, None])
    # The elders that leave another state than their parent's behind: all but leaves.
    left = tl.max((earlier & (size > 1)[None, :]).to(tl.int32), axis=1)
    # Between a node and its parent lie the parent's smaller children and all below them.
    gap = tl.where(parent >= 0, 1 + tl.sum(tl.where(earlier, size[None, :], 0), axis=1), 0)
    place = tl.where(drawn, tl.sum(below * gap[None, :], axis=1), node)
    # A node's state is needed until the last of its children: below all others that are no leaves it has to be
    # kept. So as many slots are taken above a node as nodes on its path, itself among them, have siblings to come.
    waits = tl.where(leaf, 0, tl.max(later.to(tl.int32), axis=1))
    slot = tl.sum(below * waits[None, :], axis=1)
    inner = tl.sum(((parent[None, :] == node[:, None]) & (size > 1)[None, :]).to(tl.int32), axis=1)
    of_parent = node[None, :] == parent[:, None]
    take = tl.where(left > 0, tl.sum(tl.where(of_parent, slot[None, :], 0), axis=1), -1)
    keep = tl.where(inner > 1, slot, -1)

    out = request + place
    placed = tl.sum(tl.where(of_parent, place[None, :], 0), axis=1)
    one = tl.full([BLOCK_W, BLOCK_W], 1, tl.int64)
    bits = tl.sum(tl.where(below == 1, one << place[None, :].to(tl.int64), 0), axis=1)
    tl.store(ordered_tokens + out, tl.load(tokens + request + node, live, other=0), live)
    tl.store(ordered_positions + out, tl.load(positions + request + node, live, other=0), live)
    tl.store(ordered_depths + out, tl.load(depths + request + node, live, other=0), live)
    tl.store(ordered_on_spine + out, tl.load(on_spine + request + node, live, other=0), live)
    tl.store(ordered_parents + out, tl.where(parent >= 0, placed, -1), live)
    tl.store(ordered_ancestors + out, bits, live)
    tl.store(moves + out, (take + 1) | ((keep + 1) << 8) | (leaf.to(tl.int32) << 16), live)


@triton.jit(do_not_specialize=["size"])
def tree_mask_kernel(
    ancestors: tl.tensor,
    seq_lens: tl.tensor,
    mask: tl.tensor,
    size: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (bs, window): one row of the packed attention mask; never a byte past `size`."""
    request = tl.program_id(0)
    row = tl.program_id(1)
    earlier = tl.arange(0, BLOCK_BS)
    lens = tl.load(seq_lens + earlier, earlier < request, other=0).to(tl.int64)
    start = tl.sum(tl.where(earlier < request, (lens + WINDOW) * WINDOW, 0), axis=0)
    prefix = tl.load(seq_lens + request).to(tl.int64)
    bits = tl.load(ancestors + request * WINDOW + row)
    start += row * (prefix + WINDOW)
    for begin in range(0, prefix + WINDOW, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        # The prefix is seen as the root is: by all.
        seen = ((bits >> tl.maximum(column - prefix, 0)) & 1) == 1
        tl.store(mask + start + column, seen, (column < prefix + WINDOW) & (start + column < size))


@triton.jit
def walk_tree_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    target_tokens: tl.tensor,
    packed: tl.tensor,
    WINDOW: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Grid (bs,): from the root, while the target's token at a node is one of its children, go there."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_W)
    step = tl.arange(0, BLOCK_S)
    live = node < WINDOW
    token = tl.load(tokens + request * WINDOW + node, live, other=-1)
    parent = tl.load(parents + request * WINDOW + node, live, other=-1)
    target = tl.load(target_tokens + request * WINDOW + node, live, other=-1)
    path = tl.where(step == 0, 0, tl.full([BLOCK_S], -1, tl.int64))
    emitted = tl.full([BLOCK_S], -1, tl.int64)
    current = 0
    count = 0
    walking = 1
    for d in range(0, STEPS):
        if walking == 1:
            wanted = tl.sum(tl.where(node == current, target, 0), axis=0)
            emitted = tl.where(step == d, wanted, emitted)
            count += 1
            child = tl.min(tl.where((parent == current) & (token == wanted), node, BLOCK_W), axis=0)
            if (child < BLOCK_W) & (d + 1 < STEPS):
                current = child
                path = tl.where(step == d + 1, child.to(tl.int64), path)
            else:
                walking = 0
    out = packed + request * (2 * STEPS + 1)
    tl.store(out + step, path, step < STEPS)
    tl.store(out + STEPS + step, emitted, step < STEPS)
    tl.store(out + 2 * STEPS, count)


def shard_candidates(
    logits: torch.Tensor,
    k: int,
    *,
    num_org: int,
    num_org_padded: int,
    num_added: int,
    org_start: int,
    added_start: int,
) -> torch.Tensor:
    """Records int32 `[rows, parts, 2 * k + 2]` of blocks of columns of a shard's `logits [rows, columns]`.

    Columns `[0, num_org)` are ids from `org_start`, columns `[num_org_padded, num_org_padded + num_added)`
    ids from `added_start`; all others are padding. A logit that is not a number is never a candidate.
    """
    rows, columns = logits.shape
    block = min(COLUMN_BLOCK, triton.next_power_of_2(max(columns, 16)))
    parts = max(1, triton.cdiv(columns, block))
    records = torch.empty((rows, parts, 2 * k + 2), dtype=torch.int32, device=logits.device)
    shard_candidates_kernel[(rows, parts)](
        logits,
        records,
        columns,
        logits.stride(0),
        num_org,
        num_org_padded,
        num_added,
        org_start,
        added_start,
        K=k,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=4,
    )
    return records


def merge_candidates(records: torch.Tensor, *, parts_first: bool = False) -> torch.Tensor:
    """One record per row, int32 `[rows, 2 * k + 2]`, of `[rows, parts, ...]` or `[parts, rows, ...]`."""
    rows = records.shape[1 if parts_first else 0]
    merged = torch.empty((rows, records.shape[2]), dtype=torch.int32, device=records.device)
    _merge(records, parts_first, merged, None, None)
    return merged


def finish_candidates(records: torch.Tensor, *, parts_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities fp32 `[rows, k]`, descending, and ids int64 `[rows, k]` of a whole vocabulary's records."""
    rows = records.shape[1 if parts_first else 0]
    k = records.shape[2] // 2 - 1
    logp = torch.empty((rows, k), dtype=torch.float32, device=records.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=records.device)
    _merge(records, parts_first, None, logp, ids)
    return logp, ids


def _merge(
    records: torch.Tensor,
    parts_first: bool,
    merged: torch.Tensor | None,
    logp: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> None:
    parts, rows = records.shape[:2] if parts_first else (records.shape[1], records.shape[0])
    part_stride, row_stride = records.stride()[:2] if parts_first else (records.stride(1), records.stride(0))
    k = records.shape[2] // 2 - 1
    merge_candidates_kernel[(rows,)](
        records,
        records if merged is None else merged,
        records if logp is None else logp,
        records if ids is None else ids,
        row_stride,
        part_stride,
        PARTS=parts,
        K=k,
        FINAL=merged is None,
        BLOCK_C=triton.next_power_of_2(parts * k),
        BLOCK_P=triton.next_power_of_2(parts),
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=4,
    )
