"""The recurrent states of a hybrid target while trees are verified, and their commit.

The engine keeps a state per window node, request and layer, and commits by copying one. A tree needs far
less. A verify keeps the *inputs* of every node, which are a hundredth of a state, and states of the few
nodes whose later children are still to come (`ddtree_tree.DraftTree`), in slots that all layers share.
A commit runs the accepted path, from the committed state and the kept inputs, through the same kernel.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
import triton
from sglang.srt.speculative.ddtree_recurrent import (
    CHANNEL_BLOCK,
    VALUE_BLOCK,
    commit_convolution_kernel,
    convolve_tree,
    tree_recurrence_kernel,
)
from sglang.srt.speculative.ddtree_tree import DraftTree, branch_slots

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def verifies_trees(args: ServerArgs) -> bool:
    """Whether the target of a server with these arguments verifies trees."""
    return args.speculative_algorithm == "DDTREE" and not args.speculative_ddtree_shadow_linear


def state_steps(args: ServerArgs) -> int | None:
    """For how many tokens of a verify the engine's own pool keeps states: none, where a path is run again."""
    return 0 if verifies_trees(args) else args.speculative_num_draft_tokens


def verify_bytes(args: ServerArgs, params: Mamba2CacheParams, dtype: torch.dtype) -> int:
    """What verifying costs in memory per running request of a hybrid target, in bytes, beside its state.

    `dtype` is that of the target's activations.
    """
    window = args.speculative_num_draft_tokens
    assert window is not None
    if not verifies_trees(args):
        return params.mamba_cache_per_req * window
    channels = sum(shape[0] for shape in params.shape.conv)
    value_heads = params.shape.temporal[0]
    kept = window * len(params.layers) * (2 * channels * dtype.itemsize + 2 * value_heads * 4)
    return kept + _slots(window) * prod(params.shape.temporal) * 4


def _slots(window: int) -> int:
    # A table without rows has no address to give to a kernel.
    return max(1, branch_slots(window))


