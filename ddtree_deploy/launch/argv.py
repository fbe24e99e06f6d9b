"""From a service to the argv and environment that serve it, each part with its reason. Pure.

The rules are those of an 8-GPU PCIe box with compute capability 12.0; a service may say otherwise. What cannot
be known without the host and its models is listed in :attr:`Command.notes`, never assumed in silence.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import flags, quoting
from ddtree_deploy.launch.service import DDTREE, LEGAL_TP, Service, illegal_tp

_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Attention backends without kernels for compute capability 12.0, in all versions and before the named one.
_NOT_ON_SM120 = frozenset({"fa3", "flashmla", "cutlass_mla", "trtllm_mla"})
_LATER_ON_SM120 = {"nsa": Version("0.5.17"), "dsa": Version("0.5.17"), "trtllm_mha": Version("0.5.23")}
_ON_SM120 = ("flashinfer", "triton")
_DEEP_GEMM_OFF_ON_SM120 = Version("0.5.14")
_DRAFTER_ROPE_READ = Version("0.5.13")


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag with its value, or a flag alone, and why it is there."""

    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable and why it is set."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, with what environment; ``notes`` say what was not checked or must be done by hand."""

    service: Service
    engine: Version
    program: tuple[str, ...]
    arguments: tuple[Argument, ...]
    environment: tuple[Setting, ...]
    notes: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole argument vector, the interpreter first."""
        return (*self.program, *(word for argument in self.arguments for word in argument.words))


def build_command(
    service: Service, *, tp: int | None = None, engine: str | None = None, python: str | None = None
) -> Command:
    """The command of ``service`` at ``tp`` GPUs, with the flag names of that engine version.

    What is None comes from the service. Raises :class:`DeployError`: ``DD601`` if something needed is missing
    or malformed, ``DD602`` if the machine or the engine cannot do it; ``details`` has every reason when there
    are several.
    """
    version = _engine_version(service, engine)
    service = service if tp is None else replace(service, tp=tp)
    refused = list(_refusals(service, version))
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise DeployError("DD602", f"{service.name}: {refused[0]}{more}", details=refused if more else ())
    interpreter = python or service.python
    if interpreter is None:
        raise DeployError(
            "DD601",
            f"{service.name}: no interpreter for the engine",
            hint="set `python` in the service or in its host, such as /opt/sglang/venv/bin/python",
        )
    quoting.exec_program(interpreter)
    if ":" in interpreter:
        raise DeployError("DD601", f"{service.name}: {interpreter!a} cannot go into PATH: it holds ':'")
    return Command(
        service=service,
        engine=version,
        program=(interpreter, "-m", "sglang.launch_server"),
        arguments=tuple(_arguments(service, version)),
        environment=tuple(_environment(service, version, interpreter)),
        notes=tuple(_notes(service, version)),
    )


def _engine_version(service: Service, engine: str | None) -> Version:
    named = engine or service.engine
    try:
        version = flags.DEFAULT if named is None else Version(named)
    except InvalidVersion:
        raise DeployError("DD601", f"{named!a} is not an engine version such as {flags.DEFAULT}") from None
    if version < flags.OLDEST:
        raise DeployError(
            "DD602",
            f"{service.name}: sglang {version} is older than {flags.OLDEST}, the first release with DFLASH",
        )
    return version


def _refusals(service: Service, engine: Version) -> Iterator[str]:
    if service.tp not in LEGAL_TP:
        yield f"tp {illegal_tp(service.tp)}"
    elif service.gpus and len(service.gpus) < service.tp:
        yield f"tp {service.tp} needs {service.tp} GPUs, and the service lists {len(service.gpus)} in `gpus`"
    if service.compute_capability.startswith("12."):
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


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the flags of one service in the names of one engine version."""

    service: Service
    engine: Version

    def value(self, key: str, reason: str) -> Iterator[Argument]:
        """The flag of ``key`` with the service's value, if it has one."""
        value = getattr(self.service, key)
        if value is not None:
            yield self.fixed(key, str(value), reason)

    def switch(self, key: str, on: bool, reason: str) -> Iterator[Argument]:
        """The flag of ``key`` without a value, if ``on``."""
        if on:
            yield Argument((flags.flag(key, self.engine),), reason)

    def fixed(self, key: str, value: str, reason: str) -> Argument:
        """The flag of ``key`` with this value."""
        return Argument((flags.flag(key, self.engine), value), reason)


