"""What is run on the GPU: engines, the steps that each is put through, and the shards that group them.

Pure data. A *shard* names steps on some engines; running several shards together starts each engine once.
A step's result is kept under a key made of all that it depends on, so that a run can be done in parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Step = dict[str, Any]

DRAFTERS = ("draft-weak", "draft")
ARRIVALS: tuple[int | str, ...] = (1, 2, 8, "staggered")
PROMPTS = 16
NEW_TOKENS = 128
# Eager rounds are slow and differ from replayed ones within a few of them if at all.
EAGER_NEW_TOKENS = 64
BLOCK = 16
SAMPLES = 4096
PROMPTS_STEP = "prompts"
GAPS_STEP = "gaps"

# Several engines share the GPU: pools are capped by count, not by a share of the memory.
COMMON: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "attention_backend": "triton",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.7,
    "max_total_tokens": 20000,
    "max_mamba_cache_size": 48,
    "max_running_requests": 8,
    "cuda_graph_max_bs": 8,
    "context_length": 2048,
    "disable_radix_cache": True,
    "log_level": "info",
    "random_seed": 1,
}
_RADIX = {"disable_radix_cache": False, "mamba_scheduler_strategy": "extra_buffer", "page_size": 1}


@dataclass(frozen=True)
class EngineSpec:
    """An engine: which source it runs (`pristine` or `patched`) and its arguments.

    `target` is a folder of the model directory. Only a `patched` engine's results depend on the patch set.
    """

    name: str
    site: str
    algorithm: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    target: str = "target"
    drafter: str = "draft-weak"

    @property
    def budget(self) -> int | None:
        """The number of draft nodes per tree; None unless trees are verified."""
        budget = self.options.get("speculative_ddtree_budget")
        return None if budget is None or self.options.get("speculative_ddtree_shadow_linear") else int(budget)

    def arguments(self) -> dict[str, Any]:
        """The engine's arguments but for paths and ports."""
        together = {**COMMON, **self.options}
        if self.algorithm:
            together["speculative_algorithm"] = self.algorithm
        return together


def _tree(budget: int, name: str = "tree", **options: Any) -> EngineSpec:
    return EngineSpec(f"{name}{budget}", "patched", "DDTREE", {"speculative_ddtree_budget": budget, **options})


# An idle scheduler would poll, and take a core's speed from the one that is timed.
_QUIET = {"sleep_on_idle": True}
_LARGE = {
    **_QUIET,
    "load_format": "dummy",
    "context_length": 4096,
    "max_total_tokens": 40000,
    "max_mamba_cache_size": 24,
}


def _large(spec: EngineSpec) -> EngineSpec:
    return EngineSpec(
        f"large-{spec.name}",
        spec.site,
        spec.algorithm,
        {**spec.options, **_LARGE},
        target="large",
        drafter="large-draft",
    )


def _attention(spec: EngineSpec) -> EngineSpec:
    return EngineSpec(f"attention-{spec.name}", spec.site, spec.algorithm, spec.options, target="attention")


def _rounded(spec: EngineSpec) -> EngineSpec:
    return EngineSpec(f"bf16-{spec.name}", spec.site, spec.algorithm, {**spec.options, "mamba_ssm_dtype": "bfloat16"})


def _timed(spec: EngineSpec) -> EngineSpec:
    return EngineSpec(f"timed-{spec.name}", spec.site, spec.algorithm, {**spec.options, **_QUIET})


_PLAIN_ENGINE = EngineSpec("plain", "pristine", None)
_CHAIN = EngineSpec("chain", "pristine", "DFLASH")
ENGINES: Mapping[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        _PLAIN_ENGINE,
        _CHAIN,
        *(_tree(budget) for budget in (15, 16, 31, 63)),
        _tree(31, "shadow", speculative_ddtree_shadow_linear=True),
        _tree(15, "eager", disable_cuda_graph=True),
        _tree(15, "radix", **_RADIX),
        *(_rounded(spec) for spec in (_CHAIN, _tree(31))),
        EngineSpec("radix-chain", "pristine", "DFLASH", _RADIX),
        *(_attention(spec) for spec in (_PLAIN_ENGINE, _CHAIN, _tree(31))),
        *(_timed(spec) for spec in (_CHAIN, _tree(15), _tree(31))),
        _large(_CHAIN),
        *(_large(_tree(budget)) for budget in (15, 31, 63)),
    )
}
# By the target's folder: the engine without speculation, and the one that verifies chains.
PLAIN_OF = {"target": "plain", "attention": "attention-plain"}
CHAIN_OF = {"target": "chain", "attention": "attention-chain"}


