"""How patch sets stand on a host, told from hashes: pending, applied, superseded, drift, partly applied.

A file that several sets change has a *chain* of hashes: before the first set, after the first, after the
second, ... Where the file's hash stands in the chain says which of them are applied to it. A hash that is in
no chain is explained by the host's own record, or it is drift.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from ddtree_deploy.patching.declaration import FileHashes
from ddtree_deploy.patching.patchset import Family, PatchSet, with_requirements


class State(StrEnum):
    """How a set, or a file of it, stands on a host."""

    PENDING = "pending"
    APPLIED = "applied"
    SUPERSEDED = "superseded"  # as another version of the set left it
    DRIFT = "drift"
    PARTLY = "partly"  # of a set: some of its files are applied, others pending
    UNSERVED = "unserved"  # of a set: no family is for this engine version
    UNNEEDED = "unneeded"  # of a set: it says that this engine version needs nothing of it


@dataclass(frozen=True)
class Recorded:
    """A set that the host's record says is applied; ``files``: path -> fingerprint it was left with."""

    name: str
    version: str
    digest: str
    files: Mapping[str, str | None]


@dataclass(frozen=True)
class FileStatus:
    """One file of a set. ``before`` and ``after`` are what the set says (both None for an ad-hoc set);
    ``current`` is the host's fingerprint; ``changed_by`` an applied set that accounts for a drift.
    """

    path: str
    state: State
    before: str | None
    after: str | None
    current: str | None
    changed_by: str | None = None


@dataclass(frozen=True)
class SetStatus:
    """One set. ``family`` and ``version`` (the exact engine version whose hashes were used) are the nearest
    ones for an unserved set; ``version`` is None for an ad-hoc set. ``borrowed``: no family lists the engine,
    but every hash is that of ``version``. ``recorded``: the host's record of the set, of whatever version. An
    unneeded set has no version and no files.
    """

    patch_set: PatchSet
    family: Family
    version: str | None
    state: State
    files: tuple[FileStatus, ...]
    borrowed: bool
    recorded: Recorded | None


def touched_paths(sets: Iterable[PatchSet], recorded: Iterable[Recorded] = ()) -> tuple[str, ...]:
    """Every path whose state decides how ``sets`` stand, sorted: those of all their families, and those that
    recorded versions of them touched.
    """
    sets = tuple(sets)
    names = {patch_set.name for patch_set in sets}
    paths = {path for item in sets for family in item.families.values() for path in family.paths}
    paths.update(path for record in recorded if record.name in names for path in record.files)
    return tuple(sorted(paths))


def classify(
    sets: Sequence[PatchSet],
    engine: str,
    current: Mapping[str, str | None],
    recorded: Sequence[Recorded] = (),
) -> tuple[SetStatus, ...]:
    """The status of each of ``sets``, which hold all that they require.

    ``current``: path -> fingerprint for all of :func:`touched_paths`. ``recorded``: what the host's record
    says is applied, oldest first. Hashes are the truth: the record is asked only about files that they do not
    explain, and about ad-hoc sets, which have none.
    """
    return _Classifier(sets, engine, current, recorded).statuses()


@dataclass(frozen=True)
class _Choice:
    """The family and version used for each set of a closure, and whether all of it fits the host."""

    versions: Mapping[str, tuple[Family, str | None]]
    fits: bool
    borrowed: frozenset[str]

    def chain(self, path: str) -> list[tuple[str, FileHashes]]:
        """The sets that change ``path``, in order, with its hashes."""
        steps = []
        for name, (family, version) in self.versions.items():
            hashes = family.hashes[version].get(path) if version is not None else None
            if hashes is not None:
                steps.append((name, hashes))
        return steps


