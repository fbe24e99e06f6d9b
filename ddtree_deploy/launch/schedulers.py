"""A service on several nodes under a scheduler that is there already: Slurm batch script, LeaderWorkerSet. Pure.

The engine's own distributed mode does the work (``--nnodes``, ``--node-rank``, ``--dist-init-addr``); the scheduler
gives every node its rank and the first node's name. GPUs are the scheduler's to hand out: ``gpus`` is not used.
"""

from __future__ import annotations

import functools
import posixpath
import re
from dataclasses import dataclass

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import quoting, render
from ddtree_deploy.launch.argv import NODE_RANK, RENDEZVOUS, Command
from ddtree_deploy.launch.render import RenderedFile

#: Which GPUs a process sees is for the scheduler to say.
_SCHEDULERS_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound


@dataclass(frozen=True, slots=True)
class Volume:
    """A model's folder on every node, as a pod sees it."""

    name: str
    path: str


def render_slurm(command: Command) -> RenderedFile:
    """A batch script for ``sbatch``. Raises :class:`DeployError` ``DD601``."""
    service = command.service
    ranks = [argument for argument in command.arguments if NODE_RANK in argument.words]
    text = render.template("launch.slurm.j2").render(
        _shared(command),
        node_rank_flag=ranks[0].words[0] if ranks else None,
        arguments=[argument.words for argument in command.arguments if argument not in ranks],
        rendezvous_port=str(service.rendezvous_port),
    )
    return RenderedFile(f"{service.name}.sbatch", 0o755, text, None)


def render_k8s(command: Command) -> RenderedFile:
    """A LeaderWorkerSet and the Service in front of its leader, for ``kubectl apply``.

    Raises :class:`DeployError` ``DD601`` where the service lacks an image or is not reachable for its probes.
    """
    service = command.service
    shared = _shared(command)
    unit = shared["unit_name"]
    if service.image is None:
        raise DeployError(
            "DD601", f"{service.name}: no container image", "set `image` to one that holds the patched engine"
        )
    if _DNS_LABEL.fullmatch(str(unit)) is None:
        raise DeployError(
            "DD601",
            f"{service.name}: {unit} is not a name that Kubernetes takes",
            "a service's name must be lower-case letters, digits and `-` there",
        )
    if service.bind not in _EVERY_ADDRESS:
        raise DeployError(
            "DD601",
            f"{service.name}: the cluster's probes do not reach {service.bind}",
            'set bind = "0.0.0.0"',
        )
    folders = [service.model, *([service.drafter] if service.speculative and service.drafter else [])]
    paths = dict.fromkeys(posixpath.normpath(path) for path in folders if path.startswith("/"))
    text = render.template("launch.k8s.j2").render(
        shared,
        image=service.image,
        port=service.port,
        command=list(command.program),
        arguments=[
            [_in_a_pod(word, service.rendezvous_port) for word in argument.words] for argument in command.arguments
        ],
        volumes=[Volume(f"model-{number}", path) for number, path in enumerate(paths)],
    )
    return RenderedFile(f"{service.name}.k8s.yaml", 0o644, text, None)


@dataclass(frozen=True, slots=True)
class PodVariable:
    """Text with a variable that Kubernetes fills in, against which nothing else in a manifest is expanded."""

    text: str


def _in_a_pod(word: str, port: int) -> str | PodVariable:
    if word == NODE_RANK:
        return PodVariable("$(LWS_WORKER_INDEX)")
    return PodVariable(f"$(LWS_LEADER_ADDRESS):{port}") if word == RENDEZVOUS else word


def _shared(command: Command) -> dict[str, object]:
    service = command.service
    program, *program_arguments = command.program
    return {
        "header": render.header(command),
        "unit_name": render.unit_name(service),
        "program": program,
        "program_arguments": program_arguments,
        "settings": [setting for setting in command.environment if setting.name not in _SCHEDULERS_OWN],
        "secrets": service.secrets,
        "working_directory": service.working_directory,
        "nodes": service.nodes,
        "gpus_per_node": service.gpus_per_node,
    }


def _batch_word(word: str) -> str:
    return '"$RENDEZVOUS"' if word == RENDEZVOUS else quoting.shell_word(word)


def _sbatch_word(value: object) -> str:
    return quoting.sbatch_word(str(value))


def _pod_string(value: str | PodVariable) -> str:
    if isinstance(value, PodVariable):
        return quoting.yaml_string(value.text)
    return quoting.yaml_string(value.replace("$", "$$"))


FILTERS = {
    "batch_words": functools.partial(render.joined, _batch_word),
    "sbatch_word": _sbatch_word,
    "yaml_string": lambda value: quoting.yaml_string(str(value)),
    "yaml_integer": lambda value: str(int(value)),
    "pod_string": _pod_string,
    # What a macro of the same template made: its own values passed their filters there.
    "rendered": str,
}