class TreeStates:
    """What one target's linear layers keep of the trees of one verify, for `rows` requests.

    `history [layers, pool rows, channels, width - 1]` and `pool [layers, pool rows, value_heads, V, K]` are
    the engine's committed inputs and states. All tables stay where they are, so that captured graphs see
    the trees of the verify that they are replayed for.
    """

    def __init__(
        self, history: torch.Tensor, pool: torch.Tensor, *, rows: int, window: int, dtype: torch.dtype
    ) -> None:
        layers, _, channels, self.past = history.shape
        value_heads, self.value_dim, self.key_dim = pool.shape[2:]
        # Sizes of heads are powers of two (the guard sees to it).
        self.value_block = min(VALUE_BLOCK, self.value_dim)
        self.heads = (channels - value_heads * self.value_dim) // (2 * self.key_dim)
        self.history, self.pool = history, pool
        self.rows, self.window = rows, window
        device = pool.device

        def kept(*shape: int, of: torch.dtype) -> torch.Tensor:
            return torch.zeros((layers, rows, window, *shape), dtype=of, device=device)

        self.inputs, self.mixed = kept(channels, of=dtype), kept(channels, of=dtype)
        self.decays, self.betas = kept(value_heads, of=torch.float32), kept(value_heads, of=torch.float32)
        # In single precision whatever the pool's: a path's state is rounded once, when it is committed.
        self.branches = torch.zeros((rows, _slots(window), *pool.shape[2:]), dtype=torch.float32, device=device)

        # Until there is a tree: a chain.
        self.parents = torch.arange(-1, window - 1, dtype=torch.int32, device=device).repeat(rows, 1)
        self.moves = torch.zeros((rows, window), dtype=torch.int32, device=device)
        self.ancestors = (torch.ones_like(self.moves, dtype=torch.int64) << (self.parents.to(torch.int64) + 1)).cumsum(
            dim=1
        )
        self.all_nodes = torch.full((rows,), window - 1, dtype=torch.int32, device=device)
        self.no_step = torch.full((rows,), -1, dtype=torch.int32, device=device)

    @classmethod
    def of_target(cls, model_runner: ModelRunner) -> TreeStates | None:
        """For the target that this runner has loaded; None where no trees are verified with it."""
        args = model_runner.server_args
        if model_runner.is_draft_worker or not verifies_trees(args):
            return None
        window = args.speculative_num_draft_tokens
        assert window is not None
        cache = model_runner.req_to_token_pool.get_speculative_mamba2_params_all_layers()
        return cls(
            cache.conv[0],
            cache.temporal,
            rows=model_runner.req_to_token_pool.size,
            window=window,
            dtype=model_runner.dtype,
        )

    def load(self, tree: DraftTree | None) -> None:
        """Let the next verify and its commit be of these trees; None: of no requests."""
        if tree is None:
            return
        requests = len(tree.parents)
        self.parents[:requests].copy_(tree.parents)
        self.moves[:requests].copy_(tree.moves)
        self.ancestors[:requests].copy_(tree.ancestors)

    def verify(
        self,
        layer: RadixLinearAttention,
        index: int,
        slots: torch.Tensor,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        """The `index`-th linear layer's output for every node, `[1, tokens, value_heads, V]`.

        `mixed_qkv [tokens, channels]`, `a` and `b` `[tokens, value_heads]` are its projections of
        `tokens / window` requests, `slots` int32 their rows in the pools, -1 for rows that pad. Changes
        nothing that is committed.
        """
        tokens = mixed_qkv.shape[0]
        requests = tokens // self.window
        assert isinstance(layer.conv_weights, torch.Tensor) and not isinstance(layer.bias, tuple)
        assert layer.A_log is not None and layer.dt_bias is not None
        convolve_tree(
            mixed_qkv,
            a,
            b,
            weight=layer.conv_weights,
            bias=layer.bias,
            silu=layer.activation in ("silu", "swish"),
            decay_log=layer.A_log,
            decay_bias=layer.dt_bias,
            history=self.history[index],
            slots=slots,
            parents=self.parents,
            inputs=self.inputs[index],
            mixed=self.mixed[index],
            decays=self.decays[index],
            betas=self.betas[index],
        )
        output = mixed_qkv.new_empty((1, tokens, self.pool.shape[2], self.value_dim))
        self._recur(requests, slots, self.all_nodes, slots, output, layers=1, first_layer=index)
        return output

    def commit(
        self,
        slots: torch.Tensor,
        steps: torch.Tensor,
        track_slots: torch.Tensor | None = None,
        track_steps: torch.Tensor | None = None,
    ) -> None:
        """Commit the state of node `steps[n]` to row `slots[n]` of the pools, all layers, per request.

        `steps`, `slots` `[requests]` of any integer type; a step of -1 commits nothing. With `track_steps`
        the states of these nodes, on the way to the former, go to rows `track_slots` likewise.
        """
        if track_slots is not None and track_steps is not None:
            # First, while the committed state that the path starts from is there.
            self._commit(slots, track_steps, track_slots)
        self._commit(slots, steps, slots)

    def _commit(self, slots: torch.Tensor, steps: torch.Tensor, targets: torch.Tensor) -> None:
        """The states of nodes `steps`, of the requests in rows `slots`, to rows `targets`."""
        requests = steps.shape[0]
        if requests == 0:
            return
        layers, pool_rows, channels, past = self.history.shape
        slots, steps, targets = (_narrow(table[:requests]) for table in (slots, steps, targets))
        self._recur(requests, slots, steps, targets, None, layers=layers, first_layer=0)
        commit_convolution_kernel[(layers, requests, triton.cdiv(channels, CHANNEL_BLOCK))](
            self.inputs,
            self.history,
            slots,
            self.parents,
            steps,
            targets,
            self.rows,
            pool_rows,
            CHANNELS=channels,
            WINDOW=self.window,
            WIDTH=past + 1,
            BLOCK=CHANNEL_BLOCK,
            num_warps=4,
        )

    def _recur(
        self,
        requests: int,
        slots: torch.Tensor,
        steps: torch.Tensor,
        targets: torch.Tensor,
        output: torch.Tensor | None,
        *,
        layers: int,
        first_layer: int,
    ) -> None:
        """Verify one layer, or without `output` commit some."""
        value_heads = self.pool.shape[2]
        grid: Any = (layers, self.value_dim // self.value_block, requests * value_heads)
        tree_recurrence_kernel[grid](
            self.mixed,
            self.decays,
            self.betas,
            self.pool,
            self.branches,
            self.mixed if output is None else output,
            slots,
            self.moves,
            self.ancestors,
            steps,
            targets,
            self.key_dim**-0.5,
            first_layer,
            self.rows,
            self.pool.shape[1],
            int(output is None),
            WINDOW=self.window,
            BRANCHES=self.branches.shape[1],
            HEADS=self.heads,
            VALUE_HEADS=value_heads,
            K=self.key_dim,
            V=self.value_dim,
            BLOCK_V=self.value_block,
            num_warps=1,
        )


def _narrow(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int32).contiguous()
