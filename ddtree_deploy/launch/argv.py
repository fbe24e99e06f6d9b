"""From a service to the argv and environment that serve it, each part with its reason. Pure.

The rules are those of an 8-GPU PCIe box with compute capability 12.0; a service may say otherwise. What was not
read of the host and its models is listed in :attr:`Command.unchecked`, never assumed in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import budget, flags, legality, machine, quoting, remarks
from ddtree_deploy.launch.budget import Plan
from ddtree_deploy.launch.environment import Setting, settings
from ddtree_deploy.launch.flagcheck import check_arguments
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.models import Model
from ddtree_deploy.launch.service import DDTREE, ENGINE_RUNNING_REQUESTS, TREE_BACKENDS, Service

#: Stand for what only the scheduler of several nodes knows; each format writes its own words for them.
NODE_RANK, RENDEZVOUS = "{node rank}", "{rendezvous}"
_INVENTORY = "set in the inventory; the engine's choice without it"


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag with its value, or a flag alone; why it is there, and what would change it."""

    words: tuple[str, ...]
    reason: str
    change: str


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, with what environment.

    ``notes`` are findings that do not stop it, ``unchecked`` what could not be known from here. ``plan`` is the
    memory of one GPU, None where the model's configuration was not read; ``source`` says whose parser the flags were
    held against, None for no one's.
    """

    service: Service
    engine: Version
    program: tuple[str, ...]
    arguments: tuple[Argument, ...]
    environment: tuple[Setting, ...]
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]
    plan: Plan | None
    source: str | None

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole argument vector, the interpreter first."""
        return (*self.program, *(word for argument in self.arguments for word in argument.words))


def build_command(
    service: Service,
    *,
    tp: int | None = None,
    nodes: int | None = None,
    engine: str | None = None,
    python: str | None = None,
    known: Known | None = None,
) -> Command:
    """The command of ``service`` at ``tp`` GPUs on ``nodes``, with the flag names of that engine version.

    What is None comes from the service. ``known`` is what was read of engine and models; its engine's version goes
    before the service's. Raises :class:`DeployError`: ``DD601`` if something needed is missing or malformed,
    ``DD602`` if the machine, the engine or the models cannot do it; ``details`` has every reason when there are
    several.
    """
    known = known or Known()
    service = replace(service, tp=service.tp if tp is None else tp, nodes=service.nodes if nodes is None else nodes)
    version = _engine_version(service, engine, known)
    if service.speculative and service.block_size is None and known.drafter is not None:
        # Known from the drafter's own configuration, as the engine will read it.
        service = replace(service, block_size=known.drafter.block_size)
    refused = list(machine.refusals(service, version))
    findings: list[legality.Finding] = []
    plan = None
    if not refused and known.model is not None:
        findings, plan = _with_models(service, version, known, known.model)
        refused += [finding.text for finding in findings if finding.refused] or plan.faults
    if known.model is not None:
        service = replace(service, hybrid=known.model.recurrent is not None)
    arguments = tuple(_arguments(service, version, known, plan))
    if known.engine is not None:
        held = check_arguments(known.engine.parser, ([*map(_on_a_node, each.words)] for each in arguments))
        findings += held
        refused += _without_ddtree(service, known) or [finding.text for finding in held if finding.refused]
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        table = plan.table() if plan is not None and set(plan.faults) & set(refused) else []
        raise DeployError("DD602", f"{service.name}: {refused[0]}{more}", details=(refused if more else []) + table)
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
    warnings = [finding.text for finding in findings if not finding.refused]
    return Command(
        service=service,
        engine=version,
        program=(interpreter, "-m", "sglang.launch_server"),
        arguments=arguments,
        environment=tuple(settings(service, version, interpreter, known)),
        notes=(*warnings, *(plan.notes if plan else ()), *remarks.notes(service, version, known)),
        unchecked=tuple(remarks.unchecked(service, version, known)),
        plan=plan,
        source=None if known.engine is None else known.engine.source,
    )


def _with_models(service: Service, engine: Version, known: Known, model: Model) -> tuple[list[legality.Finding], Plan]:
    """What stands in the way of serving the model so, and how it would use a GPU's memory."""
    tree = legality.Tree.of_release(engine) if known.engine is None else known.engine.tree
    findings = legality.check(service, engine, model, known.drafter, tree)
    mib = service.gpu_memory_mib or budget.RTX_PRO_6000_MIB
    compact = tree.compact_states
    return findings, budget.plan(service, engine, model, known.drafter, gpu_mib=mib, compact_states=compact)


def _on_a_node(word: str) -> str:
    """The word with what a scheduler fills in put in its place."""
    return {NODE_RANK: "0", RENDEZVOUS: "node:20000"}.get(word, word)


def _engine_version(service: Service, engine: str | None, known: Known) -> Version:
    named = engine or service.engine
    try:
        version = flags.DEFAULT if named is None else Version(named)
    except InvalidVersion:
        raise DeployError("DD601", f"{named!a} is not an engine version such as {flags.DEFAULT}") from None
    if known.engine is not None:
        version = known.engine.version
    if version < flags.OLDEST:
        raise DeployError(
            "DD602",
            f"{service.name}: sglang {version} is older than {flags.OLDEST}, the first release with DFLASH",
        )
    return version


