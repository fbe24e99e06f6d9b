"""Whether an engine can serve these models in this way, told before anything is loaded. Pure.

Each rule is one that the engine enforces after minutes of loading, or one that it never enforces and that silently
costs speed. Sources: ``server_args``, ``layers/quantization/fp8.py``, ``models/dflash.py`` and
``speculative/dflash_utils.py`` of the releases named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.version import Version

from ddtree_deploy.launch.models import Drafter, Model
from ddtree_deploy.launch.service import TRACK_INTERVAL, Service

DRAFTER_ROPE_READ = Version("0.5.13")
DRAFTER_WINDOWS_HONOURED = Version("0.5.14")
DRAFTER_KV_BUDGETED = Version("0.5.18")
_DRAFTER_SOURCE = "sglang/srt/models/dflash.py"
_COMPACT_STATES = "sglang/srt/speculative/ddtree_states.py"
_DSA_ON_SM120 = Version("0.5.17")
_NVFP4_MOE_AUTO = Version("0.5.14")
_NVFP4_DENSE_FIXED = Version("0.5.14")
_DFLASH2 = Version("0.5.19")
# Architectures whose classes hand their layers' outputs to a DFLASH drafter, in 0.5.11 and later.
_DRAFTED_FOR = ("Qwen3", "DeepseekV", "GlmMoeDsa", "Llama", "GptOss", "KimiK25")
_FP4_CACHES = ("nvfp4", "fp4_e2m1", "fp4_mx_block16")
_HYBRID_BACKENDS_ON_BLACKWELL = ("triton", "trtllm_mha", "fa4", "flashinfer")
_NVFP4_MOE_BACKEND = "flashinfer_cutlass"
_MASK_BACKENDS = ("flashinfer", "triton", "fa3", "fa4")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that stands in the way. ``refused``: it will not start, or would serve what nobody wants."""

    refused: bool
    text: str


@dataclass(frozen=True, slots=True)
class Tree:
    """What the sources of the installed engine show of what was fixed and added in it.

    ``compact_states``: a tree's verify keeps inputs instead of states, as ddtree does from 1.1 on.
    """

    draft_rope_read: bool
    draft_windows_honoured: bool
    compact_states: bool

    @classmethod
    def of_release(cls, engine: Version) -> Tree:
        """What the published release of that version does, with the ddtree set that ships with this program."""
        return cls(engine >= DRAFTER_ROPE_READ, engine >= DRAFTER_WINDOWS_HONOURED, True)

    @classmethod
    def of_source(cls, read: Callable[[str], bytes | None], engine: Version) -> Tree:
        """What the installed tree does, patched or not; ``read`` takes paths relative to the site."""
        release = cls.of_release(engine)
        dflash = read(_DRAFTER_SOURCE) or b""
        rope = b"get_rope_config" in dflash or b"_get_dflash_rope_config" in dflash
        windows = b"sliding_window" in dflash
        compact = read(_COMPACT_STATES) is not None
        return cls(release.draft_rope_read or rope, release.draft_windows_honoured or windows, compact)


def check(
    service: Service, engine: Version, model: Model, drafter: Drafter | None = None, tree: Tree | None = None
) -> list[Finding]:
    """Everything that stands in the way of serving ``model`` (with ``drafter``) as ``service`` says, refusals first.

    ``tree`` is what is known of the installed engine; None stands for the published release.
    """
    tree = tree or Tree.of_release(engine)
    found = list(_target(service, engine, model))
    if drafter is not None and service.speculative:
        found += _pair(service, model, drafter)
        found += _drafter(service, engine, drafter, tree)
    return sorted(found, key=lambda finding: not finding.refused)


def _refuse(text: str) -> Finding:
    return Finding(True, text)


def _warn(text: str) -> Finding:
    return Finding(False, text)


# The target against tensor parallelism, the machine and the algorithm.


def _target(service: Service, engine: Version, model: Model) -> Iterator[Finding]:
    yield from _heads("the model", model.heads, 0 if model.latent else model.kv_heads, service.tp)
    if model.recurrent:
        for what, heads in (("key", model.recurrent.key_heads), ("value", model.recurrent.value_heads)):
            if heads % service.tp:
                yield _refuse(f"{heads} {what} heads of the recurrent layers do not divide by tp {service.tp}")
    yield from _blocks(service, model)
    if service.context_length is not None and service.context_length > model.context:
        yield _warn(f"context_length {service.context_length} exceeds the {model.context} positions of the model")
    if service.compute_capability.startswith("12."):
        yield from _on_sm120(service, engine, model)
    if model.recurrent and service.hybrid is False:
        yield _refuse("`hybrid` is false, but the model has recurrent layers: take it out of the service")
    if model.recurrent and service.speculative:
        yield from _recurrent(service)
    if service.verifies_trees:
        if model.sliding:
            yield _refuse("DDTREE serves no target with sliding-window layers: use DFLASH")
        if model.sparse_attention:
            yield _refuse("DDTREE verifies on triton alone: sparse attention has kernels of its own")


