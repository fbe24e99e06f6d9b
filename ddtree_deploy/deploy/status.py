"""How a host stands: every recorded and every known set, file by file, and the rest of the tree against RECORD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree_deploy.deploy.baseline import RECORD, container_notes, judge, published_hashes
from ddtree_deploy.deploy.facts import HostFacts, entry_fingerprint, recorded
from ddtree_deploy.deploy.ground import is_older
from ddtree_deploy.errors import ExitStatus
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.patching.classify import SetStatus, State, classify, touched_paths
from ddtree_deploy.patching.patchset import PatchSet

PRISTINE, REINSTALLED, INTERRUPTED, UNKNOWN = "pristine", "reinstalled", "interrupted", "unknown"
#: States that need nobody's attention.
GOOD = frozenset(
    {PRISTINE, UNKNOWN} | {state.value for state in (State.APPLIED, State.PENDING, State.UNSERVED, State.UNNEEDED)}
)


@dataclass(frozen=True)
class FileLine:
    """One file of a set: its path, its state and, where that needs saying, why."""

    path: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class SetLine:
    """One set: ``version`` is the host's where the set is recorded, else the one known here.

    ``known``: another version of a recorded set, if that is what is known here. ``back``: the versions that
    ``rollback --to`` takes it to, newest first.
    """

    name: str
    version: str
    state: str
    files: tuple[FileLine, ...]
    detail: str = ""
    known: str | None = None
    back: tuple[str, ...] = ()


@dataclass(frozen=True)
class StatusReport:
    """The whole answer. ``foreign``: files that neither the installer nor a set left as they are."""

    host: str
    root: Mapping[str, Any]
    state: str
    sets: tuple[SetLine, ...]
    foreign: tuple[FileLine, ...]
    unlisted: int
    record: Mapping[str, Any]
    processes: tuple[Mapping[str, Any], ...]
    interrupted: Mapping[str, Any] | None
    holder: Mapping[str, Any] | None
    last: Mapping[str, Any] | None
    state_dir: str | None
    notes: tuple[str, ...] = field(default=())

    @property
    def exit_status(self) -> ExitStatus:
        """OK while everything is pristine, applied or pending; else FINDINGS."""
        fine = self.state in GOOD and not self.foreign
        return ExitStatus.OK if fine else ExitStatus.FINDINGS


def read_status(session: HostSession, known: Mapping[str, PatchSet]) -> StatusReport:
    """Ask the host and hold its answer against the sets ``known`` here. Raises DeployError."""
    sets = list(known.values())
    status = session.call("status", {"paths": list(touched_paths(sets)), "survey": True})
    root, record = status["root"], status["record"]
    published = None if record["state"] == "present" else published_hashes(root)
    status["record"] = judge(record, root["version"], published)
    found = report(HostFacts(session.target.name, status, {}), sets)
    return replace(found, notes=(*found.notes, *status["record"]["notes"], *container_notes(session.target, root)))


def report(facts: HostFacts, sets: Sequence[PatchSet]) -> StatusReport:
    """The report from plain facts: pure, so that a recorded answer can be judged again."""
    status = facts.status
    current = {path: entry_fingerprint(entry) for path, entry in status["entries"].items()}
    here = {item.name: item for item in sets}
    lost = set(status["reinstalled"])
    lines = [
        _lost_line(facts, layer, here.get(layer["set"]))
        if layer["set"] in lost
        else _recorded_line(facts, layer, current)
        for layer in facts.layers
    ]
    recorded_names = {layer["set"] for layer in facts.layers}
    if facts.status["root"]["version"]:
        for item in classify(sets, facts.engine, current, facts.recorded()):
            if item.patch_set.name not in recorded_names:
                lines.append(
                    SetLine(
                        item.patch_set.name,
                        item.patch_set.version,
                        item.state.value,
                        tuple(
                            FileLine(file.path, file.state.value, _expected(file.before, file.current))
                            for file in item.files
                        )
                        if item.state is not State.UNSERVED
                        else (),
                        _unserved(item.patch_set)
                        if item.state is State.UNSERVED
                        else item.patch_set.unneeded.get(facts.engine, ""),
                    )
                )
            elif item.patch_set.name not in lost:
                lines = [_beside(line, item) if line.name == item.patch_set.name else line for line in lines]
    foreign, unlisted = _foreign(facts)
    return StatusReport(
        host=facts.host,
        root=status["root"],
        state=_overall(status, lines, foreign),
        sets=tuple(lines),
        foreign=foreign,
        unlisted=unlisted,
        record=status["record"] or {},
        processes=tuple(status["processes"]),
        interrupted=status["interrupted"],
        holder=status["holder"],
        last=status["last"],
        state_dir=status["state_dir"],
    )


def _recorded_line(facts: HostFacts, layer: Mapping[str, Any], current: Mapping[str, str | None]) -> SetLine:
    """A set that the host's record names: judged by that record alone, so that any client says the same."""
    top: dict[str, tuple[str, str | None]] = {}
    for other in facts.layers:
        for path, left in recorded(other).files.items():
            top[path] = (other["set"], left)
    lines = []
    for item in layer["files"]:
        path = item["path"]
        if current[path] == top[path][1]:
            lines.append(FileLine(path, State.APPLIED.value))
        else:
            back = current[path] == entry_fingerprint(item["before"])
            detail = "is back as it was before the set" if back else f"found {_short(current[path])}"
            lines.append(FileLine(path, State.DRIFT.value, detail))
    state = State.DRIFT if any(line.state == State.DRIFT for line in lines) else State.APPLIED
    ways = tuple(facts.status["back"].get(layer["set"], ()))
    return SetLine(layer["set"], layer["version"], state.value, tuple(lines), back=ways)


