"""One process of the deep checks: a rank of an all-reduce, or the import of a kernel package. Sent as its own source.

Its settings are a JSON object in argv[1]; its answer is one JSON line, the last of its stdout. It ends itself when
its time is over, whoever started it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any, Dict

_WARM, _TIMED = 2, 5


def all_reduce(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Sum a tensor over all ranks a few times: whether every sum is right, and the seconds of one."""
    import datetime

    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    cuda = settings["backend"] == "nccl"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=settings["seconds"])
    distributed.init_process_group(settings["backend"], rank=rank, world_size=world, timeout=limit)
    expected = float(world * (world + 1) // 2)
    synchronize = torch.cuda.synchronize if cuda else (lambda: None)
    right, seconds = True, 0.0
    for step in range(_WARM + _TIMED):
        tensor = torch.full((settings["bytes"] // 4,), float(rank + 1), device=device)
        synchronize()
        started = time.monotonic()
        distributed.all_reduce(tensor)
        synchronize()
        if step >= _WARM:
            seconds += time.monotonic() - started
        right = right and bool((tensor == expected).all())
    distributed.destroy_process_group()
    return {"right": right, "seconds": seconds / _TIMED}


def imports(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Import torch and then a kernel package, as the engine does."""
    started = time.monotonic()
    importlib.import_module("torch")
    importlib.import_module(settings["module"])
    return {"seconds": time.monotonic() - started}


def main() -> None:
    """Run what the settings name."""
    settings = json.loads(sys.argv[1])
    signal.alarm(int(settings["seconds"]) + 1)
    sys.path[:0] = settings["path"]
    try:
        answer = {"error": None, **{"all_reduce": all_reduce, "imports": imports}[settings["what"]](settings)}
    except BaseException as error:  # noqa: BLE001 - whatever went wrong is the answer
        lines = str(error).strip().splitlines() or [""]
        # A loader's long message names the library or symbol somewhere below its first line.
        causes = [line.strip() for line in lines[1:] if "cannot open" in line or "undefined symbol" in line][:1]
        answer = {"error": "; ".join(["%s: %s" % (type(error).__name__, lines[0]), *causes])[:600]}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    # A process group that failed may hang at exit.
    os._exit(0)
