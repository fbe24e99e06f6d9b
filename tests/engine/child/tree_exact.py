"""Verify DDTree's trees through the engine's own gated-delta-net backend, interpreted, and commit a path.

    tree_exact.py SITE < '[{"new": FOLDER, "jobs": [{"logp": ..., "ids": ..., ...}, ...]}, ...]'

Two layers of random weights run `GDNAttnBackend.forward_extend` on every tree as in a verify: the engine's causal
convolution and delta rule, fed with the builder's links. Every node is then decoded again by the same backend, token
by token from the committed state along the node's path alone (`forward_decode`), and by a plain torch recurrence. The
convolution sums in another order when it decodes, so the replayed delta rule is given what the verify convolved.
At last each request's path is walked and committed by `update_mamba_state_after_mtp_verify`. FOLDER is what the set
adds to a site, or an edited copy. Prints for each folder and job:

    output, window, state   largest difference of a node from torch's, per request
    replay                  per request, whether every node's state and window are, bit for bit, those of its replay
    convolved, replayed     largest difference of a node's convolution, of its output, from its replay's
    parents                 whether the convolution derived the builder's parents
    committed, tracked      whether each request's pool row and prefix-cache row hold the replayed state
    untouched               whether the other pool rows are as before
    path                    the walked paths' lengths, and how many of them leave the window's first nodes
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

LAYERS, HEADS, VALUE_HEADS, HEAD_DIM = 2, 1, 2, 16
CHANNELS = (2 * HEADS + VALUE_HEADS) * HEAD_DIM
# The modules under test of the folder at hand.
subject = SimpleNamespace()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Convolution:
    """The backend's causal convolution: keeps what it made, and gives what it is told to instead."""

    real = staticmethod(gdn_backend.causal_conv1d_update)
    made: torch.Tensor
    instead: torch.Tensor | None = None

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.made = self.real(*args, **kwargs)
        return self.made if self.instead is None else self.instead


convolution = gdn_backend.causal_conv1d_update = Convolution()


class Model:
    """Pools of `rows` requests and the two layers over them."""

    def __init__(self, rows: int, requests: int, steps: int, width: int, state_dtype: torch.dtype):
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape)

        self.caches = SimpleNamespace(
            conv=[normal(LAYERS, rows, CHANNELS, width - 1)],
            temporal=(normal(LAYERS, rows, VALUE_HEADS, HEAD_DIM, HEAD_DIM) * 0.3).to(state_dtype),
            intermediate_ssm=torch.zeros(
                (LAYERS, requests + 1, steps, VALUE_HEADS, HEAD_DIM, HEAD_DIM), dtype=state_dtype
            ),
            intermediate_conv_window=[torch.zeros(LAYERS, requests + 1, steps, CHANNELS, width - 1)],
        )
        self.layers = [
            SimpleNamespace(
                layer_id=layer,
                conv_weights=normal(CHANNELS, width),
                bias=normal(CHANNELS),
                activation="silu",
                A_log=normal(VALUE_HEADS),
                dt_bias=normal(VALUE_HEADS),
                q_dim=HEADS * HEAD_DIM,
                k_dim=HEADS * HEAD_DIM,
                v_dim=VALUE_HEADS * HEAD_DIM,
                num_q_heads=HEADS,
                num_k_heads=HEADS,
                num_v_heads=VALUE_HEADS,
                head_q_dim=HEAD_DIM,
                head_k_dim=HEAD_DIM,
                head_v_dim=HEAD_DIM,
            )
            for layer in range(LAYERS)
        ]
        self.backend = object.__new__(gdn_backend.GDNAttnBackend)
        self.backend.req_to_token_pool = SimpleNamespace(
            mamba2_layer_cache=self.layer_cache, get_speculative_mamba2_params_all_layers=lambda: self.caches
        )
        self.backend.verify_intermediate_state_indices = torch.arange(requests, dtype=torch.int32)
        triton = LinearAttnKernelBackend.TRITON
        self.backend.kernel_dispatcher = gdn_backend.GDNKernelDispatcher(triton, triton)
        # The one-token kernel whose arithmetic is the verify's.
        self.backend.kernel_dispatcher.supports_packed_decode = False

    def layer_cache(self, layer: int) -> MambaPool.SpeculativeState:
        return MambaPool.SpeculativeState(
            conv=[self.caches.conv[0][layer]],
            temporal=self.caches.temporal[layer],
            intermediate_ssm=self.caches.intermediate_ssm[layer],
            intermediate_conv_window=[self.caches.intermediate_conv_window[0][layer]],
        )

    def run(self, layer: int, mode: str, slots: torch.Tensor, starts: torch.Tensor, given: tuple, **metadata) -> object:
        """A layer's output for the tokens of `given` (channels, a, b): one step of decode, or one verify."""
        links = {"retrieve_next_token": None, "retrieve_next_sibling": None, "retrieve_parent_token": None}
        width = metadata.pop("width", 1)
        self.backend.forward_metadata = SimpleNamespace(
            query_start_loc=starts, mamba_cache_indices=slots, has_mamba_track_mask=False, **{**links, **metadata}
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: mode == "verify"),
            spec_info=SimpleNamespace(draft_token_num=width),
            batch_size=len(slots),
            mamba_track_mask=None,
        )
        forward = self.backend.forward_extend if mode == "verify" else self.backend.forward_decode
        channels, a, b = given
        return forward(self.layers[layer], batch, channels, a=a, b=b)


