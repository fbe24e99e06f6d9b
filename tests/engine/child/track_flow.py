"""Drive the engine's DFLASH worker, scheduler bookkeeping and radix cache over a toy hybrid model.

The toy model's recurrent state is a hash of every token that went in, so a state says which
prefix it belongs to. It reads and writes the engine's real pools the way the kernels do: prefill
updates a request's slot and saves tracked states, verify leaves one state per step in the
intermediate buffers. The rest is the engine's own: `DFlashWorker.forward_batch_generation`,
`DFlashVerifyInput`, `ScheduleBatch`, the pools, the scatter kernel, `MambaRadixCache` and the
scheduler's processing of results.

    track_flow.py SITE < '[{"seed": 0, "ping_pong": 1, "waves": [[[70, 90], [20, 60]], [], [[9, 40]]], "retract": [7]}]'

`waves[n]` are the requests, as [prompt length, new tokens], that arrive before step n; `retract` are
the steps at which the running batch loses its last request to the queue. When all are done, each
request is sent again with its own output as part of the prompt: the second turn continues from the
radix cache. Prints, for each scenario, {"leaked": {...}, "turns": [first, second]}; a turn is
{"requests", "crossings", "prefix_hits", "retractions", "wrong": {"live", "tracked", "tree", "output"}}, where
`wrong` counts states that are not those of the prefix they stand for, and outputs that are not the
toy model's.
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import bootstrap

bootstrap.install(Path(sys.argv[1]))

import torch  # noqa: E402
from sglang.srt import server_args as engine_args  # noqa: E402
from sglang.srt.configs.mamba_utils import (  # noqa: E402
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.attention import hybrid_linear_attn_backend  # noqa: E402
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

try:
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
except ModuleNotFoundError:
    # Since 0.5.13 a class of its own, which asks itself for the scheduler's attributes.
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    members = {name: item for name, item in vars(SchedulerBatchResultProcessor).items() if name[:2] != "__"}
    members = {name: item for name, item in members.items() if callable(item)}
    for part in ("output_streamer", "metrics_reporter", "metrics_collector", "model_worker", "draft_worker"):
        members[part] = bootstrap.inert_class(part)()
    members["metrics_reporter"].num_generated_tokens = members["metrics_reporter"].forward_ct_decode = 0
    SchedulerOutputProcessorMixin = type("Processing", (), members)
    # The worker takes one name from the scheduler, which imports a web server.
    scheduler = sys.modules["sglang.srt.managers.scheduler"] = bootstrap.InertModule("sglang.srt.managers.scheduler")
    scheduler.GenerationBatchResult = GenerationBatchResult

from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.dflash_worker import DFlashWorker  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

VOCAB = 251
BLOCK = 8
INTERVAL = 64
CHUNK = 64
LAYERS = 2
PRIMES = (65521, 65497)  # a state lane is below 2**16: exact in float32
MAX_REQUESTS = 16
STATES = 200
KV_SLOTS = 8192
STOP = 5  # a stop token of every other request


def absorb(state, token: int):
    """The state of every layer, as ints, after one more token."""
    return [
        [(lane * 31 + token * (7 + layer) + 11) % PRIMES[0], (other * 131 + lane + token + layer) % PRIMES[1]]
        for layer, (lane, other) in enumerate(state)
    ]


def state_of(tokens):
    state = [[0, 0]] * LAYERS
    for token in tokens:
        state = absorb(state, token)
    return state


def window_of(tokens):
    return [0, 0, 0, *tokens][-3:]


def next_token(state) -> int:
    return (state[0][0] * 7 + state[-1][1]) % VOCAB


def one_hot(tokens) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).to(torch.float32)


class ToyTarget:
    """Stands for the target's `TpModelWorker`: reads tokens, writes states and logits."""

    def __init__(self, pool):
        self.pool = pool
        backend = object.__new__(hybrid_linear_attn_backend.HybridLinearAttnBackend)
        backend.linear_attn_backend = SimpleNamespace(req_to_token_pool=pool, forward_metadata=None)
        backend.full_attn_backend = SimpleNamespace()
        self.model_runner = SimpleNamespace(
            device="cpu",
            attn_backend=backend,
            model=SimpleNamespace(
                get_input_embeddings=lambda: lambda ids: torch.zeros(*ids.shape, 1),
                lm_head=SimpleNamespace(weight=None, shard_indices=None),
            ),
        )

    def read(self, slot: int):
        cache = self.pool.mamba_pool.mamba_cache
        state = [[int(x) for x in cache.temporal[layer, slot].flatten()] for layer in range(LAYERS)]
        return state, [int(x) for x in cache.conv[0][0, slot].flatten()]

    def write(self, where, state, window):
        ssm, conv = where
        for layer in range(LAYERS):
            ssm[layer].copy_(torch.tensor(state[layer], dtype=torch.float32).view(1, 1, 2))
            conv[layer].copy_(torch.tensor([window], dtype=torch.float32))

    def slot(self, slot: int):
        cache = self.pool.mamba_pool.mamba_cache
        return cache.temporal[:, slot], cache.conv[0][:, slot]

    def forward_batch_generation(self, batch, is_verify: bool = False):
        slots = self.pool.get_mamba_indices(batch.req_pool_indices)
        self.model_runner.attn_backend.linear_attn_backend.forward_metadata = SimpleNamespace(mamba_cache_indices=slots)
        run = self.verify if is_verify else self.prefill
        predicted, hidden_rows = run(batch, slots.tolist(), batch.input_ids.tolist())
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(
                next_token_logits=one_hot(predicted), hidden_states=torch.zeros(hidden_rows, 1)
            ),
            next_token_ids=torch.tensor(predicted),
        )

    def prefill(self, batch, slots, ids):
        predicted, start = [], 0
        # Since 0.5.13 the worker gets the scheduler's own batch, which has other names for these.
        lengths, prefixes = (
            (batch.extend_lens, batch.prefix_lens)
            if hasattr(batch, "extend_lens")
            else (batch.extend_seq_lens, batch.extend_prefix_lens)
        )
        for i, (slot, length, prefix) in enumerate(zip(slots, lengths, prefixes, strict=True)):
            state, window = self.read(slot)
            track_at = None
            if batch.mamba_track_mask[i]:
                track_at = (int(batch.mamba_track_seqlens[i]) - prefix) // CHUNK * CHUNK
            for step, token in enumerate(ids[start : start + length], 1):
                state, window = absorb(state, token), [*window[1:], token]
                if step == track_at:
                    self.write(self.slot(int(batch.mamba_track_indices[i])), state, window)
            self.write(self.slot(slot), state, window)
            predicted.append(next_token(state))
            start += length
        return predicted, start

    def verify(self, batch, slots, ids):
        cache = self.pool.mamba_pool.mamba_cache
        predicted = []
        for row, slot in enumerate(slots):
            state, window = self.read(slot)
            for step in range(BLOCK):
                token = ids[row * BLOCK + step]
                state, window = absorb(state, token), [*window[1:], token]
                self.write(
                    (cache.intermediate_ssm[:, row, step], cache.intermediate_conv_window[0][:, row, step]),
                    state,
                    window,
                )
                predicted.append(next_token(state))
            # The conv kernel leaves the last window in the request's own row; the commit repairs it.
            cache.conv[0][:, slot] = cache.intermediate_conv_window[0][:, row, BLOCK - 1]
        return predicted, len(ids)


