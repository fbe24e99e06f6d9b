"""The base of the drafter's RoPE on later engines: where dflash-fixes 0002 goes along, and where the fault ended."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from tests.engine.test_draft_rope import CASES, MODEL, attributes, check_request
from tests.engine.versions import fixed_files, small_site

pytestmark = pytest.mark.wheel

FAULTY = ("0.5.12", "0.5.12.post1")
MENDED = ("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.18")
CONFIG = "sglang/srt/utils/hf_transformers/common.py"
FACTORY = "sglang/srt/layers/rotary_embedding/factory.py"


@pytest.mark.parametrize("version", FAULTY)
def test_every_layer_asks_for_the_configured_base(version, engine_tree, tmp_path):
    tree = engine_tree(version)
    fixed = small_site(tmp_path / "fixed", fixed_files(version, tree))
    stock = small_site(tmp_path / "stock", {MODEL: tree[MODEL]})
    for case in CASES:
        check_request(fixed, case)
        if "stock" in case:
            with pytest.raises((AssertionError, TypeError)):
                check_request(stock, case)


def own_function(source: bytes, name: str, provided: dict[str, object]):
    """One of the engine's own functions."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    annotations = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    exec(compile(ast.fix_missing_locations(ast.Module([annotations, *found], [])), name, "exec"), provided)
    return provided[name]


@pytest.mark.parametrize("version", MENDED)
def test_upstream_reads_the_configured_base_itself(version, engine_tree):
    """There 0002 is left out: a plain configuration gets its base, a nested one is an error and no wrong base."""
    tree = engine_tree(version)
    assert b"rope_theta, rope_scaling = get_rope_config(config)" in tree[MODEL]
    assert MODEL not in fixed_files(version, tree)
    read = own_function(tree[CONFIG], "get_rope_config", {})
    torch = SimpleNamespace(get_default_dtype=lambda: "float32")
    known = {"torch": torch, "_ROPE_DICT": {}, "_get_live_rope_cache_entry": {}.get}
    get_rope = own_function(tree[FACTORY], "get_rope", known)
    given = [SimpleNamespace(**attributes(case)) for case in CASES]
    plain = [config for config in given if "rope_theta" in (getattr(config, "rope_parameters", None) or {})]
    nested = [config for config in given if "full_attention" in (getattr(config, "rope_parameters", None) or {})]
    assert len(plain) > 3
    assert nested
    for config in plain:
        assert read(config)[0] == config.rope_parameters["rope_theta"]
    for config in nested:
        with pytest.raises((KeyError, TypeError)):
            base, scaling = read(config)
            get_rope(16, rotary_dim=16, max_position=128, base=base, rope_scaling=scaling)
