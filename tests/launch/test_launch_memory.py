"""The memory arithmetic against the published engines' own expressions, run on a grid, and against known figures."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from ddtree_deploy.launch import budget, memory
from ddtree_deploy.launch.models import drafter_weight_bytes, estimated_weight_bytes
from ddtree_deploy.launch.service import Service
from ddtree_deploy.resources import patches_dir
from ddtree_deploy.snapshots.pristine import PristineTree
from tests.launch import models, sources
from tests.launch.conftest import VERSIONS

Published = Callable[[str], PristineTree]
GIB = 1 << 30
MIXIN = "sglang/srt/model_executor/model_runner_kv_cache_mixin.py"
CONFIGURATOR = "sglang/srt/mem_cache/kv_cache_configurator.py"
TPS = (1, 2, 4, 8)
HYBRIDS = ("qwen3.6-27b", "qwen3.6-35b-a3b")


def service(**keys: Any) -> Service:
    drafting = {"drafter": "/d"} if keys.get("algorithm", "none") != "none" else {}
    return Service(name="s", model="/m", python="/p", **drafting, **keys)


def pool_source(tree: PristineTree) -> bytes:
    return tree[MIXIN] if MIXIN in tree else tree[CONFIGURATOR]


# The engine's expressions.


@pytest.mark.wheel
@pytest.mark.parametrize("version", VERSIONS)
def test_state_of_a_request(version: str, published: Published) -> None:
    wanted = ("extra_groups_for_head_shards", "Mamba2StateShape", "BaseLinearStateParams", "Mamba2CacheParams")
    provided = {
        "dataclass": dataclasses.dataclass,
        "field": dataclasses.field,
        "np": sources.NUMPY,
        "ABC": object,
        "divide": lambda whole, parts: whole // parts,
    }
    cut = sources.cut(published(version)["sglang/srt/configs/mamba_utils.py"], *wanted)
    engine = sources.run(cut, provided)
    for name, tp, size in itertools.product(HYBRIDS, TPS, (2, 4)):
        recurrent = models.target(name).recurrent
        assert recurrent is not None
        for heads in (recurrent.key_heads, 6):
            part = dataclasses.replace(recurrent, key_heads=heads)
            shape = engine["Mamba2StateShape"].create(
                tp_world_size=tp,
                intermediate_size=part.value_heads * part.value_dim,
                n_groups=part.key_heads,
                num_heads=part.value_heads,
                head_dim=part.value_dim,
                state_size=part.key_dim,
                conv_kernel=part.conv_kernel,
            )
            dtype = SimpleNamespace(conv=sources.float_dtype(2), temporal=sources.float_dtype(size))
            params = engine["Mamba2CacheParams"](shape=shape, layers=list(range(part.layers)), dtype=dtype)
            assert memory.state_bytes(part, tp, ssm_bytes=size) == params.mamba_cache_per_req


def engine_pools(tree: PristineTree) -> Callable[..., tuple[int, float]]:
    """The engine's own function, as one that gives (slots, bytes left for the KV cache)."""
    name = "handle_max_mamba_cache" if MIXIN in tree else "_handle_max_mamba_cache"
    context = sources.Context()
    provided: dict[str, Any] = {
        f"get_{bag}": lambda: context for bag in ("exec", "spec", "schedule", "memory", "context", "parallel")
    }
    provided |= {"kimi_linear_config": lambda config: None, "max_speculative_num_draft_tokens": lambda: None}
    provided |= {"_pd_prefill_skips_mamba_spec_state": lambda: False}
    function = sources.run(sources.cut(pool_source(tree), name), provided)[name]
    parallel = {"pp_size": 1, "attn_dp_size": 1, "dp_size": 1}

    def pools(rest: int, state: int, *, running: int, window: int, each: int, radix: bool) -> tuple[int, float]:
        context.__dict__.update(
            speculative_num_draft_tokens=window or None,
            max_running_requests=running,
            max_mamba_cache_size=None,
            disable_radix_cache=not radix,
            mamba_full_memory_ratio=memory.FULL_MEMORY_RATIO,
            enable_dp_attention=False,
            dp_size=1,
            mamba=SimpleNamespace(enable_linear_replayssm_spec=False),
        )
        states = SimpleNamespace(mamba_cache_per_req=state, layers=[0, 1, 2])
        runner = SimpleNamespace(
            mambaish_config=SimpleNamespace(mamba2_cache_params=states),
            server_args=context,
            spec_algorithm=SimpleNamespace(is_none=lambda: window == 0),
            hybrid_gdn_config=object(),
            model_config=SimpleNamespace(),
            ps=SimpleNamespace(**parallel),
            fused_entry_bytes=lambda _what: None,
            extra_mamba_cache_bytes_per_req=0,
            _calculate_mamba_ratio=lambda: each,
            **parallel,
        )
        left = function(runner, rest / GIB)
        return context.max_mamba_cache_size, left * GIB

    return pools