def make_worker(args, pool, allocator, target, draft_tokens):
    """A `DFlashWorker` without its constructor: no model files, everything else as it leaves them."""
    worker = object.__new__(DFlashWorker)
    worker.__dict__.update(
        server_args=args,
        target_worker=target,
        model_runner=target.model_runner,
        tp_rank=0,
        device="cpu",
        page_size=1,
        block_size=BLOCK,
        draft_window_size=None,
        use_compact_draft_cache=False,
        draft_model=SimpleNamespace(layers=[], project_target_hidden=lambda hidden: hidden),
        draft_model_runner=SimpleNamespace(
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=None,
            attn_backend=None,
            forward=lambda batch: SimpleNamespace(
                logits_output=SimpleNamespace(hidden_states=torch.zeros(len(batch.input_ids), 1))
            ),
        ),
        _mask_token_id=0,
        _warned_sampling_fallback=False,
        _logged_first_verify=True,
        _block_pos_offsets=torch.arange(BLOCK),
        _draft_block_ids_buf=None,
        _draft_block_spec_info=DFlashVerifyInput(
            draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=BLOCK
        ),
        _use_fused_kv_materialize=False,
        _fused_kv_helper=None,
        _greedy_sample_from_vocab_parallel_head=draft_tokens,
    )
    return worker