def _arguments(service: Service, engine: Version) -> Iterator[Argument]:
    write = _Writer(service, engine)
    yield from write.value("engine_config", "settings that must not be in argv; the command line wins over it")
    yield from write.value("model", "the target")
    yield from write.value("served_name", "the name that clients ask for")
    yield from write.value("revision", "pins the target's weights")
    yield from write.switch(
        "trust_remote_code", service.trust_remote_code, "classes may come from the model's or drafter's folder"
    )
    yield from write.value("quantization", "set in the inventory; the drafter inherits it")
    yield from write.value("kv_cache_dtype", "set in the inventory; the engine's choice without it")
    yield from write.value("context_length", "the longest request; the model's own length without it")
    yield from write.value("bind", "the address to listen on")
    yield from write.value("port", "the port to listen on")
    yield from write.value("tp", "the GPUs that the model is split over")
    yield from write.switch(
        "custom_all_reduce",
        service.tp > 2 if service.custom_all_reduce is None else not service.custom_all_reduce,
        "custom all-reduce needs NVLink above two GPUs; over PCIe NCCL does it",
    )
    if service.speculative:
        yield from _speculation(write)
    yield from _recurrent(write)
    yield from write.value("attention_backend", "set in the inventory; the engine's choice without it")
    yield from write.value("moe_runner_backend", "set in the inventory; the engine's choice without it")
    yield write.fixed(
        "max_running_requests",
        str(service.running_requests),
        "the engine's own 48 would reserve recurrent state for 48 verify windows",
    )
    yield write.fixed(
        "cuda_graph_max_bs",
        str(service.cuda_graph_max_bs or service.running_requests),
        "no batch is larger than the running requests: larger graphs only take memory",
    )
    yield from write.value("mem_fraction_static", "share of GPU memory for weights, state and KV cache")
    yield from write.value("chunked_prefill_size", "tokens of one prefill chunk: bounds the activations")
    yield from write.value("reasoning_parser", "splits the model's reasoning from its answer")
    yield from write.value("tool_call_parser", "reads the model's tool calls")
    yield from write.switch("metrics", service.metrics, "/metrics, with the accept length of speculation")
    yield from write.value("json_model_override_args", "set in the inventory; goes to target and drafter")
    yield from write.value("model_loader_extra_config", "set in the inventory; how weights are loaded")
    if service.extra_args:
        yield Argument(service.extra_args, "`extra_args` of the inventory, as they stand")


def _speculation(write: _Writer) -> Iterator[Argument]:
    service = write.service
    yield from write.value("algorithm", "how the drafter's tokens are laid out and verified")
    yield from write.value("drafter", "the drafter")
    yield from write.value("drafter_revision", "pins the drafter's weights")
    yield from write.value("block_size", "positions that the drafter fills in at once")
    yield from write.value("draft_window", "the drafter attends to so many tokens only")
    yield from write.value("draft_attention_backend", "set in the inventory; the engine's choice without it")
    if service.algorithm == DDTREE:
        yield from write.value("budget", "tree nodes that one verify takes")
        yield from write.value("topk", "candidates for each position of the tree")
        yield from write.switch(
            "allow_hybrid_unsafe",
            service.allow_hybrid_unsafe,
            "starts a hybrid target even where exactness was not verified",
        )
        yield from write.switch(
            "shadow_linear", service.shadow_linear, "drafts the tree and logs it, but serves the chain"
        )