def _lost_line(facts: HostFacts, layer: Mapping[str, Any], here: PatchSet | None) -> SetLine:
    """A recorded set that a new install took away: what is left of it, and what `apply` can do about it."""
    engine, then = facts.status["root"]["version"], (layer.get("install") or {}).get("version")
    files = tuple(
        FileLine(
            item["path"], REINSTALLED, "added by the set, still there" * (item["path"] in facts.status["survivors"])
        )
        for item in layer["files"]
    )
    detail = f"sglang was installed anew (then {then}, now {engine})"
    if here is not None and engine in here.unneeded:
        detail += f"; not needed on {engine}: {here.unneeded[engine]}"
    elif here is not None and here.family_for(engine):
        detail += f"; `apply {here.name}` puts it back" if then == engine else f"; {here.version} has a family for that"
    elif here is not None:
        detail += f"; no family for that is known here: `apply {here.name} --check` says what changed"
    known = here.version if here is not None and here.version != layer["version"] else None
    return SetLine(layer["set"], layer["version"], REINSTALLED, files, detail, known)


def _beside(line: SetLine, status: SetStatus) -> SetLine:
    """The line of a recorded set beside what is known of it here."""
    item, record = status.patch_set, status.recorded
    if status.state is State.UNNEEDED:
        return replace(line, known=item.version, detail=f"not needed on this engine, says {item.version}")
    if record is None or record.digest == status.family.digest:
        return line
    other = f"{item.version} is known here" if item.version != record.version else "its content is another one here"
    if status.state is State.APPLIED:
        return replace(line, known=item.version, detail=f"{other}, with the same effect")
    if status.state is not State.SUPERSEDED or line.state != State.APPLIED:
        return replace(line, known=item.version, detail=other)
    if is_older(item.version, record.version):
        return replace(line, known=item.version, detail=f"{other}, which is older")
    files = tuple(replace(file, state=State.SUPERSEDED.value) for file in line.files)
    return replace(line, state=State.SUPERSEDED.value, files=files, known=item.version, detail=other)


def _foreign(facts: HostFacts) -> tuple[tuple[FileLine, ...], int]:
    """Files that the baseline and the host's record do not account for; and how many files neither lists."""
    record = facts.status["record"] or {}
    baseline = record.get("baseline", RECORD)
    touched = {path for layer in facts.layers for path in recorded(layer).files}
    found = []
    for path in record.get("differs", []):
        if path not in touched:
            found.append(FileLine(path, State.DRIFT.value, f"differs from {baseline}"))
    for path in record.get("missing", []):
        if path not in touched:
            found.append(FileLine(path, State.DRIFT.value, f"is in {baseline}, and gone"))
    unlisted = sum(path not in touched for path in record.get("unlisted", []))
    return tuple(found), unlisted


def _overall(status: Mapping[str, Any], lines: Sequence[SetLine], foreign: Sequence[FileLine]) -> str:
    """The worst that is to be said, in one word."""
    states = {line.state for line in lines}
    if status["interrupted"]:
        return INTERRUPTED
    for state in (State.DRIFT.value, REINSTALLED, State.PARTLY.value, State.SUPERSEDED.value):
        if state in states:
            return state
    if foreign:
        return State.DRIFT.value
    if status["layers"]:
        return State.APPLIED.value
    # Without a baseline nothing says what the tree was like when it was installed.
    record = status["record"] or {}
    return PRISTINE if record.get("baseline", record.get("state") == "present") else UNKNOWN


def _unserved(item: PatchSet) -> str:
    return f"serves {', '.join(item.engines)}"


def _expected(before: str | None, current: str | None) -> str:
    return "" if before == current else f"found {_short(current)}"


def _short(fingerprint: str | None) -> str:
    if fingerprint is None:
        return "no file"
    if ":" in fingerprint:
        return fingerprint.replace("link:", "a link to ").removeprefix("other:")
    return f"sha256 {fingerprint[:12]}"
