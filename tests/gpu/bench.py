"""Time the tree's kernels by themselves, on a GPU, against the engine's own.

    PYTHONPATH=PATCHED:SITE python -m tests.gpu.bench [--blocks 4,8,16,32] [--json FILE]

PATCHED is a folder made by `sites.make_site`, SITE one with what the engine imports. Layers are a large hybrid
target's: 32 value heads of 128 x 128, 16 key heads. Medians in microseconds of CUDA graph replays, over enough
layers that no cache holds them. `--blocks`: state columns per program to try in the recurrence (`VALUE_BLOCK`).
With each, a path's outputs and its commit are compared with the engine's own of that path as a chain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYERS, HEADS, VALUE_HEADS, DIM, WIDTH, DEPTH, TOPK = 12, 16, 32, 128, 4, 15, 8
CHANNELS = (2 * HEADS + VALUE_HEADS) * DIM
LONG_CONTEXT = 128 * 1024


def microseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of a replay of `work`, captured."""
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(1000 * before.elapsed_time(after))
    return sorted(times)[len(times) // 2]


class Target:
    """The layers' weights, pools and projections of `requests` requests."""

    def __init__(self, requests: int, window: int) -> None:
        import torch
        from sglang.srt.speculative.ddtree_states import TreeStates
        from sglang.srt.speculative.ddtree_tree import build_tree

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        torch.manual_seed(1)
        self.requests, self.window = requests, window
        self.history = normal(LAYERS, requests + 1, CHANNELS, WIDTH - 1)
        self.pool = 0.3 * normal(LAYERS, requests + 1, VALUE_HEADS, DIM, DIM, dtype=torch.float32)
        self.layer = SimpleNamespace(
            conv_weights=normal(CHANNELS, WIDTH),
            bias=None,
            activation="silu",
            A_log=normal(VALUE_HEADS, dtype=torch.float32),
            dt_bias=normal(VALUE_HEADS),
        )
        self.given = normal(requests * window, CHANNELS), *(normal(requests * window, VALUE_HEADS) for _ in range(2))
        self.slots = torch.arange(1, requests + 1, dtype=torch.int32, device="cuda")
        logits = torch.randn(requests, DEPTH, 50, device="cuda") * 3
        logp, ids = torch.log_softmax(logits, dim=-1).topk(TOPK)
        ones = torch.ones(requests, dtype=torch.int64, device="cuda")
        self.grow = lambda: build_tree(logp.contiguous(), ids.contiguous(), ones, ones, window, False)
        self.tree = self.grow()
        self.states = TreeStates(self.history, self.pool, rows=requests, window=window, dtype=torch.bfloat16)
        self.states.load(self.tree)

    def verify(self) -> Any:
        for index in range(LAYERS):
            output = self.states.verify(self.layer, index, self.slots, *self.given)
        return output

    def engine_chain(self, chain: SimpleNamespace, index: int) -> Any:
        """The engine's own verify of chains, as `chain` was made for."""
        from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
        from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update

        mixed = causal_conv1d_update(
            chain.x.transpose(1, 2),
            chain.history,
            self.layer.conv_weights,
            None,
            "silu",
            conv_state_indices=chain.slots,
            intermediate_conv_window=chain.windows,
            intermediate_state_indices=chain.rows,
        )
        mixed = mixed.transpose(1, 2).reshape(1, -1, CHANNELS)
        query, key, value = mixed.split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=-1)
        return (
            TritonGDNKernel()
            .target_verify(
                A_log=self.layer.A_log,
                dt_bias=self.layer.dt_bias,
                q=query.view(1, -1, HEADS, DIM),
                k=key.view(1, -1, HEADS, DIM),
                v=value.view(1, -1, VALUE_HEADS, DIM),
                a=chain.a.view(-1, VALUE_HEADS),
                b=chain.b.view(-1, VALUE_HEADS),
                ssm_states=self.pool[index],
                cache_indices=chain.slots,
                query_start_loc=chain.starts,
                intermediate_states_buffer=chain.states,
                intermediate_state_indices=chain.rows,
                cache_steps=chain.states.shape[1],
                retrieve_parent_token=None,
            )
            .view(*chain.x.shape[:2], VALUE_HEADS, DIM)
        )

    def chain(self, path: list[int], requests: int, index: int = 0) -> SimpleNamespace:
        """What the engine's verify of `requests` chains takes: nodes `path` of the projections, by row."""
        import torch

        length = len(path)
        x, a, b = (part.view(self.requests, self.window, -1)[:requests, path].contiguous() for part in self.given)
        return SimpleNamespace(
            x=x,
            a=a,
            b=b,
            slots=self.slots[:requests],
            rows=torch.arange(requests, dtype=torch.int32, device="cuda"),
            starts=torch.arange(0, requests * length + 1, length, dtype=torch.int32, device="cuda"),
            # The convolution leaves its last inputs there.
            history=self.history[index].clone(),
            windows=torch.zeros(requests, length, CHANNELS, WIDTH - 1, dtype=torch.bfloat16, device="cuda"),
            states=torch.zeros(requests, length, VALUE_HEADS, DIM, DIM, device="cuda"),
        )

    def check(self) -> dict[str, Any]:
        """The deepest node's path of the first request: its outputs, and its commit, against the engine's chain."""
        import torch

        output = self.states.verify(self.layer, 0, self.slots, *self.given).view(
            self.requests, self.window, VALUE_HEADS, DIM
        )
        last = int(self.tree.depths[0].argmax())
        path = [node for node in range(self.window) if int(self.tree.ancestors[0, last]) >> node & 1]
        chain = self.chain(path, 1)
        expected = self.engine_chain(chain, 0)
        before = self.pool.clone(), self.history.clone()
        steps = torch.full((self.requests,), last, dtype=torch.int32, device="cuda")
        self.states.commit(self.slots, steps)
        pairs = {
            "output": (output[0, path], expected[0]),
            "state": (self.pool[0, 1], chain.states[0, -1]),
            "window": (self.history[0, 1], chain.windows[0, -1]),
        }
        found = {
            name: {"equal": torch.equal(one, other), "off": float((one.float() - other.float()).abs().max())}
            for name, (one, other) in pairs.items()
        }
        self.pool.copy_(before[0])
        self.history.copy_(before[1])
        return {"path": len(path), **found}


