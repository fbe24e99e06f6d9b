"""DDTree's tree: candidates of a block drafter, the verified tree made of them, its mask and its walk.

A block drafter gives one distribution per position of its block, each blind to the tokens drawn before it.
Of all trees of `window - 1` such tokens, the one with the most expected accepted tokens holds the prefixes
of greatest probability under the product of those distributions ("Accelerating Speculative Decoding with
Block Diffusion Draft Trees", github.com/liranringel/ddtree).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
from sglang.srt.speculative.ddtree_kernels import (
    MASK_BLOCK,
    MASK_REQUESTS,
    MAX_TOPK,
    MAX_WINDOW,
    build_tree_kernel,
    finish_candidates,
    merge_candidates,
    order_tree_kernel,
    shard_candidates,
    tree_mask_kernel,
    walk_tree_kernel,
)


class Gather(Protocol):
    """A tensor-parallel group as far as candidates need it."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[ranks, *tensor.shape]`, the tensors of all ranks in rank order."""


@dataclass
class DraftTree:
    """The trees of a batch: `bs` requests of `window` nodes each, all tensors on the device.

    Node 0 is the root, the token that the target decoded last. The others follow depth first: a node's
    first child comes right after it, its further children each after all that is below the one before.
    Children come in order of how many nodes they and all below them are, leaves first, so that little is
    ever left open: see `branch_slots`. Nodes that no candidate was left for are pads, the last of the window: the
    root's token again, one below the root, nobody's child.
    """

    tokens: torch.Tensor  # int64 [bs, window]
    positions: torch.Tensor  # int64 [bs, window]; committed length + depth
    parents: torch.Tensor  # int32 [bs, window]; -1 for the root and for pads
    depths: torch.Tensor  # int32 [bs, window]; 0 for the root, 1 for pads
    ancestors: torch.Tensor  # int64 [bs, window]; bit j: node j is the node itself or above it (pads: the root)
    on_spine: torch.Tensor  # bool [bs, window]; the root, and nodes that the first choices lead to
    # int32 [bs, window]; (branch slot to take the parent's state from + 1, 0: it is the state at hand)
    # | (branch slot to keep the own state in + 1, 0: no later node needs it there) << 8
    # | (1: a leaf, whose own state nobody needs: the one before stays at hand) << 16
    moves: torch.Tensor