class ToyScheduler(SchedulerOutputProcessorMixin):
    """The scheduler's non-overlap loop: admit, prefill first, else decode, process the result."""

    algorithm = SpeculativeAlgorithm.DFLASH
    verified_tokens = BLOCK  # per request and round
    target_class = ToyTarget
    kinds: tuple[str, ...] = ("live", "tracked", "tree", "output")

    def __init__(self, scenario):
        self.rng = random.Random(scenario["seed"])
        self.server_args = engine_args.get_global_server_args()
        self.enable_overlap = self.enable_overlap_mlx = self.enable_metrics = self.enable_hisparse = False
        self.is_generation = True
        self.num_generated_tokens = 0
        self.forward_ct_decode = 0
        self.model_config = SimpleNamespace(
            vocab_size=VOCAB, is_encoder_decoder=False, is_matryoshka=False, think_end_id=None
        )
        self.req_to_token_pool = memory_pool.HybridReqToTokenPool(
            size=MAX_REQUESTS,
            mamba_size=STATES,
            mamba_spec_state_size=MAX_REQUESTS,
            max_context_len=1024,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
                layers=list(range(LAYERS)),
                shape=Mamba2StateShape(
                    conv=[(1, 3)],
                    temporal=(1, 1, 2),
                    intermediate_size=1,
                    conv_dim=1,
                    ssm_state_size=2,
                    num_heads=1,
                    head_dim=1,
                    state_size=2,
                    conv_kernel=4,
                ),
            ),
            mamba_layer_ids=list(range(LAYERS)),
            enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=self.verified_tokens,
            enable_overlap_schedule=scenario["ping_pong"] == 2,
        )
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(KV_SLOTS, torch.float32, "cpu", None, False)
        self.tree_cache = MambaRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                page_size=1,
                enable_mamba_extra_buffer=True,
            )
        )
        self.target = self.target_class(self.req_to_token_pool)
        self.worker = self.make_worker()
        self.running = self.batch()
        self.last = None
        self.queue = []
        self.turns = []

    def make_worker(self):
        return make_worker(
            self.server_args,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.target,
            self.draft_tokens,
        )

    def stream_output(self, *args, **kwargs):
        pass

    report_prefill_stats = report_decode_stats = update_spec_metrics = stream_output
    maybe_collect_routed_experts = stream_output

    def batch(self, reqs=()) -> ScheduleBatch:
        return ScheduleBatch.init_new(
            list(reqs),
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            False,
            self.algorithm,
        )

    def draft_tokens(self, *, hidden_states, lm_head) -> torch.Tensor:
        """Drafts that are right for a random number of steps and wrong from there on."""
        drafts = []
        draft = self.running.spec_info
        roots = draft.verified_id if hasattr(draft, "verified_id") else draft.bonus_tokens  # since 0.5.12
        for req, root in zip(self.running.reqs, roots.tolist(), strict=True):
            state, _ = self.target.read(int(req.mamba_pool_idx))
            state = absorb(state, root)
            right = self.rng.choice((0, 2, 5, BLOCK - 1))
            for step in range(BLOCK - 1):
                token = next_token(state)
                drafts.append(token if step < right else (token + 1) % VOCAB)
                state = absorb(state, drafts[-1])
        return torch.tensor(drafts)

    def request(self, prompt, new) -> Req:
        stop = [STOP] if len(prompt) % 2 else None
        params = SamplingParams(max_new_tokens=new, temperature=0, stop_token_ids=stop)
        params.normalize(None)
        name = f"r{self.rng.random()}"
        probe = Req(name, "", prompt, params, vocab_size=VOCAB)
        if isinstance(probe.output_ids, list):
            return probe
        return Req(name, "", array("q", prompt), params, vocab_size=VOCAB)  # since 0.5.13

    def admit(self, req: Req):
        req.init_next_round_input(self.tree_cache)
        if hasattr(req, "fill_len"):  # since 0.5.13: nothing is cut off
            req.fill_len = len(req.full_untruncated_fill_ids)
        self.tree_cache.inc_lock_ref(req.last_node)
        if len(req.prefix_indices):
            self.turns[-1]["prefix_hits"] += 1
            waiting = getattr(req, "mamba_cow_src_index", None)  # since 0.5.13 copied when the batch is run
            slot = int(req.mamba_pool_idx) if waiting is None else int(waiting)
            self.expect("live", slot, [*req.origin_input_ids, *req.output_ids][: len(req.prefix_indices)])

    def settle(self, batch: ScheduleBatch):
        """What since 0.5.13 waits for the forward stream: prompts, states to be copied and cleared."""
        if not hasattr(batch, "prefill_input_ids_cpu"):
            return
        batch.input_ids = batch.prefill_input_ids_cpu
        pool = self.req_to_token_pool.mamba_pool
        if batch.mamba_clear_indices is not None:
            pool.mamba_cache.temporal[:, batch.mamba_clear_indices] = 0
            pool.mamba_cache.conv[0][:, batch.mamba_clear_indices] = 0
        if batch.mamba_cow_src_indices is not None:
            pool.copy_from(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)

    def step(self, retract: bool) -> bool:
        """One pass of the loop; false when there is nothing to run."""
        if self.last is not None and self.last.forward_mode.is_extend():
            self.last.filter_batch(chunked_req_to_exclude=[])
            if not self.last.is_empty():
                if self.running.is_empty():
                    self.running = self.last
                else:
                    self.running.merge_batch(self.last)
        if self.queue:
            reqs, self.queue = self.queue, []
            for req in reqs:
                self.admit(req)
            batch = self.batch(reqs)
            batch.prepare_for_extend()
            self.settle(batch)
        else:
            self.running.filter_batch(v1_spec_info_filtered=True)
            if retract and not self.running.is_empty():
                self.queue, _, _ = self.running.retract_decode(self.server_args)
            if self.running.is_empty():
                self.last = None
                return False
            batch = self.running
            batch.prepare_for_decode()
            if batch.seq_lens_sum is None:  # since 0.5.13 summed when the batch is run
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        result = self.worker.forward_batch_generation(batch)
        batch.output_ids = result.next_token_ids
        before = [req.mamba_last_track_seqlen for req in batch.reqs]
        if batch.forward_mode.is_extend():
            self.process_batch_result_prefill(batch, result)
        else:
            self.process_batch_result_decode(batch, result)
            self.check_requests(batch.reqs, before)
        if batch.forward_mode.is_extend() or any(req.finished() for req in batch.reqs):
            self.check_tree()  # it changes at no other time
        self.last = batch
        return True

    def check_requests(self, reqs, tracked_before):
        for req, before in zip(reqs, tracked_before, strict=True):
            tokens = [*req.origin_input_ids, *req.output_ids]
            crossed = req.mamba_last_track_seqlen != before
            self.turns[-1]["crossings"] += crossed
            if req.finished():
                continue  # its slots have gone to the tree or back to the pool
            self.expect("live", int(req.mamba_pool_idx), tokens[:-1])
            if crossed:
                kept = self.req_to_token_pool.get_mamba_ping_pong_other_idx(req.mamba_next_track_idx)
                slot = int(req.mamba_ping_pong_track_buffer[kept])
                self.expect("tracked", slot, tokens[: req.mamba_last_track_seqlen])

    def check_tree(self):
        stack = [(self.tree_cache.root_node, [])]
        while stack:
            node, prefix = stack.pop()
            tokens = prefix + list(node.key.token_ids)
            if node.mamba_value is not None:
                self.expect("tree", int(node.mamba_value[0]), tokens)
            stack += [(child, tokens) for child in node.children.values()]

    def expect(self, what: str, slot: int, tokens):
        if self.target.read(slot) != (state_of(tokens), window_of(tokens)):
            self.turns[-1]["wrong"][what] += 1


