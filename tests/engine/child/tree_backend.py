"""What the engine's own backends and runners make of a DDTREE verify input, and of a target that may not verify trees.

    tree_backend.py SITE < '["links", {"guard": ["bf16 state", ...]}, ...]'

Runs each named check of `CHECKS` and prints its report; a `guard` entry sets up a sound target, lets the
named faults happen to it, and reports each as [findings, start without the flag, start with it].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bootstrap

bootstrap.install(Path(sys.argv[1]))

import torch  # noqa: E402
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid  # noqa: E402
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend  # noqa: E402
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MambaPool  # noqa: E402
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.speculative import ddtree_guard, ddtree_info  # noqa: E402
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput  # noqa: E402
from sglang.srt.speculative.ddtree_tree import DraftTree  # noqa: E402
from sglang.srt.speculative.ddtree_worker import DDTreeWorker  # noqa: E402
from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.dflash_worker import DFlashWorker  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

WINDOW = 4
VERIFY = ForwardMode.TARGET_VERIFY
# Root with children 1 and 2, and 3 below 1.
FIRST_CHILD, NEXT_SIBLING = [1, 3, -1, -1], [-1, 2, -1, -1]


def tree_input(bs: int) -> DDTreeVerifyInput:
    def table(values):
        return torch.tensor([values] * bs)

    tree = DraftTree(
        tokens=table([7, 8, 9, 10]),
        positions=table([0, 1, 1, 2]),
        next_token=table(FIRST_CHILD),
        next_sibling=table(NEXT_SIBLING),
        parents=table([-1, 0, 0, 1]),
        depths=table([0, 1, 1, 2]),
        ancestors=table([1, 3, 5, 11]),
        on_spine=table([1, 1, 0, 1]) > 0,
    )
    return DDTreeVerifyInput.from_tree(tree, 2)


def chain_input() -> DFlashVerifyInput:
    return DFlashVerifyInput(draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=WINDOW)


class Linear(hybrid.MambaAttnBackendBase):
    """The part that all linear backends share."""

    forward_decode = forward_extend = None


def linear_backend(max_bs: int = 4) -> Linear:
    runner = SimpleNamespace(
        device="cpu",
        server_args=SimpleNamespace(speculative_eagle_topk=1),
        req_to_token_pool=SimpleNamespace(get_mamba_indices=lambda indices: indices + 100),
    )
    backend = Linear(runner)
    backend.init_cuda_graph_state(max_bs, max_bs * WINDOW)
    return backend


def links_of(metadata) -> list | None:
    if metadata.retrieve_next_token is None:
        return None
    assert metadata.retrieve_parent_token.shape == metadata.retrieve_next_token.shape
    return [metadata.retrieve_next_token.tolist(), metadata.retrieve_next_sibling.tolist()]


def links() -> dict:
    """Links in eager forward, capture and replay; a chain's input has none in any."""
    report = {}
    for name, spec, capture in (
        ("tree", tree_input(2), DDTreeVerifyInput.for_capture(WINDOW, torch.ones(1, dtype=torch.bool))),
        ("chain", chain_input(), chain_input()),
    ):
        backend = linear_backend()
        eager = backend._forward_metadata(
            SimpleNamespace(
                batch_size=2,
                req_pool_indices=torch.tensor([5, 6]),
                forward_mode=VERIFY,
                input_ids=torch.zeros(2 * WINDOW),
                spec_info=spec,
                mamba_track_mask=None,
                mamba_track_indices=None,
            )
        )
        captured = backend._capture_metadata(2, torch.tensor([1, 2]), VERIFY, capture)
        replayed = backend._replay_metadata(2, torch.tensor([5, 6]), VERIFY, spec, torch.tensor([9, 4]))
        report[name] = {
            "eager": links_of(eager),
            "captured": captured.retrieve_next_token is not None,
            "replayed": links_of(replayed),
            # A graph reads where it was captured.
            "same memory": captured.retrieve_next_token is replayed.retrieve_next_token,
        }
    return report


def replay(bs: int, spec, seq_lens: list[int], indices: list[int]) -> dict:
    backend = linear_backend()
    metadata = backend._replay_metadata(bs, torch.tensor(indices), VERIFY, spec, torch.tensor(seq_lens))
    return {"states": metadata.mamba_cache_indices.tolist(), "starts": metadata.query_start_loc.tolist()}


