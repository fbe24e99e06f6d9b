"""What the engine's own backends and runners make of a DDTREE verify input, and of a target that may not verify trees.

    tree_backend.py SITE < '["links", {"guard": ["bf16 state", ...]}, ...]'

Runs each named check of `CHECKS` and prints its report; a `guard` entry sets up a sound target, lets the
named faults happen to it, and reports each as [findings, start without the flag, start with it].
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bootstrap

bootstrap.install(Path(sys.argv[1]))

import torch  # noqa: E402
from sglang.srt.configs.mamba_utils import (  # noqa: E402
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid  # noqa: E402
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend  # noqa: E402
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel  # noqa: E402
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin  # noqa: E402
from sglang.srt.speculative import (  # noqa: E402
    ddtree_guard,
    ddtree_info,
    ddtree_kernels,
    ddtree_states,
    ddtree_tree,
    ddtree_worker,
)
from sglang.srt.speculative.ddtree_args import TreeSizes  # noqa: E402
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput  # noqa: E402
from sglang.srt.speculative.ddtree_tree import DraftTree  # noqa: E402
from sglang.srt.speculative.ddtree_worker import DDTreeWorker  # noqa: E402
from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.dflash_worker import DFlashWorker  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

WINDOW = 4
VERIFY = ForwardMode.TARGET_VERIFY
# Root with children 1 and 2, and 3 below 2.
PARENTS, MOVES, ANCESTORS = [-1, 0, 0, 2], [0, 1 << 16, 0, 1 << 16], [1, 3, 5, 13]


def tree_input(bs: int) -> DDTreeVerifyInput:
    def table(values):
        return torch.tensor([values] * bs)

    tree = DraftTree(
        tokens=table([7, 8, 9, 10]),
        positions=table([0, 1, 1, 2]),
        parents=table(PARENTS),
        depths=table([0, 1, 1, 2]),
        ancestors=table(ANCESTORS),
        on_spine=table([1, 0, 1, 1]) > 0,
        moves=table(MOVES),
    )
    return DDTreeVerifyInput.from_tree(tree, 2)


def chain_input() -> DFlashVerifyInput:
    return DFlashVerifyInput(draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=WINDOW)


def server_args(algorithm: str = "DDTREE", shadow: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_ddtree_shadow_linear=shadow,
        speculative_num_draft_tokens=WINDOW,
        speculative_eagle_topk=1,
    )


def mamba_params(dtype: torch.dtype = torch.float32) -> Mamba2CacheParams:
    """Three layers of one key head and two value heads of 2 x 2."""
    return Mamba2CacheParams(
        dtype=Mamba2StateDType(conv=dtype, temporal=torch.float32),
        layers=[0, 1, 2],
        shape=Mamba2StateShape(
            conv=[(8, 3)],
            temporal=(2, 2, 2),
            intermediate_size=4,
            conv_dim=8,
            ssm_state_size=2,
            num_heads=2,
            head_dim=2,
            state_size=2,
            conv_kernel=4,
        ),
    )


def mamba_pool(args: SimpleNamespace, requests: int = 4) -> HybridReqToTokenPool:
    memory_pool.torch = TorchOnCpu()
    return HybridReqToTokenPool(
        size=requests,
        mamba_size=9,
        mamba_spec_state_size=requests,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=mamba_params(),
        mamba_layer_ids=[0, 1, 2],
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=ddtree_states.state_steps(args),
    )


class TorchOnCpu:
    """The torch module, for the one engine module that allocates on "cuda" by name."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *args, **kwargs):
        return torch.zeros(*args, **{**kwargs, "device": "cpu"})