def _heads(whose: str, heads: int, kv_heads: int, tp: int) -> Iterator[Finding]:
    if heads % tp:
        yield _refuse(f"{heads} attention heads of {whose} do not divide by tp {tp}")
    if kv_heads >= tp and kv_heads % tp:
        yield _refuse(f"{kv_heads} KV heads of {whose} do not divide by tp {tp}")
    if 0 < kv_heads < tp and tp % kv_heads:
        yield _refuse(f"{kv_heads} KV heads of {whose} cannot be repeated evenly over tp {tp}")


def _recurrent(service: Service) -> Iterator[Finding]:
    if service.radix_cache and service.mamba_scheduler_strategy == "no_buffer":
        yield _refuse("no_buffer cannot speculate on this hybrid model with the radix cache: use extra_buffer")
    interval = TRACK_INTERVAL if service.mamba_track_interval is None else service.mamba_track_interval
    if service.radix_cache and service.verify_tokens > interval:
        yield _refuse(f"a verify of {service.verify_tokens} tokens exceeds mamba_track_interval {interval}")


def _blocks(service: Service, model: Model) -> Iterator[Finding]:
    """Block-wise scales must not be cut by tensor parallelism: each rank's share is a whole number of blocks."""
    quantization = model.quantization
    if quantization is None or quantization.block is None:
        return
    rows, columns = quantization.block
    for what, kind, share, block in _shares(model, service.tp, rows, columns):
        if share % block and quantization.covers(kind):
            yield _refuse(
                f"{what}: {share} of each rank at tp {service.tp} is not a multiple of the quantisation block {block}"
            )


