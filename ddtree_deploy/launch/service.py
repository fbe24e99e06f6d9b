"""A service of the inventory: what to serve, how, and as whom; read strictly from its TOML table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import flags, quoting
from ddtree_deploy.wording import did_you_mean, toml_type

DDTREE, DFLASH, NO_SPECULATION = "DDTREE", "DFLASH", "none"
LEGAL_TP = (1, 2, 4, 8)
LEGAL_TP_OF_NODES = (2, 4, 8, 16, 32, 64)
GPUS_OF_A_NODE = 8
MAX_RUNNING_REQUESTS = 16
ENGINE_RUNNING_REQUESTS = 48  # the engine's own under DFLASH
BLOCK_SIZE = 16  # the engine's own fallback where neither flag nor draft config says one
TRACK_INTERVAL = 256  # the engine's default of --mamba-track-interval

# Attention backends whose verify takes a tree mask.
TREE_BACKENDS = ("triton",)

_SERVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,30}")
_BIND = re.compile(r"[A-Za-z0-9:][A-Za-z0-9_.:%-]*")
_CHOICE_WORD = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]")
_SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "APIKEY", "CREDENTIAL", "CREDENTIALS"})
_SECRET_IN_URL = re.compile(r"://[^/@\s:]*:[^/@\s]+@")


@dataclass(frozen=True, slots=True)
class Service:
    """One ``[services.NAME]`` table. ``None`` leaves the choice to the engine, unless said otherwise.

    Sizes are in tokens, requests or GPUs, as the engine's flag of the same name has them.
    """

    name: str
    model: str
    host: str | None = None  # the inventory host it runs on
    engine: str | None = None  # version whose flag names are rendered; None: flags.DEFAULT
    python: str | None = None  # the engine's interpreter; None: the host's
    served_name: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    context_length: int | None = None

    algorithm: str = NO_SPECULATION
    drafter: str | None = None
    drafter_revision: str | None = None
    block_size: int | None = None
    draft_window: int | None = None
    draft_attention_backend: str | None = None
    budget: int | None = None
    topk: int | None = None
    allow_hybrid_unsafe: bool = False
    shadow_linear: bool = False

    hybrid: bool | None = None  # whether the target has recurrent layers; None: not known
    radix_cache: bool = True
    mamba_scheduler_strategy: str | None = None
    mamba_track_interval: int | None = None
    mamba_ssm_dtype: str | None = None

    tp: int = 1  # over all nodes
    nodes: int = 1  # more than one needs a scheduler: Slurm or Kubernetes
    rendezvous_port: int = 20000  # where the ranks of several nodes meet, on the first of them
    image: str | None = None  # container image, for Kubernetes
    gpu_memory_mib: int | None = None  # of one GPU, as nvidia-smi shows it; None: an RTX PRO 6000's
    gpus: tuple[int, ...] = ()  # empty: all GPUs of the host, none hidden; not used under a scheduler
    compute_capability: str = "12.0"
    custom_all_reduce: bool | None = None  # None: off above two GPUs

    bind: str = "127.0.0.1"
    port: int = 30000
    max_running_requests: int | None = None  # None: MAX_RUNNING_REQUESTS, always passed
    cuda_graph_max_bs: int | None = None  # None: max_running_requests
    mem_fraction_static: float | None = None
    chunked_prefill_size: int | None = None  # -1: not chunked
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    moe_runner_backend: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    metrics: bool = True
    json_model_override_args: str | None = None  # JSON text
    model_loader_extra_config: str | None = None  # JSON text
    engine_config: str | None = None  # YAML on the host, for what must not be in argv
    extra_args: tuple[str, ...] = ()

    user: str | None = None
    group: str | None = None
    working_directory: str = "/"
    cuda_home: str = "/usr/local/cuda"
    environment_directory: str = "/etc/sglang"
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # names of variables that the operator's secrets file sets

    @property
    def speculative(self) -> bool:
        """Whether a drafter runs."""
        return self.algorithm != NO_SPECULATION

    @property
    def gpus_per_node(self) -> int:
        """GPUs that the service takes on each of its nodes."""
        return max(self.tp // self.nodes, 1)

    @property
    def running_requests(self) -> int:
        """The ``--max-running-requests`` that is passed."""
        return MAX_RUNNING_REQUESTS if self.max_running_requests is None else self.max_running_requests

    @property
    def verifies_trees(self) -> bool:
        """Whether trees are verified, not only drafted."""
        return self.algorithm == DDTREE and not self.shadow_linear

    @property
    def verify_tokens(self) -> int:
        """Tokens that one verify of one request takes: the tree and its root, or the block."""
        if self.verifies_trees and self.budget is not None:
            return self.budget + 1
        return BLOCK_SIZE if self.block_size is None else self.block_size

    @classmethod
    def from_table(cls, name: str, table: Mapping[str, object]) -> Service:
        """Read a service's TOML table, with nothing unknown, mistyped or contradictory in it.

        Raises :class:`DeployError` ``DD004``; ``details`` has one ``services.NAME.KEY: why`` a problem. No
        message repeats a value that may be a secret.
        """
        problems: list[str] = []
        if _SERVICE_NAME.fullmatch(name) is None:
            problems.append(f"services.{name!a}: a service's name is letters, digits, '.', '_' and '-', at most 64")
        values: dict[str, Any] = {}
        for key, value in table.items():
            reader = _READERS.get(key)
            if reader is None:
                shown = key if key.isprintable() else ascii(key)
                problems.append(f"services.{name}.{shown}: unknown key{did_you_mean(key, _READERS)}")
                continue
            try:
                values[key] = reader(value)
            except _Bad as bad:
                problems.append(f"services.{name}.{key}: {bad}")
        if "model" not in table:
            problems.append(f"services.{name}.model: missing; every service needs one")
        if not problems:
            service = cls(name=name, **values)
            problems = [f"services.{name}.{key}: {why}" for key, why in _contradictions(service)]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise DeployError("DD004", problems[0] + more, details=problems if more else ())
        return service


class _Bad(ValueError):
    """A value that a key cannot take; the text goes after the key."""


_Reader = Callable[[object], Any]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Bad(f"must be a string, not {toml_type(value)}")
    why = quoting.fault(value)
    if why is not None:
        raise _Bad(f"cannot be used: {why}")
    return value


def _word(value: object) -> str:
    """Text that stands as the value of a flag."""
    text = _text(value)
    if not text.strip():
        raise _Bad("must not be empty")
    if text.startswith("-"):
        raise _Bad("must not start with '-': the engine would read it as a flag")
    return text


def _pattern(regex: re.Pattern[str], what: str) -> _Reader:
    def read(value: object) -> str:
        text = _word(value)
        if regex.fullmatch(text) is None:
            raise _Bad(f"{text!a} is not {what}")
        return text

    return read


def _choice(*choices: str) -> _Reader:
    def read(value: object) -> str:
        text = _text(value)
        if text not in choices:
            raise _Bad(f"{text!a} is not one of {', '.join(choices)}{did_you_mean(text, choices)}")
        return text

    return read


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Bad(f"must be true or false, not {toml_type(value)}")
    return value


def _integer(low: int, high: int, *others: int) -> _Reader:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _Bad(f"must be an integer, not {toml_type(value)}")
        if not low <= value <= high and value not in others:
            also = "".join(f" or {other}" for other in others)
            raise _Bad(f"{value} is not between {low} and {high}{also}")
        return value

    return read


def _fraction(value: object) -> float:
    if not isinstance(value, float):
        raise _Bad(f"must be a fraction such as 0.8, not {toml_type(value)}")
    if not 0 < value < 1:
        raise _Bad(f"{value} is not between 0 and 1")
    return value


def _tp(value: object) -> int:
    # Whether so many nodes can hold them is for the whole table to say.
    tp: int = _integer(1, LEGAL_TP_OF_NODES[-1])(value)
    if tp not in LEGAL_TP and tp not in LEGAL_TP_OF_NODES:
        raise _Bad(illegal_tp(tp))
    return tp


def _path(value: object) -> str:
    text = _text(value)
    why = quoting.path_fault(text)
    if why is not None:
        raise _Bad(f"{text!a} cannot be used: {why}")
    return text


def _search_path_part(value: object) -> str:
    path = _path(value)
    if ":" in path:
        raise _Bad("must not hold ':': its bin folder goes into PATH")
    return path


def _python(value: object) -> str:
    path = _search_path_part(value)
    try:
        quoting.exec_program(path)
    except DeployError as error:
        raise _Bad(error.message) from None
    return path


def _environment_directory(value: object) -> str:
    path = _path(value)
    try:
        quoting.environment_file_path(path)
    except DeployError as error:
        raise _Bad(error.message) from None
    return path


def _yaml_path(value: object) -> str:
    path = _path(value)
    if not path.lower().endswith((".yaml", ".yml")):
        raise _Bad("must end in .yaml or .yml: the engine reads no other")
    return path


def _served_name(value: object) -> str:
    text = _word(value)
    if ":" in text:
        raise _Bad("must not hold ':': the engine refuses it")
    return text


def _version(value: object) -> str:
    text = _word(value)
    try:
        return str(Version(text))
    except InvalidVersion:
        raise _Bad(f"{text!a} is not a version such as 0.5.11") from None


def _json_table(value: object) -> str:
    if not isinstance(value, dict):
        raise _Bad(f"must be a table, not {toml_type(value)}; it is passed as JSON")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Bad(f"cannot be written as JSON: {error}") from None


def _list_of(reader: _Reader) -> _Reader:
    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Bad(f"must be a list, not {toml_type(value)}")
        items: list[Any] = []
        for number, item in enumerate(value, 1):
            try:
                items.append(reader(item))
            except _Bad as bad:
                raise _Bad(f"item {number}: {bad}") from None
        return tuple(items)

    return read


def _distinct(reader: _Reader) -> _Reader:
    def read(value: object) -> tuple[Any, ...]:
        items: tuple[Any, ...] = _list_of(reader)(value)
        for item in items:
            if items.count(item) > 1:
                raise _Bad(f"{item} is listed twice")
        return items

    return read


def _env_name(value: object) -> str:
    text = _text(value)
    if not quoting.is_env_name(text):
        # Not repeated: someone may have put the secret itself here.
        raise _Bad("is not the name of a variable: letters, digits and _ only, and no digit first")
    return text


def _environment(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise _Bad(f"must be a table, not {toml_type(value)}")
    environment: dict[str, str] = {}
    for name, setting in value.items():
        if not quoting.is_env_name(name):
            raise _Bad(f"{name!a} is not the name of a variable")
        if isinstance(setting, bool) or not isinstance(setting, (str, int)):
            raise _Bad(f"{name} must be a string or an integer, not {toml_type(setting)}")
        text = str(setting)
        why = quoting.fault(text)
        if why is not None:
            raise _Bad(f"{name} cannot be used: {why}")
        if _SECRET_WORDS & set(name.upper().split("_")) or _SECRET_IN_URL.search(text):
            raise _Bad(
                f"{name} looks like a secret, which does not belong in an inventory: list its name under "
                "`secrets` and set it in the secrets file on the host"
            )
        environment[name] = text
    return environment


_backend = _pattern(_CHOICE_WORD, "a name of lower-case letters, digits, '_', '.' and '-'")
_user = _pattern(_USER, "a user or group name")
_size = _integer(1, 1_000_000_000)

_READERS: Mapping[str, _Reader] = {
    "host": _pattern(_SERVICE_NAME, "the name of an inventory host"),
    "engine": _version,
    "python": _python,
    "model": _word,
    "served_name": _served_name,
    "revision": _word,
    "trust_remote_code": _flag,
    "quantization": _backend,
    "context_length": _size,
    "algorithm": _choice(DDTREE, DFLASH, NO_SPECULATION),
    "drafter": _word,
    "drafter_revision": _word,
    "block_size": _integer(1, 1024),
    "draft_window": _size,
    "draft_attention_backend": _backend,
    "budget": _integer(1, 63),
    "topk": _integer(1, 32),
    "allow_hybrid_unsafe": _flag,
    "shadow_linear": _flag,
    "hybrid": _flag,
    "radix_cache": _flag,
    "mamba_scheduler_strategy": _choice("no_buffer", "extra_buffer"),
    "mamba_track_interval": _size,
    "mamba_ssm_dtype": _choice("float32", "bfloat16", "float16"),
    "tp": _tp,
    "nodes": _integer(1, 64),
    "rendezvous_port": _integer(1, 65535),
    "image": _word,
    "gpu_memory_mib": _integer(1024, 1 << 22),
    "gpus": _distinct(_integer(0, 63)),
    "compute_capability": _pattern(_CAPABILITY, "a compute capability such as 12.0"),
    "custom_all_reduce": _flag,
    "bind": _pattern(_BIND, "an address to listen on"),
    "port": _integer(1, 65535),
    "max_running_requests": _integer(1, 100_000),
    "cuda_graph_max_bs": _integer(1, 100_000),
    "mem_fraction_static": _fraction,
    "chunked_prefill_size": _integer(1, 1_000_000, -1),
    "attention_backend": _backend,
    "kv_cache_dtype": _backend,
    "moe_runner_backend": _backend,
    "reasoning_parser": _backend,
    "tool_call_parser": _backend,
    "metrics": _flag,
    "json_model_override_args": _json_table,
    "model_loader_extra_config": _json_table,
    "engine_config": _yaml_path,
    "extra_args": _list_of(_text),
    "user": _user,
    "group": _user,
    "working_directory": _path,
    "cuda_home": _search_path_part,
    "environment_directory": _environment_directory,
    "environment": _environment,
    "secrets": _distinct(_env_name),
}


def illegal_tp(tp: int, nodes: int = 1) -> str:
    """Why no service runs at this tensor-parallel size on so many nodes."""
    if nodes > 1:
        return (
            f"{tp} cannot be split over {nodes} nodes: it must be a power of two up to {LEGAL_TP_OF_NODES[-1]} that "
            f"divides by the nodes, with at most {GPUS_OF_A_NODE} GPUs of each"
        )
    return (
        f"{tp} is not a tensor-parallel size that the served models divide by: attention heads, key heads "
        f"of the recurrent layers and the drafter's heads allow {', '.join(map(str, LEGAL_TP))}"
    )


def is_legal_tp(tp: int, nodes: int) -> bool:
    """Whether so many GPUs can serve on so many nodes; what the model's own heads allow is not asked here."""
    if nodes == 1:
        return tp in LEGAL_TP
    return tp in LEGAL_TP_OF_NODES and tp % nodes == 0 and tp // nodes <= GPUS_OF_A_NODE


