"""The environment that a service's engine runs in, each variable with its reason. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import Version

from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.service import Service

_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_DEEP_GEMM_OFF_ON_SM120 = Version("0.5.14")


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable, why it is set, and what would change it."""

    name: str
    value: str
    reason: str
    change: str


def settings(service: Service, engine: Version, interpreter: str, known: Known) -> Iterator[Setting]:
    """What is set by default, then what the service sets; the service's word goes before a default."""
    own = service.environment
    for setting in _defaults(service, engine, interpreter, known):
        if setting.name not in own:
            yield setting
    for name, value in own.items():
        yield Setting(name, value, "set in the inventory", "`environment`")


def _defaults(service: Service, engine: Version, interpreter: str, known: Known) -> Iterator[Setting]:
    folders = dict.fromkeys((posixpath.dirname(interpreter), f"{service.cuda_home}/bin", *_SYSTEM_PATH))
    yield Setting(
        "PATH",
        ":".join(folders),
        "kernels are compiled at run time: ninja of the venv, and nvcc",
        "`python`, `cuda_home` or `environment`",
    )
    yield Setting(
        "CUDA_HOME", service.cuda_home, "where run-time compilation finds nvcc and the headers", "`cuda_home`"
    )
    if service.gpus:
        yield Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPU numbers mean what nvidia-smi shows", "`gpus` left out")
        visible = ",".join(str(gpu) for gpu in service.gpus[: service.gpus_per_node])
        yield Setting("CUDA_VISIBLE_DEVICES", visible, "the GPUs of this service", "`gpus` or `tp`")
    if service.tp > 1 and service.nodes == 1:
        yield Setting("NCCL_IB_DISABLE", "1", "one host: no InfiniBand to look for", "more than one of `nodes`")
    if service.gpus_per_node > 1:
        yield Setting("NCCL_P2P_LEVEL", "SYS", "peer-to-peer over PCIe, across sockets too", "`environment`, or tp 1")
    yield Setting("OMP_NUM_THREADS", "8", "each rank would else start a thread on every core", "`environment`")
    if service.speculative and _drafter_is_shorter(service, known):
        yield Setting(
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
            "1",
            "drafters are trained on shorter contexts than the target serves"
            if known.drafter is None
            else f"the drafter has {known.drafter.context} positions, less than requests may have",
            "`context_length` within the drafter's",
        )
    if engine < _DEEP_GEMM_OFF_ON_SM120 and service.compute_capability.startswith("12."):
        yield Setting(
            "SGLANG_ENABLE_JIT_DEEPGEMM",
            "0",
            "takes capability 12.0 for 10.0 and gives wrong results",
            f"sglang {_DEEP_GEMM_OFF_ON_SM120} or later, or another `compute_capability`",
        )


def _drafter_is_shorter(service: Service, known: Known) -> bool:
    """Whether the drafter's positions may be fewer than a request's; assumed where a configuration was not read."""
    wanted = service.context_length or (None if known.model is None else known.model.context)
    return known.drafter is None or wanted is None or known.drafter.context < wanted