def generation(
    drafter: str | None,
    arrival: int | str,
    *,
    eager: bool = False,
    new: int | None = None,
    **setting: Any,
) -> Step:
    """Greedy decoding of the prompts, `arrival` at a time or one after another while others run."""
    name = "/".join(
        [
            "generate",
            drafter or "none",
            "eager" if eager else "graphs",
            str(arrival),
            *(f"{key}={value}" for key, value in sorted(setting.items())),
        ]
    )
    return {
        "name": name,
        "kind": "generate",
        "prompts": "prompts-text.json",
        "count": PROMPTS,
        "new": new or (EAGER_NEW_TOKENS if eager else NEW_TOKENS),
        "drafter": drafter,
        "arrival": arrival,
        "eager": eager,
        **setting,
    }


def _exactness(**setting: Any) -> list[Step]:
    return [
        generation(drafter, arrival, eager=eager, **setting)
        for eager in (False, True)
        for drafter in DRAFTERS
        for arrival in (8, 1, 2, "staggered")
    ]


def _oracle(arrival: int) -> Step:
    """Greedy decoding of the prompts with candidates among which the right ones are hidden.

    `ranks`: of ten positions, at which rank each has its right token.
    """
    step = generation("draft-weak", arrival)
    return {**step, "name": f"oracle/{arrival}", "kind": "oracle", "ranks": [0, 0, 0, 0, 0, 0, 1, 1, 1, 2], "passes": 4}


def _state(drafter: str = "draft-weak", **setting: Any) -> Step:
    """The pools' states after a verify round against those that a prefill of the same tokens leaves."""
    name = "/".join(["state", drafter, *(f"{key}={value}" for key, value in sorted(setting.items()))])
    return {
        "name": name,
        "kind": "state",
        "prompts": "prompts-text.json",
        "count": 8,
        "round": 12,
        "drafter": drafter,
        **setting,
    }


def _sample(temperature: float, drafter: str | None) -> Step:
    return {
        "name": f"sample/{drafter or 'none'}/{temperature}",
        "kind": "sample",
        "prompts": "prompts-text.json",
        "prompt": 3,
        "samples": SAMPLES,
        "new": 4,
        "temperature": temperature,
        "drafter": drafter,
    }


def _timing(kind: str, drafter: str, **setting: Any) -> list[Step]:
    """Alone on the GPU. `clock` reads the host's clock per round, in turns with other engines; `breakdown`
    times a round's parts, `kernels` what runs on the device.
    """
    return [
        {
            "name": f"{kind}/{drafter}/{batch}",
            "kind": kind,
            "exclusive": True,
            "drafter": drafter,
            "batch": batch,
            **setting,
        }
        for batch in (1, 8)
    ]


_TINY_ROUNDS = {"length": 128, "new": 96, "vocabulary": 4096, "repeats": 2}
_LARGE_ROUNDS = {"length": 512, "new": 64, "vocabulary": 50000, "repeats": 1}

_TURNS: Step = {
    "name": "turns",
    "kind": "turns",
    "prompts": "prompts-text.json",
    "count": 8,
    "first": 300,
    "second": 64,
    "drafter": "draft-weak",
    # Requests join and leave the batch before and after the point that the cache keeps a state of.
    "arrival": "staggered",
}
_STOPS: Step = {
    "name": "stops",
    "kind": "stops",
    "prompts": "prompts-text.json",
    "count": PROMPTS,
    "drafter": "draft-weak",
}
_SYNC: Step = {"name": "sync", "kind": "sync", "drafter": "draft-weak", "batch": 8}
_MIXED: Step = {**generation("draft-weak", 8), "name": "mixed", "kind": "mixed"}
_PROMPTS: Step = {"name": PROMPTS_STEP, "kind": "prompts", "prompts": "prompts-text.json", "count": PROMPTS}
_GAPS: Step = {"name": GAPS_STEP, "kind": "gaps"}
_PLAIN: list[Step] = [_PROMPTS, *(generation(None, arrival) for arrival in (8, 1, 2, "staggered"))]

