"""Apply sets to a host: look, plan in memory, let the agent transact, report what was read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.agent.layers import identity
from ddtree_deploy.console import Console
from ddtree_deploy.deploy.facts import Entry, HostFacts, entry_of, look
from ddtree_deploy.deploy.ground import Ground, Known, prepare
from ddtree_deploy.deploy.lost import with_impact
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

    ground: Ground
    plan: Plan
    result: Mapping[str, Any] | None

    @property
    def facts(self) -> HostFacts:
        """The look at the host that it was planned on."""
        return self.ground.facts

    @property
    def to_do(self) -> bool:
        """Whether there was anything to change, be it in the host's record alone."""
        return bool(self.plan.to_apply or self.ground.replaced)

    @property
    def changes(self) -> dict[str, tuple[Entry, Entry]]:
        """What stands on disk and what shall, for every path where these differ."""
        wanted = {**self.ground.entries, **{path: entry_of(item.after) for path, item in self.plan.changes.items()}}
        now = self.facts.status["entries"]
        return {path: (now[path], entry) for path, entry in sorted(wanted.items()) if now[path] != entry}


def apply_sets(
    session: HostSession,
    sets: Sequence[PatchSet],
    console: Console,
    *,
    known: Known = dict,
    downgrade: bool = False,
    check: bool = False,
    live: bool = False,
    smoke: bool = False,
    break_links: bool = False,
    wait: float = 0.0,
    reason: str | None = None,
) -> Applied:
    """Apply ``sets`` (requirements first) in one transaction; with ``check`` only plan.

    Other versions of them that are applied are replaced in the same transaction, and sets that build on these
    come along: those of ``sets``, else of ``known``. An interrupted transaction is recovered first (with
    ``check`` it is refused). Raises DeployError: everything of :func:`ddtree_deploy.patching.plan.plan` and
    :func:`ddtree_deploy.deploy.ground.prepare`, DD312 a foreign interpreter, DD5xx.
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
        ground = prepare(session, facts, sets, known, downgrade=downgrade, break_links=break_links)
        planned = _plan(session, ground)
        applied = Applied(ground, planned, None)
        foreign = facts.status["root"]["foreign_python"]
        if foreign and applied.to_do:
            raise DeployError(
                "DD312",
                f"{facts.host}: {foreign}",
                "name the engine's own interpreter: --python, or python in the inventory",
            )
        if check or not applied.to_do:
            return applied
        progress(0, 0, f"applying to {facts.host}")
        args = {
            "layers": _wire_layers(planned, ground),
            "drop": [layer["set"] for layer in ground.taken],
            "expect": [identity(layer) for layer in ground.facts.layers],
            "engine": facts.engine,
            "live": live,
            "smoke": smoke,
            "break_links": break_links,
            "wait": wait,
            "reason": reason,
        }
        result = transact(session, "apply", args, _blobs(planned), progress)
    _check_read_back(applied, result)
    return Applied(ground, planned, result)


def _plan(session: HostSession, ground: Ground) -> Plan:
    try:
        return plan(ground.sets, ground.facts.engine, ground.images, ground.recorded)
    except DeployError as refusal:
        if ground.along:
            names = ", ".join(ground.along)
            hint = (
                f"{names} comes along, since it builds on what is replaced: name a version that fits, or roll it back"
            )
            hint = f"{refusal.hint}; {hint}" if refusal.hint else hint
            raise DeployError(refusal.code, refusal.message, hint, refusal.details) from None
        raise with_impact(session, ground.facts, ground.sets, refusal) from None


def _wire_layers(planned: Plan, ground: Ground) -> list[dict[str, Any]]:
    recorded = {item.name for item in ground.recorded} | {layer.patch_set.name for layer in planned.to_apply}
    return [_wire_layer(layer, ground, recorded) for layer in planned.to_apply]


def _wire_layer(layer: Layer, ground: Ground, recorded: set[str]) -> dict[str, Any]:
    files = []
    for path, change in layer.changes.items():
        before = entry_of(change.before)
        if path in ground.linked and change.before == ground.images[path]:
            before = dict(ground.linked[path] or {})
        files.append({"path": path, "before": before, "after": entry_of(change.after)})
    return {
        "set": layer.patch_set.name,
        "version": layer.patch_set.version,
        "digest": layer.digest,
        "family": layer.status.family.name,
        "requires": [name for name in layer.patch_set.requires if name in recorded],
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


def _check_read_back(applied: Applied, result: Mapping[str, Any]) -> None:
    """The host's own reading must be the plan, file by file, and no file more."""
    wanted, found = {path: after for path, (_before, after) in applied.changes.items()}, result["files"]
    wrong = [path for path in sorted({*wanted, *found}) if wanted.get(path, "none") != found.get(path, "none")]
    if wrong:
        raise DeployError(
            "DD505",
            f"{applied.facts.host}: {len(wrong)} file(s) read back differ from the plan",
            "run `ddtree-deploy status` and, if it is not as you want it, `rollback`",
            wrong,
        )