def padding() -> dict:
    """A batch of two in a graph for four, one of them a request of a single token: which rows are live."""
    return {
        "tree": replay(4, tree_input(2), [1, 9, 1, 1], [5, 6, 0, 0]),
        "full": replay(2, tree_input(2), [1, 1], [5, 6]),
        "stock count": replay(4, chain_input(), [8, 9, 1, 1], [5, 6, 0, 0]),
    }


def stale() -> list | None:
    """The links of a smaller batch after a larger one: its own rows are its own."""
    backend = linear_backend()
    larger = tree_input(4)
    larger.tree.next_token.fill_(-1)
    backend._replay_metadata(4, torch.arange(4), VERIFY, larger, torch.tensor([9] * 4))
    metadata = backend._replay_metadata(4, torch.arange(4), VERIFY, tree_input(3), torch.tensor([9, 9, 9, 1]))
    return links_of(metadata)


def cache_steps() -> dict:
    """The stride that the delta rule kernel is given, for a buffer of more steps than are verified."""
    backend = object.__new__(gdn_backend.GDNAttnBackend)
    given = {}

    def kernel(**kwargs):
        given.update(kwargs)
        return kwargs["q"]

    cache = MambaPool.SpeculativeState(
        conv=[torch.zeros(9, 3, 3)],
        temporal=torch.zeros(9, 1, 1, 1),
        intermediate_ssm=torch.zeros(5, WINDOW + 3, 1, 1, 1),
        intermediate_conv_window=[torch.zeros(5, WINDOW + 3, 3, 3)],
    )
    backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer: cache)
    backend.kernel_dispatcher = SimpleNamespace(target_verify=kernel)
    backend.verify_intermediate_state_indices = torch.arange(4)
    backend.forward_metadata = linear_backend()._replay_metadata(
        2, torch.tensor([5, 6]), VERIFY, tree_input(2), torch.tensor([9, 4])
    )
    gdn_backend.causal_conv1d_update = lambda x, *args, **kwargs: given.update(conv=kwargs) or x.clone()
    layer = SimpleNamespace(layer_id=0, conv_weights=None, bias=None, activation="silu", A_log=None, dt_bias=None)
    for kind in "qkv":
        setattr(layer, f"{kind}_dim", 1)
        setattr(layer, f"num_{kind}_heads", 1)
        setattr(layer, f"head_{kind}_dim", 1)
    batch = SimpleNamespace(forward_mode=VERIFY, spec_info=tree_input(2))
    backend.forward_extend(layer, batch, torch.zeros(2 * WINDOW, 3), None, None)
    return {
        "cache_steps": given["cache_steps"],
        "buffer": cache.intermediate_ssm.shape[1],
        "links reach both kernels": given["conv"]["retrieve_parent_token"] is given["retrieve_parent_token"],
        "conv links": links_of(SimpleNamespace(**given["conv"])),
    }


def triton_attention(window: int | None = WINDOW) -> TritonAttnBackend:
    backend = object.__new__(TritonAttnBackend)
    backend.__dict__.update(
        num_draft_tokens=window,
        max_context_len=100,
        num_head=1,
        max_kv_splits=1,
        v_head_dim=1,
        swa_v_head_dim=None,
        device="cpu",
        skip_prefill=False,
        sliding_window_size=None,
    )
    return backend


def mask_buffer() -> dict:
    """Whether a full batch of requests at the context's end fits the graphs' mask buffer."""
    sizes = {}
    for window in (WINDOW, None):
        backend = triton_attention(window)
        tokens = 3 * (window or 1)
        backend.init_cuda_graph_state(3, tokens)
        needed = tokens * (backend.max_context_len + (window or 0))
        sizes[str(window)] = [backend.cuda_graph_custom_mask.numel(), needed]
    return sizes


