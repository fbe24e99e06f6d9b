"""Triton kernels of DDTree's recurrent layers: the causal convolution and the gated delta rule over a tree.

Shapes: `rows` requests, `window` nodes each, `channels` of the projected queries, keys and values side by
side, `width` taps of the convolution, `value_heads` states of `V x K`, `layers` of them. A verify leaves the
pools of committed states as they are. What it was given stays in `inputs`, `mixed` and `gates`, so that a
commit can go down the accepted path once more: no state of a node is kept for that.

Nodes come parents first, each node's first child right after it, and leaves before their siblings. So a state
stays in registers from a node to its first child, and at a leaf for the sibling that follows. Only a node of
several children that are no leaves stores its state, into one of a few *branch slots*, and those but the first
load it. `moves` says so per node: `(slot to load + 1) | (slot to store + 1) << 8 | leaf << 16`.

The arithmetic is that of the engine's own kernels for a single token, in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHANNEL_BLOCK = 256
# Columns of a state per program: a warp holds them in registers over all nodes of a tree.
VALUE_BLOCK = 8


@triton.jit
def above(parents: tl.tensor, node: tl.tensor) -> tl.tensor:
    """What precedes a node: its parent, and from the root on the committed inputs, the newest of them as -1."""
    return tl.where(node >= 0, tl.load(parents + tl.maximum(node, 0)), node - 1)


@triton.jit
def input_at(
    drafted: tl.tensor, past: tl.tensor, node: tl.tensor, there: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """The convolution's input at a node, or before the root (see `above`)."""
    ours = tl.load(drafted + node.to(tl.int64) * stride, there & (node >= 0), other=0)
    committed = tl.load(past + (WIDTH - 1 + node), there & (node < 0), other=0)
    return tl.where(node >= 0, ours, committed)


@triton.jit(do_not_specialize=["x_stride", "a_stride", "b_stride"])
def tree_convolution_kernel(
    x: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    decay_log: tl.tensor,
    decay_bias: tl.tensor,
    history: tl.tensor,
    slots: tl.tensor,
    parents: tl.tensor,
    inputs: tl.tensor,
    mixed: tl.tensor,
    decays: tl.tensor,
    betas: tl.tensor,
    x_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Grid (rows * window, channel blocks): a node's convolution along its path, and its gates."""
    token = tl.program_id(0).to(tl.int64)
    row = token // WINDOW
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    node = tl.program_id(0) % WINDOW
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    table = parents + row * WINDOW
    drafted = x + row * WINDOW * x_stride + channel
    past = history + (slot * CHANNELS + channel) * (WIDTH - 1)

    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, there, other=0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        at = node
        for _ in tl.static_range(WIDTH - 1 - tap):
            at = above(table, at)
        value = input_at(drafted, past, at, there, x_stride, WIDTH)
        total += value * tl.load(weight + channel * WIDTH + tap, there, other=0)
        if tap == WIDTH - 1:
            tl.store(inputs + token * CHANNELS + channel, value, there)
    if SILU:
        total = total / (1 + tl.exp(-total))
    tl.store(mixed + token * CHANNELS + channel, total, there)

    if tl.program_id(1) == 0:
        head = tl.arange(0, BLOCK_H)
        real = head < VALUE_HEADS
        raw = tl.load(a + token * a_stride + head, real, other=0).to(tl.float32)
        raw += tl.load(decay_bias + head, real, other=0).to(tl.float32)
        rate = tl.exp(tl.load(decay_log + head, real, other=0).to(tl.float32))
        decay = tl.exp(-rate * tl.where(raw <= 20.0, tl.log(1.0 + tl.exp(raw)), raw))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head, real, other=0).to(tl.float32)))
        tl.store(decays + token * VALUE_HEADS + head, decay, real)
        tl.store(betas + token * VALUE_HEADS + head, beta, real)


