"""Why an engine did not get ready: what its log's known messages mean, and what mends them. Pure.

From the engine's sources and public reports; the row that fits the most specific message comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """A known cause: what happened, what to do, and the log line that says so."""

    what: str
    mend: str
    line: str


_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"attention\.hpp:\d+.*Unsupported architecture|Unsupported architecture.*attention\.hpp",
        "DeepGEMM has no kernels of this GPU for the model's sparse attention",
        "use sglang 0.5.17 or later with FlashInfer 0.6.14 or later",
    ),
    (
        r"Could not load any common_ops library|lib(cudart|nvrtc)\.so\.\d+: cannot open shared object|"
        r"common_ops.*undefined symbol|libnuma\.so\.1",
        "the kernel wheel does not fit torch, or a shared library of CUDA is missing",
        "run `doctor`: it compares the CUDA versions of torch and of the kernel wheel",
    ),
    (
        r"No supported CUDA architectures found for major versions|FlashInfer requires GPUs with sm75|"
        r"SM ?12\.?x requires CUDA >= 12\.9",
        "FlashInfer found no compiler for this GPU",
        "install nvcc 12.9 or later and set cuda_home in the service",
    ),
    (
        r"ptxas fatal\s*: Value 'sm_\w+' is not defined",
        "an old ptxas was picked up",
        "unset TRITON_PTXAS_PATH, or point it to the ptxas of CUDA 12.9 or later",
    ),
    (
        r"out of resource: shared memory|OutOfResources.*shared memory",
        "a triton kernel wants more shared memory than this GPU has",
        "take another backend, or tile sizes for this compute capability",
    ),
    (
        r"Capture cuda graph failed|Capturing CUDA graph failed",
        "capturing the CUDA graphs failed, mostly for want of memory",
        "lower mem_fraction_static or cuda_graph_max_bs",
    ),
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "no memory is left for the KV pool after the weights",
        "raise mem_fraction_static, or lower max_running_requests: each reserves recurrent state",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation",
        "a GPU ran out of memory",
        "see who else holds it (`doctor`); then lower max_running_requests or mem_fraction_static",
    ),
    (
        r"address already in use|Errno 98",
        "the port is taken",
        "stop what listens there, or give the service another port",
    ),
    (
        r"unrecognized arguments: .*|ambiguous option: .*|argument --[\w-]+: invalid choice: .*",
        "the installed engine does not know a flag of the command",
        "render for the version that is installed (`--engine`); DDTREE needs the set ddtree applied there",
    ),
    (
        r"allow-hybrid-unsafe|speculative-ddtree-allow-hybrid-unsafe",
        "the guard of DDTREE refused this hybrid target",
        "its message names the precondition that was not met",
    ),
    (
        r"Repository Not Found|GatedRepoError|is not a local folder and is not a valid model identifier",
        "the model or drafter was not found",
        "give a folder on the host as model and drafter",
    ),
    (
        r"No such file or directory: '[^']*(config\.json|\.safetensors)'|does not appear to have a file named config",
        "the model folder is not whole",
        "check the path and that every shard is there",
    ),
    (
        r"No module named",
        "a Python module is missing in the engine's environment",
        "is `python` in the inventory the engine's own interpreter?",
    ),
    (
        r"Failed to load environment files",
        "a file of the service's environment is missing",
        "create the secrets file (mode 0600), or install again",
    ),
    (
        r"status=203/EXEC|Failed to execute|Unable to locate executable",
        "the program of the unit cannot be executed",
        "is `python` in the inventory the engine's interpreter on this host?",
    ),
    (
        r"status=217/USER|Failed to determine (?:user credentials|supplementary groups)",
        "the user or group of the unit does not exist on the host",
        "create it, or name another one in the service",
    ),
    (
        r"status=200/CHDIR|Changing to the requested working directory failed",
        "the working directory does not exist or may not be entered",
        "create it, or set working_directory in the service",
    ),
    (
        r"unhandled (system|cuda) error|NCCL WARN|ncclSystemError|ncclUnhandledCudaError",
        "NCCL could not set up communication between the GPUs",
        "look at /dev/shm, memlock, IOMMU and ACS (`doctor`); NCCL_P2P_DISABLE=1 tells whether P2P is the cause",
    ),
    (
        r"Initialization failed\. warmup error|[Ww]arm ?up.*(?:fail|timed out)",
        "the first request after loading failed",
        "the lines above it say why; SGLANG_WARMUP_TIMEOUT gives it more time",
    ),
    (
        r"A process of this unit has been killed by the OOM killer|oom-kill",
        "the host ran out of memory",
        "page cache counts: no MemoryMax below the model's size; see who else uses the memory",
    ),
    (
        r"Received sigquit from a child process|Killing the process tree|scheduler.*died",
        "a worker process of the engine crashed and took the others along",
        "its own traceback is above, in the log",
    ),
)
_COMPILED = tuple((re.compile(pattern), what, mend) for pattern, what, mend in _KNOWN)
_ERROR = re.compile(r"^\s*(?:\[[^\]]*\]\s*)?(?:[A-Za-z_.]+(?:Error|Exception)\b|error:|fatal:)", re.IGNORECASE)


def find_cause(log: Iterable[str]) -> Cause | None:
    """The first known cause, by the table's order, in a service's log; None where no line is known."""
    lines = list(log)
    for pattern, what, mend in _COMPILED:
        for line in lines:
            if pattern.search(line):
                return Cause(what, mend, line.strip())
    return None


def telling_lines(log: Iterable[str], limit: int = 12) -> list[str]:
    """The lines to show of a log: its last ones, and before them the last that looks like an exception."""
    lines = [line.rstrip() for line in log if line.strip()]
    tail = lines[-limit:]
    errors = [line for line in lines[:-limit] if _ERROR.search(line)]
    return [*errors[-1:], *tail]