def _contradictions(service: Service) -> list[tuple[str, str]]:
    """Pairs of key and problem that can be known without the host, the engine version or the models."""
    found: list[tuple[str, str]] = []
    if service.speculative and service.drafter is None:
        found.append(("drafter", f"missing; {service.algorithm} needs one"))
    if service.algorithm == DDTREE:
        if service.budget is None:
            found.append(("budget", "missing; DDTREE needs the number of tree nodes to verify"))
        backend = service.attention_backend
        if backend is not None and backend not in TREE_BACKENDS and not service.shadow_linear:
            needs = " or ".join(TREE_BACKENDS)
            found.append(("attention_backend", f"{backend} takes no tree mask; DDTREE needs {needs}"))
    if (
        service.draft_window is not None
        and service.block_size is not None
        and service.draft_window < service.block_size
    ):
        found.append(("draft_window", f"{service.draft_window} is less than block_size {service.block_size}"))
    found += _recurrent_contradictions(service)
    if not is_legal_tp(service.tp, service.nodes):
        found.append(("tp", illegal_tp(service.tp, service.nodes)))
    elif service.nodes == 1 and service.gpus and len(service.gpus) < service.tp:
        found.append(("gpus", f"{len(service.gpus)} listed, but tp is {service.tp}"))
    if "CUDA_VISIBLE_DEVICES" in service.environment and service.gpus:
        found.append(("environment", "CUDA_VISIBLE_DEVICES is made from `gpus`; give one of the two"))
    for name in service.secrets:
        if name in service.environment:
            found.append(("secrets", f"{name} is in `environment` too"))
    return found + _extra_args_contradictions(service)


