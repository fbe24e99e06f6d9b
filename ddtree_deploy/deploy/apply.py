"""Apply sets to a host: look, plan in memory, let the agent transact, report what was read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.console import Console
from ddtree_deploy.deploy.facts import HostFacts, entry_of, look
from ddtree_deploy.deploy.recover import describe, recover
from ddtree_deploy.deploy.transaction import transact
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.patching.images import FileImage
from ddtree_deploy.patching.patchset import PatchSet
from ddtree_deploy.patching.plan import Layer, Plan, plan


@dataclass(frozen=True)
class Applied:
    """The outcome. ``result`` is what the host read back; None when nothing was to do or only checked."""

    facts: HostFacts
    plan: Plan
    result: Mapping[str, Any] | None
    #: Recorded sets that a reinstall had taken away and that this transaction put back or replaced.
    forgotten: tuple[str, ...] = ()


def apply_sets(
    session: HostSession,
    sets: Sequence[PatchSet],
    console: Console,
    *,
    check: bool = False,
    live: bool = False,
    smoke: bool = False,
    break_links: bool = False,
    wait: float = 0.0,
    reason: str | None = None,
) -> Applied:
    """Apply ``sets`` (requirements first) in one transaction; with ``check`` only plan.

    An interrupted transaction is recovered first (with ``check`` it is refused). Raises DeployError: everything
    of :func:`ddtree_deploy.patching.plan.plan`, DD312 a foreign interpreter, DD5xx.
    """
    with console.progress(f"reading {session.target.name}") as progress:
        facts = look(session, sets, break_links=break_links)
        if facts.status["interrupted"]:
            if check:
                raise DeployError(
                    "DD503",
                    f"{facts.host}: an earlier transaction was interrupted",
                    "run `ddtree-deploy recover` first: it finishes or undoes it",
                )
            console.note(f"{facts.host}: {describe(recover(session, wait=wait))}")
            facts = look(session, sets, break_links=break_links)
        planned = plan(sets, facts.engine, facts.images, facts.recorded())
        foreign = facts.status["root"]["foreign_python"]
        if foreign and planned.to_apply:
            raise DeployError(
                "DD312",
                f"{facts.host}: {foreign}",
                "name the engine's own interpreter: --python, or python in the inventory",
            )
        if check or not planned.to_apply:
            return Applied(facts, planned, None)
        progress(0, 0, f"applying to {facts.host}")
        forgotten = _forgotten(facts, planned)
        args = {
            "layers": [_wire_layer(layer, facts) for layer in planned.to_apply],
            "drop": list(forgotten),
            "expect": [[layer["set"], layer["version"]] for layer in facts.layers],
            "engine": facts.engine,
            "live": live,
            "smoke": smoke,
            "break_links": break_links,
            "wait": wait,
            "reason": reason,
        }
        result = transact(session, "apply", args, _blobs(planned), progress)
    _check_read_back(facts.host, planned, result)
    return Applied(facts, planned, result, forgotten)


def _forgotten(facts: HostFacts, planned: Plan) -> tuple[str, ...]:
    """Lost sets whose record the new layers replace: the same sets, and those on the same files."""
    lost = set(facts.status["reinstalled"])
    names = {layer.patch_set.name for layer in planned.to_apply}
    paths = {path for layer in planned.to_apply for path in layer.changes}
    return tuple(
        layer["set"]
        for layer in facts.layers
        if layer["set"] in lost and (layer["set"] in names or paths & {item["path"] for item in layer["files"]})
    )


def _wire_layer(layer: Layer, facts: HostFacts) -> dict[str, Any]:
    files = []
    for path, change in layer.changes.items():
        before = entry_of(change.before)
        if path in facts.status["linked"] and change.before == facts.images[path]:
            before = facts.status["entries"][path]
        files.append({"path": path, "before": before, "after": entry_of(change.after)})
    return {
        "set": layer.patch_set.name,
        "version": layer.patch_set.version,
        "digest": layer.digest,
        "family": layer.status.family.name,
        "requires": list(layer.patch_set.requires),
        "files": files,
    }


def _blobs(planned: Plan) -> list[bytes]:
    """Every post-image once; pre-images are on the host, or are post-images of a lower set."""
    return list(
        {
            change.after.data: None
            for layer in planned.to_apply
            for change in layer.changes.values()
            if isinstance(change.after, FileImage)
        }
    )


def _check_read_back(host: str, planned: Plan, result: Mapping[str, Any]) -> None:
    """The host's own reading must be the plan, file by file."""
    wrong = [
        path
        for path, change in planned.changes.items()
        if result["files"].get(path, "missing") != entry_of(change.after)
    ]
    if wrong:
        raise DeployError(
            "DD505",
            f"{host}: {len(wrong)} file(s) read back differ from the plan",
            "run `ddtree-deploy status` and, if it is not as you want it, `rollback`",
            wrong,
        )