@pytest.mark.wheel
@pytest.mark.parametrize("version", VERSIONS)
def test_shares_of_the_pools(version: str, published: Published) -> None:
    engine, count = engine_pools(published(version)), 0
    for state, running, window, radix in itertools.product(
        (4_000_000, 19_000_000, 154_000_000), (1, 8, 48), (0, 8, 16, 64), (True, False)
    ):
        for rest in (20 * GIB, 60 * GIB):
            each = 1 if not radix else 4 if Version(version) < Version("0.5.14") else 5
            ours = memory.share_out(
                rest,
                state,
                running=running,
                verify=window * state,
                slots_each=each,
                radix=radix,
                engine=Version(version),
            )
            try:
                slots, left = engine(rest, state, running=running, window=window, each=each, radix=radix)
            except RuntimeError:
                assert ours.slots <= 0
                continue
            count += 1
            assert abs(ours.slots - slots) <= 1, (state, running, window, radix, rest)
            # The engine calculates in floating-point GiB: a slot may fall on either side of its last digit.
            assert abs(ours.cache - left) <= 1024 + state * (1 + window) * abs(ours.slots - slots)
    assert count > 100


@pytest.mark.wheel
def test_slots_of_a_request(published: Published) -> None:
    constants = (
        "MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO",
        "MAMBA_CACHE_V2_ADDITIONAL_RATIO_OVERLAP",
        "MAMBA_CACHE_V2_ADDITIONAL_RATIO_NO_OVERLAP",
    )
    cut = sources.cut(published("0.5.11")[MIXIN], *constants, "_calculate_mamba_ratio")
    ratio = sources.run(cut, {})["_calculate_mamba_ratio"]
    for radix, buffer, overlap in itertools.product((True, False), (True, False), (True, False)):
        arguments = SimpleNamespace(
            disable_radix_cache=not radix,
            enable_mamba_extra_buffer=lambda buffer=buffer: buffer,
            disable_overlap_schedule=not overlap,
        )
        given = service(
            algorithm="DFLASH",
            radix_cache=radix,
            mamba_scheduler_strategy="extra_buffer" if buffer else "no_buffer",
        )
        engine = Version("0.5.14" if overlap else "0.5.11")
        assert memory.slots_per_request(given, engine) == ratio(SimpleNamespace(server_args=arguments))