def graph_input() -> dict:
    """The verify input that each kind of runner captures its graphs with."""
    report = {}
    for name, algorithm, is_draft, shadow in (
        ("target", "DDTREE", False, False),
        ("shadow", "DDTREE", False, True),
        ("drafter", "DFLASH", True, False),
        ("dflash", "DFLASH", False, False),
    ):
        runner = object.__new__(CudaGraphRunner)
        runner.model_runner = SimpleNamespace(
            spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
            is_draft_worker=is_draft,
            server_args=SimpleNamespace(speculative_num_draft_tokens=WINDOW, speculative_ddtree_shadow_linear=shadow),
            attn_backend=triton_attention(),
        )
        runner.buffers = SimpleNamespace(custom_mask="mask")
        spec = runner.get_spec_info(WINDOW)
        links = getattr(spec, "retrieve_next_token", "none")
        mode = spec.capture_hidden_mode.name
        report[name] = [type(spec).__name__, spec.topk, spec.custom_mask, mode, links, spec.draft_token_num]
    return report


def requests() -> dict:
    """What the scheduler answers to requests that neither algorithm serves."""
    plain = dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"))
    asked = {
        "plain": (False, plain),
        "logprobs": (True, plain),
        "grammar": (False, {**plain, "regex": "a*"}),
    }
    return {
        kind: [
            scheduler.validate_dflash_request(
                SimpleNamespace(return_logprob=logprob, sampling_params=SimpleNamespace(**params)), algorithm
            )
            for algorithm in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE)
        ]
        for kind, (logprob, params) in asked.items()
    }


# -- the walk's tokens --------------------------------------------------------------------------------------


def renorm(probs, kept):
    kept = torch.where(kept, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_k_renorm(probs, top_ks):
    """As the engine's kernel: all that equal the last of the `top_k` are kept."""
    last = top_ks.clamp(max=probs.shape[1]).long().unsqueeze(1) - 1
    return renorm(probs, probs >= probs.sort(dim=-1, descending=True).values.gather(1, last))


def top_p_renorm(probs, top_ps):
    ordered, order = probs.sort(dim=-1, descending=True)
    kept = ordered.cumsum(dim=-1) - ordered < top_ps.unsqueeze(1)
    return renorm(probs, torch.zeros_like(kept).scatter(1, order, kept))


def rope_table() -> list:
    """Whether the fused KV path asks the device for the largest position: on one that holds no values it cannot."""
    from sglang.srt.speculative.triton_ops.fused_kv_materialize import FusedKVMaterializeHelper

    helper = object.__new__(FusedKVMaterializeHelper)
    lengths: list[int] = []
    helper.n_layers = 0
    helper.batched_kv_weight = torch.empty(1, 2, 3, device="meta")
    helper.rotary_emb = SimpleNamespace(
        cos_sin_cache=torch.empty(10, 4, device="meta"), _ensure_cos_sin_cache_length=lengths.append
    )
    hidden, positions = torch.empty(2, 3, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    outcomes = []
    for last in (9, 10, None):
        try:
            helper.materialize(hidden, positions, write_layer_kv=None, max_position=last)
            outcomes.append("written")
        except RuntimeError as error:
            outcomes.append("too long" if "too short" in str(error) else "asked")
    return [outcomes, lengths]


def sampling(draws: int = 20000) -> dict:
    """How often each token is drawn at a node, for requests of unlike parameters in one batch.

    Request -> [frequencies, probabilities], of 5 tokens. The greedy request's logits have a tie.
    """
    torch.manual_seed(0)
    ddtree_info.top_k_renorm_prob, ddtree_info.top_p_renorm_prob = top_k_renorm, top_p_renorm
    ddtree_info.get_tp_group = lambda: SimpleNamespace(world_size=1)
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0, 0.0])
    plain = 1 << 30
    requests = {  # temperature, top_k, top_p, min_p
        "greedy": (1.0, 1, 1.0, 0.0),
        "plain": (1.0, plain, 1.0, 0.0),
        "hot": (2.0, plain, 1.0, 0.0),
        "top_k": (1.0, 3, 1.0, 0.0),
        "top_p": (1.0, plain, 0.7, 0.0),
        "min_p": (1.0, plain, 1.0, 0.3),
    }
    columns = [torch.tensor(column) for column in zip(*requests.values(), strict=True)]
    info = SimpleNamespace(
        is_all_greedy=False,
        temperatures=columns[0].view(-1, 1),
        top_ks=columns[1],
        top_ps=columns[2],
        min_ps=columns[3],
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
    )
    window = draws
    drawn = ddtree_info.target_tokens(logits.repeat(len(requests) * window, 1), info, window).view(-1, window)
    report = {}
    for row, (name, (temperature, top_k, top_p, min_p)) in zip(drawn, requests.items(), strict=True):
        probs = torch.softmax(logits / temperature, dim=-1).unsqueeze(0)
        probs = top_p_renorm(top_k_renorm(probs, torch.tensor([top_k])), torch.tensor([top_p]))
        probs = renorm(probs, probs >= min_p * probs.max())[0]
        if top_k == 1:
            probs = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
        report[name] = [(row.bincount(minlength=5) / draws).tolist(), probs.tolist()]
    info.is_all_greedy = True
    report["all greedy"] = ddtree_info.target_tokens(logits.repeat(2, 1), info, 1).tolist()
    group = SimpleNamespace(world_size=2, broadcast=lambda tokens, src: tokens.fill_(src))
    ddtree_info.get_tp_group = lambda: group
    info.is_all_greedy = False
    report["other rank"] = ddtree_info.target_tokens(logits.repeat(len(requests), 1), info, 1).tolist()
    return report


