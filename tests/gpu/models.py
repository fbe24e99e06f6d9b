"""Targets that are made on the machine.

One of the fixture's layout at a realistic size, and a drafter for it: the engine draws the weights itself
(`load_format="dummy"`). Nothing is accepted with them, but a round costs what it costs.

One without recurrent layers that takes the fixture's drafters: random weights, wide enough for the likeliest
token to be clear. Only what is put among the drafts on purpose is accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 32
_HIDDEN = 2560
_VOCABULARY = 151936

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": _HIDDEN,
    "shared_expert_intermediate_size": _HIDDEN,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "norm_topk_prob": True,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(LAYERS)],
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": 16,
    "num_target_layers": LAYERS,
    "dflash_config": {"mask_token": "<|MASK|>", "mask_token_id": 1, "target_layer_ids": [1, 8, 15, 22, 29]},
}

ATTENTION: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_SPREAD = 0.08


def attention_shapes() -> dict[str, tuple[int, ...]]:
    """The attention-only target's weights by name; those of one dimension are all ones."""
    hidden, inner, head = ATTENTION["hidden_size"], ATTENTION["intermediate_size"], ATTENTION["head_dim"]
    queries, keys = ATTENTION["num_attention_heads"] * head, ATTENTION["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (ATTENTION["vocab_size"], hidden),
        "lm_head.weight": (ATTENTION["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(ATTENTION["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def write_attention(models: Path) -> None:
    """Make the folder `attention`, the same on every machine."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) * _SPREAD
        for name, shape in attention_shapes().items()
    }
    (models / "attention").mkdir(parents=True, exist_ok=True)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        models / "attention/model.safetensors",
        metadata={"format": "pt"},
    )
    (models / "attention/config.json").write_text(json.dumps(ATTENTION))


def parameters() -> int:
    """The target's parameters, from its layout; biases, norms and other vectors left out."""
    hidden = _HIDDEN
    experts = (TARGET["num_experts"] + 1) * 3 * hidden * TARGET["moe_intermediate_size"]
    keys = TARGET["linear_num_key_heads"] * TARGET["linear_key_head_dim"]
    values = TARGET["linear_num_value_heads"] * TARGET["linear_value_head_dim"]
    linear = hidden * (2 * keys + 2 * values) + values * hidden
    heads, shared = TARGET["num_attention_heads"], TARGET["num_key_value_heads"]
    full = hidden * TARGET["head_dim"] * (2 * heads + 2 * shared) + heads * TARGET["head_dim"] * hidden
    full_layers = TARGET["layer_types"].count("full_attention")
    mixing = full_layers * full + (LAYERS - full_layers) * linear
    return mixing + LAYERS * experts + 2 * _VOCABULARY * hidden


def write(models: Path) -> None:
    """Write the folders of the large target and its drafter, `large` and `large-draft`."""
    for name, config in (("large", TARGET), ("large-draft", DRAFTER)):
        (models / name).mkdir(parents=True, exist_ok=True)
        (models / name / "config.json").write_text(json.dumps(config))