def run_turn(scheduler: ToyScheduler, waves, retract=()):
    """Run until all requests are done, and return them in order of arrival."""
    wrong = dict.fromkeys(scheduler.kinds, 0)
    turn = {"requests": 0, "crossings": 0, "prefix_hits": 0, "retractions": 0, "wrong": wrong}
    scheduler.turns.append(turn)
    reqs, step, live = [], 0, True
    while step < len(waves) or live:
        wave = waves[step] if step < len(waves) else []
        reqs += (new := [scheduler.request(*request) for request in wave])
        scheduler.queue += new
        live = scheduler.step(step in retract)
        step += 1
    for req in reqs:
        wrong["output"] += list(req.output_ids) != expected_output(req)
        turn["retractions"] += req.retraction_count
    turn["requests"] = len(reqs)
    return reqs


def expected_output(req):
    stop = req.sampling_params.stop_token_ids or ()
    state, output = state_of(req.origin_input_ids), []
    while len(output) < req.sampling_params.max_new_tokens:
        output.append(next_token(state))
        if output[-1] in stop:
            break
        state = absorb(state, output[-1])
    return output


def run(scenario, scheduler: ToyScheduler) -> dict:
    rng = random.Random(scenario["seed"] + 1)
    waves = [
        [([rng.randrange(VOCAB) for _ in range(prompt)], new) for prompt, new in wave] for wave in scenario["waves"]
    ]
    first = run_turn(scheduler, waves, scenario.get("retract", ()))
    run_turn(scheduler, [[([*req.origin_input_ids, *req.output_ids, 1, 2, 3], 20) for req in first]])
    cache = scheduler.tree_cache
    pool = scheduler.req_to_token_pool
    states = getattr(pool, "mamba_allocator", pool.mamba_pool)  # one of its own since 0.5.13
    kept_states = states.available_size() + cache.mamba_evictable_size()
    kept_kv = scheduler.token_to_kv_pool_allocator.available_size() + cache.full_evictable_size()
    return {"leaked": {"states": STATES - kept_states, "kv": KV_SLOTS - kept_kv}, "turns": scheduler.turns}