def host_copies() -> list:
    """The columns that one copy moves to the device, back as lists."""
    return [column.tolist() for column in ddtree_info.to_device([[1, 2], [], [3], [4, 5, 6]], torch.device("cpu"))]


# -- the guard --------------------------------------------------------------------------------------------


class Layer(RadixAttention):
    def __init__(self, layer_id: int, sliding_window_size: int = -1):
        torch.nn.Module.__init__(self)
        self.layer_id, self.sliding_window_size = layer_id, sliding_window_size


def sound_target() -> SimpleNamespace:
    """A hybrid target of the kind that the exactness tests prove, four requests."""
    linear = object.__new__(gdn_backend.GDNAttnBackend)
    linear.kernel_dispatcher = SimpleNamespace(verify_kernel=object.__new__(TritonGDNKernel))
    backend = object.__new__(hybrid.HybridLinearAttnBackend)
    backend.full_attn_backend, backend.linear_attn_backend = triton_attention(), linear
    cache = SimpleNamespace(
        conv=[torch.zeros(2, 9, 8, 3)],
        intermediate_ssm=torch.zeros(2, 5, WINDOW, 1, 2, 2),
        intermediate_conv_window=[torch.zeros(2, 5, WINDOW, 8, 3)],
    )
    return SimpleNamespace(
        attn_backend=backend,
        model=torch.nn.ModuleList([Layer(0), torch.nn.Linear(1, 1), Layer(3)]),
        page_size=1,
        sliding_window_size=None,
        mambaish_config="hybrid",
        req_to_token_pool=SimpleNamespace(size=4, cache=cache, get_speculative_mamba2_params_all_layers=lambda: cache),
    )


def fault(name: str):
    def register(change):
        FAULTS[name] = change
        return change

    return register


FAULTS = {}
fault("none")(lambda target, cache: None)
fault("attention only")(
    lambda target, cache: vars(target).update(
        attn_backend=triton_attention(), mambaish_config=None, req_to_token_pool=None
    )
)


@fault("other attention")
def _(target, cache):
    class FlashAttentionBackend:
        pass

    target.attn_backend.full_attn_backend = FlashAttentionBackend()


@fault("attention of another width")
def _(target, cache):
    target.attn_backend.full_attn_backend.num_draft_tokens = WINDOW + 1


@fault("pages")
def _(target, cache):
    target.page_size = 16


@fault("a sliding layer")
def _(target, cache):
    target.model[2].sliding_window_size = 127


@fault("a sliding target")
def _(target, cache):
    target.sliding_window_size = 127


@fault("other verify kernel")
def _(target, cache):
    class FlashInferGDNKernel(TritonGDNKernel):
        pass

    target.attn_backend.linear_attn_backend.kernel_dispatcher.verify_kernel = object.__new__(FlashInferGDNKernel)


@fault("KDA")
def _(target, cache):
    target.attn_backend.linear_attn_backend = object.__new__(kda_backend.KDAAttnBackend)


@fault("a subclass of GDN")
def _(target, cache):
    class AscendGDNAttnBackend(gdn_backend.GDNAttnBackend):
        pass

    target.attn_backend.linear_attn_backend = object.__new__(AscendGDNAttnBackend)


