"""Build the RoPE of each of a drafter's layers from the attributes of its configuration.

    draft_rope.py SITE < '[{"rope_theta": 1000000.0}, {"rope_parameters": {...}}, ...]'

Prints for each, by layer, the base that the RoPE names, the angle by which it turns the second pair of a
head at position 1, and its class; also whether the worker lets the layers share the fused KV path.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import bootstrap

bootstrap.install(Path(sys.argv[1]))

from sglang.srt import server_args  # noqa: E402
from sglang.srt.models import dflash  # noqa: E402
from sglang.srt.speculative import dflash_worker  # noqa: E402

HEAD_DIM = 16
LAYERS = 2


def takes_fused_path(layers) -> bool:
    """Whether the worker's own check lets these layers share one fused KV helper."""
    worker = object.__new__(dflash_worker.DFlashWorker)
    worker.__dict__.update(
        tp_rank=1,
        device="cpu",
        draft_model=SimpleNamespace(layers=layers),
        _use_fused_kv_materialize=True,
        _fused_kv_helper=None,
    )
    worker._init_fused_kv_helper()
    return worker._use_fused_kv_materialize


def report(attributes) -> dict:
    config = SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        **attributes,
    )
    layers = [SimpleNamespace(self_attn=dflash.DFlashAttention(config, layer)) for layer in range(LAYERS)]
    ropes = [layer.self_attn.rotary_emb for layer in layers]
    turned = [rope.cos_sin_cache[1].tolist() for rope in ropes]
    return {
        "bases": [rope.base for rope in ropes],
        "angles": [math.atan2(row[1 + HEAD_DIM // 2], row[1]) for row in turned],
        "kinds": [type(rope).__name__ for rope in ropes],
        "fused": takes_fused_path(layers),
    }


server_args.set_global_server_args_for_scheduler(object.__new__(server_args.ServerArgs))
# Only RoPE is under test: the projections need a process group, the fused kernel a GPU.
dflash.get_tensor_model_parallel_world_size = lambda: 1
dflash.QKVParallelLinear = dflash.RowParallelLinear = bootstrap.inert_class("Linear")
dflash.RadixAttention = lambda **kwargs: SimpleNamespace(k_scale=None, v_scale=None)
dflash_worker.can_dflash_use_fused_qkv_proj = lambda projection: (True, "")
dflash_worker._get_fused_kv_materialize_helper = lambda: SimpleNamespace

if __name__ == "__main__":
    reports = []
    for attributes in json.load(sys.stdin):
        try:
            reports.append(report(attributes))
        except TypeError as error:
            reports.append({"error": type(error).__name__})
    print(json.dumps(reports))
