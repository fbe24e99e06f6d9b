"""What is known, before anything is rendered, of the engine and of the models that a service is about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.legality import Tree
from ddtree_deploy.launch.models import Drafter, Model, read_drafter, read_model
from ddtree_deploy.launch.parser import EngineParser, read_parser
from ddtree_deploy.launch.service import Service

if TYPE_CHECKING:
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.store import Snapshot

_MAX_CONFIG = 1 << 20
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine whose sources were read; ``source`` says where.

    ``installed``: they are a host's own, not a release's; ``live``: they were read there just now.
    """

    version: Version
    parser: EngineParser
    tree: Tree
    source: str
    installed: bool
    live: bool


@dataclass(frozen=True, slots=True)
class Known:
    """What could be read. ``missing`` says of each part that could not be why not."""

    engine: Engine | None = None
    model: Model | None = None
    drafter: Drafter | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def engine_of_snapshot(snapshot: Snapshot, *, live: bool = False) -> Engine:
    """The engine that a snapshot holds; ``live``: it was taken just now.

    Raises DeployError DD610 where its parser cannot be read, DD4xx.
    """
    entries = snapshot.entries
    return _engine(
        lambda path: snapshot.read(path) if path in entries else None,
        snapshot.header.version,
        f"snapshot {snapshot.id}",
        installed=True,
        live=live,
    )


def engine_of_wheel(tree: PristineTree) -> Engine:
    """The engine as it was published. Raises DeployError DD610."""
    return _engine(tree.get, tree.version, f"wheel {tree.version}", installed=False, live=False)


def _engine(
    read: Callable[[str], bytes | None], version: str | None, source: str, *, installed: bool, live: bool
) -> Engine:
    try:
        known = Version(version or "")
    except InvalidVersion:
        raise DeployError("DD610", f"{source}: the engine's version is {version!a}", "name one: --engine") from None
    return Engine(known, read_parser(read), Tree.of_source(read, known), source, installed, live)


def models_of_host(session: HostSession, service: Service) -> Known:
    """Target and drafter from their folders on the host. Raises DeployError DD611, DD3xx.

    A model that is no folder (a name on a hub) stays unknown.
    """
    folders = {"model": service.model}
    if service.speculative and service.drafter is not None:
        folders["drafter"] = service.drafter
    missing = {name: f"{path!a} is no folder on the host" for name, path in folders.items() if path[:1] != "/"}
    asked = {name: path for name, path in folders.items() if name not in missing}
    answer = session.call("models", {"folders": asked}).get("models") if asked else {}
    found: dict[str, Any] = {}
    for name, path in asked.items():
        facts = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(facts, dict):
            raise DeployError("DD307", f"{session.target.name}: the answer does not speak of {path}")
        if not facts.get("there"):
            raise DeployError("DD611", f"{session.target.name}: {path} is no folder", "is the model downloaded there?")
        config, size = facts.get("config"), facts.get("weight_bytes")
        if not isinstance(config, dict):
            why = facts.get("config_error") or "is missing"
            raise DeployError("DD611", f"{session.target.name}: {path}/config.json {why}")
        read = read_model if name == "model" else read_drafter
        found[name] = read(config, f"{path}/config.json", weight_bytes=size if type(size) is int and size > 0 else None)
    return Known(model=found.get("model"), drafter=found.get("drafter"), missing=missing)


def models_of_files(model: Path | None, drafter: Path | None) -> Known:
    """Target and drafter from ``config.json`` files here, with the sizes of the weights beside them, if any.

    Raises DeployError DD611, DD007.
    """
    return Known(
        model=None if model is None else read_model(_json(model), str(model), weight_bytes=_weight_bytes(model)),
        drafter=None
        if drafter is None
        else read_drafter(_json(drafter), str(drafter), weight_bytes=_weight_bytes(drafter)),
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as handle:
            data = handle.read(_MAX_CONFIG + 1)
    except OSError as error:
        raise DeployError("DD007", f"{path}: {error.strerror or error}") from None
    if len(data) > _MAX_CONFIG:
        raise DeployError("DD611", f"{path} is larger than {_MAX_CONFIG} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise DeployError("DD611", f"{path} is not JSON") from None
    if not isinstance(value, dict):
        raise DeployError("DD611", f"{path} holds no JSON object")
    return value


def _weight_bytes(config: Path) -> int | None:
    """The sizes of the safetensors files beside a configuration, or what their index says in sum."""
    sizes = [path.stat().st_size for path in config.parent.glob("*.safetensors") if path.is_file()]
    if sizes:
        return sum(sizes)
    index = config.parent / _INDEX
    if not index.is_file():
        return None
    try:
        total = json.loads(index.read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return int(total) if isinstance(total, int | float) and total > 0 else None
