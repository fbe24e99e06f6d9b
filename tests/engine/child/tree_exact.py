"""Verify DDTree's trees through the engine's own gated-delta-net backend, interpreted, and commit a path.

    tree_exact.py SITE < '[{"new": FOLDER, "jobs": [{"logp": ..., "ids": ..., ...}, ...]}, ...]'

Two layers of random weights run `GDNAttnBackend.forward_extend` on every tree as in a verify. What is kept for trees is
poisoned before. Then every path is run again by the engine's own kernels from the committed state: token by token
(`forward_decode`), and as a chain (`forward_extend` as DFLASH verifies it); and by a plain torch recurrence. At last
each request's path is walked and committed by `update_mamba_state_after_mtp_verify`. FOLDER is what the set adds to a
site, or an edited copy. Prints for each folder and job:

    output, committed state    largest difference of a node's output, of a committed state from torch's, per request
    decoded, chained           per request, whether every node's output is, bit for bit, that of the tokens of its path
                               decoded one by one (with states in float32: to another type the engine rounds after
                               each token that it decodes, but not within a verify), and verified as a chain
    own slots                  per request, whether it wrote the branch slots that its tree needs, and no others
    committed, tracked         whether each request's pool row and prefix-cache row hold, bit for bit, what the engine's
                               own verify and commit of that chain would leave there
    untouched                  whether the verify changed nothing in the pools, and the commit no other row of them and
                               no branch slot: the layers of a commit run side by side
    path                       the walked paths' lengths, and how many of them leave the window's first nodes
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
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid  # noqa: E402
from sglang.srt.layers.attention.linear import gdn_backend  # noqa: E402
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MambaPool  # noqa: E402

LAYERS = 2
# The modules under test of the folder at hand.
subject = SimpleNamespace()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ONE = torch.tensor([0, 1], dtype=torch.int32)


class Model:
    """Pools of random states and the two layers over them."""

    def __init__(self, job: dict, pool_rows: int, rows: int):
        state_dtype = DTYPES[job["state"]]
        heads, value_heads = job.get("heads", [1, 2])
        dim, width, window = job.get("head_dim", 16), job["conv_width"], job["window"]
        self.channels, self.value_heads, self.head_dim = (2 * heads + value_heads) * dim, value_heads, dim

        self.conv = torch.randn(LAYERS, pool_rows, self.channels, width - 1)
        self.temporal = (torch.randn(LAYERS, pool_rows, value_heads, dim, dim) * 0.3).to(state_dtype)
        # What the engine's own verify of a single chain leaves.
        self.chain_states = torch.zeros(LAYERS, 1, window, value_heads, dim, dim, dtype=state_dtype)
        self.chain_windows = torch.zeros(LAYERS, 1, window, self.channels, width - 1)
        self.layers = [
            SimpleNamespace(
                layer_id=10 + layer,
                conv_weights=torch.randn(self.channels, width),
                bias=torch.randn(self.channels) if job.get("bias", True) else None,
                activation="silu",
                A_log=torch.randn(value_heads),
                dt_bias=torch.randn(value_heads),
                q_dim=heads * dim,
                k_dim=heads * dim,
                v_dim=value_heads * dim,
                num_q_heads=heads,
                num_k_heads=heads,
                num_v_heads=value_heads,
                head_q_dim=dim,
                head_k_dim=dim,
                head_v_dim=dim,
            )
            for layer in range(LAYERS)
        ]
        self.tree = self.backend()
        self.tree.tree_states = subject.states.TreeStates(
            self.conv, self.temporal, rows=rows, window=window, dtype=torch.float32
        )
        self.stock = self.backend()
        self.stock.tree_states = None

    def backend(self) -> gdn_backend.GDNAttnBackend:
        backend = object.__new__(gdn_backend.GDNAttnBackend)
        backend.req_to_token_pool = SimpleNamespace(
            mamba2_layer_cache=self.layer_cache, mamba_map={10 + layer: layer for layer in range(LAYERS)}
        )
        backend.verify_intermediate_state_indices = torch.zeros(1, dtype=torch.int32)
        triton = LinearAttnKernelBackend.TRITON
        backend.kernel_dispatcher = gdn_backend.GDNKernelDispatcher(triton, triton)
        # The one-token kernel whose arithmetic is the verify's.
        backend.kernel_dispatcher.supports_packed_decode = False
        return backend

    def layer_cache(self, layer_id: int) -> MambaPool.SpeculativeState:
        layer = layer_id - 10
        return MambaPool.SpeculativeState(
            conv=[self.conv[layer]],
            temporal=self.temporal[layer],
            intermediate_ssm=self.chain_states[layer],
            intermediate_conv_window=[self.chain_windows[layer]],
        )

    def run(self, backend, layer: int, mode: str, slots: torch.Tensor, given: tuple, width: int) -> torch.Tensor:
        """A layer's output `[tokens, value_heads, head_dim]` for `given` (channels, a, b)."""
        tokens = len(given[0])
        backend.forward_metadata = SimpleNamespace(
            query_start_loc=torch.arange(0, tokens + 1, width, dtype=torch.int32),
            mamba_cache_indices=slots,
            has_mamba_track_mask=False,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_parent_token=None,
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: mode == "verify"),
            spec_info=SimpleNamespace(draft_token_num=width),
            batch_size=len(slots),
            mamba_track_mask=None,
        )
        forward = backend.forward_extend if mode == "verify" else backend.forward_decode
        channels, a, b = given
        return forward(self.layers[layer], batch, channels, a=a, b=b).view(tokens, self.value_heads, self.head_dim)


