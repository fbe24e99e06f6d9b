"""What one GPU will hold, before anything is loaded: a table, whether it fits, and sizes picked so that it does. Pure.

The pools are the engine's own arithmetic (:mod:`ddtree_deploy.launch.memory`). What lies beside its static share is
estimated as the engine estimates it (``_handle_gpu_memory_settings``), plus the buffers of the CUDA graphs
(attention backends: cache indices and mask for every token of every graph over the whole context) and the drafter,
which are loaded after the pools were sized. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from packaging.version import Version

from ddtree_deploy.launch import memory
from ddtree_deploy.launch.models import Drafter, Model, drafter_weight_bytes, estimated_weight_bytes
from ddtree_deploy.launch.service import BLOCK_SIZE, DDTREE, Service

MIB, GIB = 1 << 20, 1 << 30
RTX_PRO_6000_MIB = 97_887  # what nvidia-smi shows of one
#: CUDA context, NCCL and the libraries' workspaces, before the engine measures what is free: observed, not computed.
OVERHEAD = 1 * GIB
#: Tokens of the KV pool: with less, one request of any use does not fit.
MIN_TOKENS = 8192
_FRACTIONS = tuple(round(0.85 - step / 100, 2) for step in range(51))  # 0.85 to 0.35
_VISION_PERCENT = 5  # of what is free, which the engine sets aside for a vision tower
_RUNNING = (16, 12, 8, 6, 4, 3, 2, 1)
_PREFILL_CHUNK = 8192  # the engine's choice between 60 and 160 GB
_INDEX_BYTES = {"flashinfer": 4}  # of a cache index in the graphs' buffers; triton's are 8
_SSM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Row:
    """One use of a GPU's memory: what, how many bytes, and how they come about."""

    what: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one GPU holds. ``faults`` is empty if it fits; ``notes`` are what fits with less than was asked for.

    ``rows`` add up to ``total``. ``tokens`` is the size of the KV pool, ``effective`` how many requests run at once
    with the state slots that there are.
    """

    running: int
    fraction: float
    graph_batch: int
    total: int
    rows: tuple[Row, ...]
    tokens: int
    effective: int
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the service can start so."""
        return not self.faults

    def table(self) -> list[str]:
        """The rows as lines of text."""
        return [f"{row.bytes / GIB:8.2f} GiB  {row.what}: {row.how}" for row in self.rows]


def plan(
    service: Service,
    engine: Version,
    model: Model,
    drafter: Drafter | None = None,
    *,
    gpu_mib: int = RTX_PRO_6000_MIB,
    compact_states: bool = False,
) -> Plan:
    """How one GPU's memory is used; running requests, static fraction and graph sizes are picked where not given.

    The most requests (up to 16) that all run at once are picked, beside a cache of a whole context where the service
    names its length, and with them the largest fraction that leaves the reserve. Where nothing fits, the plan of the
    fewest requests says why. ``compact_states``: how the engine's trees keep them, see
    :func:`~ddtree_deploy.launch.memory.verify_bytes`.
    """
    counts = _RUNNING if service.max_running_requests is None else (service.max_running_requests,)
    drafter = drafter if service.speculative else None
    budgets = [_Budget(service, engine, model, drafter, each, gpu_mib * MIB, compact_states) for each in counts]
    tried = [each.plan() for each in budgets]
    fitting = [each for each in tried if each.fits]
    preferred = [each for each in fitting if each.effective == each.running]
    if service.context_length is not None:
        preferred = [each for each in preferred if not each.notes] or preferred
    return next(iter(preferred or fitting), tried[-1])