@triton.jit(do_not_specialize=["first_layer", "rows", "pool_rows", "commits"])
def tree_recurrence_kernel(
    mixed: tl.tensor,
    decays: tl.tensor,
    betas: tl.tensor,
    pool: tl.tensor,
    branches: tl.tensor,
    output: tl.tensor,
    slots: tl.tensor,
    moves: tl.tensor,
    ancestors: tl.tensor,
    steps: tl.tensor,
    targets: tl.tensor,
    scale: tl.tensor,
    first_layer: tl.tensor,
    rows: tl.tensor,
    pool_rows: tl.tensor,
    commits: tl.tensor,
    WINDOW: tl.constexpr,
    BRANCHES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Grid (layers, state blocks, requests * value_heads), one warp: the gated delta rule over a tree or a path.

    Of a verify (`commits` 0), nodes `[0, steps[row]]`: outputs, and branch slots. Of a commit, the nodes of
    these that are node `steps[row]` or above it (-1: none): the pool's row `targets[row]` becomes the state of
    the former. Both are one program in machine code: what is committed is what was verified, to the last bit.

    Layers of one launch run side by side, and share the branch slots: a verify is of one layer, and a commit,
    which may be of all, uses none.
    """
    layer = first_layer + tl.program_id(0).to(tl.int64)
    row = (tl.program_id(2) // VALUE_HEADS).to(tl.int64)
    value_head = tl.program_id(2) % VALUE_HEADS
    slot = tl.load(slots + row).to(tl.int64)
    step = tl.load(steps + row)
    if (slot < 0) | (step < 0):
        return
    path = tl.load(ancestors + row * WINDOW + step)
    members = tl.where(commits != 0, path, -1)

    k = tl.arange(0, K)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = value_head * V * K + v[None, :] * K + k[:, None]
    states = pool + layer * pool_rows * VALUE_HEADS * V * K
    state = tl.load(states + slot * VALUE_HEADS * V * K + tile).to(tl.float32)
    waiting = branches + row * BRANCHES * VALUE_HEADS * V * K

    head = value_head // (VALUE_HEADS // HEADS)
    first = (layer * rows + row) * WINDOW
    queries = mixed + first * (2 * HEADS * K + VALUE_HEADS * V) + head * K + k
    values = mixed + first * (2 * HEADS * K + VALUE_HEADS * V) + 2 * HEADS * K + value_head * V + v
    gates = first * VALUE_HEADS + value_head
    query = tl.load(queries)
    key = tl.load(queries + HEADS * K)
    value = tl.load(values)
    decay = tl.load(decays + gates)
    beta = tl.load(betas + gates)

    for node in range(0, step + 1):
        # The next node's, for the wait to be over when it is its turn.
        following = tl.minimum(node + 1, WINDOW - 1)
        at = following * (2 * HEADS * K + VALUE_HEADS * V)
        next_query = tl.load(queries + at)
        next_key = tl.load(queries + at + HEADS * K)
        next_value = tl.load(values + at)
        next_decay = tl.load(decays + gates + following * VALUE_HEADS)
        next_beta = tl.load(betas + gates + following * VALUE_HEADS)
        if ((members >> node) & 1) == 1:
            move = tl.load(moves + row * WINDOW + node)
            take = tl.where(commits != 0, 0, move & 255) - 1
            keep = tl.where(commits != 0, 0, (move >> 8) & 255) - 1
            leaf = tl.where(commits != 0, 0, move >> 16)
            if take >= 0:
                state = tl.load(waiting + take * VALUE_HEADS * V * K + tile)

            q = query.to(tl.float32)
            q = q / tl.sqrt(tl.sum(q * q) + 1e-6) * scale
            unit = key.to(tl.float32)
            unit = unit / tl.sqrt(tl.sum(unit * unit) + 1e-6)
            after = state * decay
            error = (value.to(tl.float32) - tl.sum(after * unit[:, None], 0)) * beta
            after += unit[:, None] * error[None, :]

            if commits == 0:
                out = ((row * WINDOW + node) * VALUE_HEADS + value_head) * V + v
                tl.store(output + out, tl.sum(after * q[:, None], 0).to(output.dtype.element_ty))
            if keep >= 0:
                tl.store(waiting + keep * VALUE_HEADS * V * K + tile, after)
                tl.debug_barrier()
            state = tl.where(leaf == 0, after, state)
        query = next_query
        key = next_key
        value = next_value
        decay = next_decay
        beta = next_beta

    if commits != 0:
        target = tl.load(targets + row).to(tl.int64)
        tl.store(states + target * VALUE_HEADS * V * K + tile, state.to(pool.dtype.element_ty), target >= 0)


@triton.jit(do_not_specialize=["rows", "pool_rows"])
def commit_convolution_kernel(
    inputs: tl.tensor,
    history: tl.tensor,
    slots: tl.tensor,
    parents: tl.tensor,
    steps: tl.tensor,
    targets: tl.tensor,
    rows: tl.tensor,
    pool_rows: tl.tensor,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (layers, requests, channel blocks): the last inputs of the path to a node become a pool row.

    Which nodes and rows is as of `tree_recurrence_kernel`.
    """
    layer = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    step = tl.load(steps + row)
    target = tl.load(targets + row).to(tl.int64)
    if (slot < 0) | (step < 0) | (target < 0):
        return
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    table = parents + row * WINDOW
    drafted = inputs + (layer * rows + row) * WINDOW * CHANNELS + channel
    windows = history + (layer * pool_rows * CHANNELS + channel) * (WIDTH - 1)
    # Where the row is its own target, a column is read before it is written: each moves to a lower place.
    for column in tl.static_range(WIDTH - 1):
        at = step
        for _ in tl.static_range(WIDTH - 2 - column):
            at = above(table, at)
        kept = input_at(drafted, windows + slot * CHANNELS * (WIDTH - 1), at, there, CHANNELS, WIDTH)
        tl.store(windows + target * CHANNELS * (WIDTH - 1) + column, kept, there)


def convolve_tree(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    decay_log: torch.Tensor,
    decay_bias: torch.Tensor,
    history: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    inputs: torch.Tensor,
    mixed: torch.Tensor,
    decays: torch.Tensor,
    betas: torch.Tensor,
) -> None:
    """Convolve one layer's nodes, each along its path, and work out their gates.

    `x [tokens, channels]`, `a`, `b` `[tokens, value_heads]`: the projections of `tokens / window` requests.
    `history [pool rows, channels, width - 1]` and `slots` int32 `[requests]` (-1: a row that pads): the
    committed inputs. `parents` int32 `[rows, window]`, -1 the root's. Fills the layer's `inputs` and
    `mixed` `[rows, window, channels]` with the nodes' inputs and their convolutions, and `decays` and
    `betas` fp32 `[rows, window, value_heads]`.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    tree_convolution_kernel[(tokens, triton.cdiv(channels, CHANNEL_BLOCK))](
        x,
        a,
        b,
        weight,
        weight if bias is None else bias,
        decay_log,
        decay_bias,
        history,
        slots,
        parents,
        inputs,
        mixed,
        decays,
        betas,
        x.stride(0),
        a.stride(0),
        b.stride(0),
        CHANNELS=channels,
        VALUE_HEADS=a.shape[1],
        WINDOW=parents.shape[1],
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SILU=silu,
        BLOCK=CHANNEL_BLOCK,
        BLOCK_H=triton.next_power_of_2(a.shape[1]),
        num_warps=4,
    )
