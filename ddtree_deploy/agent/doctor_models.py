"""Model folders: whether every file that they name is there and whole. Headers are read, weights are not."""

from __future__ import annotations

import json
import os
import struct
from typing import Any, Dict, List

from .doctor_probe import Fact, listing, read

_MAX_CONFIG = 1024 * 1024
_MAX_INDEX = 64 * 1024 * 1024
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_FILES = 2000
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_INDEX = "model.safetensors.index.json"


def gather(folder: str) -> Fact:
    """``there``, ``config``, ``index``, ``weights`` (one object a safetensors file), ``tokenizer``, ``dangling``."""
    facts: Fact = {
        "there": os.path.isdir(folder),
        "readable": os.access(folder, os.R_OK | os.X_OK),
        "config": None,
        "config_error": None,
        "quantization": None,
        "index": None,
        "index_error": None,
        "weights": {},
        "bytes": 0,
        "tokenizer": False,
        "dangling": [],
    }
    if not facts["there"]:
        return facts
    names = listing(folder)[:_MAX_FILES]
    facts["dangling"] = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    facts["tokenizer"] = any(name.startswith("tokenizer") or name in ("vocab.json", "merges.txt") for name in names)
    facts["config"], facts["config_error"] = _json(os.path.join(folder, "config.json"), _MAX_CONFIG)
    facts["quantization"] = _json(os.path.join(folder, "hf_quant_config.json"), _MAX_CONFIG)[0]
    tensors: Dict[str, List[str]] = {}
    for name in names:
        if name.endswith(".safetensors") and name not in facts["dangling"]:
            facts["weights"][name], tensors[name] = weights(os.path.join(folder, name))
            facts["bytes"] += facts["weights"][name]["size"]
    if _INDEX in names:
        index, facts["index_error"] = _json(os.path.join(folder, _INDEX), _MAX_INDEX)
        placed = index.get("weight_map") if index else None
        if isinstance(placed, dict):
            facts["index"] = _index(placed, index, tensors)
        elif index is not None:
            facts["index_error"] = "holds no weight_map"
    return facts


def _index(placed: Dict[str, Any], index: Dict[str, Any], tensors: Dict[str, List[str]]) -> Fact:
    """The index against the files: the shards that it names, and tensors that their shard does not hold."""
    held = {name: set(listed) for name, listed in tensors.items()}
    lost = sorted(key for key, shard in placed.items() if str(shard) in held and key not in held[str(shard)])
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return {
        "shards": sorted({str(shard) for shard in placed.values()}),
        "tensors": len(placed),
        "lost": {"count": len(lost), "first": lost[:3]},
        "total_size": int(total) if isinstance(total, (int, float)) and not isinstance(total, bool) else None,
    }


def weights(path: str) -> Any:
    """``(facts, tensor names)`` of one safetensors file: its size, the size that its header promises, or a fault.

    Format: 8 bytes of little-endian header length, a JSON header with ``data_offsets`` relative to its end,
    then the data.
    """
    facts: Fact = {"size": 0, "expected": None, "error": None}
    try:
        with open(path, "rb") as handle:
            facts["size"] = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            if start and _LFS_POINTER.startswith(start):
                facts["error"] = "is a git-lfs pointer, not the weights"
                return facts, []
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _MAX_HEADER or 8 + length > facts["size"]:
                facts["error"] = "has no whole header"
                return facts, []
            header = json.loads(handle.read(length).decode("utf-8"))
            names = [name for name in header if name != "__metadata__"]
            ends = [int(header[name]["data_offsets"][1]) for name in names]
    except OSError as error:
        facts["error"] = error.strerror or str(error)
        return facts, []
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        facts["error"] = "has a damaged header"
        return facts, []
    facts["expected"] = 8 + length + max(ends or [0])
    return facts, names


def _json(path: str, limit: int) -> Any:
    """``(object, None)`` or ``(None, why not)``."""
    text = read(path, limit + 1)
    if text is None:
        return None, "cannot be read"
    if len(text) > limit:
        return None, "is larger than %d bytes" % limit
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None, "is a git-lfs pointer" if text.startswith("version https://git-lfs") else "is not JSON"
    return (value, None) if isinstance(value, dict) else (None, "is no JSON object")