def linear_backend(args: SimpleNamespace | None = None, max_bs: int = 4, **runner) -> gdn_backend.GDNAttnBackend:
    args = args or server_args()
    pool = mamba_pool(args)
    pool.get_mamba_indices = lambda indices: (indices + 100).to(torch.int32)
    for name in ("get_linear_attn_decode_backend", "get_linear_attn_prefill_backend"):
        setattr(gdn_backend, name, lambda: LinearAttnKernelBackend.TRITON)
    values = {"device": "cpu", "is_draft_worker": False, "dtype": torch.float32, **runner}
    backend = gdn_backend.GDNAttnBackend(SimpleNamespace(server_args=args, req_to_token_pool=pool, **values))
    backend.init_cuda_graph_state(max_bs, max_bs * WINDOW)
    return backend


def eager(backend, spec, requests: int = 2) -> None:
    backend.init_forward_metadata(
        SimpleNamespace(
            batch_size=requests,
            req_pool_indices=torch.arange(requests) + 5,
            forward_mode=VERIFY,
            input_ids=torch.zeros(requests * WINDOW),
            spec_info=spec,
            mamba_track_mask=None,
            mamba_track_indices=None,
        )
    )


def replayed(backend, bs: int, spec, seq_lens: list[int], indices: list[int]) -> None:
    backend.init_forward_metadata_replay_cuda_graph(
        bs, torch.tensor(indices), torch.tensor(seq_lens), 0, None, VERIFY, spec, torch.tensor(seq_lens)
    )


def tables(states) -> list:
    return [table[:2].tolist() for table in (states.parents, states.moves, states.ancestors)]


def trees() -> dict:
    """The tables that the kernels read, after an eager forward's and a replay's preparation, and where they are."""
    report = {}
    for name, prepare in (
        ("eager", eager),
        ("replay", lambda backend, spec: replayed(backend, 2, spec, [9, 4], [5, 6])),
    ):
        backend = linear_backend()
        states = backend.tree_states
        where = [table.data_ptr() for table in (states.parents, states.moves, states.ancestors)]
        report[f"{name} before"] = tables(states)
        prepare(backend, tree_input(2))
        report[name] = tables(states)
        # A graph reads where it was captured.
        report[f"{name} same memory"] = where == [
            table.data_ptr() for table in (states.parents, states.moves, states.ancestors)
        ]
        prepare(backend, DDTreeVerifyInput.for_capture(WINDOW, torch.ones(1, dtype=torch.bool)))
        report[f"{name} of no tree"] = tables(states) == report[name]
    return report


def who_keeps() -> dict:
    """Which runners' linear backends verify trees, and the steps of the engine's own pool of states."""
    report = {}
    for name, args, runner in (
        ("target", server_args(), {}),
        ("shadow", server_args(shadow=True), {}),
        ("dflash", server_args("DFLASH"), {}),
        ("drafter", server_args(), {"is_draft_worker": True}),
    ):
        backend = linear_backend(args, **runner)
        cache = backend.req_to_token_pool.mamba_pool.mamba_cache
        steps = cache.intermediate_ssm.shape[2], cache.intermediate_conv_window[0].shape[2]
        report[name] = [backend.tree_states is not None, *steps]
    return report


def replay(bs: int, spec, seq_lens: list[int], indices: list[int]) -> dict:
    backend = linear_backend()
    replayed(backend, bs, spec, seq_lens, indices)
    metadata = backend.forward_metadata
    return {"states": metadata.mamba_cache_indices.tolist(), "starts": metadata.query_start_loc.tolist()}


def padding() -> dict:
    """A batch of two in a graph for four, one of them a request of a single token: which rows are live."""
    return {
        "tree": replay(4, tree_input(2), [1, 9, 1, 1], [5, 6, 0, 0]),
        "full": replay(2, tree_input(2), [1, 1], [5, 6]),
        "stock count": replay(4, chain_input(), [8, 9, 1, 1], [5, 6, 0, 0]),
    }


def stale() -> list:
    """The tables of a smaller batch after a larger one: its own rows are its own."""
    backend = linear_backend()
    larger = tree_input(4)
    larger.tree.parents.fill_(-1)
    replayed(backend, 4, larger, [9] * 4, [0, 1, 2, 3])
    replayed(backend, 4, tree_input(2), [9, 9, 1, 1], [0, 1, 0, 0])
    return tables(backend.tree_states)


