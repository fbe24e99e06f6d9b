"""The engine's flags that a service's keys write, with their names from version to version.

Names are full ones: an abbreviation that works today is an error as soon as a new flag shares its prefix.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from packaging.version import Version

OLDEST = Version("0.5.11")  # the first release with DFLASH
NEWEST = Version("0.5.23")  # the last release whose flag names were read
DEFAULT = OLDEST

# Key of the service -> the flag that it writes.
_FLAGS: Mapping[str, str] = {
    "model": "--model-path",
    "served_name": "--served-model-name",
    "revision": "--revision",
    "trust_remote_code": "--trust-remote-code",
    "quantization": "--quantization",
    "context_length": "--context-length",
    "tp": "--tp-size",
    "custom_all_reduce": "--disable-custom-all-reduce",
    "bind": "--host",
    "port": "--port",
    "algorithm": "--speculative-algorithm",
    "drafter": "--speculative-draft-model-path",
    "drafter_revision": "--speculative-draft-model-revision",
    "block_size": "--speculative-dflash-block-size",
    "draft_window": "--speculative-dflash-draft-window-size",
    "draft_attention_backend": "--speculative-draft-attention-backend",
    "budget": "--speculative-ddtree-budget",
    "topk": "--speculative-ddtree-topk",
    "allow_hybrid_unsafe": "--speculative-ddtree-allow-hybrid-unsafe",
    "shadow_linear": "--speculative-ddtree-shadow-linear",
    "radix_cache": "--disable-radix-cache",
    "mamba_scheduler_strategy": "--mamba-scheduler-strategy",
    "mamba_track_interval": "--mamba-track-interval",
    "mamba_ssm_dtype": "--mamba-ssm-dtype",
    "max_running_requests": "--max-running-requests",
    "cuda_graph_max_bs": "--cuda-graph-max-bs",
    "mem_fraction_static": "--mem-fraction-static",
    "chunked_prefill_size": "--chunked-prefill-size",
    "attention_backend": "--attention-backend",
    "kv_cache_dtype": "--kv-cache-dtype",
    "moe_runner_backend": "--moe-runner-backend",
    "reasoning_parser": "--reasoning-parser",
    "tool_call_parser": "--tool-call-parser",
    "metrics": "--enable-metrics",
    "json_model_override_args": "--json-model-override-args",
    "model_loader_extra_config": "--model-loader-extra-config",
    "engine_config": "--config",
    "nodes": "--nnodes",
    "node_rank": "--node-rank",
    "rendezvous": "--dist-init-addr",
}

# What the scheduler of several nodes fills in; no key of a service.
SCHEDULED = ("node_rank", "rendezvous")

# Keys of a drafter, and keys whose flags only the ddtree patch set adds: no release has them.
DRAFT_KEYS = ("drafter", "drafter_revision", "block_size", "draft_window", "draft_attention_backend")
DDTREE_KEYS = ("budget", "topk", "allow_hybrid_unsafe", "shadow_linear")

# Flag -> its successor and the first version that has it. The old names of these are gone from 0.5.20 on.
_RENAMED: Mapping[str, tuple[Version, str]] = {
    "--speculative-dflash-draft-window-size": (Version("0.5.12"), "--speculative-draft-window-size"),
    "--mamba-scheduler-strategy": (Version("0.5.14"), "--mamba-radix-cache-strategy"),
    "--cuda-graph-max-bs": (Version("0.5.14"), "--cuda-graph-max-bs-decode"),
}

# Other names of what a key writes.
_ALIASES: Mapping[str, str] = {
    "--model": "model",
    "--tensor-parallel-size": "tp",
    "--speculative-draft-model": "drafter",
    "--speculative-num-draft-tokens": "block_size",
}

# Flags whose value is a secret: every user of the host can read argv.
_SECRET = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")


def flag(key: str, engine: Version, installed: Container[str] | None = None) -> str:
    """The full name of the flag that ``key`` writes: in that engine version, or among the flags ``installed``.

    The installed parser's word counts where it has one of the names; the newer one goes first.
    """
    name = _FLAGS[key]
    if name not in _RENAMED:
        return name
    since, successor = _RENAMED[name]
    if installed is not None and (successor in installed) != (name in installed):
        return successor if successor in installed else name
    return successor if engine >= since else name


def renamed(name: str) -> str | None:
    """What a flag that a parser does not know is called before or after its renaming, if that is known."""
    for old, (since, new) in _RENAMED.items():
        if name == old:
            return f"{new} from sglang {since} on"
        if name == new:
            return f"{old} before sglang {since}"
    return None


def owner(argument: str) -> str | None:
    """The key of the service that writes the flag in ``argument``, or None.

    Abbreviations and names of other versions count too: the engine would take them for the same setting.
    """
    name = _flag_of(argument)
    if name is None:
        return None
    for flag_name, key in _names():
        if flag_name == name:
            return key
    return next((key for flag_name, key in _names() if flag_name.startswith(name)), None)


def secret(argument: str) -> str | None:
    """The flag in ``argument`` if its value would be a secret, abbreviated or not, else None."""
    name = _flag_of(argument)
    if name is None or name == "--ssl-keyfile":
        return None
    return name if any(known.startswith(name) for known in _SECRET) else None


def _names() -> list[tuple[str, str]]:
    names = [(name, key) for key, name in _FLAGS.items()]
    names += [(_RENAMED[name][1], key) for key, name in _FLAGS.items() if name in _RENAMED]
    return names + list(_ALIASES.items())


def _flag_of(argument: str) -> str | None:
    name = argument.partition("=")[0]
    return name if name.startswith("--") and len(name) > 2 else None
