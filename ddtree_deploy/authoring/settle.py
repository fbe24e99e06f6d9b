"""After a set's patches changed: its hashes on every engine version, and the sets that are built on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ddtree_deploy.authoring.series import Series
from ddtree_deploy.authoring.stack import Pristine, Stack, family_of, stack_of
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.declaration import FileHashes
from ddtree_deploy.patching.images import fingerprint, sha256
from ddtree_deploy.patching.patchset import Family, PatchSet, check_chain, in_order, short, with_requirements

#: Engine version -> its pristine files. Raises DeployError DD404 where they are not to be had.
PristineOf = Callable[[str], Pristine]

_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")
PARTS = ("major", "minor", "patch")


@dataclass(frozen=True)
class Settled:
    """``sets``: what is to be written, the changed set first. ``notices``: what the author should know."""

    sets: tuple[PatchSet, ...]
    notices: tuple[str, ...]


def hashes_of(stack: Stack, like: Mapping[str, FileHashes] | None = None) -> dict[str, FileHashes]:
    """Path -> hashes for every file that the family touches, in the order of ``like``, then by path."""
    paths = stack.family.paths
    known = [path for path in like or () if path in paths]
    return {
        path: FileHashes(fingerprint(stack.levels[0].get(path)), fingerprint(stack.levels[-1].get(path)))
        for path in dict.fromkeys([*known, *paths])
    }


def settle(
    changed: PatchSet,
    families: Sequence[str],
    known: Mapping[str, PatchSet],
    pristine_of: PristineOf,
    *,
    split: str | None = None,
    with_dependents: bool = False,
) -> Settled:
    """The set with the hashes of ``families`` made anew, and the sets that require it made to fit.

    ``changed`` has new patches or added files; ``known``: the sets as they are on disk, the old one among them.
    ``split``: the versions to which a family's new patches apply become a family of that name; the others keep
    the old patches. ``with_dependents``: hashes of sets that require this one are made anew where they apply.

    Raises one DeployError: DD102 DD103 DD106 patches that do not apply on a version, DD117 dependents that stand
    in the way, DD404 a version's files that are not to be had.
    """
    old = known.get(changed.name)
    notices: list[str] = []
    moved = {engine for name in families for engine in changed.families[name].engines}
    made: list[str] = []
    for name in families:
        changed, family = _rehash(changed, name, known, pristine_of, old, split, notices)
        made.append(family)
    changed = _without_stale_notes(_follow_added(changed, made, notices), notices)
    library = {**known, changed.name: changed}
    dependents = _dependents(changed, library, pristine_of, moved, with_dependents, notices)
    return Settled((changed, *dependents), tuple(notices))


# -- the set itself ----------------------------------------------------------------------------------


def _rehash(
    changed: PatchSet,
    name: str,
    known: Mapping[str, PatchSet],
    pristine_of: PristineOf,
    old: PatchSet | None,
    split: str | None,
    notices: list[str],
) -> tuple[PatchSet, str]:
    """The set with one family's hashes, and the name of the family that has the new patches."""
    family = changed.families[name]
    ordered = with_requirements(changed.name, {**known, changed.name: changed})
    hashes: dict[str, dict[str, FileHashes]] = {}
    failed: dict[str, DeployError] = {}
    for engine in family.engines:
        try:
            stack = stack_of(ordered, engine, pristine_of(engine), trust_hashes=False)
            hashes[engine] = hashes_of(stack, family.hashes.get(engine))
        except DeployError as error:
            if error.code not in ("DD102", "DD103", "DD106"):
                raise
            failed[engine] = error
    if not failed:
        if split is not None:
            raise DeployError("DD001", f"--split {split}: the patches apply to every version of {name}", "leave it out")
        return _with_family(changed, replace(family, hashes=hashes)), name
    if split is None or not hashes or old is None or name not in old.families:
        raise _not_everywhere(changed, name, failed, bool(hashes))
    if split in changed.families:
        raise DeployError("DD001", f"{changed.name} has a family {split}", "take another name for --split")
    before = old.families[name]
    kept = replace(before, engines=tuple(failed), hashes={engine: before.hashes[engine] for engine in failed})
    notices.append(f"{', '.join(failed)} keep(s) the patches of the family {name}; {', '.join(hashes)}: now {split}")
    new = replace(family, name=split, engines=tuple(hashes), hashes=hashes)
    return _with_family(_with_family(changed, kept), new), split


def _with_family(item: PatchSet, family: Family) -> PatchSet:
    return replace(item, families={**item.families, family.name: family})


def _not_everywhere(item: PatchSet, name: str, failed: Mapping[str, DeployError], some: bool) -> DeployError:
    lines = [line for engine, error in failed.items() for line in _lines(engine, error)]
    first = next(iter(failed.values()))
    hint = "`--split NAME` makes a family of the versions to which it applies; `patchset port` carries it to the others"
    versions = ", ".join(failed)
    where = f"{item.name}: the changed patches do not apply to {versions} (family {name})"
    return DeployError(first.code, where, hint if some else first.hint, lines)


def _lines(engine: str, error: DeployError) -> list[str]:
    return [f"{engine}: {line}" for line in (error.details or [error.message])]