class _Classifier:
    def __init__(
        self,
        sets: Sequence[PatchSet],
        engine: str,
        current: Mapping[str, str | None],
        recorded: Sequence[Recorded],
    ) -> None:
        self.sets = {patch_set.name: patch_set for patch_set in sets}
        self.engine = engine
        self.current = current
        self.recorded = recorded
        self.top = {path: record for record in recorded for path in record.files}
        closures = {
            name: [item for item in with_requirements(name, self.sets) if engine not in item.unneeded]
            for name in self.sets
        }
        self.choices = {name: self.choose(closure) for name, closure in closures.items()}

    def statuses(self) -> tuple[SetStatus, ...]:
        return tuple(self.status(patch_set) for patch_set in self.sets.values())

    # -- which family, and whose hashes --------------------------------------------------------

    def choose(self, closure: Sequence[PatchSet]) -> _Choice:
        """For a version that a set does not list, the newest version all of whose hashes fit the host, else
        the one of which most do.
        """
        unlisted = [item for item in closure if item.family_for(self.engine) is None]
        common = set.intersection(*(set(item.engines) for item in unlisted)) if unlisted else {self.engine}
        # Sets that no single version serves are unserved whichever versions are shown.
        candidates = sorted(common or set(unlisted[-1].engines), key=_release, reverse=True)
        best: tuple[int, _Choice] | None = None
        for candidate in candidates:
            versions = {item.name: self.version(item, candidate) for item in closure}
            choice = _Choice(versions, bool(common), frozenset(item.name for item in unlisted))
            wrong = sum(
                self.current[path] not in _levels(choice.chain(path)) and not self.in_force(item, family, path)
                for item in unlisted
                for family, _ in [versions[item.name]]
                for path in family.paths
            )
            if not wrong:
                return choice
            if best is None or wrong < best[0]:
                best = (wrong, replace(choice, fits=False))
        assert best is not None, "a checked set has a family with a version"
        return best[1]

    def version(self, item: PatchSet, candidate: str) -> tuple[Family, str | None]:
        """The family to use for a set and the version whose hashes count: the engine's own before others."""
        if item.adhoc:
            return next(iter(item.families.values())), None
        for version in (self.engine, candidate, item.engines[0]):
            family = item.family_for(version)
            if family is not None:
                return family, version
        raise AssertionError("a set serves the engines that it lists")

    # -- one set -------------------------------------------------------------------------------

    def status(self, patch_set: PatchSet) -> SetStatus:
        if self.engine in patch_set.unneeded:
            family = next(iter(patch_set.families.values()))
            record = self.record_of(patch_set, family)
            return SetStatus(patch_set, family, None, State.UNNEEDED, (), False, record)
        # Its own, or that of a set built on it which accounts for what its own does not.
        own = self.choices[patch_set.name]
        fitting = (choice for choice in self.choices.values() if choice.fits and patch_set.name in choice.versions)
        choice = own if own.fits else next(fitting, own)
        family, version = choice.versions[patch_set.name]
        record = self.record_of(patch_set, family)
        said = {path: self.by_hash(patch_set.name, choice, path) for path in family.paths}
        # Where a later set brings back an earlier content, a file's hash fits both: then the other files decide.
        sure = {state for states in said.values() if len(states) == 1 for state in states}
        fallback = State.APPLIED if record is not None else State.PENDING
        unsure = sure.pop() if len(sure) == 1 else fallback
        files = tuple(
            self.file(patch_set, family, version, record, path, states if len(states) < 2 else {unsure})
            for path, states in said.items()
        )
        if not choice.fits:
            state = State.UNSERVED
        else:
            state = self.set_state(family, files, record)
        borrowed = choice.fits and patch_set.name in choice.borrowed
        return SetStatus(patch_set, family, version, state, files, borrowed, record)

    def record_of(self, patch_set: PatchSet, family: Family) -> Recorded | None:
        """The record's entry for the set: by name, for an ad-hoc set also by what it does."""
        for record in reversed(self.recorded):
            if record.name == patch_set.name or (patch_set.adhoc and record.digest == family.digest):
                return record
        return None

    def set_state(self, family: Family, files: Collection[FileStatus], record: Recorded | None) -> State:
        states = {file.state for file in files}
        if State.DRIFT in states:
            return State.DRIFT
        if record is not None and record.digest != family.digest:
            # Another version is in force, unless this one does all that it did, and to the same effect.
            force = {path for path in record.files if self.intact(path, record)}
            if force and (states != {State.APPLIED} or force - set(family.paths)):
                return State.SUPERSEDED
        if not states:  # a set that does nothing yet
            return State.PENDING
        return states.pop() if len(states) == 1 else State.PARTLY

    def intact(self, path: str, record: Recorded) -> bool:
        """Whether ``path`` is as the record's last set on it left it, so that ``record`` is in force there."""
        return path in record.files and self.top[path].files[path] == self.current[path]

    def in_force(self, item: PatchSet, family: Family, path: str) -> bool:
        """Whether the record says that this very version of the set is applied, and ``path`` bears it out."""
        record = self.record_of(item, family)
        return record is not None and record.digest == family.digest and self.intact(path, record)

    # -- one file ------------------------------------------------------------------------------

    def file(
        self,
        patch_set: PatchSet,
        family: Family,
        version: str | None,
        record: Recorded | None,
        path: str,
        states: Collection[State],
    ) -> FileStatus:
        hashes = family.hashes[version][path] if version is not None else FileHashes(None, None)
        state = next(iter(states), None) or self.by_record(patch_set, family, record, path)
        top = self.top.get(path)
        changed_by = None
        if state is State.DRIFT and top is not None and self.intact(path, top):
            changed_by = top.name
        return FileStatus(path, state, hashes.before, hashes.after, self.current[path], changed_by)

    def by_hash(self, name: str, own: _Choice, path: str) -> set[State]:
        """What the chains say in which the set changes ``path``: its own, and those of sets built on it."""
        found: set[State] = set()
        for choice in self.choices.values():
            if choice.versions.get(name) != own.versions[name]:
                continue
            chain = choice.chain(path)
            index = next((at for at, step in enumerate(chain) if step[0] == name), len(chain))
            for level, sha in enumerate(_levels(chain) if index < len(chain) else ()):
                if sha == self.current[path]:
                    found.add(State.APPLIED if level > index else State.PENDING)
        return found

    def by_record(self, patch_set: PatchSet, family: Family, record: Recorded | None, path: str) -> State:
        if record is not None and path in record.files:
            if not self.intact(path, record):
                return State.DRIFT
            return State.APPLIED if record.digest == family.digest else State.SUPERSEDED
        if not patch_set.adhoc:
            return State.DRIFT
        # The very set is recorded, and left this path as it was: the source of a copy.
        return State.APPLIED if record is not None and record.digest == family.digest else State.PENDING


def _levels(chain: Sequence[tuple[str, FileHashes]]) -> list[str | None]:
    """The file's hashes with none, one, two ... of the chain's sets applied."""
    return [chain[0][1].before, *(hashes.after for _, hashes in chain)] if chain else []


def _release(version: str) -> tuple[bool, Version, str]:
    try:
        return True, Version(version), version
    except InvalidVersion:
        return False, Version("0"), version
