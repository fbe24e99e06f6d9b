"""The base of the drafter's RoPE: dflash-fixes 0002."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.child.bootstrap import inert_class
from tests.engine.standin import execute

pytestmark = pytest.mark.wheel

MODEL = "sglang/srt/models/dflash.py"
CASES = json.loads((Path(__file__).parents[1] / "cases" / "dflash-rope.json").read_text())["cases"]
LAYERS = 2
by_name = {"ids": lambda case: case["name"].replace(" ", "-")}


def attributes(case) -> dict:
    loaded = case["loaded"]
    if "rope_parameters" in loaded:
        return {"rope_scaling": loaded["rope_parameters"], **loaded}
    return loaded


def asked_for(site: Path, case) -> list[dict]:
    """What each layer's attention, built by the source at `site`, asks the engine's get_rope for."""
    calls: list[dict] = []
    module = execute(
        site / MODEL,
        {
            "sglang.srt.layers.rotary_embedding": {"get_rope": lambda *args, **kwargs: calls.append(kwargs)},
            "sglang.srt.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
            "torch": {"nn": SimpleNamespace(Module=object, functional=None), "no_grad": inert_class("no_grad")},
        },
    )
    config = SimpleNamespace(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, **attributes(case)
    )
    for layer in range(LAYERS):
        module.DFlashAttention(config, layer)
    return calls


def check_request(site: Path, case) -> None:
    calls = asked_for(site, case)
    assert [call["base"] for call in calls] == case["bases"]
    if "scaling" in case:
        assert [call["rope_scaling"] for call in calls] == case["scaling"]


@pytest.mark.parametrize("case", CASES, **by_name)
def test_every_layer_asks_for_the_configured_base(case, trees):
    check_request(trees["patched"], case)


@pytest.mark.parametrize("case", [case for case in CASES if "stock" in case], **by_name)
def test_stock_fails_the_same_check(case, trees):
    with pytest.raises((AssertionError, TypeError)):
        check_request(trees["stock"], case)


@pytest.mark.parametrize("case", [case for case in CASES if "stock" not in case], **by_name)
def test_what_stock_gets_right_is_unchanged(case, trees):
    assert asked_for(trees["patched"], case) == asked_for(trees["stock"], case)


@pytest.mark.torch
@pytest.mark.parametrize("case", [case for case in CASES if "checkpoint" in case], **by_name)
def test_cases_are_what_transformers_loads(case, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "num_hidden_layers": LAYERS, **case["checkpoint"]})
    )
    config = AutoConfig.from_pretrained(tmp_path)
    config.update(case.get("override", {}))
    assert {name: getattr(config, name) for name in case["loaded"]} == case["loaded"]
    assert ("rope_theta" in vars(config)) == ("rope_theta" in case["loaded"])
    assert config.rope_scaling == config.rope_parameters


@pytest.fixture(scope="module")
def built(trees, run_child) -> dict[str, list[dict]]:
    inputs = [attributes(case) for case in CASES]
    return {tree: run_child("draft_rope.py", site, inputs) for tree, site in trees.items()}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, **by_name)
def test_rope_turns_by_the_configured_base(case, built):
    rope = built["patched"][CASES.index(case)]
    assert rope["bases"] == case["bases"]
    if "scaling" not in case:
        # Pair 1 of a 16-wide head turns by base ** -(2 / 16) at position 1.
        assert rope["angles"] == pytest.approx([base ** (-2 / 16) for base in case["bases"]], rel=1e-5)
    kind = case.get("scaling", [{}])[0].get("rope_type", "default")
    expected = {
        "default": "RotaryEmbedding",
        "linear": "LinearScalingRotaryEmbedding",
        "yarn": "YaRNScalingRotaryEmbedding",
    }
    assert rope["kinds"] == [expected[kind]] * LAYERS


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, **by_name)
def test_stock_builds_what_the_case_says(case, built):
    rope = built["stock"][CASES.index(case)]
    expected = case.get("stock", case["bases"])
    assert (rope["error"] if isinstance(expected, str) else rope["bases"]) == expected


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, **by_name)
def test_fused_kv_only_where_layers_share_their_rope(case, built):
    assert built["patched"][CASES.index(case)]["fused"] == (len(set(case["bases"])) == 1)


@pytest.mark.torch
def test_the_fused_check_notices_its_absence(site_with, patched_files, run_child):
    """With the model patched and the worker not, layers that differ would be turned by the first one's angles."""
    site = site_with({MODEL: patched_files[MODEL]})
    nested = next(case for case in CASES if len(set(case["bases"])) > 1)
    assert run_child("draft_rope.py", site, [attributes(nested)])[0]["fused"] is True
