"""What a machine without NVLink, of compute capability 12.0, and the algorithms refuse, whatever the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from ddtree_deploy.launch.service import Service, illegal_tp, is_legal_tp

# Attention backends without kernels for compute capability 12.0, in all versions and before the named one.
_NOT_ON_SM120 = frozenset({"fa3", "flashmla", "cutlass_mla", "trtllm_mla"})
_LATER_ON_SM120 = {"nsa": Version("0.5.17"), "dsa": Version("0.5.17"), "trtllm_mha": Version("0.5.23")}
_ON_SM120 = ("flashinfer", "triton")
# Flags of collectives that need NVLink, NVSwitch or multicast.
_NVLINK_ONLY = (
    "--enable-flashinfer-allreduce-fusion",
    "--enable-mscclpp",
    "--enable-torch-symm-mem",
    "--enable-nccl-nvls",
    "--enable-symm-mem",
)
_DP_ATTENTION = "--enable-dp-attention"
_DP_ATTENTION_WITH_DFLASH = Version("0.5.23")


def refusals(service: Service, engine: Version) -> Iterator[str]:
    """Why this service cannot run, one sentence a reason."""
    if not is_legal_tp(service.tp, service.nodes):
        yield f"tp {illegal_tp(service.tp, service.nodes)}"
    elif service.nodes == 1 and service.gpus and len(service.gpus) < service.tp:
        yield f"tp {service.tp} needs {service.tp} GPUs, and the service lists {len(service.gpus)} in `gpus`"
    if service.compute_capability.startswith("12."):
        yield from _on_sm120(service, engine)
    if service.speculative:
        yield from _with_drafter(service, engine)


def _on_sm120(service: Service, engine: Version) -> Iterator[str]:
    where = f"compute capability {service.compute_capability}"
    allowed = " or ".join(_ON_SM120)
    for key in ("attention_backend", "draft_attention_backend"):
        backend = getattr(service, key)
        if backend in _NOT_ON_SM120:
            yield f"{key} {backend} has no kernels for {where}: use {allowed}"
    since = _LATER_ON_SM120.get(service.attention_backend or "")
    if since is not None and engine < since:
        yield (
            f"attention_backend {service.attention_backend} does not work on {where} before sglang "
            f"{since}: use {allowed}"
        )
    for argument in service.extra_args:
        if argument in _NVLINK_ONLY:
            yield f"{argument} needs NVLink, which machines with {where} do not have"


def _with_drafter(service: Service, engine: Version) -> Iterator[str]:
    """What the engine refuses beside DFLASH, which keys of ours do not write."""
    arguments = service.extra_args
    if _DP_ATTENTION in arguments and engine < _DP_ATTENTION_WITH_DFLASH:
        yield f"{service.algorithm} refuses {_DP_ATTENTION} before sglang {_DP_ATTENTION_WITH_DFLASH}"
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
        if name in ("--pp-size", "--pipeline-parallel-size") and value != "1":
            yield f"{service.algorithm} refuses pipeline parallelism ({name} {value})"
