"""Checks of what a service's command line and environment ask for, on this engine and these GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from ddtree_deploy.doctor.common import (
    capability,
    chosen,
    dotted,
    engine_version,
    fitted,
    installed_options,
    options,
    read_target,
    services,
    shown,
)
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, warning
from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.argv import build_command
from ddtree_deploy.launch.service import DDTREE

_STRATEGY = ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy")
_CHOOSES_BUFFER = Version("0.5.14")  # from here on the engine's own choice may be extra_buffer
_NVLINK_FLAGS = (
    "--enable-flashinfer-allreduce-fusion",
    "--enable-mscclpp",
    "--enable-torch-symm-mem",
    "--enable-nccl-nvls",
    "--enable-symm-mem",
)
_TRITON_KERNEL_DRIVER = (595,)
_DEEP_GEMM_OFF = Version("0.5.14")
_DEEP_GEMM_SWITCH = "SGLANG_ENABLE_JIT_DEEPGEMM"


@check("DD280")
def rendered(facts: Facts) -> Iterator[Saying]:
    engine, python = str(engine_version(facts)), facts.at("python").text("executable")
    for service in services(facts):
        try:
            build_command(fitted(service, facts), engine=engine, python=python)
        except DeployError as refusal:
            for line in refusal.details or (refusal.message.removeprefix(f"{service.name}: "),):
                yield error(
                    f"{service.name}: {line}",
                    f"sglang {engine}",
                    mend=refusal.hint or "change the service in the inventory",
                )


@check("DD281")
def extra_buffer(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        settings = service.settings
        target = read_target(service, facts) if settings.speculative and settings.radix_cache else None
        if target is None or target.recurrent is None:
            continue
        given = installed_options(service, facts)
        if given is None:
            continue  # what is not installed yet gets the flag when it is: the models are read then
        strategy = next((given[name] for name in _STRATEGY if name in given), None)
        if strategy == "no_buffer" or (strategy is None and engine_version(facts) < _CHOOSES_BUFFER):
            yield error(
                f"{service.name}: a hybrid target with the radix cache cannot speculate without extra_buffer",
                f"{target.architecture} has {target.recurrent.layers} recurrent layers; "
                f"the strategy is {strategy or 'left to the engine, which takes no_buffer'}",
                mend=f"`ddtree-deploy launch --service {service.name} --install` reads the model and adds it",
            )


@check("DD282")
def algorithm(facts: Facts) -> Iterator[Saying]:
    traits = facts.at("engine").at("traits")
    for service in services(facts):
        if service.settings.algorithm == DDTREE and not traits.flag("ddtree"):
            yield error(
                f"{service.name}: this engine has no DDTREE",
                "no release has it: the patch set ddtree brings it",
                mend="`ddtree-deploy apply ddtree`",
            )


@check("DD283")
def flags_for_other_machines(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        given = options(service, facts)
        gpus = chosen(service, facts)
        if any(capability(device)[0] == 12 for device in gpus):
            for name in _NVLINK_FLAGS:
                if name in given:
                    yield error(
                        f"{service.name}: {name} needs NVLink or GPUs of compute capability 9.0 or 10.x",
                        mend="take it out of extra_args",
                    )
        driver = dotted(facts.at("gpu").text("driver"), "gpu.driver")
        if given.get("--moe-runner-backend") == "triton_kernel" and driver >= _TRITON_KERNEL_DRIVER:
            yield error(
                f"{service.name}: moe_runner_backend triton_kernel crashes on driver {shown(driver)}",
                "segmentation faults on Blackwell from driver 595 on",
                mend='set moe_runner_backend = "triton"',
            )
        if service.settings.tp > 2 and service.settings.custom_all_reduce:
            yield warning(
                f"{service.name}: custom all-reduce has no effect over PCIe above two GPUs",
                mend="take custom_all_reduce out of the service",
            )


@check("DD284")
def wrong_kernels(facts: Facts) -> Iterator[Saying]:
    engine = engine_version(facts)
    for service in services(facts):
        if engine >= _DEEP_GEMM_OFF or not any(capability(device)[0] == 12 for device in chosen(service, facts)):
            continue
        own = service.settings.environment.get(_DEEP_GEMM_SWITCH)
        # Rendered for these GPUs, the environment has the switch; one's own setting wins over it.
        if own not in (None, "0", "false", "False"):
            yield error(
                f"{service.name}: {_DEEP_GEMM_SWITCH}={own} gives wrong results on compute capability 12.0",
                f"sglang {engine} takes it for 10.0; off by itself from {_DEEP_GEMM_OFF} on",
                mend=f"take {_DEEP_GEMM_SWITCH} out of the service's environment",
            )
