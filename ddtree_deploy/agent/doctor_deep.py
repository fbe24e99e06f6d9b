"""The deep checks, each in processes of its own and bounded: an all-reduce over the GPUs, an import of the kernels."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
from typing import Any, Dict, List, Optional

from . import doctor_rank
from .doctor_probe import Fact, run, together

SECONDS = 60.0
BYTES = 64 * 1024 * 1024
MAX_SECONDS = 300.0
MAX_BYTES = 1024 * 1024 * 1024
_MAX_RANKS = 16
_KERNEL_PACKAGES = ("sgl_kernel", "flashinfer")
# What the engine itself sets before it starts its workers, where the environment does not say otherwise.
_ENGINE_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def gather(request: Dict[str, Any], gpu: Fact, path: List[str]) -> Fact:
    """``skipped`` (why nothing was run, or None), ``all_reduce``, ``imports``.

    ``path``: folders to import from, first. Nothing is run where another process holds a GPU that would be
    used, unless the request says ``live``.
    """
    wanted: Dict[str, Any] = request["deep"]
    environment = _environment(wanted.get("environment") or {})
    seconds = min(float(wanted.get("seconds") or SECONDS), MAX_SECONDS)
    size = min(int(wanted.get("bytes") or BYTES), MAX_BYTES)
    backend = str(wanted.get("backend") or "nccl")
    devices = gpu["devices"] if isinstance(gpu.get("devices"), list) else []
    chosen = wanted.get("gpus") or [int(device["index"]) for device in devices]
    facts: Fact = {"skipped": None, "all_reduce": None, "imports": {}}
    used = {device["uuid"] for device in devices if int(device["index"]) in chosen}
    busy = [holder for holder in gpu.get("holders") or [] if holder["gpu"] is None or holder["gpu"] in used]
    if backend == "nccl" and not devices:
        facts["skipped"] = "no GPU is known"
    elif busy and not wanted.get("live"):
        facts["skipped"] = "process %d holds a GPU" % busy[0]["pid"]
    if facts["skipped"] is None:
        facts["imports"] = {
            name: _rank({"what": "imports", "module": name, "seconds": seconds, "path": path}, environment)
            for name in _KERNEL_PACKAGES
        }
        facts["all_reduce"] = _all_reduce(chosen[:_MAX_RANKS], backend, seconds, size, path, environment)
    return facts


def _all_reduce(
    gpus: List[int], backend: str, seconds: float, size: int, path: List[str], environment: Dict[str, str]
) -> Fact:
    settings = {"what": "all_reduce", "backend": backend, "bytes": size, "seconds": seconds, "path": path}
    port = _free_port()
    actions = {}
    for rank, number in enumerate(gpus):
        own = {
            **environment,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(gpus)),
        }
        actions[str(number)] = functools.partial(_rank, settings, own)
    ranks = together(actions, seconds + 5)
    return {"backend": backend, "bytes": size, "seconds": seconds, "ranks": ranks}


def _rank(settings: Dict[str, Any], environment: Dict[str, str]) -> Fact:
    answer = run([sys.executable, "-c", _source(), json.dumps(settings)], settings["seconds"] + 2, environment)
    last = answer["out"].strip().splitlines()[-1:]
    try:
        value = json.loads(last[0]) if last and answer["error"] is None else None
    except ValueError:
        value = None
    if isinstance(value, dict) and "error" in value:
        return {"right": None, "seconds": None, **value}
    said = answer["err"].strip().splitlines()[-1:]
    if answer["status"] == -signal.SIGALRM:
        answer["error"] = "no answer within %g s" % settings["seconds"]
    why = answer["error"] or (said[0] if said else "ended with status %s" % answer["status"])
    return {"right": None, "seconds": None, "error": why[:300]}


def _source() -> str:
    loader: Any = doctor_rank.__loader__
    return str(loader.get_source(doctor_rank.__name__)) + "\nmain()\n"


def _environment(extra: Dict[str, str]) -> Dict[str, str]:
    environment = {**_ENGINE_DEFAULTS, **os.environ, **{str(name): str(value) for name, value in extra.items()}}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return environment


def _free_port() -> Optional[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