def _without_ddtree(service: Service, known: Known) -> list[str]:
    """DDTREE is offered only where the tree's own parser has it."""
    engine = known.engine
    if service.algorithm != DDTREE or engine is None or engine.parser.has_ddtree:
        return []
    mend = (
        "apply patch set ddtree there" if engine.installed else "no release has it; name the patched host with --host"
    )
    return [f"{engine.source} has no DDTREE: {mend}"]


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the flags of one service in the names of one engine."""

    service: Service
    engine: Version
    known: Known

    def value(self, key: str, reason: str, change: str | None = None) -> Iterator[Argument]:
        """The flag of ``key`` with the service's value, if it has one."""
        value = getattr(self.service, key)
        if value is not None:
            yield self.fixed(key, str(value), reason, change)

    def switch(self, key: str, on: bool, reason: str, change: str | None = None) -> Iterator[Argument]:
        """The flag of ``key`` without a value, if ``on``."""
        if on:
            yield Argument((self._name(key),), reason, change or f"`{key}`")

    def fixed(self, key: str, value: str, reason: str, change: str | None = None) -> Argument:
        """The flag of ``key`` with this value."""
        return Argument((self._name(key), value), reason, change or f"`{key}`")

    def _name(self, key: str) -> str:
        parser = None if self.known.engine is None else self.known.engine.parser
        return flags.flag(key, self.engine, None if parser is None else parser.by_name)


def _arguments(service: Service, engine: Version, known: Known, plan: Plan | None) -> Iterator[Argument]:
    write = _Writer(service, engine, known)
    yield from write.value("engine_config", "settings that must not be in argv; the command line wins over it")
    yield from write.value("model", "the target")
    yield from write.value("served_name", "the name that clients ask for")
    yield from write.value("revision", "pins the target's weights")
    yield from write.switch(
        "trust_remote_code", service.trust_remote_code, "classes may come from the model's or drafter's folder"
    )
    yield from write.value("quantization", "set in the inventory; the drafter inherits it")
    yield from write.value("kv_cache_dtype", _INVENTORY)
    yield from write.value("context_length", "the longest request; the model's own length without it")
    yield from write.value("bind", "the address to listen on")
    yield from write.value("port", "the port to listen on")
    yield from write.value("tp", "the GPUs that the model is split over", "`tp`, or --tp")
    yield from _distributed(write)
    yield from write.switch(
        "custom_all_reduce",
        service.tp > 2 if service.custom_all_reduce is None else not service.custom_all_reduce,
        "custom all-reduce needs NVLink above two GPUs; over PCIe NCCL does it",
        "`custom_all_reduce`, or tp 1 or 2",
    )
    if service.speculative:
        yield from _speculation(write)
    yield from _recurrent(write)
    yield from write.value("attention_backend", _attention_reason(service))
    yield from write.value("moe_runner_backend", _INVENTORY)
    yield from _sizes(write, plan)
    yield from write.value("chunked_prefill_size", "tokens of one prefill chunk: bounds the activations")
    yield from write.value("reasoning_parser", "splits the model's reasoning from its answer")
    yield from write.value("tool_call_parser", "reads the model's tool calls")
    yield from write.switch("metrics", service.metrics, "/metrics, with the accept length of speculation")
    yield from write.value("json_model_override_args", "set in the inventory; goes to target and drafter")
    yield from write.value("model_loader_extra_config", "set in the inventory; how weights are loaded")
    if service.extra_args:
        yield Argument(service.extra_args, "`extra_args` of the inventory, as they stand", "`extra_args`")


def _attention_reason(service: Service) -> str:
    if service.verifies_trees:
        return f"a tree is verified on {' or '.join(TREE_BACKENDS)} alone"
    return _INVENTORY


def _distributed(write: _Writer) -> Iterator[Argument]:
    if write.service.nodes > 1:
        yield from write.value("nodes", "the engine's own distributed mode over several hosts", "`nodes`, or --nodes")
        yield write.fixed("node_rank", NODE_RANK, "which of the nodes this is", "the scheduler")
        yield write.fixed("rendezvous", RENDEZVOUS, "where the ranks meet: the first node", "`rendezvous_port`")


def _sizes(write: _Writer, plan: Plan | None) -> Iterator[Argument]:
    service = write.service
    if plan is not None and service.max_running_requests is None:
        running = plan.running
        why = "picked: the most requests that fit the GPU's memory beside the weights; see --memory"
    else:
        running = service.running_requests
        why = "requests at once: bounds the batch, and the memory that each request takes"
        if service.speculative and service.hybrid is not False:
            why = f"the engine's own {ENGINE_RUNNING_REQUESTS} would reserve recurrent states for so many verifies"
    yield write.fixed("max_running_requests", str(running), why)
    yield write.fixed(
        "cuda_graph_max_bs",
        str(service.cuda_graph_max_bs or running),
        "no batch is larger than the running requests: larger graphs only take memory",
        "`cuda_graph_max_bs`, or `max_running_requests`",
    )
    share = "share of GPU memory for weights, state and KV cache"
    if plan is not None and service.mem_fraction_static is None:
        why = f"picked: the largest {share} that leaves room for the rest; see --memory"
        yield write.fixed("mem_fraction_static", str(plan.fraction), why)
    else:
        yield from write.value("mem_fraction_static", share)


def _speculation(write: _Writer) -> Iterator[Argument]:
    service = write.service
    yield from write.value("algorithm", "how the drafter's tokens are laid out and verified")
    yield from write.value("drafter", "the drafter")
    yield from write.value("drafter_revision", "pins the drafter's weights")
    yield from write.value("block_size", "positions that the drafter fills in at once")
    yield from write.value("draft_window", "the drafter attends to so many tokens only")
    yield from write.value("draft_attention_backend", _INVENTORY)
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
            "`mamba_scheduler_strategy`, or `radix_cache = false`",
        )
    yield from write.value("mamba_track_interval", "set in the inventory: tokens between saved states")
    yield from write.value("mamba_ssm_dtype", "set in the inventory: precision of the recurrent state")