def _recurrent(write: _Writer) -> Iterator[Argument]:
    service = write.service
    yield from write.switch("radix_cache", not service.radix_cache, "set in the inventory: no prefix is reused")
    if service.mamba_scheduler_strategy is not None:
        yield from write.value("mamba_scheduler_strategy", "set in the inventory")
    elif service.hybrid and service.speculative and service.radix_cache:
        yield write.fixed(
            "mamba_scheduler_strategy",
            "extra_buffer",
            "a hybrid target with the radix cache cannot speculate without the extra buffer",
        )
    yield from write.value("mamba_track_interval", "set in the inventory: tokens between saved states")
    yield from write.value("mamba_ssm_dtype", "set in the inventory: precision of the recurrent state")


def _environment(service: Service, engine: Version, interpreter: str) -> Iterator[Setting]:
    own = service.environment
    for setting in _default_environment(service, engine, interpreter):
        if setting.name not in own:
            yield setting
    for name, value in own.items():
        yield Setting(name, value, "set in the inventory")


def _default_environment(service: Service, engine: Version, interpreter: str) -> Iterator[Setting]:
    folders = dict.fromkeys((posixpath.dirname(interpreter), f"{service.cuda_home}/bin", *_SYSTEM_PATH))
    yield Setting("PATH", ":".join(folders), "kernels are compiled at run time: ninja of the venv, and nvcc")
    yield Setting("CUDA_HOME", service.cuda_home, "where run-time compilation finds nvcc and the headers")
    if service.gpus:
        yield Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPU numbers mean what nvidia-smi shows")
        visible = ",".join(str(gpu) for gpu in service.gpus[: service.tp])
        yield Setting("CUDA_VISIBLE_DEVICES", visible, "the GPUs of this service")
    if service.tp > 1:
        yield Setting("NCCL_IB_DISABLE", "1", "one host: no InfiniBand to look for")
        yield Setting("NCCL_P2P_LEVEL", "SYS", "peer-to-peer over PCIe, across sockets too")
    yield Setting("OMP_NUM_THREADS", "8", "each rank would else start a thread on every core")
    if service.speculative:
        yield Setting(
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
            "1",
            "drafters are trained on shorter contexts than the target serves",
        )
    if engine < _DEEP_GEMM_OFF_ON_SM120 and service.compute_capability.startswith("12."):
        yield Setting("SGLANG_ENABLE_JIT_DEEPGEMM", "0", "takes capability 12.0 for 10.0 and gives wrong results")


def _notes(service: Service, engine: Version) -> Iterator[str]:
    yield f"flag names are those of sglang {engine}; the version that is installed was not read"
    if engine > flags.NEWEST:
        yield f"sglang {engine} is newer than {flags.NEWEST}, the last version whose flags are known"
    if service.algorithm == DDTREE:
        yield "not checked: that the host's engine has DDTREE; no release has, see `ddtree-deploy status`"
    if not service.gpus:
        yield f"not checked: that the host has {service.tp} GPUs; `gpus` lists none"
    yield f"not checked: the model's heads, experts and quantisation blocks against tp {service.tp}"
    yield (
        f"not checked: that weights, KV cache and state of {service.running_requests} running requests "
        "fit the GPUs' memory"
    )
    if service.speculative:
        yield "not checked: the drafter's layers, sizes, vocabulary and context against the target"
        if service.hybrid is None:
            yield (
                "not checked: whether the target has recurrent layers; set `hybrid`, since then it needs "
                "the extra_buffer strategy"
            )
        if engine < _DRAFTER_ROPE_READ and '"rope_theta"' not in (service.json_model_override_args or ""):
            yield (
                f"sglang {engine} reads the drafter's rope base wrong where its config has rope_parameters: "
                "apply patch set dflash-fixes, or set rope_theta in `json_model_override_args`"
            )
    unused: tuple[str, ...] = () if service.algorithm == DDTREE else flags.DDTREE_KEYS
    unused += () if service.speculative else flags.DRAFT_KEYS
    for key in unused:
        if getattr(service, key):
            yield f"`{key}` has no effect: the algorithm is {service.algorithm}"
    if service.user is None:
        yield "no `user` is set: the unit runs the engine as root"