@pytest.mark.wheel
@pytest.mark.parametrize("name", [*HYBRIDS, "glm-5-nvfp4"])
@pytest.mark.parametrize("tp", TPS)
def test_kv_cache_of_a_token(name: str, tp: int, published: Published) -> None:
    model = models.target(name)
    pool = SimpleNamespace(quant_block_size=128, index_k_with_scale_buffer_dtype=1)
    provided = {
        "torch": SimpleNamespace(_utils=SimpleNamespace(_element_size=lambda dtype: dtype)),
        "get_attention_tp_size": lambda: tp,
        "is_float4_e2m1fn_x2": lambda dtype: False,
        "is_deepseek_nsa": lambda config: model.sparse_attention,
        "get_nsa_index_head_dim": lambda config: model.latent.index_dim if model.latent else 0,
        "NSATokenToKVPool": pool,
    }
    cut = sources.cut(published("0.5.11")["sglang/srt/model_executor/pool_configurator.py"], "_compute_cell_size")
    compute = sources.run(cut, provided)["_compute_cell_size"]
    config = SimpleNamespace(
        hf_config=None,
        head_dim=model.head_dim,
        v_head_dim=model.head_dim,
        get_num_kv_heads=lambda size: max(1, model.kv_heads // size),
        kv_lora_rank=model.latent.kv_rank if model.latent else 0,
        qk_rope_head_dim=model.latent.rope_dim if model.latent else 0,
    )
    for element, dtype in ((2, None), (1, "fp8_e4m3")):
        runner = SimpleNamespace(model_config=config, kv_cache_dtype=element, use_mla_backend=model.latent is not None)
        layers = model.layers if model.latent else model.attention_layers
        assert memory.kv_bytes_per_token(model, tp, dtype) == compute(None, runner, layers)


@pytest.mark.wheel
@pytest.mark.parametrize("version", VERSIONS)
def test_budget_of_target_and_drafter(version: str, published: Published) -> None:
    scale = sources.run(
        sources.cut(
            published(version)["sglang/srt/speculative/dflash_utils.py"], "scale_kv_cell_size_per_token_for_dflash"
        ),
        {"Optional": None},
    )["scale_kv_cell_size_per_token_for_dflash"]
    exact = Version(version) >= Version("0.5.18")
    for target, layers, draft, draft_layers in itertools.product((16384, 65537), (10, 16), (1, 32768), (1, 5, 8)):
        engine = scale(
            target_cell_size_per_token=target,
            target_num_layers=layers,
            draft_num_layers=draft_layers,
            draft_cell_size_per_token=draft if exact else None,
        )
        assert memory.budgeted_cell(target, layers, draft, draft_layers, Version(version)) == engine


@pytest.mark.wheel
def test_from_where_on_the_drafters_own_size_is_budgeted(published: Published) -> None:
    for version in VERSIONS:
        source = published(version)["sglang/srt/model_executor/pool_configurator.py"]
        assert (b"draft_cell_size_per_token=" in source) == (Version(version) >= memory.DRAFTER_KV_BUDGETED)


@pytest.mark.wheel
def test_reserve_beside_the_static_share(published: Published) -> None:
    """The engine's own fraction leaves what our rows of activations and graphs say, where no floor is in the way."""
    cut = sources.cut(published("0.5.11")["sglang/srt/server_args.py"], "_handle_gpu_memory_settings")
    handle = sources.run(cut, {"envs": SimpleNamespace()})["_handle_gpu_memory_settings"]
    for chunk, batch, tp in itertools.product((8192, 16384), (16, 64), TPS):
        arguments = SimpleNamespace(
            chunked_prefill_size=chunk, cuda_graph_max_bs=batch, cuda_graph_bs=[batch], tp_size=tp, pp_size=1,
            device="cuda", piecewise_cuda_graph_max_tokens=1, piecewise_cuda_graph_tokens=[], mem_fraction_static=None,
            enable_dp_attention=False, disable_piecewise_cuda_graph=True, speculative_algorithm=None,
            get_model_config=lambda: SimpleNamespace(is_multimodal=False), language_only=False, enable_symm_mem=False,
            model_path="/m", max_total_tokens=None,
        )  # fmt: skip
        handle(arguments, budget.RTX_PRO_6000_MIB)
        engine = budget.RTX_PRO_6000_MIB * (1 - arguments.mem_fraction_static)
        given = service(chunked_prefill_size=chunk, cuda_graph_max_bs=batch, tp=tp, max_running_requests=batch)
        rows = budget.plan(given, Version("0.5.11"), models.target("qwen3.6-27b")).rows
        ours = sum(row.bytes for row in rows if row.what in ("activations", "CUDA graphs")) / (1 << 20)
        assert abs(engine - ours) <= 0.0005 * budget.RTX_PRO_6000_MIB + 1


@pytest.mark.wheel
@pytest.mark.parametrize(("backend", "index"), [("triton", 8), ("flashinfer", 4)])
def test_graph_buffers_of_the_attention_backends(backend: str, index: int, published: Published) -> None:
    """Both backends still allocate indices and mask for every token of a graph over the whole context."""
    source = published("0.5.11")[f"sglang/srt/layers/attention/{backend}_backend.py"]
    cut = sources.cut(source, "init_cuda_graph_state")
    allocated: dict[str, tuple[int, int]] = {}
    for node in ast.walk(cut["init_cuda_graph_state"]):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and "zeros" in ast.unparse(node.value.func)
        ):
            call = node.value
            dtype = next((ast.unparse(word.value) for word in call.keywords if word.arg == "dtype"), "")
            size = ast.unparse(call.args[0]).replace("self.", "")
            name = ast.unparse(node.targets[0]).removeprefix("self.")
            width = {"torch.int64": 8, "torch.int32": 4, "torch.uint8": 1}.get(dtype)
            values = {"max_num_tokens": 7, "max_context_len": 1000, "max_bs": 1, "sliding_window_size": 1}
            if width and "max_context_len" in size:
                found = eval(size, {}, values)
                allocated[name] = (found[0] if isinstance(found, tuple) else found, width)
    assert allocated["cuda_graph_kv_indices"] == (7000, index)
    assert allocated["cuda_graph_custom_mask"] == (7000, 1)
    assert budget._INDEX_BYTES.get(backend, 8) == index