@dataclass(frozen=True)
class _Budget:
    """One service on one GPU with a given number of running requests."""

    service: Service
    engine: Version
    model: Model
    drafter: Drafter | None
    running: int
    total: int
    compact_states: bool

    @property
    def free(self) -> int:
        return self.total - OVERHEAD

    @property
    def graph_batch(self) -> int:
        return self.service.cuda_graph_max_bs or self.running

    @property
    def window(self) -> int:
        """Tokens of one verify of one request; 1 without speculation."""
        return self.service.verify_tokens if self.service.speculative else 1

    @property
    def context(self) -> int:
        return self.service.context_length or self.model.context

    @cached_property
    def weights(self) -> int:
        whole = estimated_weight_bytes(self.model) if self.model.weight_bytes is None else self.model.weight_bytes
        return whole // self.service.tp

    @cached_property
    def state(self) -> int:
        """The recurrent state of one request."""
        if self.model.recurrent is None:
            return 0
        ssm = _SSM_BYTES.get(self.service.mamba_ssm_dtype or "")
        return memory.state_bytes(self.model.recurrent, self.service.tp, ssm_bytes=ssm)

    @property
    def compact(self) -> bool:
        """Whether a tree is verified, and keeps inputs instead of states."""
        return self.compact_states and self.service.verifies_trees

    @cached_property
    def verify(self) -> int:
        """What the verify of one request keeps beside its state."""
        if self.model.recurrent is None or not self.service.speculative:
            return 0
        return memory.verify_bytes(
            self.model.recurrent,
            self.service.tp,
            self.window,
            compact_tree=self.compact,
            ssm_bytes=_SSM_BYTES.get(self.service.mamba_ssm_dtype or ""),
            activation_bytes=self.model.dtype_bytes,
        )

    @cached_property
    def cell(self) -> tuple[int, int]:
        """Bytes a token of the KV cache: (what the engine budgets, what it leaves out of that)."""
        service, drafter, layers = self.service, self.drafter, max(self.model.attention_layers, 1)
        target = memory.kv_bytes_per_token(self.model, service.tp, service.kv_cache_dtype)
        if drafter is None:
            return target, 0
        draft = memory.draft_kv_bytes_per_token(drafter, service.tp, service.kv_cache_dtype)
        budgeted = memory.budgeted_cell(target, layers, draft, drafter.layers, self.engine)
        return budgeted, max(target + draft - budgeted, 0)

    @cached_property
    def slots_each(self) -> int:
        return memory.slots_per_request(self.service, self.engine)

    @cached_property
    def reserve(self) -> tuple[Row, ...]:
        """What lies beside the static share."""
        return tuple(self._reserve())

    def _reserve(self) -> Iterator[Row]:
        service, batch = self.service, self.graph_batch
        chunk = service.chunked_prefill_size or _PREFILL_CHUNK
        activations = int(max(chunk, 2048) * 1.5 + 512) * MIB
        yield Row("activations", activations, f"512 MiB, and 1.5 MiB for each of the {chunk} tokens of a prefill chunk")
        graphs = (batch * 2 + service.tp * 128) * MIB
        yield Row("CUDA graphs", graphs, f"2 MiB for each of {batch} requests, 128 MiB for each of {service.tp} ranks")
        tokens = batch * self.window
        entries = self.model.vocabulary
        yield Row("logits", tokens * entries * 4, f"{tokens} tokens x {entries} entries x 4 bytes")
        yield from self._graph_buffers("attention", tokens, service.attention_backend, service.algorithm == DDTREE)
        if self.drafter is not None:
            weights = drafter_weight_bytes(self.drafter) // service.tp
            yield Row("drafter", weights, f"its weights, over tp {service.tp}")
            tokens = batch * (service.block_size or self.drafter.block_size or BLOCK_SIZE)
            backend = service.draft_attention_backend or service.attention_backend
            yield from self._graph_buffers("the drafter", tokens, backend, False)
        if self.model.multimodal:
            share = self.free * _VISION_PERCENT // 100
            yield Row("vision inputs", share, f"{_VISION_PERCENT} % of what is free, as the engine sets aside")
        if self.model.recurrent and self.engine < memory.PADDING_BUDGETED:
            verify = 0 if self.compact else self.verify
            yield Row("padding of the state pools", self.state + verify, "one request more than is budgeted")

    def _graph_buffers(self, whose: str, tokens: int, backend: str | None, tree: bool) -> Iterator[Row]:
        width = _INDEX_BYTES.get(backend or "", 8)
        columns = self.context + (self.window if tree else 0)
        how = f"{tokens} tokens x ({width} x {self.context} + {columns}) bytes"
        yield Row(f"indices and mask of {whose} in graphs", tokens * (width * self.context + columns), how)

    def pools(self, fraction: float) -> tuple[memory.Pools, int]:
        """The pools and the KV tokens that the engine makes of a static fraction."""
        rest = int(self.free * fraction) - self.weights
        pools = memory.Pools(0, 0, 0, rest)
        if self.model.recurrent is not None:
            pools = memory.share_out(
                rest,
                self.state,
                running=self.running,
                verify=self.verify,
                slots_each=self.slots_each,
                radix=self.service.radix_cache,
                engine=self.engine,
            )
        return pools, max(pools.cache // self.cell[0], 0)

    def _fraction(self) -> float:
        if self.service.mem_fraction_static is not None:
            return self.service.mem_fraction_static
        needed = sum(row.bytes for row in self.reserve)

        def leaves_enough(fraction: float) -> bool:
            return self.free * (1 - fraction) >= needed + self.pools(fraction)[1] * self.cell[1]

        return next(filter(leaves_enough, _FRACTIONS), _FRACTIONS[-1])

    def plan(self) -> Plan:
        """The table, and what is wrong with it."""
        fraction = self._fraction()
        pools, tokens = self.pools(fraction)
        rows = [*self._static_rows(pools, tokens), *self.reserve]
        left = self.total - sum(row.bytes for row in rows)
        last = (
            ("left over", "for fragmentation and what was not foreseen") if left >= 0 else ("lacking", "beyond the GPU")
        )
        rows.append(Row(last[0], left, last[1]))
        effective = self.running
        if self.model.recurrent is not None:
            effective = max(min(self.running, pools.slots // self.slots_each), 0)
        plan = Plan(self.running, fraction, self.graph_batch, self.total, tuple(rows), tokens, effective)
        faults = tuple(self._faults(plan, pools, left))
        return replace(plan, faults=faults, notes=() if faults else tuple(self._notes(plan)))

    def _static_rows(self, pools: memory.Pools, tokens: int) -> Iterator[Row]:
        yield Row("driver, CUDA and NCCL", OVERHEAD, "before the engine measures what is free: an observation")
        source = "estimated from the geometry" if self.model.weight_bytes is None else "as its files are"
        yield Row("weights", self.weights, f"{source}, over tp {self.service.tp}")
        if self.model.recurrent is not None:
            if self.service.speculative:
                how = f"{pools.scratch // self.verify} requests x {self.window} tokens x {self.state / MIB:.1f} MiB"
                if self.compact:
                    branches = memory.branch_slots(self.window)
                    how = (
                        f"{pools.scratch // self.verify} requests x {self.verify / MIB:.1f} MiB: inputs of "
                        f"{self.window} nodes, states of {branches}"
                    )
                yield Row("recurrent states of the verify", pools.scratch, how)
            slots = max(pools.slots, 0)
            yield Row("recurrent state slots", slots * self.state, f"{slots} slots x {self.state / MIB:.1f} MiB")
        budgeted, left_out = self.cell
        yield Row("KV cache", tokens * budgeted, f"{tokens} tokens x {budgeted} bytes")
        if left_out:
            how = f"{tokens} tokens x {left_out} bytes that sglang {self.engine} does not budget"
            yield Row("KV cache of the drafter", tokens * left_out, how)

    def _faults(self, plan: Plan, pools: memory.Pools, left: int) -> Iterator[str]:
        static = int(self.free * plan.fraction)
        share = f"the {static / GIB:.1f} GiB of --mem-fraction-static {plan.fraction}"
        weights = f"{self.weights / GIB:.1f} GiB"
        if self.weights >= static:
            yield f"the weights take {weights} of each GPU, more than {share}: raise tp"
        elif pools.scratch > static - self.weights:
            yield (
                f"{self.running} running requests need {pools.scratch / GIB:.1f} GiB of recurrent states for their "
                f"verifies, beside {weights} of weights in {share}: lower max_running_requests or the window, or raise "
                "tp; a larger fraction is not the cure"
            )
        elif plan.effective < 1:
            yield f"{pools.slots} recurrent state slots are too few for a request: lower max_running_requests"
        elif plan.tokens < MIN_TOKENS:
            yield (
                f"the KV cache holds {plan.tokens} tokens, less than {MIN_TOKENS}: lower max_running_requests or the "
                "window, or raise tp"
            )
        elif left < 0:
            yield (
                f"{-left / GIB:.1f} GiB more than there is are needed beside {share}: lower it, cuda_graph_max_bs, "
                "context_length or chunked_prefill_size"
            )

    def _notes(self, plan: Plan) -> Iterator[str]:
        if plan.effective < plan.running:
            yield f"{plan.effective} of {plan.running} requests run at once: there are no state slots for more"
        if plan.tokens < self.context:
            yield f"the KV cache holds {plan.tokens} tokens, and a request may have {self.context}"
