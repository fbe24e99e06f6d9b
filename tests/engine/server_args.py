"""The engine's ServerArgs, its handlers run in the engine's own order for a given model and GPU: no torch needed."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tests.engine.standin import execute

ENGINE_ARGS = "sglang/srt/server_args.py"
DDTREE_ARGS = "sglang/srt/speculative/ddtree_args.py"

# Of the handlers that `__post_init__` calls, those that this set's decisions depend on, or that it changes.
HANDLERS = {
    "_handle_missing_default_values",
    "_handle_model_specific_adjustments",
    "_handle_attention_backend_compatibility",
    "_handle_mamba_backend",
    "_handle_linear_attn_backend",
    "_handle_page_size",
    "_handle_speculative_decoding",
}


class UnsetVariables:
    """The engine's environment variables, none of them set."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: False, is_set=lambda: False, set=lambda value: None)


def model(arch: str = "Qwen3ForCausalLM", *, swa: bool = False) -> SimpleNamespace:
    """A target's configuration as far as the arguments depend on it."""
    config = SimpleNamespace(architectures=[arch], num_hidden_layers=4)
    config.get_text_config = lambda: config
    return SimpleNamespace(
        hf_config=config,
        hf_text_config=config,
        is_hybrid_swa=swa,
        is_encoder_decoder=False,
        has_attention_sinks=False,
        is_multimodal=False,
        attention_arch="MHA",
        quantization=None,
    )


def load(site: Path, *, gpu: str = "hopper", draft_block: int | None = 16) -> ModuleType:
    """The module `server_args` of a site. `gpu`: hopper, blackwell or none; `draft_block`: the drafter's own."""
    common = {
        "LORA_TARGET_ALL_MODULES": "all",
        "SUPPORTED_LORA_TARGET_MODULES": [],
        "is_cuda": lambda: gpu != "none",
        "is_hopper_with_cuda_12_3": lambda: gpu == "hopper",
        "is_sm90_supported": lambda: gpu == "hopper",
        "is_sm100_supported": lambda: gpu == "blackwell",
        "is_blackwell_supported": lambda: gpu == "blackwell",
        "is_sm120_supported": lambda: False,
        "is_flashinfer_available": lambda: gpu != "none",
        "is_no_spec_infer_or_topk_one": lambda args: args.speculative_eagle_topk in (None, 1),
        "get_device": lambda: "cuda",
        "get_device_memory_capacity": lambda device: 141_000,
        "get_device_name": lambda: gpu,
        "parse_connector_type": lambda path: None,
        "get_quantization_config": lambda config: None,
        "json_list_type": str,
        "nullable_str": str,
        **{f"is_{name}": (lambda: False) for name in ("cpu", "hip", "mps", "musa", "npu", "xpu")},
    }
    provided = {
        "sglang.srt.utils.common": common,
        "sglang.srt.utils": common,
        "sglang.srt.layers.attention.fla.chunk_delta_h": {"CHUNK_SIZE": 64},
        "sglang.srt.configs.linear_attn_model_registry": {"get_linear_attn_spec_by_arch": lambda arch: None},
        "sglang.srt.configs.model_config": {
            "AttentionArch": SimpleNamespace(MLA="MLA"),
            "is_deepseek_nsa": lambda config: False,
        },
        "sglang.srt.connector": {"ConnectorType": SimpleNamespace(INSTANCE="instance")},
        "sglang.srt.environ": {"envs": UnsetVariables()},
        "sglang.srt.platforms": {
            "current_platform": SimpleNamespace(
                apply_server_args_defaults=lambda args: None, is_out_of_tree=lambda: False
            )
        },
        "sglang.srt.layers.moe.utils": {
            "MoeRunnerBackend": lambda name: SimpleNamespace(is_flashinfer_trtllm=lambda: False)
        },
        "sglang.srt.function_call.function_call_parser": {"FunctionCallParser": SimpleNamespace(ToolCallParserEnum={})},
        "sglang.srt.parser.reasoning_parser": {"ReasoningParser": SimpleNamespace(DetectorMap={})},
        "sglang.srt.utils.hf_transformers_utils": {"get_config": lambda path, **kwargs: draft_block},
        "sglang.srt.speculative.dflash_utils": {
            "parse_dflash_draft_config": lambda draft_hf_config: SimpleNamespace(
                resolve_block_size=lambda default: draft_hf_config or default
            )
        },
        "torch": {"cuda": SimpleNamespace(is_available=lambda: False)},
    }
    if (site / DDTREE_ARGS).exists():
        provided["sglang.srt.speculative.ddtree_args"] = vars(execute(site / DDTREE_ARGS, provided))
    module = execute(site / ENGINE_ARGS, provided)
    for name in vars(module.ServerArgs).copy():
        if name.startswith("_handle_") and name not in HANDLERS and name != "_handle_mamba_radix_cache":
            setattr(module.ServerArgs, name, lambda self, *args: None)
    module.ServerArgs._maybe_download_model_for_runai = lambda self: None
    return module


def parse(module: ModuleType, flags: Iterable[str], target: SimpleNamespace | None = None):
    """ServerArgs as the engine's command line makes them of `flags`, all handlers having run."""
    module.ServerArgs.get_model_config = lambda self: target or model()
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.ServerArgs.add_cli_args(parser)
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
    return module.ServerArgs.from_cli_args(parser.parse_args(["--model-path", "target", *flags]))