def _shares(model: Model, tp: int, rows: int, columns: int) -> Iterator[tuple[str, str, int, int]]:
    """(what, kind of layer, one rank's part, block that must divide it) of every layer that is split."""
    if model.latent is None:
        queries = model.heads * model.head_dim * (1 + model.gated_attention)
        keys = max(model.kv_heads // tp, 1) * model.head_dim
        yield "attention's queries", "self_attn", queries // tp, rows
        yield "attention's keys", "self_attn", keys, rows
        if tp > 1:
            yield "attention's output", "self_attn", model.heads * model.head_dim // tp, columns
    if model.recurrent:
        part = model.recurrent
        yield "the recurrent layers' keys", "linear_attn", part.key_heads * part.key_dim // tp, rows
        yield "the recurrent layers' values", "linear_attn", part.value_heads * part.value_dim // tp, rows
    if model.intermediate and not model.experts:
        yield "the feed-forward width", "mlp", model.intermediate // tp, rows
    if model.experts:
        yield "an expert's width", "mlp", model.experts.intermediate // tp, rows
        if model.experts.shared_intermediate:
            yield "the shared expert's width", "mlp", model.experts.shared_intermediate // tp, rows


def _on_sm120(service: Service, engine: Version, model: Model) -> Iterator[Finding]:
    where = f"compute capability {service.compute_capability}"
    if model.sparse_attention and engine < _DSA_ON_SM120:
        yield _refuse(
            f"sparse attention ({model.architecture}) has no kernels for {where} before sglang {_DSA_ON_SM120}"
        )
    backend = service.attention_backend
    if model.recurrent and backend is not None and backend not in _HYBRID_BACKENDS_ON_BLACKWELL:
        allowed = ", ".join(_HYBRID_BACKENDS_ON_BLACKWELL)
        yield _refuse(f"a hybrid model on {where} takes the attention backends {allowed}, not {backend}")
    nvfp4 = model.quantization is not None and model.quantization.method == "nvfp4"
    runner = service.moe_runner_backend
    if model.experts and (runner or "").startswith("flashinfer_trtllm"):
        yield _refuse(f"moe_runner_backend {runner} has no kernels for {where}: use {_NVFP4_MOE_BACKEND} or triton")
    elif nvfp4 and model.experts and engine < _NVFP4_MOE_AUTO and runner in (None, "auto"):
        yield _refuse(
            f"sglang {engine} picks trtllm kernels for NVFP4 experts, which {where} lacks: "
            f'set moe_runner_backend = "{_NVFP4_MOE_BACKEND}"'
        )
    if nvfp4 and engine < _NVFP4_DENSE_FIXED and _extra(service, "--fp4-gemm-backend") == "cutlass":
        yield _refuse("--fp4-gemm-backend cutlass gives NaN on this machine in early versions: leave it out")


def _extra(service: Service, name: str) -> str | None:
    """The value that ``extra_args`` gives a flag."""
    words = service.extra_args
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


# The drafter against the target.


def _pair(service: Service, model: Model, drafter: Drafter) -> Iterator[Finding]:
    if drafter.target_layers is not None and drafter.target_layers != model.layers:
        # The engine only logs this, and then accepts next to nothing.
        yield _refuse(
            f"the drafter was trained for a target of {drafter.target_layers} layers; the model has {model.layers}"
        )
    if drafter.hidden != model.hidden:
        yield _refuse(f"the drafter's hidden size is {drafter.hidden}, the model's {model.hidden}")
    if drafter.vocabulary != model.vocabulary:
        yield _refuse(f"the drafter's vocabulary has {drafter.vocabulary} tokens, the model's {model.vocabulary}")
    if drafter.mask_token_id is not None and drafter.mask_token_id >= model.vocabulary:
        yield _refuse(f"the drafter's mask token {drafter.mask_token_id} is outside of the vocabulary")
    for layer in drafter.target_layer_ids or ():
        # Layer k's output is taken in front of layer k + 1.
        if layer >= model.layers - 1:
            yield _refuse(f"the drafter reads layer {layer}, but the last that can be read is {model.layers - 2}")
    if drafter.target_layer_ids is not None and not drafter.target_layer_ids:
        yield _refuse("the drafter's target_layer_ids are empty")
    if not model.architecture.startswith(_DRAFTED_FOR):
        yield _warn(f"{model.architecture} may not hand its layers' outputs to a drafter: then the engine refuses it")
    if service.kv_cache_dtype in _FP4_CACHES:
        yield _warn(f"kv_cache_dtype {service.kv_cache_dtype} is reported to crash beside a DFLASH drafter")
    wanted = service.context_length or model.context
    if drafter.context < wanted:
        yield _warn(
            f"the drafter has {drafter.context} positions, requests may have {wanted}: "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN lets it start, acceptance falls beyond them"
        )
    quantised = service.quantization or ""
    if quantised and "--speculative-draft-model-quantization" not in " ".join(service.extra_args):
        yield _warn(
            f"the drafter inherits quantization {quantised}: leave the key out (the checkpoint says it), or add "
            "--speculative-draft-model-quantization unquant to extra_args"
        )


def _drafter(service: Service, engine: Version, drafter: Drafter, tree: Tree) -> Iterator[Finding]:
    if not drafter.architecture.startswith("DFlash"):
        yield _refuse(f"{drafter.architecture} is no DFLASH drafter")
    if drafter.architecture.startswith("DFlash2") and engine < _DFLASH2:
        yield _refuse(f"{drafter.architecture} is a class of sglang {_DFLASH2} and later")
    yield from _heads("the drafter", drafter.heads, drafter.kv_heads, service.tp)
    block = service.block_size
    if block is not None and drafter.block_size is not None and block > drafter.block_size:
        yield _warn(f"block_size {block} exceeds the {drafter.block_size} positions that the drafter was trained on")
    window = service.draft_window
    if window is not None and window < (block or drafter.block_size or 0):
        yield _refuse(f"draft_window {window} is less than the block of {block or drafter.block_size}")
    if service.verifies_trees and service.budget is not None:
        chain = (block or drafter.block_size or 0) - 1
        if service.budget < chain:
            yield _refuse(f"budget {service.budget} is less than the drafter's chain of {chain}")
    overridden = '"rope_theta"' in (service.json_model_override_args or "")
    if drafter.rope_base_is_nested and drafter.rope_base != 1e6 and not tree.draft_rope_read and not overridden:
        yield _warn(
            f"this engine runs the drafter at RoPE base 1e6 instead of {drafter.rope_base:g}, and accepts little: "
            "apply patch set dflash-fixes, or set rope_theta in `json_model_override_args`"
        )
    if drafter.sliding_layers and not tree.draft_windows_honoured:
        yield _warn(
            f"sglang {engine} runs the drafter's {drafter.sliding_layers} sliding layers (window "
            f"{drafter.sliding_window}) as full attention: acceptance falls on contexts longer than that; "
            f"honoured from {DRAFTER_WINDOWS_HONOURED} on"
        )
    backend = service.draft_attention_backend
    if backend is not None and backend not in _MASK_BACKENDS and backend != "trtllm_mha":
        yield _refuse(f"draft_attention_backend {backend}: the drafter takes {', '.join(_MASK_BACKENDS)}")