def test_a_trees_states_as_the_set_counts_them() -> None:
    """The formula by which the shipped set has the engine reserve, where it has one: ddtree from 1.1 on."""
    for source in patches_dir().glob("ddtree/new/sglang/srt/speculative/ddtree_states.py"):
        tree = sources.cut(source.with_name("ddtree_tree.py").read_bytes(), "branch_slots")
        nodes = tree | sources.cut(source.read_bytes(), "verify_bytes", "_slots")
        engine = sources.run(nodes, {"prod": math.prod, "verifies_trees": lambda args: True})
        for name, tp, window in itertools.product(HYBRIDS, TPS, (1, 2, 3, 16, 17, 31, 32, 64)):
            part = models.target(name).recurrent
            assert part is not None
            shape = SimpleNamespace(
                conv=[(memory._channels(part, tp), part.conv_kernel - 1)],
                temporal=(part.value_heads // tp, part.value_dim, part.key_dim),
            )
            params = SimpleNamespace(shape=shape, layers=[0] * part.layers)
            arguments = SimpleNamespace(speculative_num_draft_tokens=window)
            counted = engine["verify_bytes"](arguments, params, sources.float_dtype(2))
            assert memory.verify_bytes(part, tp, window, compact_tree=True) == counted


# Known figures: 1.5 of the launch notes, and published sizes.


@pytest.mark.parametrize(
    ("name", "mib"), [("qwen3.6-27b", (146.8, 73.4, 36.7, 18.4)), ("qwen3.6-35b-a3b", (61.4, 30.7, 15.4, 7.7))]
)
def test_states_in_mib(name: str, mib: tuple[float, ...]) -> None:
    recurrent = models.target(name).recurrent
    assert recurrent is not None
    assert tuple(round(memory.state_bytes(recurrent, tp) / 2**20, 1) for tp in TPS) == mib


@pytest.mark.parametrize(
    ("name", "requests", "window", "gib"),
    [
        ("qwen3.6-27b", 48, 16, (110, 55, 27.5, 13.8)),
        ("qwen3.6-27b", 16, 16, (36.7, 18.4, 9.2, 4.6)),
        ("qwen3.6-27b", 8, 23, (26.4, 13.2, 6.6, 3.3)),
        ("qwen3.6-35b-a3b", 48, 16, (46.1, 23.0, 11.5, 5.8)),
        ("qwen3.6-35b-a3b", 8, 23, (11.0, 5.5, 2.8, 1.4)),
    ],
)
def test_states_of_a_verify_in_gib(name: str, requests: int, window: int, gib: tuple[float, ...]) -> None:
    recurrent = models.target(name).recurrent
    assert recurrent is not None
    for tp, wanted in zip(TPS, gib, strict=True):
        found = requests * memory.verify_bytes(recurrent, tp, window) / GIB
        assert found == pytest.approx(wanted, abs=0.12)


@pytest.mark.parametrize(
    ("window", "branches", "megabytes"), [(1, 1, 5.2), (16, 2, 38.0), (32, 3, 72.9), (64, 4, 139.6)]
)
def test_a_compact_tree_in_megabytes(window: int, branches: int, megabytes: float) -> None:
    """27B at TP 1: two rows of 10240 channels and two numbers a head for each node and layer, a few states."""
    recurrent = models.target("qwen3.6-27b").recurrent
    assert recurrent is not None
    assert memory.branch_slots(window) == branches
    found = memory.verify_bytes(recurrent, 1, window, compact_tree=True)
    assert found / 1e6 == pytest.approx(megabytes, abs=0.1)
    # Whatever the state's own precision: branches are kept in single precision.
    assert found == memory.verify_bytes(recurrent, 1, window, compact_tree=True, ssm_bytes=2)


@pytest.mark.parametrize(
    ("name", "target", "draft"),
    [
        ("qwen3.6-27b", (64, 32, 16, 16), (20, 10, 5, 2.5)),
        ("qwen3.6-35b-a3b", (20, 10, 10, 10), (32, 16, 8, 4)),
    ],
)
def test_kv_cache_in_kib(name: str, target: tuple[float, ...], draft: tuple[float, ...]) -> None:
    model, drafter = models.target(name), models.drafter(f"{name}-dflash")
    assert tuple(memory.kv_bytes_per_token(model, tp) / 1024 for tp in TPS) == target
    assert tuple(memory.draft_kv_bytes_per_token(drafter, tp) / 1024 for tp in TPS) == draft


def test_what_early_versions_do_not_budget_for_the_drafter() -> None:
    """44 per cent above the budget on 35B-A3B at TP 1 and 2; nothing on 27B, and nothing from 0.5.18 on."""
    model, drafter = models.target("qwen3.6-35b-a3b"), models.drafter("qwen3.6-35b-a3b-dflash")
    for tp in (1, 2):
        target, draft = memory.kv_bytes_per_token(model, tp), memory.draft_kv_bytes_per_token(drafter, tp)
        early = memory.budgeted_cell(target, model.attention_layers, draft, drafter.layers, Version("0.5.17"))
        assert (target + draft) / early == pytest.approx(1.44, abs=0.01)
        late = memory.budgeted_cell(target, model.attention_layers, draft, drafter.layers, Version("0.5.18"))
        assert late == target + draft


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("qwen3.6-27b", 54), ("qwen3.6-35b-a3b", 70), ("qwen3.6-35b-a3b-fp8", 35), ("glm-5-nvfp4", 437)],
)
def test_weights_from_the_geometry_are_close_to_the_published_sizes(name: str, gigabytes: float) -> None:
    assert estimated_weight_bytes(models.target(name)) / 1e9 == pytest.approx(gigabytes, rel=0.025)