def dispatch() -> dict:
    """Which layer of what a verify goes to, and a commit; a chain's goes where it went."""
    backend = linear_backend()
    given = {}

    class States:
        def load(self, tree):
            pass

        def verify(self, layer, index, slots, *tensors):
            given.update(index=index, slots=slots.tolist(), tensors=tensors)
            return "output"

        def commit(self, *arguments):
            given.update(commit=[argument.tolist() for argument in arguments])

    backend.tree_states = States()
    backend.req_to_token_pool.mamba_map = {0: 0, 4: 1, 7: 2}
    replayed(backend, 3, tree_input(2), [9, 4, 1], [5, 6, 0])
    batch = SimpleNamespace(forward_mode=VERIFY, spec_info=tree_input(2))
    attention = object.__new__(hybrid.HybridLinearAttnBackend)
    attention.linear_attn_backend = backend
    # The engine's own kernels would miss the layer's weights, and tensors on a GPU.
    with contextlib.suppress(AttributeError, ValueError):
        given["output"] = backend.forward_extend(
            SimpleNamespace(layer_id=7), batch, torch.zeros(3 * WINDOW, 8), "a", "b"
        )
    with contextlib.suppress(AttributeError, ValueError):
        attention.update_mamba_state_after_mtp_verify(
            torch.tensor([3, 1]), torch.tensor([8, 9]), torch.tensor([-1, 0]), None
        )
    return {
        "output": given.get("output"),
        "layer": given.get("index"),
        "slots": given.get("slots"),
        "tensors": [list(item.shape) if isinstance(item, torch.Tensor) else item for item in given.get("tensors", ())],
        "commit": given.get("commit"),
    }


def memory() -> dict:
    """Bytes that verifying takes per request: of what a target has allocated, and of what is reserved for it."""
    args = server_args()
    report = {}
    for window, dtype in ((WINDOW, torch.float32), (32, torch.bfloat16)):
        args.speculative_num_draft_tokens = window
        states = linear_backend(args, dtype=dtype).tree_states
        kept = (states.inputs, states.mixed, states.decays, states.betas, states.branches)
        report[str(window)] = [
            sum(tensor.nbytes for tensor in kept) // states.rows,
            ddtree_states.verify_bytes(args, mamba_params(), dtype),
        ]
    args.speculative_num_draft_tokens = WINDOW
    chain = server_args("DFLASH")
    report["chain"] = [
        mamba_params().mamba_cache_per_req * WINDOW,
        ddtree_states.verify_bytes(chain, mamba_params(), torch.float32),
    ]
    report["reserved"] = [reserved(args), reserved(chain)]
    return report


def reserved(args: SimpleNamespace) -> int:
    """What the engine sets aside of the memory for 5 requests, in bytes."""

    class Runner(ModelRunnerKVCacheMixin):
        mambaish_config = SimpleNamespace(mamba2_cache_params=mamba_params())
        server_args = args
        spec_algorithm = SpeculativeAlgorithm.DDTREE
        model_config = SimpleNamespace(dtype=torch.float32)

    args.max_running_requests = 5
    args.enable_dp_attention = False
    args.max_mamba_cache_size = args.dp_size = 0
    args.disable_radix_cache = True
    args.max_mamba_cache_size, args.dp_size = 0, 1
    return round((1 - Runner().handle_max_mamba_cache(1.0)) * (1 << 30))


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
        mode = spec.capture_hidden_mode.name
        report[name] = [type(spec).__name__, spec.custom_mask, mode, spec.draft_token_num]
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
    linear = linear_backend()
    backend = object.__new__(hybrid.HybridLinearAttnBackend)
    backend.full_attn_backend, backend.linear_attn_backend = triton_attention(), linear
    cache = SimpleNamespace(conv=[torch.zeros(3, 9, 8, 3)], temporal=torch.zeros(3, 9, 2, 2, 2))
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