def recurrence(layer: SimpleNamespace, conv: torch.Tensor, state: torch.Tensor, given: tuple) -> tuple:
    """One token of the convolution and the gated delta rule: the output, the new window, the new state."""
    channels, a, b = given
    columns = torch.cat([conv, channels[:, None]], dim=1)
    mixed = torch.nn.functional.silu((columns * layer.conv_weights).sum(dim=1) + layer.bias)
    query, key, value = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim])

    def unit(heads: torch.Tensor) -> torch.Tensor:
        heads = heads.view(HEADS, HEAD_DIM)
        return (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(VALUE_HEADS // HEADS, 0)

    decay = torch.exp(-torch.exp(layer.A_log) * torch.nn.functional.softplus(a + layer.dt_bias))
    state = state.float() * decay[:, None, None]
    error = value.view(VALUE_HEADS, HEAD_DIM) - (state * unit(key)[:, None, :]).sum(-1)
    state = state + (error * torch.sigmoid(b)[:, None])[:, :, None] * unit(key)[:, None, :]
    output = (state * unit(query)[:, None, :]).sum(-1) * HEAD_DIM**-0.5
    return output, columns[:, 1:], state


def verify(job: dict) -> dict:
    torch.manual_seed(job["seed"])
    bs, window, pads = len(job["roots"]), job["window"], job.get("pad_rows", 0)
    rows = bs + pads
    logp = torch.tensor(job["logp"], dtype=torch.float32)
    ids, roots, lens = (torch.tensor(job[name]) for name in ("ids", "roots", "seq_lens"))
    tree = subject.tree.build_tree(logp, ids, roots, lens, window, job["spine"])

    model = Model(3 * rows + 2, rows, job.get("steps", window), job["conv_width"], DTYPES[job["state"]])
    caches = model.caches
    pool = (caches.conv[0].clone(), caches.temporal.clone())
    slots = torch.tensor([3 * row + 1 for row in range(bs)] + [-1] * pads, dtype=torch.int32)
    # Rows that pad a captured graph have no tokens, and the links of an earlier replay.
    starts = torch.tensor([min(row, bs) * window for row in range(rows + 1)], dtype=torch.int32)
    links = [torch.randint(0, window, (rows, window), dtype=torch.int32) for _ in range(2)]
    links[0][:bs], links[1][:bs] = tree.next_token, tree.next_sibling
    derived = torch.full((rows, window), 12345, dtype=torch.int32)
    given = [
        (
            torch.randn(rows * window, CHANNELS),
            torch.randn(rows * window, VALUE_HEADS),
            torch.randn(rows * window, VALUE_HEADS),
        )
        for _ in range(LAYERS)
    ]
    outputs, convolved = [], []
    convolution.instead = None
    for layer in range(LAYERS):
        output = model.run(
            layer,
            "verify",
            slots,
            starts,
            given[layer],
            width=window,
            retrieve_next_token=links[0],
            retrieve_next_sibling=links[1],
            retrieve_parent_token=derived,
        )
        outputs.append(output.view(rows, window, VALUE_HEADS, HEAD_DIM))
        convolved.append(convolution.made)
    real = tree.parents >= 0
    answer = {
        "parents": torch.equal(derived[:bs][real], tree.parents[real]),
        "pads": int((~real).sum()) - bs,
        **compare(model, tree, pool, slots, given, outputs, convolved),
    }
    answer.update(commit(job, model, tree, pool, slots, answer.pop("replays")))
    return answer


def compare(model, tree, pool, slots, given, outputs, convolved) -> dict:
    """Each node against its replay by the backend and by torch."""
    bs, window = tree.tokens.shape
    found: dict = {name: [0.0] * bs for name in ("output", "window", "state", "convolved", "replayed")}
    found["replay"] = [True] * bs
    replays: dict = {}
    caches = model.caches
    one = torch.tensor([0, 1], dtype=torch.int32)
    verified = (caches.intermediate_conv_window[0].clone(), caches.intermediate_ssm.clone())
    spoiled = (caches.conv[0].clone(), caches.temporal.clone())
    for request in range(bs):
        slot = slots[request : request + 1]
        row = int(slot)
        for layer in range(LAYERS):
            # Node -1 stands for the committed prefix.
            decoded = {-1: (pool[0][layer, row], pool[1][layer, row])}
            plain = {-1: (pool[0][layer, row], pool[1][layer, row].float())}
            for node in range(window):
                parent = int(tree.parents[request, node])
                if node and parent < 0:
                    continue
                token = request * window + node
                tokens = tuple(part[token : token + 1] for part in given[layer])
                caches.conv[0][layer, row], caches.temporal[layer, row] = decoded[parent]
                convolution.instead = convolved[layer][request : request + 1, :, node]
                again = model.run(layer, "decode", slot, one, tokens).view(VALUE_HEADS, HEAD_DIM)
                decoded[node] = (caches.conv[0][layer, row].clone(), caches.temporal[layer, row].clone())
                expected, columns, state = recurrence(
                    model.layers[layer], *plain[parent], tuple(part[0] for part in tokens)
                )
                plain[node] = (columns, state.to(caches.temporal.dtype).float())
                output = outputs[layer][request, node]
                left = (verified[0][layer, request, node], verified[1][layer, request, node])
                for name, one_side, other in (
                    ("output", output, expected),
                    ("window", left[0], columns),
                    ("state", left[1].float(), plain[node][1]),
                    ("convolved", convolution.instead, convolution.made),
                    ("replayed", output, again),
                ):
                    found[name][request] = max(found[name][request], float((one_side - other).abs().max()))
                found["replay"][request] &= all(map(torch.equal, left, decoded[node]))
                replays[layer, request, node] = decoded[node]
    caches.conv[0].copy_(spoiled[0])
    caches.temporal.copy_(spoiled[1])
    return {**found, "replays": replays}


def commit(job, model, tree, pool, slots, replays) -> dict:
    """Walk and commit: what is in the pools against the replay of each committed path."""
    bs = len(tree.tokens)
    caches = model.caches
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
    attention.linear_attn_backend = model.backend
    model.backend.forward_metadata = SimpleNamespace(mamba_cache_indices=slots)
    torch.Tensor.is_cuda = property(lambda tensor: True)  # the scatter insists
    try:
        attention.update_mamba_state_after_mtp_verify(torch.tensor(last), tracked, steps, None)
    finally:
        del torch.Tensor.is_cuda

    def holds(row: int, request: int, node: int) -> bool:
        held = [(caches.conv[0][layer, row], caches.temporal[layer, row]) for layer in range(LAYERS)]
        return all(all(map(torch.equal, held[layer], replays[layer, request, node])) for layer in range(LAYERS))

    mine = {int(slot) for slot in slots[:bs]} | {int(row) for row in tracked[1:]}
    others = [row for row in range(caches.temporal.shape[1]) if row not in mine]
    return {
        "committed": [holds(int(slots[request]), request, paths[request][-1]) for request in range(bs)],
        "tracked": [holds(int(tracked[request]), request, middle[request]) for request in range(1, bs)],
        "untouched": torch.equal(caches.conv[0][:, others], pool[0][:, others])
        and torch.equal(caches.temporal[:, others], pool[1][:, others]),
        "path": {"lengths": list(map(len, paths)), "branching": sum(path[-1] != len(path) - 1 for path in paths)},
    }


def answers(folder: Path, jobs: list[dict]) -> list[dict]:
    """Do the jobs with the modules of a folder."""
    bootstrap.add_modules(folder)
    subject.tree = importlib.import_module("sglang.srt.speculative.ddtree_tree")
    return [verify(job) for job in jobs]


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps([answers(Path(item["new"]), item["jobs"]) for item in json.load(sys.stdin)]))