def configure():
    """The server arguments that the code under test asks for, over the engine's defaults."""
    args = object.__new__(engine_args.ServerArgs)
    args.mamba_scheduler_strategy = "extra_buffer"
    args.mamba_track_interval = INTERVAL
    args.page_size = 1
    args.attention_backend = "torch_native"  # request-table writes without a kernel
    args.speculative_algorithm = "DFLASH"
    args.speculative_num_draft_tokens = BLOCK
    args.disable_overlap_schedule = True
    args._mamba_cache_chunk_size = CHUNK
    engine_args.set_global_server_args_for_scheduler(args)


class TorchOnCpu:
    """The torch module, for the one engine module that allocates on "cuda" by name."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *args, **kwargs):
        return torch.zeros(*args, **{**kwargs, "device": "cpu"})


def scatter_interpreted(*args):
    """The engine's scatter with its kernel interpreted; it insists on tensors that say CUDA."""
    torch.Tensor.is_cuda = property(lambda tensor: True)
    try:
        real_scatter(*args)
    finally:
        del torch.Tensor.is_cuda


memory_pool.torch = TorchOnCpu()
real_scatter = hybrid_linear_attn_backend.fused_mamba_state_scatter_with_mask
hybrid_linear_attn_backend.fused_mamba_state_scatter_with_mask = scatter_interpreted

if __name__ == "__main__":
    configure()
    print(json.dumps([run(scenario, ToyScheduler(scenario)) for scenario in json.load(sys.stdin)]))
