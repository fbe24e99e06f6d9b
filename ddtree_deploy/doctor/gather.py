"""From an open session to facts: one exec of the agent, and what this machine knows of the host beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ddtree_deploy.deploy.facts import HostFacts
from ddtree_deploy.deploy.status import StatusReport, report
from ddtree_deploy.doctor.common import Planned, engine_version, read_draft, read_target
from ddtree_deploy.doctor.facts import Facts, NotKnown
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession, Progress
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.render import render
from ddtree_deploy.launch.run import find_service, resolve
from ddtree_deploy.patching.classify import touched_paths
from ddtree_deploy.patching.patchset import PatchSet

if TYPE_CHECKING:
    from ddtree_deploy.hosts.inventory import Inventory
    from ddtree_deploy.launch.render import Rendering
    from ddtree_deploy.launch.service import Service

SCHEMA = "ddtree-deploy.doctor-facts/1"
_ALWAYS = ("tp", "port")
#: Keys of a service that hold JSON text, and are tables in an inventory.
_JSON_KEYS = ("json_model_override_args", "model_loader_extra_config")


@dataclasses.dataclass(frozen=True)
class Deep:
    """What ``--deep`` may do: limits in seconds and bytes, and whether others may hold the GPUs meanwhile."""

    seconds: float
    bytes: int
    live: bool


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One service to look at, who runs it, and its rendering where it can be rendered from here."""

    service: Service
    python: str | None
    rendering: Rendering | None


def services_of(inventory: Inventory, host: str, named: str | None) -> list[Wanted]:
    """The service of that name, or all that the inventory has for ``host``. Raises DeployError ``DD006``."""
    if named is not None:
        chosen = [find_service(inventory, named)]
    elif inventory.shipped:
        chosen = []
    else:
        chosen = [item for item in inventory.services.values() if (item.host or inventory.default_host) == host]
    return [wanted(service, resolve(inventory, service.name).interpreter) for service in chosen]


def wanted(service: Service, python: str | None) -> Wanted:
    """A service that the interpreter ``python`` of the host runs."""
    try:
        return Wanted(service, python, render(service, python=python))
    except DeployError:
        return Wanted(service, python, None)  # DD280 says why, with what the host has


def gather(
    session: HostSession,
    wanted: Sequence[Wanted],
    sets: Sequence[PatchSet],
    *,
    deep: Deep | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The facts of a host, as :func:`ddtree_deploy.doctor.examine.examine` takes them. Raises DeployError DD30x."""
    services = [service_facts(item.service, item.rendering) for item in wanted]
    sent = time.time()
    answer = session.call("doctor", _request(services, sets, deep), progress=progress)
    received = time.time()
    status = answer.pop("status", None)
    services = [service_facts(item.service, _as_installed(item, answer)) for item in wanted]
    return {
        **answer,
        "schema": SCHEMA,
        "target": session.target.name,
        "client": {"sent": sent, "received": received},
        "services": services,
        "patches": _patches(session.target.name, status, sets),
    }


def _as_installed(wanted: Wanted, answer: Mapping[str, Any]) -> Rendering | None:
    """The rendering as an install makes it: for the engine and the models that the host has."""
    facts = Facts(dict(answer))
    planned = Planned(wanted.service, facts)
    try:
        known = Known(model=read_target(planned, facts), drafter=read_draft(planned, facts))
        return render(wanted.service, engine=str(engine_version(facts)), python=wanted.python, known=known)
    except (DeployError, NotKnown):
        return None  # DD270 to DD280 say why


def service_facts(service: Service, rendering: Rendering | None) -> dict[str, Any]:
    """A service as plain data: its inventory table, and the names and hashes of what it is rendered to."""
    directory = service.environment_directory.rstrip("/")
    return {
        "name": service.name,
        "table": inventory_table(service),
        "environment": {} if rendering is None else rendering.env,
        "unit": {
            "name": f"sglang-{service.name}.service",
            "sha256": None if rendering is None else _sha256(rendering.unit.text),
        },
        "environment_file": {
            "path": f"{directory}/{service.name}.env",
            "sha256": None if rendering is None else _sha256(rendering.environment_file.text),
        },
        "secrets_file": f"{directory}/{service.name}.secrets.env" if service.secrets else None,
    }


def inventory_table(service: Service) -> dict[str, Any]:
    """A service's ``[services.NAME]`` table: what ``Service.from_table`` reads back to the same service.

    Keys with their default value are left out, but for those that the checks read from here.
    """
    table: dict[str, Any] = {}
    for field in dataclasses.fields(service):
        value = getattr(service, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name == "name" or (value == default and field.name not in _ALWAYS):
            continue
        if field.name in _JSON_KEYS:
            value = json.loads(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        table[field.name] = value
    return table


def _request(services: Sequence[Mapping[str, Any]], sets: Sequence[PatchSet], deep: Deep | None) -> dict[str, Any]:
    tables = [service["table"] for service in services]
    models = [table.get(key) for table in tables for key in ("model", "drafter")]
    request: dict[str, Any] = {
        "paths": list(touched_paths(sets)),
        "survey": True,
        "models": list(dict.fromkeys(path for path in models if path and path.startswith("/"))),
        "ports": sorted({table["port"] for table in tables}),
        "units": [service["unit"]["name"] for service in services],
        "folders": [f"/var/cache/sglang-{service['name']}" for service in services],
        "environment_files": [service["environment_file"]["path"] for service in services],
        "secrets_files": [service["secrets_file"] for service in services if service["secrets_file"]],
        # Compilers are looked for as the first service finds them.
        "environment": services[0]["environment"] if services else {},
    }
    if deep is not None:
        chosen = {number for table in tables for number in table.get("gpus", [])[: table["tp"]]}
        environment = {name: value for name, value in request["environment"].items() if name.startswith("NCCL_")}
        request["deep"] = {**dataclasses.asdict(deep), "gpus": sorted(chosen), "environment": environment}
    return request


def _patches(host: str, status: Any, sets: Sequence[PatchSet]) -> dict[str, Any]:
    """How the host's files stand against RECORD and the sets known here, in brief."""
    if isinstance(status, dict) and "error" in status:
        return {"error": str(status["error"])}
    try:
        return _brief(report(HostFacts(host, status, {}), sets))
    except (DeployError, LookupError, TypeError, ValueError, AttributeError) as error:
        return {"error": f"the host's status cannot be read: {error}"}


def _brief(result: StatusReport) -> dict[str, Any]:
    return {
        "state": result.state,
        "sets": [
            {"name": line.name, "version": line.version, "state": line.state, "detail": line.detail}
            for line in result.sets
        ],
        "foreign": [line.path for line in result.foreign],
        "interrupted": result.interrupted is not None,
        "processes": [
            {"pid": process["pid"], "command": process["command"], "older": _older(process, result.last)}
            for process in result.processes
        ],
    }


def _older(process: Mapping[str, Any], last: Mapping[str, Any] | None) -> bool:
    """Whether a process surely uses the engine and started before the last change of its files."""
    if last is None or not process["certain"] or not process["started"]:
        return False
    changed = datetime.strptime(last["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return bool(process["started"] < changed.timestamp())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
