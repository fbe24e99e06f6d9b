"""How a host stands: every recorded and every known set, file by file, and the rest of the tree against RECORD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_deploy.deploy.facts import HostFacts, entry_fingerprint, recorded
from ddtree_deploy.errors import ExitStatus
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.patching.classify import State, classify, touched_paths
from ddtree_deploy.patching.patchset import PatchSet

PRISTINE, REINSTALLED, INTERRUPTED, UNKNOWN = "pristine", "reinstalled", "interrupted", "unknown"
#: States that need nobody's attention.
GOOD = frozenset({PRISTINE, UNKNOWN, State.APPLIED.value, State.PENDING.value, State.UNSERVED.value})


@dataclass(frozen=True)
class FileLine:
    """One file of a set: its path, its state and, where that needs saying, why."""

    path: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class SetLine:
    """One set: ``version`` is the host's where the set is recorded, else the one known here."""

    name: str
    version: str
    state: str
    files: tuple[FileLine, ...]
    detail: str = ""


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
    return report(HostFacts(session.target.name, status, {}), sets)


def report(facts: HostFacts, sets: Sequence[PatchSet]) -> StatusReport:
    """The report from plain facts: pure, so that a recorded answer can be judged again."""
    status = facts.status
    current = {path: entry_fingerprint(entry) for path, entry in status["entries"].items()}
    lost = set(status["reinstalled"])
    lines = [_recorded_line(facts, layer, current) for layer in facts.layers]
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
                        _unserved(item.patch_set) if item.state is State.UNSERVED else "",
                    )
                )
            elif item.state is State.SUPERSEDED and item.patch_set.name not in lost:
                lines = [_superseded(line, item.patch_set) for line in lines]
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
    name = layer["set"]
    if name in facts.status["reinstalled"]:
        files = tuple(FileLine(item["path"], REINSTALLED) for item in layer["files"])
        was = layer.get("install") or {}
        detail = f"sglang was installed anew (then {was.get('version')}, now {facts.status['root']['version']})"
        return SetLine(name, layer["version"], REINSTALLED, files, detail)
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
    states = {line.state for line in lines}
    return SetLine(
        name, layer["version"], State.DRIFT.value if State.DRIFT in states else State.APPLIED.value, tuple(lines)
    )


def _superseded(line: SetLine, newer: PatchSet) -> SetLine:
    if line.name != newer.name or line.state != State.APPLIED.value:
        return line
    files = tuple(FileLine(file.path, State.SUPERSEDED.value, file.detail) for file in line.files)
    return SetLine(line.name, line.version, State.SUPERSEDED.value, files, f"{newer.version} is known here")


def _foreign(facts: HostFacts) -> tuple[tuple[FileLine, ...], int]:
    """Files that RECORD and the host's record do not account for; and how many files RECORD does not list."""
    record = facts.status["record"] or {}
    touched = {path for layer in facts.layers for path in recorded(layer).files}
    found = []
    for path in record.get("differs", []):
        if path not in touched:
            found.append(FileLine(path, State.DRIFT.value, "differs from the installer's RECORD"))
    for path in record.get("missing", []):
        if path not in touched:
            found.append(FileLine(path, State.DRIFT.value, "is in the installer's RECORD, and gone"))
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
    # Without a RECORD nothing says what the tree was like when it was installed.
    return PRISTINE if (status["record"] or {}).get("state") == "present" else UNKNOWN


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