def _follow_added(changed: PatchSet, done: Sequence[str], notices: list[str]) -> PatchSet:
    """``new/`` is one folder for all families: a file changed for one is changed for all that take it."""
    latest = {path: data for name in done for path, data in changed.families[name].added.items()}
    for family in changed.families.values():
        other = {path: latest[path] for path in family.added if path in latest and latest[path] != family.added[path]}
        if family.name in done or not other:
            continue
        hashes = {
            engine: {
                path: FileHashes(None, sha256(other[path])) if path in other else both for path, both in per.items()
            }
            for engine, per in family.hashes.items()
        }
        changed = _with_family(changed, replace(family, added={**family.added, **other}, hashes=hashes))
        notices.append(f"the family {family.name} takes {', '.join(sorted(other))} too: changed there as well")
    return changed


def _without_stale_notes(changed: PatchSet, notices: list[str]) -> PatchSet:
    """No family can be said to do without a patch that none has any more."""
    known = {patch.name for family in changed.families.values() for patch in family.patches}
    for family in changed.families.values():
        stale = [name for name in family.left_out if name not in known]
        if stale:
            left_out = {name: why for name, why in family.left_out.items() if name in known}
            changed = _with_family(changed, replace(family, left_out=left_out))
            notices.append(f"the family {family.name} no longer says why it does without {', '.join(stale)}")
    return changed


# -- the sets built on it ----------------------------------------------------------------------------


def _dependents(
    changed: PatchSet,
    library: Mapping[str, PatchSet],
    pristine_of: PristineOf,
    moved: Collection[str],
    recompute: bool,
    notices: list[str],
) -> list[PatchSet]:
    """The sets that no longer fit, with hashes that do. ``moved``: the versions on which the set was made anew."""
    now = dict(library)
    done = []
    for name in (item.name for item in in_order(sorted(library), library)):
        item, ordered = now[name], with_requirements(name, now)
        if name == changed.name or changed.name not in [below.name for below in ordered]:
            continue
        torn: dict[str, tuple[str, ...]] = {}
        for engine in item.engines:
            if engine not in moved and not check_chain(ordered, engine):
                continue
            there = _on_new_ground(item, engine, now, pristine_of)
            if there.hashes[engine] != item.families[there.name].hashes[engine]:
                torn[engine] = _differences(item, there, engine)
                now[name] = _with_family(now[name], there)
        if torn and not recompute:
            raise DeployError(
                "DD117",
                f"{name} on {', '.join(torn)} builds on files that {changed.name} now leaves otherwise",
                "--with-dependents makes its hashes anew",
                [line for lines in torn.values() for line in lines],
            )
        if torn:
            done.append(now[name])
            notices.append(f"{name}: hashes made anew on {', '.join(torn)}")
    return done


def _differences(item: PatchSet, there: Family, engine: str) -> tuple[str, ...]:
    was, now = item.families[there.name].hashes[engine], there.hashes[engine]
    return tuple(
        f"{engine}: {path}: before was {short(was[path].before)}, is {short(now[path].before)}"
        for path in now
        if path in was and was[path].before != now[path].before
    )


def _on_new_ground(item: PatchSet, engine: str, known: Mapping[str, PatchSet], pristine_of: PristineOf) -> Family:
    """A dependent set's family for ``engine`` with the hashes that it has on what is now below it."""
    family = family_of(known[item.name], engine)
    ordered = with_requirements(item.name, known)
    try:
        stack = stack_of(ordered, engine, pristine_of(engine), trust_hashes=False)
    except DeployError as error:
        hint = f"change {item.name} first so that it does not need it, or make the change another way"
        where = f"{item.name} no longer applies to {engine} on what would be below it"
        raise DeployError("DD117", where, hint, _lines(engine, error)) from None
    hashes = hashes_of(stack, family.hashes[engine])
    if len(family.engines) == 1 and hashes != family.hashes[engine]:
        family = replace(family, patches=tuple(Series(stack).patches(renumber=True)))
    return replace(family, hashes={**family.hashes, engine: hashes})


# -- versions ----------------------------------------------------------------------------------------


def bumped(version: str, part: str) -> str:
    """The version after ``version``: its ``major``, ``minor`` or ``patch`` number one higher, those behind it 0.

    Raises DeployError DD001 for a version that is not of three numbers.
    """
    found = _NUMBERS.fullmatch(version)
    if found is None:
        raise DeployError(
            "DD001", f"{version} is not of three numbers: --bump cannot tell the next one", "--set-version X"
        )
    numbers = [int(number) for number in found.groups()]
    at = PARTS.index(part)
    return ".".join(str(number) for number in [*numbers[:at], numbers[at] + 1, *[0] * (2 - at)])


def versioned(settled: Settled, known: Mapping[str, PatchSet], part: str | None, exact: str | None) -> Settled:
    """The sets with new versions: the changed one as asked for, its dependents then one patch number on.

    A set whose content changed and whose version does not is said so.
    """
    sets: list[PatchSet] = []
    notices = list(settled.notices)
    for number, item in enumerate(settled.sets):
        old = known.get(item.name)
        version = item.version
        if not number and (exact or part):
            version = exact or bumped(version, str(part))
        elif number and (exact or part):
            version = bumped(version, "patch")
        # A set that did nothing yet is nowhere: its first patches need no new version.
        taken = old and old.version == version and any(family.paths for family in old.families.values())
        if taken and old != item:
            notices.append(f"{item.name}: the content changed and the version did not: still {version}")
        sets.append(replace(item, version=version))
    return Settled(tuple(sets), tuple(notices))
