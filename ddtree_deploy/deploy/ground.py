"""What a plan stands on: the host's tree without the recorded sets that the plan replaces.

An upgrade is planned as if what it replaces had been rolled back: in memory, from pre-images that the host keeps.
On the host's disk every file then goes from its old content to its new one in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from ddtree_deploy.agent.layers import bottom_entries, built_on, paths_of, top_entries
from ddtree_deploy.deploy.facts import Entry, HostFacts, entry_fingerprint, look, stored_images
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.patching.classify import Recorded, SetStatus, State, classify, touched_paths
from ddtree_deploy.patching.images import Image
from ddtree_deploy.patching.patchset import ADHOC_FAMILY, PatchSet, in_order, short

Known = Callable[[], Mapping[str, PatchSet]]


@dataclass(frozen=True)
class Ground:
    """``facts`` is the look at the host. ``sets``: the request, and the sets that have to come along with it.

    ``taken``: the recorded layers that the plan takes off, oldest first; ``lost``: the names of those that a
    reinstall had taken away before. ``entries``: what stands without them, for every path of theirs.
    ``images`` and ``recorded`` are what to plan on. ``linked``: paths whose image is that of a file which the
    link in their entry leads to. ``along``: the sets that nobody asked for. ``notices``: what the user should know.
    """

    facts: HostFacts
    sets: tuple[PatchSet, ...]
    taken: tuple[Mapping[str, Any], ...]
    lost: tuple[str, ...]
    entries: Mapping[str, Entry]
    images: Mapping[str, Image]
    recorded: tuple[Recorded, ...]
    linked: Mapping[str, Entry]
    along: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def replaced(self) -> dict[str, str]:
        """The sets in force that the plan takes off, oldest first, and their versions."""
        return {layer["set"]: layer["version"] for layer in self.taken if layer["set"] not in self.lost}


def prepare(
    session: HostSession,
    facts: HostFacts,
    sets: Sequence[PatchSet],
    known: Known,
    *,
    downgrade: bool = False,
    break_links: bool = False,
) -> Ground:
    """Find which recorded sets ``sets`` replace, and the tree without these.

    ``facts``: a look at the host for ``sets``. ``known``: the sets known here; one that builds on a replaced
    set, and is applied, comes along. Raises DeployError: DD101 a replaced set's file was edited, DD110 a set
    that would have to come along is not known here, DD114 the host's version is newer (unless ``downgrade``),
    DD508 a pre-image that is gone.
    """
    requested = {item.name for item in sets}
    sets = tuple(sets)
    while True:
        names, notices = _to_replace(facts, sets, downgrade)
        taken = built_on(facts.layers, names)
        asked = {item.name for item in sets}
        lost = {layer["set"] for layer in taken} & set(facts.status["reinstalled"])
        missing = [layer["set"] for layer in taken if layer["set"] not in asked | lost]
        if not missing:
            break
        sets = _together(facts.host, sets, missing, taken, known())
        facts = look(session, sets, break_links=break_links)
    sets = _in_recorded_order(sets, taken)
    standing = [layer for layer in taken if layer["set"] not in lost]
    _check_untouched(facts, standing)
    survivors = dict.fromkeys(set(facts.status["survivors"]) & set(paths_of(taken)))
    entries: dict[str, Entry] = {**survivors, **bottom_entries(standing)}
    below, linked = _images_below(session, facts, entries, set(touched_paths(sets)), break_links)
    gone = {layer["set"] for layer in taken}
    return Ground(
        facts,
        sets,
        tuple(taken),
        tuple(sorted(lost)),
        entries,
        {**facts.images, **below},
        tuple(item for item in facts.recorded() if item.name not in gone),
        {**{path: facts.status["entries"][path] for path in facts.status["linked"] if path not in below}, **linked},
        tuple(item.name for item in sets if item.name not in requested),
        notices,
    )


def _to_replace(facts: HostFacts, sets: Sequence[PatchSet], downgrade: bool) -> tuple[set[str], tuple[str, ...]]:
    """The recorded sets that give way to ``sets``: other versions of them, and what a reinstall left of them."""
    statuses = classify(sets, facts.engine, facts.fingerprints, facts.recorded())
    layers = {layer["set"]: layer for layer in facts.layers}
    names: set[str] = set()
    notices = []
    for status in statuses:
        item, old = status.patch_set, status.recorded
        if old is None:
            continue
        ordered = not item.adhoc and layers[old.name].get("family") != ADHOC_FAMILY
        older = ordered and is_older(item.version, old.version)
        if status.state is State.UNNEEDED:
            names.add(old.name)
        elif old.digest == status.family.digest:
            continue
        elif status.state is State.APPLIED and older and not downgrade:
            notices.append(f"{item.name} {old.version} is applied; {item.version} does the same on this engine")
        elif status.state in (State.APPLIED, State.SUPERSEDED) or _may_fit_below(status, facts):
            if older and not downgrade:
                raise DeployError(
                    "DD114",
                    f"{facts.host}: {item.name} {old.version} is applied, and is newer than {item.version}",
                    "get the newer set here, or give --downgrade to replace it by the older one",
                )
            names.add(old.name)
    lost = set(facts.status["reinstalled"])
    paths = {file.path for status in statuses for file in status.files}
    asked = {item.name for item in sets}
    for layer in facts.layers:
        if layer["set"] in lost and (layer["set"] in asked or paths & set(paths_of([layer]))):
            names.add(layer["set"])
    return names, tuple(notices)


def _may_fit_below(status: SetStatus, facts: HostFacts) -> bool:
    """Whether a set that does not fit the host as it is may do so once its other version is off, with all that
    builds on it: what is in the way is theirs, or it borrows its hashes from an engine version that it lists.
    """
    assert status.recorded is not None
    if status.state is State.UNSERVED:
        return True
    above = {layer["set"] for layer in built_on(facts.layers, [status.recorded.name])}
    drifted = [file for file in status.files if file.state is State.DRIFT]
    return status.state is State.DRIFT and all(file.changed_by in above for file in drifted)


def is_older(version: str, other: str) -> bool:
    """Whether the first of two versions of a set comes before the other; False where they have no order."""
    try:
        return Version(version) < Version(other)
    except InvalidVersion:
        return False


def _together(
    host: str,
    sets: Sequence[PatchSet],
    missing: Sequence[str],
    taken: Sequence[Mapping[str, Any]],
    known: Mapping[str, PatchSet],
) -> tuple[PatchSet, ...]:
    """The request with the applied sets that build on what it replaces; DD110 where they are not known here."""
    unknown = [name for name in missing if name not in known]
    if unknown:
        base = next(layer["set"] for layer in taken if layer["set"] not in missing)
        raise DeployError(
            "DD110",
            f"{host}: {', '.join(unknown)} builds on {base}, and is not known here",
            f"name both: `apply {base} {unknown[0]}` with its file or folder; or `rollback {unknown[0]}` first",
        )
    every = {**known, **{item.name: item for item in sets}}
    return in_order([*(item.name for item in sets), *missing], every)


def _in_recorded_order(sets: Sequence[PatchSet], taken: Sequence[Mapping[str, Any]]) -> tuple[PatchSet, ...]:
    """The sets, those that replace recorded ones in the order of these, whatever order they were asked for in."""
    every = {item.name: item for item in sets}
    recorded = iter([layer["set"] for layer in taken if layer["set"] in every])
    old = {layer["set"] for layer in taken}
    return in_order([next(recorded) if item.name in old else item.name for item in sets], every)


def _check_untouched(facts: HostFacts, standing: Sequence[Mapping[str, Any]]) -> None:
    """What is replaced must be as the sets left it: nobody's later edit goes unseen."""
    top = top_entries(dict(layer) for layer in standing)
    edited = []
    for path, entry in sorted(top.items()):
        now = facts.status["entries"][path]
        if now != entry:
            was, found = short(entry_fingerprint(entry)), short(entry_fingerprint(now))
            edited.append(f"{path}: left as {was}, found {'another mode' if was == found else found}")
    if edited:
        names = ", ".join(layer["set"] for layer in standing)
        raise DeployError(
            "DD101",
            f"{facts.host}: {len(edited)} file(s) were edited after {names} was applied",
            "undo those edits, or `rollback --force`: it saves the bytes that it discards on the host first",
            edited,
        )


def _images_below(
    session: HostSession,
    facts: HostFacts,
    entries: Mapping[str, Entry],
    touched: set[str],
    break_links: bool,
) -> tuple[dict[str, Image], dict[str, Entry]]:
    """The images that the entries stand for, of the touched paths; and the entries that are links led through."""
    wanted = [(path, entry) for path, entry in entries.items() if path in touched]
    images, missing = stored_images(session, wanted, break_links=break_links)
    if missing:
        raise DeployError(
            "DD508",
            f"{facts.host}: what {len(missing)} file(s) held before the set is gone from the host's state",
            f"restore {facts.status['state_dir']} from a backup; or reinstall sglang {facts.engine}, then apply again",
            [f"{path}: {why}" for path, why in missing.items()],
        )
    below = {path: images[path, entry_fingerprint(entry)] for path, entry in wanted}
    linked: dict[str, Entry] = {
        path: entry for path, entry in wanted if entry and entry["kind"] == "link" and break_links
    }
    return below, linked