SHARDS: Mapping[str, Mapping[str, Sequence[Step]]] = {
    "smoke": {
        "plain": [_PROMPTS, generation(None, 8), _GAPS],
        "chain": [generation("draft-weak", 8)],
        "tree15": [generation("draft-weak", 8), generation("draft-weak", 8, spine=True), _state(), _STOPS],
        "eager15": [generation("draft-weak", 8)],
        "shadow31": [generation("draft-weak", 1)],
    },
    "exact": {
        "plain": [*_PLAIN, _GAPS],
        "chain": _exactness(),
        "tree15": [*_exactness(), *_exactness(spine=True)],
        "tree16": _exactness(),
        "tree31": _exactness(),
    },
    "no-graphs": {
        "plain": [*_PLAIN, _GAPS],
        "chain": [generation("draft-weak", 8)],
        "eager15": [generation("draft-weak", 8)],
    },
    "window64": {
        "plain": [*_PLAIN, _GAPS],
        "tree63": _exactness(),
    },
    "gain": {
        engine: [
            *(generation(drafter, 8, topk=topk) for topk in (4, 16) for drafter in DRAFTERS),
            *(generation(drafter, 8, spine=True) for drafter in DRAFTERS if engine != "tree15"),
        ]
        for engine in ("tree15", "tree16", "tree31", "tree63")
    },
    "shadow": {
        "chain": [generation(drafter, 1) for drafter in DRAFTERS],
        "shadow31": [generation(drafter, 1) for drafter in DRAFTERS],
    },
    "leak": {
        "plain": [*_PLAIN, _GAPS],
        **{engine: [generation(drafter, 8, leak=True) for drafter in DRAFTERS] for engine in ("tree15", "tree31")},
    },
    "state": {
        "chain": [_state()],
        "bf16-chain": [_state()],
        "bf16-tree31": [_state()],
        **{engine: [_state(), _state(leak=True)] for engine in ("tree15", "tree31")},
    },
    "oracle": {
        "plain": [*_PLAIN, _GAPS],
        **{f"timed-{engine}": [_oracle(8)] for engine in ("tree15", "tree31")},
    },
    "attention": {
        "attention-plain": [*_PLAIN, _GAPS],
        "attention-chain": [generation("draft-weak", 8), generation("draft-weak", 8, eager=True)],
        "attention-tree31": [
            _oracle(8),
            generation("draft-weak", 8),
            {**_oracle(8), "name": "oracle/8/eager", "eager": True},
        ],
    },
    "stops": {engine: [_STOPS] for engine in ("tree15", "tree31")},
    "sampling": {
        "plain": [*_PLAIN, _sample(1.0, None), _sample(0.7, None), _GAPS],
        "tree15": [_sample(1.0, "draft-weak"), _MIXED],
        "tree31": [_sample(1.0, "draft-weak")],
    },
    "radix": {
        "plain": [_PROMPTS, _GAPS],
        "radix15": [_TURNS],
        "radix-chain": [_TURNS],
    },
    "sync": {engine: [_SYNC] for engine in ("chain", "tree15", "tree31")},
    "parts": {
        engine: [step for drafter in DRAFTERS for step in _timing("breakdown", drafter, **_TINY_ROUNDS)]
        for engine in ("chain", "tree15", "tree31", "tree63")
    },
    "steps": {
        f"timed-{engine}": _timing("clock", "draft-weak", **{**_TINY_ROUNDS, "repeats": 6})
        for engine in ("chain", "tree15", "tree31")
    },
    "large": {
        engine: [
            *_timing("clock", "large-draft", **{**_LARGE_ROUNDS, "repeats": 3}),
            *_timing("breakdown", "large-draft", **_LARGE_ROUNDS),
            *_timing("kernels", "large-draft", **_LARGE_ROUNDS),
        ]
        for engine in ("large-chain", "large-tree15", "large-tree31", "large-tree63")
    },
}


@dataclass(frozen=True)
class Job:
    """One engine and the steps to put it through, in order."""

    engine: EngineSpec
    steps: tuple[Step, ...]


def jobs(shards: Sequence[str]) -> list[Job]:
    """The named shards' work, each engine and each of its steps once; exclusive steps, gaps and waits come last.

    Raises KeyError for an unknown shard.
    """
    together: dict[str, dict[str, Step]] = {}
    for shard in shards:
        for engine, steps in SHARDS[shard].items():
            mine = together.setdefault(engine, {})
            for step in steps:
                mine.setdefault(step["name"], step)
    return [Job(ENGINES[engine], tuple(sorted(steps.values(), key=_turn))) for engine, steps in together.items()]


def _turn(step: Step) -> int:
    # What watches for waits may leave the worker's fused append switched off.
    return {"gaps": 2, "sync": 3}.get(step["kind"], 1 if step.get("exclusive") else 0)


def result_key(engine: EngineSpec, step: Step, digest: str) -> str:
    """What a result is kept under. `digest`: of the patch set, which a pristine engine does not depend on."""
    depends = [
        engine.name,
        engine.site,
        engine.arguments(),
        engine.target,
        step,
        "" if engine.site == "pristine" else digest,
    ]
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:20]


def every_step() -> Iterator[tuple[EngineSpec, Step]]:
    """Every step of every shard, once per engine."""
    for job in jobs(list(SHARDS)):
        for step in job.steps:
            yield job.engine, step