def tree_times(target: Target) -> dict[str, float]:
    """A round's work on the trees, and their masks of a long context."""
    import torch
    from sglang.srt.speculative.ddtree_tree import tree_mask, walk_tree

    lens = torch.full((target.requests,), LONG_CONTEXT, dtype=torch.int64, device="cuda")
    size = target.requests * target.window * (LONG_CONTEXT + target.window)
    mask = torch.empty(size, dtype=torch.bool, device="cuda")
    return {
        "build": microseconds(target.grow),
        "walk": microseconds(lambda: walk_tree(target.tree, target.tree.tokens, DEPTH)),
        "mask at 128k": microseconds(lambda: tree_mask(target.tree, lens, mask)),
        "load": microseconds(lambda: target.states.load(target.tree)),
    }


def layer_times(target: Target, blocks: list[int]) -> dict[str, Any]:
    """One layer's verify, and one's commit of a path of four: microseconds, by block."""
    import torch

    steps = (target.tree.depths == 3).to(torch.int32).argmax(dim=1).to(torch.int32)
    found: dict[str, Any] = {}
    for columns in blocks:
        target.states.value_block = columns
        found[str(columns)] = {
            "verify": microseconds(target.verify) / LAYERS,
            "commit": microseconds(lambda: target.states.commit(target.slots, steps)) / LAYERS,
            "check": target.check(),
        }
    return found


def engine_times(target: Target) -> float:
    """The engine's verify of a chain of 16, a layer's microseconds."""
    chains = [target.chain(list(range(16)), target.requests) for _ in range(3)]

    def work() -> None:
        for index in range(LAYERS):
            target.engine_chain(chains[index % 3], index)

    return microseconds(work) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    blocks = [int(block) for block in options.blocks.split(",")]
    results: dict[str, Any] = {}
    for requests in (1, 8):
        for window in (16, 32, 64):
            target = Target(requests, window)
            name = f"{requests} x {window}"
            results[name] = {"tree": tree_times(target), "layer": layer_times(target, blocks)}
            results[name]["chain of 16"] = engine_times(target)
            print(name, json.dumps(results[name]), flush=True)
            del target
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
