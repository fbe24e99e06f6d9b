"""Planning: what has to change on a host so that sets are applied, computed in memory, or every reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddtree_deploy.patching.apply import Offset, compute
from ddtree_deploy.patching.classify import FileStatus, Recorded, SetStatus, State, classify
from ddtree_deploy.patching.images import FileImage, Image, fingerprint
from ddtree_deploy.patching.patchset import PatchSet, check_chain, short
from ddtree_deploy.patching.problems import Problem, RefusedError, as_error

_NAMED = 4


@dataclass(frozen=True)
class Change:
    """What a path holds before a set, and after it."""

    before: Image
    after: Image


@dataclass(frozen=True)
class Layer:
    """One set of the request. ``changes`` is empty unless the set is to be applied now."""

    status: SetStatus
    changes: Mapping[str, Change]
    offsets: tuple[Offset, ...] = ()

    @property
    def patch_set(self) -> PatchSet:
        """The set."""
        return self.status.patch_set

    @property
    def digest(self) -> str:
        """The digest of what is applied: the family's, which the host's record keeps."""
        return self.status.family.digest


@dataclass(frozen=True)
class Plan:
    """All sets of a request in apply order. ``notices``: what the user should know although nothing is wrong."""

    layers: tuple[Layer, ...]
    notices: tuple[str, ...]

    @property
    def to_apply(self) -> tuple[Layer, ...]:
        """The layers that change something; empty when all is applied already."""
        return tuple(layer for layer in self.layers if layer.changes)

    @property
    def changes(self) -> dict[str, Change]:
        """All layers together: for each path what it holds now and what it will hold."""
        together: dict[str, Change] = {}
        for layer in self.layers:
            for path, change in layer.changes.items():
                first = together.get(path)
                together[path] = Change(first.before if first else change.before, change.after)
        return {path: change for path, change in together.items() if change.before != change.after}


def plan(
    sets: Sequence[PatchSet],
    engine: str,
    images: Mapping[str, Image],
    recorded: Sequence[Recorded] = (),
) -> Plan:
    """Plan to apply ``sets`` (a request in order, requirements first) to an engine of the version ``engine``.

    ``images``: path -> image for every path of :func:`ddtree_deploy.patching.classify.touched_paths` of the
    sets and ``recorded`` (the host's applied sets, oldest first). Folders above them that are symbolic links
    may be in it too.

    Raises one DeployError with every problem: DD101 drift and partly applied sets, DD109 no family, DD509
    links, DD102 DD103 DD106 diffs that do not apply, DD108 a set whose result is not what its hashes say. Another
    version of a set must be gone from ``images`` and ``recorded`` before.
    """
    current = {path: fingerprint(image) for path, image in images.items()}
    statuses = classify(sets, engine, current, recorded)
    planner = _Planner(images)
    if all(item.family_for(engine) or engine in item.unneeded for item in sets):
        planner.problems += check_chain(sets, engine)
    layers = [planner.layer(status, engine) for status in statuses]
    if planner.problems:
        subject = " and ".join([", ".join(item.name for item in sets[:-1]), sets[-1].name][len(sets) < 2 :])
        raise as_error(planner.problems, subject, "; ".join(planner.hints) or None)
    return Plan(tuple(layers), tuple(planner.notices))


class _Planner:
    def __init__(self, images: Mapping[str, Image]) -> None:
        self.images = dict(images)
        self.problems: list[Problem] = []
        self.hints: dict[str, None] = {}
        self.notices: list[str] = []
        self.blocked: set[str] = set()

    def layer(self, status: SetStatus, engine: str) -> Layer:
        """The set's layer; with problems noted it is an empty one, and sets that require it are not tried."""
        item = status.patch_set
        if status.borrowed:
            self.notices.append(
                f"{item.name}: no family lists {engine}, but every file's hash is that of {status.version}"
            )
        if status.state is State.UNNEEDED:
            self.notices.append(f"{item.name}: not needed on {engine}: {item.unneeded[engine]}")
            return Layer(status, {})
        self.refuse(status, engine)
        if status.state is State.APPLIED or not self.blocked.isdisjoint({item.name, *item.requires}):
            if status.state is not State.APPLIED:
                self.blocked.add(item.name)
            return Layer(status, {})
        try:
            return self.apply(status)
        except RefusedError as refused:
            self.blocked.add(item.name)
            self.problems += refused.problems
            if refused.hint:
                self.hints[refused.hint] = None
            return Layer(status, {})

    def apply(self, status: SetStatus) -> Layer:
        item, family = status.patch_set, status.family
        exact = family.paths if status.version is not None else ()
        hashes = {file.path: file for file in status.files}
        before = {path: (hashes[path].before, self.images[path]) for path in exact}
        self.check(item, before, "stands before it", "DD101")
        result = compute(self.images, family.diffs, exact)
        after = {**result.images, **{path: FileImage(data) for path, data in family.added.items()}}
        self.check(item, {path: (hashes[path].after, after[path]) for path in exact}, "results", "DD108")
        changes = {
            path: Change(self.images[path], image)
            for path, image in sorted(after.items())
            if image != self.images[path]
        }
        self.images.update(after)
        self.notices += [str(offset) for offset in result.offsets]
        if not changes:
            self.notices.append(f"{item.name}: changes nothing, the files already are as it wants them")
        return Layer(status, changes, result.offsets)

    def check(self, item: PatchSet, files: Mapping[str, tuple[str | None, Image]], what: str, code: str) -> None:
        """Raise RefusedError for files (path -> what the set says, what there is) that are not as said."""
        wrong = [
            Problem(code, f"{item.name}: {path}: the set says that {short(want)} {what}, but it is {short(found)}")
            for path, (want, found) in ((path, (want, fingerprint(image))) for path, (want, image) in files.items())
            if want != found
        ]
        if wrong:
            raise RefusedError(wrong)

    # -- why a set cannot be applied -----------------------------------------------------------

    def refuse(self, status: SetStatus, engine: str) -> None:
        """Note the problems of a set that is neither pending nor applied."""
        item, files = status.patch_set, status.files
        problems: list[Problem] = []
        if status.state is State.UNSERVED:
            self.blocked.add(item.name)
            if item.family_for(engine) is None:
                wrong = [file.path for file in files if file.state is State.DRIFT]
                near = f"; not as in {status.version}: {_some(wrong)}" if wrong else ""
                serves = ", ".join(item.engines)
                problems.append(Problem("DD109", f"{item.name}: no family serves {engine}, only {serves}{near}"))
        elif not status.family.paths:
            problems.append(Problem("DD108", f"{item.name}: the family {status.family.name} does nothing yet"))
            self.hints[f"ddtree-deploy patchset edit {item.name} --engine {engine}, then patchset refresh"] = None
        elif status.state is State.DRIFT:
            problems += [_drift(item, file) for file in files if file.state is State.DRIFT]
            self.hints["see what differs: ddtree-deploy status, and diff of a snapshot with pristine"] = None
        elif status.state is State.PARTLY:
            self.hints["put its files back as they were before the set (`patchset show` has the diffs), then apply"] = (
                None
            )
            lists = {
                state: _some([file.path for file in files if file.state is state])
                for state in (State.APPLIED, State.PENDING)
            }
            problems.append(
                Problem(
                    "DD101",
                    f"{item.name} is partly applied: applied in {lists[State.APPLIED]}; not in {lists[State.PENDING]}",
                )
            )
        if problems:
            self.problems += problems
            self.blocked.add(item.name)


def _drift(item: PatchSet, file: FileStatus) -> Problem:
    if file.current is not None and file.current.startswith("link:"):
        target = file.current.removeprefix("link:")
        return Problem("DD509", f"{item.name}: {file.path} is a symbolic link to {target}")
    by = f", as the applied set {file.changed_by} left it" if file.changed_by else ""
    expected = f"{short(file.before)} (pending) or {short(file.after)} (applied)"
    if item.adhoc:
        return Problem("DD101", f"{item.name}: {file.path} changed since the set was applied")
    return Problem("DD101", f"{item.name}: {file.path}: expected {expected}, found {short(file.current)}{by}")


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more
