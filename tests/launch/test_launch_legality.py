"""Models against machine, engine and each other: tests/cases/launch/legality.toml; damaged configurations."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import legality, machine
from ddtree_deploy.launch.known import Engine
from ddtree_deploy.launch.legality import Tree
from ddtree_deploy.launch.models import read_drafter, read_model
from ddtree_deploy.launch.service import Service
from ddtree_deploy.snapshots.pristine import PristineTree
from tests.launch import models, sources

FILE = Path(__file__).parent.parent / "cases" / "launch" / "legality.toml"
CASES = tomllib.loads(FILE.read_text(encoding="utf-8"))["case"]


def changed(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(models.config(name))
    for dotted, value in changes.items():
        *outer, key = dotted.split(".")
        table = config
        for part in outer:
            table = table[part]
        if value == "":
            del table[key]
        else:
            table[key] = value
    return config


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_findings(case: dict[str, Any]) -> None:
    keys = {"model": "/m", **({"drafter": "/d"} if "draft" in case else {}), **case["service"]}
    service = Service(name="s", **{key: value for key, value in keys.items() if key != "json_model_override_args"})
    if "json_model_override_args" in keys:
        service = Service.from_table("s", keys)
    drafter = read_drafter(changed(case["draft"], case.get("change_draft", {}))) if "draft" in case else None
    model = read_model(changed(case["model"], case.get("change_model", {})))
    found = legality.check(service, Version(case["engine"]), model, drafter)
    for kind, refused in (("refused", True), ("warned", False)):
        texts = [finding.text for finding in found if finding.refused is refused]
        wanted = case.get(kind, [])
        assert len(texts) == len(wanted), texts
        for text in wanted:
            texts.remove(next(each for each in texts if text in each))
    assert all(finding.text.isprintable() for finding in found)


def test_refusals_come_first() -> None:
    service = Service(name="s", model="/m", drafter="/d", algorithm="DFLASH", tp=2)
    found = legality.check(
        service, Version("0.5.11"), models.target("qwen3.6-27b"), models.drafter("qwen3.6-35b-a3b-dflash")
    )
    kinds = [finding.refused for finding in found]
    assert kinds == sorted(kinds, reverse=True)
    assert {True, False} == set(kinds)


@pytest.mark.wheel
def test_what_the_tree_shows_goes_before_the_version(engine_of: Callable[..., Engine]) -> None:
    assert engine_of("0.5.11").tree == Tree(False, False, False)
    patched = engine_of("0.5.11", patched=True).tree
    assert (patched.draft_rope_read, patched.draft_windows_honoured) == (True, False)
    for version in ("0.5.14", "0.5.18", "0.5.20", "0.5.23"):
        assert engine_of(version).tree == Tree(True, True, False)


def test_a_set_that_keeps_states_compactly_is_known_by_its_module() -> None:
    files = {"sglang/srt/speculative/ddtree_states.py": b""}
    assert Tree.of_source(files.get, Version("0.5.11")) == Tree(False, False, True)


@pytest.mark.wheel
def test_blocks_as_the_engine_checks_them(published: Callable[[str], PristineTree]) -> None:
    """Our shares against the engine's own check of a layer's partitions, for both quantised models at every size."""
    source = published("0.5.11")["sglang/srt/layers/quantization/fp8.py"]
    tp = 1
    provided = {"get_tensor_model_parallel_world_size": lambda: tp, "print_warning_once": print}
    validate = sources.run(sources.cut(source, "validate_block_quant_shapes"), provided)["validate_block_quant_shapes"]
    quantised = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=[128, 128]))
    verdicts = set()
    for name in ("qwen3.6-27b-fp8", "qwen3.6-35b-a3b-fp8"):
        model = models.target(name)
        for tp in (1, 2, 4, 8):
            for what, kind, share, block in legality._shares(model, tp, 128, 128):
                row = what == "attention's output"
                sizes = (share * tp, share, 1, 1, [1]) if row else (1, 1, share * tp, share, [share, share])
                try:
                    validate(quantised, *sizes)
                except ValueError:
                    legal = False
                else:
                    legal = True
                assert legal == (share % block == 0 or (tp == 1 and row)), (name, tp, what, kind)
                verdicts.add(legal)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("keys", "engine", "text"),
    [
        ({"attention_backend": "fa3"}, "0.5.11", "fa3 has no kernels"),
        ({"attention_backend": "trtllm_mha"}, "0.5.20", "before sglang 0.5.23"),
        ({"extra_args": ("--enable-nccl-nvls",)}, "0.5.23", "needs NVLink"),
        ({"algorithm": "DFLASH", "extra_args": ("--enable-dp-attention",)}, "0.5.22", "refuses --enable-dp-attention"),
        ({"algorithm": "DFLASH", "extra_args": ("--pp-size", "2")}, "0.5.23", "pipeline parallelism"),
        ({"algorithm": "DFLASH", "extra_args": ("--pp-size=2",)}, "0.5.23", "pipeline parallelism"),
        ({"tp": 16}, "0.5.11", "16 is not"),
        ({"tp": 24, "nodes": 3}, "0.5.11", "24 cannot be split over 3 nodes"),
    ],
)
def test_machine(keys: dict[str, Any], engine: str, text: str) -> None:
    found = list(machine.refusals(Service(name="s", model="/m", **keys), Version(engine)))
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        ({"attention_backend": "fa3", "compute_capability": "9.0"}, "0.5.11"),
        ({"attention_backend": "trtllm_mha"}, "0.5.23"),
        ({"algorithm": "DFLASH", "extra_args": ("--enable-dp-attention",)}, "0.5.23"),
        ({"algorithm": "DFLASH", "extra_args": ("--pp-size", "1")}, "0.5.11"),
        ({"extra_args": ("--pp-size", "2")}, "0.5.11"),
        ({"tp": 16, "nodes": 2, "gpus": (0, 1)}, "0.5.11"),
    ],
)
def test_machine_has_nothing_to_say(keys: dict[str, Any], engine: str) -> None:
    assert list(machine.refusals(Service(name="s", model="/m", **keys), Version(engine))) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": []}, "architectures names no class"),
        ({"architectures": "X"}, "architectures names no class"),
        ({"text_config": []}, "text_config is not a table"),
        ({"text_config.num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"text_config.num_hidden_layers": "64"}, "num_hidden_layers is '64', not a size"),
        ({"text_config.num_attention_heads": True}, "num_attention_heads is True, not a size"),
        ({"text_config.hidden_size": -1}, "hidden_size is -1"),
        ({"text_config.hidden_size": 5120.0}, "hidden_size is 5120.0"),
        ({"text_config.vocab_size": ""}, "vocab_size is None"),
        ({"text_config.layer_types": ["full_attention"]}, "layer_types does not name 64 layers"),
        ({"text_config.mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype is 'float8'"),
        ({"text_config.linear_key_head_dim": ""}, "linear_key_head_dim is None"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size is [128]"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "bits": "8"}}, "bits is '8'"),
        ({"quantization_config": "fp8"}, "quantization_config is not a table"),
    ],
)
def test_damaged_configurations(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DeployError) as caught:
        read_model(changed("qwen3.6-27b", changes), "/m/config.json")
    assert caught.value.code == "DD611"
    assert caught.value.message.startswith("/m/config.json: ")
    assert text in caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 50) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
PATHS = [(), *((key,) for key in models.config("qwen3.6-27b")), *(
    ("text_config", key) for key in models.config("qwen3.6-27b")["text_config"]
)]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), json_values)
def test_any_configuration_is_read_or_refused(path: tuple[str, ...], value: Any) -> None:
    config = copy.deepcopy(models.config("qwen3.6-27b"))
    table = config
    for part in path[:-1]:
        table = table[part]
    if path:
        table[path[-1]] = value
    elif isinstance(value, dict):
        config = value
    service = Service(name="s", model="/m", tp=8, algorithm="DFLASH", drafter="/d")
    for read in (read_model, read_drafter):
        try:
            found = read(config)
        except DeployError as error:
            assert error.code == "DD611"
            assert "\n" not in error.message
        else:
            if read is read_model:
                legality.check(service, Version("0.5.11"), found, None)