def recurrence(layer: SimpleNamespace, conv: torch.Tensor, state: torch.Tensor, given: tuple) -> tuple:
    """One token of the convolution and the gated delta rule: the output, the new window, the new state."""
    channels, a, b = given
    columns = torch.cat([conv, channels[:, None]], dim=1)
    mixed = (columns * layer.conv_weights).sum(dim=1) + (0 if layer.bias is None else layer.bias)
    query, key, value = torch.nn.functional.silu(mixed).split([layer.q_dim, layer.k_dim, layer.v_dim])
    heads, value_heads, dim = layer.num_q_heads, layer.num_v_heads, layer.head_v_dim

    def unit(vectors: torch.Tensor) -> torch.Tensor:
        vectors = vectors.view(heads, dim)
        norms = (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return (vectors / norms).repeat_interleave(value_heads // heads, 0)

    decay = torch.exp(-torch.exp(layer.A_log) * torch.nn.functional.softplus(a + layer.dt_bias))
    state = state * decay[:, None, None]
    error = value.view(value_heads, dim) - (state * unit(key)[:, None, :]).sum(-1)
    state = state + (error * torch.sigmoid(b)[:, None])[:, :, None] * unit(key)[:, None, :]
    output = (state * unit(query)[:, None, :]).sum(-1) * dim**-0.5
    return output, columns[:, 1:], state


def verify(job: dict) -> dict:
    torch.manual_seed(job["seed"])
    bs, window, pads = len(job["roots"]), job["window"], job.get("pad_rows", 0)
    rows = bs + pads
    logp = torch.tensor(job["logp"], dtype=torch.float32)
    ids, roots, lens = (torch.tensor(job[name]) for name in ("ids", "roots", "seq_lens"))
    tree = subject.tree.build_tree(logp, ids, roots, lens, window, job["spine"])

    # A row more than there are requests and pads, and pool rows that are nobody's.
    model = Model(job, 3 * rows + 2, rows + 1)
    states = model.tree.tree_states
    for kept in (states.inputs, states.mixed, states.decays, states.betas, states.branches):
        kept.fill_(float("nan"))
    # Rows that pad a captured graph have the tables of an earlier replay.
    for table in (states.parents, states.moves):
        table.copy_(torch.randint(0, window, table.shape))
    states.load(tree)
    slots = torch.tensor([3 * row + 1 for row in range(bs)] + [-1] * pads, dtype=torch.int32)
    given = [
        (
            torch.randn(rows * window, model.channels),
            torch.randn(rows * window, model.value_heads),
            torch.randn(rows * window, model.value_heads),
        )
        for _ in range(LAYERS)
    ]
    pool = (model.conv.clone(), model.temporal.clone())
    outputs = [
        model.run(model.tree, layer, "verify", slots, given[layer], window)[: bs * window].view(
            bs, window, model.value_heads, model.head_dim
        )
        for layer in range(LAYERS)
    ]
    slots_used = [int((moves >> 8 & 255).max()) for moves in tree.moves]
    written = states.branches[:bs].isfinite().all(dim=(2, 3, 4)).tolist()
    untouched = torch.equal(model.conv, pool[0]) and torch.equal(model.temporal, pool[1])
    found, replays = compare(model, tree, pool, slots, given, outputs, job["state"] == "float32")
    answer = {"pads": int((tree.parents < 0).sum()) - bs, **found, **commit(job, model, tree, pool, slots, replays)}
    answer["untouched"] &= untouched
    slots = states.branches.shape[1]
    answer["own slots"] = [
        row == [slot < used for slot in range(slots)] for row, used in zip(written, slots_used, strict=True)
    ]
    return answer


def compare(model, tree, pool, slots, given, outputs, decode) -> tuple[dict, dict]:
    """Each node against its path's replays: by torch, decoded token by token, and verified as a chain."""
    bs, window = tree.tokens.shape
    found: dict = {"output": [0.0] * bs, "decoded": [True] * bs, "chained": [True] * bs}
    replays: dict = {}
    for request in range(bs):
        parents = tree.parents[request].tolist()
        nodes = [0, *(node for node in range(1, window) if parents[node] >= 0)]
        slot = slots[request : request + 1]
        row = int(slot)

        def given_at(layer: int, path: list[int], request: int = request) -> tuple:
            return tuple(part[[request * window + node for node in path]] for part in given[layer])

        for layer in range(LAYERS):
            # Node -1 stands for the committed prefix.
            decoded = {-1: (pool[0][layer, row], pool[1][layer, row])}
            plain = {-1: (pool[0][layer, row], pool[1][layer, row].float())}
            for node in nodes:
                output = outputs[layer][request, node]
                parent = parents[node]
                if decode:
                    model.conv[layer, row], model.temporal[layer, row] = decoded[parent]
                    again = model.run(model.stock, layer, "decode", slot, given_at(layer, [node]), 1)[0]
                    decoded[node] = (model.conv[layer, row].clone(), model.temporal[layer, row].clone())
                    found["decoded"][request] &= torch.equal(output, again)
                tokens = tuple(part[0] for part in given_at(layer, [node]))
                expected, *after = recurrence(model.layers[layer], *plain[parent], tokens)
                plain[node] = tuple(after)
                found["output"][request] = max(found["output"][request], float((output - expected).abs().max()))
            for leaf in set(nodes) - set(parents):
                path = [node for node in nodes if int(tree.ancestors[request, leaf]) >> node & 1]
                model.conv[layer, row], model.temporal[layer, row] = pool[0][layer, row], pool[1][layer, row]
                chain = model.run(model.stock, layer, "verify", slot, given_at(layer, path), len(path))
                for step, node in enumerate(path):
                    found["chained"][request] &= torch.equal(outputs[layer][request, node], chain[step])
                    left = (model.chain_windows[layer, 0, step].clone(), model.chain_states[layer, 0, step].clone())
                    replays[layer, request, node] = (*left, plain[node][1])
    model.conv.copy_(pool[0])
    model.temporal.copy_(pool[1])
    return found, replays


def commit(job, model, tree, pool, slots, replays) -> dict:
    """Walk and commit: what is in the pools against the replay of each committed path."""
    bs = len(tree.tokens)
    packed = subject.tree.walk_tree(tree, torch.tensor(job["targets"]), job["max_depth"])
    paths = [row[: row[-1]] for row in packed.tolist()]
    # The n-th request stops n tokens early, as at the end of a text in the middle of a path.
    paths = [path[: max(1, len(path) - cut)] for path, cut in zip(paths, job["cut"], strict=True)]
    last = [path[-1] for path in paths]
    if job.get("commit") == "by length":
        last = [len(path) - 1 for path in paths]
    middle = [path[len(path) // 2] for path in paths]
    tracked = torch.arange(bs, dtype=torch.int64) * 3 + 2
    steps = torch.tensor(middle)
    steps[0] = -1
    attention = object.__new__(hybrid.HybridLinearAttnBackend)
    attention.linear_attn_backend = model.tree
    model.tree.forward_metadata = SimpleNamespace(mamba_cache_indices=slots)
    branches = model.tree.tree_states.branches.fill_(7.0)
    attention.update_mamba_state_after_mtp_verify(torch.tensor(last), tracked, steps, None)

    def holds(row: int, request: int, node: int) -> bool:
        return all(
            torch.equal(model.conv[layer, row], replays[layer, request, node][0])
            and torch.equal(model.temporal[layer, row], replays[layer, request, node][1])
            for layer in range(LAYERS)
        )

    def off(request: int) -> float:
        row, node = int(slots[request]), paths[request][-1]
        return max(
            float((model.temporal[layer, row].float() - replays[layer, request, node][2]).abs().max())
            for layer in range(LAYERS)
        )

    mine = {int(slot) for slot in slots[:bs]} | {int(row) for row in tracked[1:]}
    others = [row for row in range(model.temporal.shape[1]) if row not in mine]
    return {
        "committed state": [off(request) for request in range(bs)],
        "committed": [holds(int(slots[request]), request, paths[request][-1]) for request in range(bs)],
        "tracked": [holds(int(tracked[request]), request, middle[request]) for request in range(1, bs)],
        "untouched": bool((branches == 7.0).all())
        and torch.equal(model.conv[:, others], pool[0][:, others])
        and torch.equal(model.temporal[:, others], pool[1][:, others]),
        "path": {"lengths": list(map(len, paths)), "branching": sum(path[-1] != len(path) - 1 for path in paths)},
    }


def answers(folder: Path, jobs: list[dict]) -> list[dict]:
    """Do the jobs with the modules of a folder."""
    bootstrap.add_modules(folder)
    subject.tree = importlib.import_module("sglang.srt.speculative.ddtree_tree")
    subject.states = importlib.import_module("sglang.srt.speculative.ddtree_states")
    return [verify(job) for job in jobs]


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps([answers(Path(item["new"]), item["jobs"]) for item in json.load(sys.stdin)]))