class FlashInferGDNKernel(TritonGDNKernel):
    pass


@fault("other decode kernel")
def _(target, cache):
    target.attn_backend.linear_attn_backend.kernel_dispatcher.decode_kernel = object.__new__(FlashInferGDNKernel)


@fault("other prefill kernel")
def _(target, cache):
    target.attn_backend.linear_attn_backend.kernel_dispatcher.extend_kernel = object.__new__(FlashInferGDNKernel)


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


@fault("no room for trees")
def _(target, cache):
    target.attn_backend.linear_attn_backend.tree_states = None


@fault("another window")
def _(target, cache):
    target.attn_backend.linear_attn_backend.tree_states.window = WINDOW + 1


@fault("fewer rows")
def _(target, cache):
    target.req_to_token_pool.size = 5


@fault("odd heads")
def _(target, cache):
    target.attn_backend.linear_attn_backend.tree_states.key_dim = 96


@fault("two conv states")
def _(target, cache):
    cache.conv *= 2


@fault("a wide convolution")
def _(target, cache):
    cache.conv = [torch.zeros(3, 9, 8, 4)]


@fault("bf16 state")
def _(target, cache):
    cache.temporal = cache.temporal.bfloat16()


@fault("fp16 state")
def _(target, cache):
    cache.temporal = cache.temporal.half()


@fault("bf16 convolution")
def _(target, cache):
    cache.conv = [cache.conv[0].bfloat16()]


@fault("other kernel source")
def _(target, cache):
    ddtree_guard.PROVEN_KERNELS = dict.fromkeys(ddtree_guard.PROVEN_KERNELS, "0" * 64)


@fault("unproven and wrong")
def _(target, cache):
    target.req_to_token_pool.size = 5
    cache.temporal = cache.temporal.half()


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
        DDTreeWorker._warm_up = lambda self, steps=steps: steps.append("warm up")
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


class Noted:
    """A kernel that notes its launches."""

    launched: set[str]

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        self.launched.add(self.kernel.__name__)
        return self.kernel[grid]


def warm_up() -> dict:
    """Which kernels run when a worker starts, and whether they leave what is committed alone."""
    report = {}
    for module in (ddtree_tree, ddtree_kernels, ddtree_states):
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and not isinstance(value, Noted):
                setattr(module, name, Noted(value))
    ddtree_worker.get_tp_group = lambda: SimpleNamespace(world_size=1)
    for name, shadow, hybrid_target in (("tree", False, True), ("attention", False, False), ("shadow", True, True)):
        worker = object.__new__(DDTreeWorker)
        worker.sizes = TreeSizes(block=3, budget=WINDOW - 1, topk=2, spine=False)
        worker.shadow = "counts" if shadow else None
        columns = {"num_org_elements": 20, "num_org_elements_padded": 20, "num_added_elements": 0}
        head = SimpleNamespace(
            weight=torch.randn(20, 6),
            shard_indices=SimpleNamespace(**columns, org_vocab_start_index=0, added_vocab_start_index=20),
        )
        linear = linear_backend()
        states = linear.tree_states
        states.history.normal_()
        states.pool.normal_()
        before = states.history.clone(), states.pool.clone()
        backend = SimpleNamespace(linear_attn_backend=linear) if hybrid_target else triton_attention()
        worker.target_worker = SimpleNamespace(
            model_runner=SimpleNamespace(model=SimpleNamespace(lm_head=head), attn_backend=backend)
        )
        Noted.launched = set()
        worker._warm_up()
        same = torch.equal(states.history, before[0]) and torch.equal(states.pool, before[1])
        report[name] = [sorted(Noted.launched), same]
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
        trees,
        who_keeps,
        padding,
        stale,
        dispatch,
        memory,
        mask_buffer,
        graph_input,
        requests,
        constructor,
        warm_up,
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