def _extra_args_contradictions(service: Service) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for argument in service.extra_args:
        secret = flags.secret(argument)
        key = flags.owner(argument)
        if secret is not None:
            found.append(
                (
                    "extra_args",
                    f"{secret} would put a secret into argv, which every user of the host can read: "
                    "set it in the file that `engine_config` names",
                )
            )
        elif key is not None:
            found.append(("extra_args", f"{argument.partition('=')[0]} is what the key `{key}` writes"))
    return found


def _recurrent_contradictions(service: Service) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    strategy = service.mamba_scheduler_strategy
    if strategy == "extra_buffer" and not service.radix_cache:
        found.append(("mamba_scheduler_strategy", "the engine refuses extra_buffer without the radix cache"))
    if service.hybrid is not True or not service.speculative:
        return found
    if service.radix_cache and strategy == "no_buffer":
        found.append(
            (
                "mamba_scheduler_strategy",
                "no_buffer cannot speculate on a hybrid target with the radix cache: use extra_buffer "
                "or radix_cache = false",
            )
        )
    interval = TRACK_INTERVAL if service.mamba_track_interval is None else service.mamba_track_interval
    if service.radix_cache and service.verify_tokens > interval:
        key = "budget" if service.verifies_trees else "block_size"
        found.append((key, f"a verify of {service.verify_tokens} tokens exceeds mamba_track_interval {interval}"))
    return found
