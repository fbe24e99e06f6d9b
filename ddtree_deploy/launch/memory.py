"""The engine's own arithmetic of a GPU's memory: states, caches and how its static share is divided. Pure.

Sources: ``handle_max_mamba_cache`` (model_runner_kv_cache_mixin, later kv_cache_configurator),
``pool_configurator``, ``configs/mamba_utils`` and ``speculative/dflash_utils``; the tests hold every formula against
the published sources. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from ddtree_deploy.launch.legality import DRAFTER_KV_BUDGETED
from ddtree_deploy.launch.models import Drafter, Model, Recurrent
from ddtree_deploy.launch.service import Service

FULL_MEMORY_RATIO = 0.9  # the engine's --mamba-full-memory-ratio
#: From there on the state pools' padding row is budgeted for.
PADDING_BUDGETED = Version("0.5.17")
_JOINT_SOLVE = Version("0.5.13")  # scratch of the requests that the slots allow, not of all that may run
_OVERLAP = Version("0.5.14")
_CONV_BYTES = 2
_SLOTS_PER_REQUEST = 3


def state_bytes(recurrent: Recurrent, tp: int, *, ssm_bytes: int | None = None) -> int:
    """The recurrent state of one request on one GPU: convolution windows and states of every layer.

    Source: ``Mamba2StateShape.create`` and ``mamba_cache_per_req``.
    """
    convolution = _channels(recurrent, tp) * (recurrent.conv_kernel - 1) * _CONV_BYTES
    element = recurrent.state_bytes if ssm_bytes is None else ssm_bytes
    state = recurrent.value_heads // tp * recurrent.value_dim * recurrent.key_dim * element
    return (convolution + state) * recurrent.layers


def _channels(recurrent: Recurrent, tp: int) -> int:
    """The convolution's channels on one GPU: values, and keys and queries whose heads are repeated if need be."""
    groups = recurrent.key_heads if recurrent.key_heads % tp == 0 else tp
    return (recurrent.value_heads * recurrent.value_dim + 2 * groups * recurrent.key_dim) // tp


def verify_bytes(
    recurrent: Recurrent,
    tp: int,
    window: int,
    *,
    compact_tree: bool = False,
    ssm_bytes: int | None = None,
    activation_bytes: int = 2,
) -> int:
    """What the verify of one running request keeps on one GPU, beside the request's own state.

    The one place for it. A chain, and a tree of ddtree 1.0, keep the state after each token of the window. A
    ``compact_tree`` (ddtree from 1.1 on; ``ddtree_states.verify_bytes``) keeps each token's inputs, of which the
    accepted path is computed anew, and of the states only those of nodes that are branched at, in single precision.
    """
    if not compact_tree:
        return window * state_bytes(recurrent, tp, ssm_bytes=ssm_bytes)
    channels, value_heads = _channels(recurrent, tp), recurrent.value_heads // tp
    inputs = window * recurrent.layers * (2 * channels * activation_bytes + 8 * value_heads)
    return inputs + branch_slots(window) * value_heads * recurrent.value_dim * recurrent.key_dim * 4


def branch_slots(window: int) -> int:
    """States that a compact tree of that many nodes reserves: as many as can be open at once, at least one.

    Open are those of nodes with a further child to come that is no leaf, the smallest subtrees being visited first.
    Source: ``branch_slots`` of the set ``ddtree``, which proves it.
    """
    return max(1, ((window + 1) // 3).bit_length() - 1)


def kv_bytes_per_token(model: Model, tp: int, kv_dtype: str | None = None) -> int:
    """The target's KV cache of one token on one GPU. Source: ``DefaultPoolConfigurator._compute_cell_size``."""
    element = 1 if (kv_dtype or "").startswith("fp8") else model.dtype_bytes
    if model.latent is not None:
        cell = (model.latent.kv_rank + model.latent.rope_dim) * model.layers * element
        if model.latent.index_dim:
            cell += (model.latent.index_dim + model.latent.index_dim // 128 * 4) * model.layers
        return cell
    heads = max(model.kv_heads // tp, 1)
    return heads * 2 * model.head_dim * model.attention_layers * element


def draft_kv_bytes_per_token(drafter: Drafter, tp: int, kv_dtype: str | None = None) -> int:
    """The drafter's KV cache of one token on one GPU; its pool has a slot for each of the target's tokens."""
    element = 1 if (kv_dtype or "").startswith("fp8") else drafter.dtype_bytes
    return max(drafter.kv_heads // tp, 1) * 2 * drafter.head_dim * drafter.layers * element


def budgeted_cell(target: int, target_layers: int, draft: int, draft_layers: int, engine: Version) -> int:
    """The bytes a token that the engine divides the pool by, target and drafter together.

    Source: ``scale_kv_cell_size_per_token_for_dflash``. Before 0.5.18 a draft layer counts as a target's.
    """
    if draft == 0:
        return target
    if engine >= DRAFTER_KV_BUDGETED:
        return target + draft
    return (target * (target_layers + draft_layers) + target_layers - 1) // target_layers


def slots_per_request(service: Service, engine: Version) -> int:
    """State slots that one running request keeps. Source: ``_calculate_mamba_ratio``."""
    if not service.radix_cache:
        return 1
    extra = service.mamba_scheduler_strategy == "extra_buffer" or (
        service.mamba_scheduler_strategy is None and service.speculative
    )
    overlap = engine >= _OVERLAP or not service.speculative
    return _SLOTS_PER_REQUEST + (0 if not extra else 2 if overlap else 1)


@dataclass(frozen=True, slots=True)
class Pools:
    """How the engine shares out what its static fraction leaves beside the weights, in bytes but for counts."""

    scratch: int
    slots: int
    states: int
    cache: int


def share_out(
    rest: int,
    state: int,
    *,
    running: int,
    verify: int,
    slots_each: int,
    radix: bool,
    engine: Version,
    ratio: float = FULL_MEMORY_RATIO,
) -> Pools:
    """Recurrent pools first, the KV cache of what is left.

    ``state`` and ``verify`` are the bytes of a request's state and of its verify, 0 without speculation.

    Source: ``handle_max_mamba_cache`` of 0.5.11, 0.5.13 (solved jointly) and 0.5.17 (a padding slot counted). A
    negative ``cache`` or ``slots`` is where the engine stops.
    """
    pad = 1 if engine >= PADDING_BUDGETED else 0
    if engine < _JOINT_SOLVE:
        rest -= running * verify
        slots = running if not radix else int(rest * ratio / (1 + ratio) // state)
        return Pools(running * verify, slots, slots * state, rest - slots * state)
    if not radix:
        slots = running
        scratch = (slots + pad) * verify
    else:
        budget = rest * ratio / (1 + ratio)
        slots = int((budget - (state + verify) * pad) // (state + verify / slots_each))
        scratch = (min(running, slots // slots_each) + pad) * verify
    return Pools(scratch, slots, (slots + pad) * state, rest - scratch - (slots + pad) * state)