def test_weights_of_the_drafter() -> None:
    assert drafter_weight_bytes(models.drafter("qwen3.6-27b-dflash")) / 1e9 == pytest.approx(3.4, abs=0.2)
    assert drafter_weight_bytes(models.drafter("qwen3.6-27b-dflash", weight_bytes=7)) == 7


# The plan.


def test_48_running_requests_of_27b_do_not_fit_one_gpu() -> None:
    given = service(algorithm="DFLASH", max_running_requests=48)
    found = budget.plan(given, Version("0.5.11"), models.target("qwen3.6-27b"), models.drafter("qwen3.6-27b-dflash"))
    assert not found.fits
    assert "48 running requests need 110.1 GiB of recurrent states" in found.faults[0]


services = st.builds(
    service,
    algorithm=st.sampled_from(["none", "DFLASH", "DDTREE"]),
    budget=st.integers(15, 63),
    tp=st.sampled_from(TPS),
    attention_backend=st.sampled_from([None, "triton", "flashinfer"]),
    max_running_requests=st.none() | st.integers(1, 200),
    mem_fraction_static=st.none() | st.floats(0.1, 0.95),
    context_length=st.none() | st.integers(1, 300_000),
    chunked_prefill_size=st.none() | st.sampled_from([2048, 8192]),
    radix_cache=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    services,
    st.sampled_from([*HYBRIDS, "qwen3.6-35b-a3b-fp8"]),
    st.sampled_from(["0.5.11", "0.5.14", "0.5.23"]),
    st.integers(20_000, 200_000),
    st.booleans(),
)
def test_every_plan_adds_up_and_keeps_what_was_given(
    given_: Service, name: str, engine: str, mib: int, compact: bool
) -> None:
    model, drafter = models.target(name), models.drafter(name.removesuffix("-fp8") + "-dflash")
    found = budget.plan(given_, Version(engine), model, drafter, gpu_mib=mib, compact_states=compact)
    assert sum(row.bytes for row in found.rows) == found.total == mib << 20
    assert given_.max_running_requests in (None, found.running)
    assert given_.mem_fraction_static in (None, found.fraction)
    if found.fits:
        assert found.tokens >= budget.MIN_TOKENS
        assert 1 <= found.effective <= found.running
        assert all(row.bytes >= 0 for row in found.rows)
        assert math.isclose(found.fraction, round(found.fraction, 2)) or given_.mem_fraction_static is not None
    else:
        assert all(fault.isprintable() for fault in found.faults)


def test_more_memory_never_fits_less() -> None:
    model, drafter = models.target("qwen3.6-27b"), models.drafter("qwen3.6-27b-dflash")
    given = service(algorithm="DFLASH")
    plans = [
        budget.plan(given, Version("0.5.11"), model, drafter, gpu_mib=mib) for mib in range(60_000, 200_000, 4_000)
    ]
    fitting = [each.fits for each in plans]
    assert fitting == sorted(fitting)
    assert any(fitting)
    assert not all(fitting)