def branch_slots(window: int) -> int:
    """The most states that a walk over the nodes of any tree of `window` nodes has to keep at once.

    A node's state is kept from its first child that is no leaf to its last, and the last is the largest. So
    a tree that needs one more slot has a child that needs one less and another at least as large: 5 nodes
    for one slot, else one more than twice as many as for one less, 3 * 2 ** n - 1 (as Ershov numbers tell
    the registers that an expression takes).
    """
    return ((window + 1) // 3).bit_length() - 1


def topk_log_probs(
    logits: torch.Tensor,
    k: int,
    *,
    num_org: int,
    num_org_padded: int,
    num_added: int,
    org_start: int,
    added_start: int,
    group: Gather | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` likeliest tokens of each row and their log-probabilities over the whole vocabulary.

    `logits [rows, columns]` are this rank's: columns `[0, num_org)` are tokens from `org_start`, columns
    `[num_org_padded, num_org_padded + num_added)` are tokens from `added_start`, all others are padding.
    Returns fp32 `[rows, k]`, descending, and global ids int64 `[rows, k]`, the same on every rank of
    `group` (None: the shard is the whole vocabulary). Equal logits are taken in order of rank, then of column,
    as stock greedy drafting takes them. With fewer than `k` tokens the rest has id 0 and -inf.

    Raises ValueError for a `k` or a layout that the kernels do not take.
    """
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"DDTREE takes 1 to {MAX_TOPK} candidates per position, not {k}.")
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of adjacent columns: {tuple(logits.shape)}, strides {logits.stride()}.")
    records = shard_candidates(
        logits,
        k,
        num_org=num_org,
        num_org_padded=num_org_padded,
        num_added=num_added,
        org_start=org_start,
        added_start=added_start,
    )
    if group is None:
        return finish_candidates(records)
    return finish_candidates(group.all_gather(merge_candidates(records)), parts_first=True)


def build_tree(
    logp: torch.Tensor, ids: torch.Tensor, roots: torch.Tensor, seq_lens: torch.Tensor, window: int, spine: bool
) -> DraftTree:
    """Grow every request's tree to `window` nodes, best first, and bring it in order.

    `logp` fp32 and `ids` int64 `[bs, depth, k]`: candidates per position, descending. `roots` int64 `[bs]`:
    the tokens to continue from. `seq_lens` `[bs]`: committed lengths. A node's score is the sum of
    log-probabilities along its path, added from the root on. The best entry of the frontier becomes the
    next node and leaves there its next sibling and its first child; among equal scores the entry made
    earlier goes first, a sibling before a child of the same node. With `spine`, the chain of first
    choices is taken before anything else, as deep as the window has room; a window of `depth + 1` is
    then that chain. Candidates of -inf are never nodes but on the spine.

    Raises ValueError for sizes that the kernel does not take.
    """
    bs, depth, k = logp.shape
    if not 2 <= window <= MAX_WINDOW:
        raise ValueError(f"A DDTREE window has 2 to {MAX_WINDOW} nodes, not {window}.")
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"DDTREE takes 1 to {MAX_TOPK} candidates per position, not {k}.")
    if not 1 <= depth < MAX_WINDOW:
        raise ValueError(f"DDTREE takes 1 to {MAX_WINDOW - 1} drafted positions, not {depth}.")
    if ids.shape != logp.shape or not (logp.is_contiguous() and ids.is_contiguous()):
        raise ValueError(f"logp and ids must be contiguous and of one shape: {tuple(logp.shape)}, {tuple(ids.shape)}.")
    tokens, positions, ancestors, *wide = _tables(6, bs, window, torch.int64, logp.device)
    parents, depths, moves, *narrow = _tables(5, bs, window, torch.int32, logp.device)
    on_spine, spine_picked = _tables(2, bs, window, torch.bool, logp.device)
    picked = (*wide, *narrow, spine_picked)
    build_tree_kernel[(bs,)](
        logp,
        ids,
        roots,
        seq_lens,
        *picked,
        depth,
        k,
        WINDOW=window,
        SPINE=spine,
        BLOCK_W=triton.next_power_of_2(window),
        BLOCK_F=triton.next_power_of_2(2 * window),
        num_warps=1,
    )
    order_tree_kernel[(bs,)](
        *picked,
        tokens,
        positions,
        ancestors,
        parents,
        depths,
        moves,
        on_spine,
        WINDOW=window,
        BLOCK_W=triton.next_power_of_2(window),
        num_warps=8,
    )
    return DraftTree(
        tokens=tokens,
        positions=positions,
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        on_spine=on_spine,
        moves=moves,
    )


def _tables(count: int, bs: int, window: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Tables of one allocation, each aligned: kernels are compiled anew for tables that are not."""
    size = bs * window
    flat = torch.empty((count, triton.cdiv(size, 16) * 16), dtype=dtype, device=device)
    return [table[:size].view(bs, window) for table in flat.unbind()]


def tree_mask(tree: DraftTree, seq_lens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` with what each node may attend to: the committed prefix, the nodes above it, itself.

    `out` is flat, bool or uint8, of the batch's total length: requests one after another, per request
    `window` rows of `seq_len + window` columns. Returns `out`. Nothing is written past its end.
    """
    bs, window = tree.ancestors.shape
    tree_mask_kernel[(bs, window)](
        tree.ancestors,
        seq_lens,
        out,
        out.numel(),
        WINDOW=window,
        BLOCK_BS=max(MASK_REQUESTS, triton.next_power_of_2(bs)),
        BLOCK=MASK_BLOCK,
        num_warps=4,
    )
    return out


def walk_tree(tree: DraftTree, target_tokens: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Follow the target's tokens down the tree.

    `target_tokens` int64 `[bs, window]`: the target's next token at every node. Returns packed int64
    `[bs, 2 * steps + 1]` with `steps = max_depth + 1`: the path as window indices from the root on (-1:
    none), the tokens emitted along it, of which the last is the target's own (-1: none), and how many
    were emitted, which is the length of the path too.
    """
    bs, window = tree.tokens.shape
    steps = max_depth + 1
    packed = torch.empty((bs, 2 * steps + 1), dtype=torch.int64, device=tree.tokens.device)
    walk_tree_kernel[(bs,)](
        tree.tokens,
        tree.parents,
        target_tokens,
        packed,
        WINDOW=window,
        STEPS=steps,
        BLOCK_W=triton.next_power_of_2(window),
        BLOCK_S=triton.next_power_of_2(steps),
        num_warps=1,
    )
    return packed
