"""What is said beside a command: what nobody could check, and what does not stop it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from ddtree_deploy.launch import flags, legality
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.service import DDTREE, Service


def unchecked(service: Service, engine: Version, known: Known) -> Iterator[str]:
    """What could not be known from here, each with what would make it known."""
    missing = known.missing
    if known.engine is None:
        why = missing.get("engine", "name a host (--host), a snapshot (--snapshot) or a wheel (--engine)")
        yield f"flags and their values against the engine: {why}; the names are those of sglang {engine}"
    elif not known.engine.installed:
        yield f"that the host runs sglang {engine} unchanged: the flags are those of its published wheel"
    elif not known.engine.live:
        yield f"that the host is still as {known.engine.source} shows it: --host reads it anew"
    if service.algorithm == DDTREE and known.engine is None:
        yield "that the host's engine has DDTREE: no release has; see `ddtree-deploy status`"
    if not service.gpus:
        yield f"that the host has {service.gpus_per_node} GPUs: `gpus` lists none"
    if known.model is None:
        why = missing.get("model", "name the host (--host), or the model's config.json (--model-config)")
        yield f"the model's heads, experts and quantisation blocks against tp {service.tp}: {why}"
        yield (
            f"that weights, KV cache and state of {service.running_requests} running requests fit the GPUs' memory: "
            f"{why}"
        )
        if service.speculative and service.hybrid is None:
            yield "whether the target has recurrent layers, and so needs extra_buffer: set `hybrid`"
    elif known.model.weight_bytes is None:
        yield "the weights' real size: it was estimated from the geometry"
    if service.speculative and known.drafter is None:
        why = missing.get("drafter", "name the host (--host), or the drafter's config.json (--draft-config)")
        yield f"the drafter's layers, sizes, vocabulary and context against the target: {why}"


def notes(service: Service, engine: Version, known: Known) -> Iterator[str]:
    """What an operator should know and nothing else tells: unused keys, names that may be old, a unit of root's."""
    if engine > flags.NEWEST and known.engine is None:
        yield f"sglang {engine} is newer than {flags.NEWEST}, the last version whose flags are known"
    if service.speculative and known.drafter is None:
        overridden = '"rope_theta"' in (service.json_model_override_args or "")
        # Where DDTREE runs, dflash-fixes is applied: the set requires it.
        read = engine >= legality.DRAFTER_ROPE_READ or service.algorithm == "DDTREE"
        if known.engine:
            read = known.engine.tree.draft_rope_read
        if not read and not overridden:
            yield (
                f"sglang {engine} reads the drafter's rope base wrong where its config has rope_parameters: "
                "apply patch set dflash-fixes, or set rope_theta in `json_model_override_args`"
            )
    if known.engine is not None and known.engine.parser.unread:
        some = known.engine.parser.unread[0]
        yield f"{len(known.engine.parser.unread)} declarations of the engine's flags could not be read, such as {some}"
    unused: tuple[str, ...] = () if service.algorithm == DDTREE else flags.DDTREE_KEYS
    unused += () if service.speculative else flags.DRAFT_KEYS
    for key in unused:
        if getattr(service, key):
            yield f"`{key}` has no effect: the algorithm is {service.algorithm}"
    if service.user is None and service.nodes == 1:
        yield "no `user` is set: the unit runs the engine as root"