@fault("a hybrid without its backend")
def _(target, cache):
    target.attn_backend = triton_attention()


@fault("Mamba2")
def _(target, cache):
    target.attn_backend.linear_attn_backend = object.__new__(hybrid.Mamba2AttnBackend)


@fault("more state steps")
def _(target, cache):
    cache.intermediate_ssm = torch.zeros(2, 5, WINDOW + 1, 1, 2, 2)


@fault("fewer conv steps")
def _(target, cache):
    cache.intermediate_conv_window = [torch.zeros(2, 5, WINDOW - 1, 8, 3)]


@fault("fewer state rows")
def _(target, cache):
    cache.intermediate_ssm = torch.zeros(2, 3, WINDOW, 1, 2, 2)


@fault("fewer conv rows")
def _(target, cache):
    cache.intermediate_conv_window = [torch.zeros(2, 3, WINDOW, 8, 3)]


@fault("two conv states")
def _(target, cache):
    cache.conv *= 2


@fault("a wide convolution")
def _(target, cache):
    cache.conv = [torch.zeros(2, 9, 8, 4)]


@fault("bf16 state")
def _(target, cache):
    cache.intermediate_ssm = cache.intermediate_ssm.bfloat16()


@fault("other kernel source")
def _(target, cache):
    ddtree_guard.PROVEN_KERNELS = dict.fromkeys(ddtree_guard.PROVEN_KERNELS, "0" * 64)


@fault("unproven and wrong")
def _(target, cache):
    cache.intermediate_ssm = torch.zeros(2, 3, WINDOW, 1, 2, 2, dtype=torch.bfloat16)


def guard(names: list[str]) -> dict:
    report = {}
    proven = ddtree_guard.PROVEN_KERNELS
    for name in names:
        target = sound_target()
        FAULTS[name](target, target.req_to_token_pool.cache)
        findings = ddtree_guard.check_target(target, WINDOW)
        ddtree_guard.PROVEN_KERNELS = proven
        starts = []
        for unsafe in (False, True):
            try:
                ddtree_guard.enforce(findings, unsafe)
                starts.append("starts")
            except ValueError as error:
                starts.append(str(error))
        report[name] = [[finding.name for finding in findings], *starts]
    return report


def constructor() -> dict:
    """What the worker's constructor does, in order; and the sizes of the drafter's own arguments."""
    report = {}
    for name, shadow in (("tree", False), ("shadow", True)):
        steps = report[name] = []

        def drafter(self, args, steps=steps, **ranks):
            self.tp_rank, self.block_size = 0, args.speculative_dflash_block_size
            steps.append("drafter")

        DFlashWorker.__init__ = drafter
        ddtree_guard.check_target = lambda runner, window, steps=steps: steps.append("check") or []
        ddtree_guard.enforce = lambda findings, unsafe, steps=steps: steps.append(f"enforce {unsafe}")
        args = SimpleNamespace(
            speculative_ddtree_shadow_linear=shadow,
            speculative_ddtree_allow_hybrid_unsafe=False,
            speculative_ddtree_budget=31,
            speculative_ddtree_topk=8,
            speculative_ddtree_spine=False,
            speculative_dflash_block_size=16,
            speculative_num_draft_tokens=16 if shadow else 32,
        )
        DDTreeWorker(args, target_worker=SimpleNamespace(model_runner=None), tp_rank=0)
    return report


def draft_arguments() -> list:
    """The drafter's copy of the arguments: its own block, and an algorithm that no tree's gate answers to."""
    args = SimpleNamespace(
        speculative_algorithm="DDTREE", speculative_num_draft_tokens=32, speculative_dflash_block_size=16
    )
    object.__new__(DDTreeWorker)._configure_draft_server_args(args)
    return [args.speculative_algorithm, args.speculative_num_draft_tokens]


CHECKS = {
    check.__name__: check
    for check in (
        links,
        padding,
        stale,
        cache_steps,
        mask_buffer,
        graph_input,
        requests,
        constructor,
        draft_arguments,
        rope_table,
        sampling,
        host_copies,
    )
}

if __name__ == "__main__":
    print(
        json.dumps(
            [guard(item["guard"]) if isinstance(item, dict) else CHECKS[item]() for item in json.load(sys.stdin)]
        )
    )
