"""Patch sets: loading and checking their folders, and the order that ``requires`` asks for.

A set's folder::

    patches/<name>/patchset.toml                see the declaration module
                  /new/<path>                   files that the set adds, as they stand
                  /<family>/series              patch names in apply order
                  /<family>/<patch>             unified diffs, strip 1

An *ad-hoc* set is a plain diff, or a folder with a ``series`` alone: it has no hashes, requires nothing and
serves every engine version.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.declaration import (
    NEW,
    Declaration,
    DeclaredFamily,
    FileHashes,
    read_declaration,
)
from ddtree_deploy.patching.diff import read
from ddtree_deploy.patching.filediff import FileDiff, Kind
from ddtree_deploy.patching.images import sha256
from ddtree_deploy.patching.names import check_paths
from ddtree_deploy.patching.problems import Problem, as_error, printable
from ddtree_deploy.patching.series import read_series

TOML = "patchset.toml"
SERIES = "series"
ADHOC_FAMILY = "any"
_IGNORED_FILES = (".md",)
_BYTECODE = "__pycache__"


@dataclass(frozen=True)
class Patch:
    """One diff of a series: its file name, its bytes as they are, and what they say."""

    name: str
    data: bytes
    diffs: tuple[FileDiff, ...]


@dataclass(frozen=True)
class Family:
    """What a set does to the engine versions of one family.

    ``hashes``: exact version -> path -> sha256 before and after; empty for an ad-hoc set. ``added``: path ->
    bytes. ``left_out``: patches of other families that this one does without -> why. ``digest`` changes with
    anything that changes what applying it means.
    """

    name: str
    engines: tuple[str, ...]
    patches: tuple[Patch, ...]
    added: Mapping[str, bytes]
    hashes: Mapping[str, Mapping[str, FileHashes]]
    digest: str
    left_out: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every path that the family touches, sorted."""
        touched = {path for patch in self.patches for diff in patch.diffs for path in diff.paths}
        return tuple(sorted(touched | set(self.added)))

    @cached_property
    def diffs(self) -> tuple[FileDiff, ...]:
        """The diffs of all patches in order, every patch a part of its own."""
        numbered: list[FileDiff] = []
        for patch in self.patches:
            first = numbered[-1].part + 1 if numbered else 0
            numbered += (replace(diff, part=first + diff.part) for diff in patch.diffs)
        return tuple(numbered)


@dataclass(frozen=True)
class PatchSet:
    """A loaded and checked set. ``digest`` covers its declaration and every family. ``unneeded``: engine
    versions that need nothing of it -> why.
    """

    name: str
    version: str
    summary: str
    package: str
    roots: tuple[str, ...]
    requires: tuple[str, ...]
    families: Mapping[str, Family]
    digest: str
    adhoc: bool = False
    unneeded: Mapping[str, str] = field(default_factory=dict)

    @property
    def engines(self) -> tuple[str, ...]:
        """The exact engine versions that the families list."""
        return tuple(engine for family in self.families.values() for engine in family.engines)

    def family_for(self, engine: str) -> Family | None:
        """The family that lists this engine version; an ad-hoc set's only one for every version."""
        if self.adhoc:
            return self.families[ADHOC_FAMILY]
        return next((family for family in self.families.values() if engine in family.engines), None)


# -- order -------------------------------------------------------------------------------------------


def in_order(names: Iterable[str], sets: Mapping[str, PatchSet | None]) -> tuple[PatchSet, ...]:
    """The named sets and all that they require, each once, requirements first, else in the given order.

    Raises DeployError DD107 for an unknown set, DD108 for a required set that is unknown or not sound (None), or
    a cycle.
    """
    ordered: dict[str, PatchSet] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in ordered:
            return
        if name in above:
            cycle = " -> ".join((*above[above.index(name) :], name))
            raise DeployError("DD108", f"patch sets require one another: {cycle}")
        found = sets.get(name)
        if found is None:
            if above or name in sets:
                what = "not valid" if name in sets else "unknown"
                by = f"the patch set {above[-1]} requires {name}, which" if above else f"the patch set {name}"
                raise DeployError("DD108", f"{by} is {what}")
            close = difflib.get_close_matches(name, sets, 1)
            known = f"did you mean {close[0]}?" if close else "known: " + (", ".join(sorted(sets)) or "none")
            raise DeployError("DD107", f"there is no patch set {name}", known)
        for required in found.requires:
            visit(required, (*above, name))
        ordered[name] = found

    for name in names:
        visit(name, ())
    return tuple(ordered.values())


def with_requirements(name: str, sets: Mapping[str, PatchSet | None]) -> tuple[PatchSet, ...]:
    """The set ``name`` last, before it all that it requires: see :func:`in_order`."""
    return in_order([name], sets)


# -- loading -----------------------------------------------------------------------------------------


def survey_sets(folder: Traversable) -> tuple[dict[str, PatchSet], dict[str, list[Problem]]]:
    """Every set below ``folder``, by name, in sorted order; plain files and hidden folders are none.

    Sound sets, and the problems (DD108) of the others: also of those that require a set that is unknown or not
    sound, require one another, or whose hashes do not fit those of the sets they are built on.
    """
    sets: dict[str, PatchSet] = {}
    broken: dict[str, list[Problem]] = {}
    for name in _names(folder):
        loaded, problems = _read_set(folder.joinpath(name))
        if loaded is not None:
            sets[name] = loaded
        else:
            broken[name] = problems
    known: dict[str, PatchSet | None] = {**sets, **dict.fromkeys(broken)}
    together = {name: _check_requirements(name, known) for name in sets}
    broken.update({name: problems for name, problems in together.items() if problems})
    return {name: item for name, item in sets.items() if name not in broken}, broken


def load_sets(folder: Traversable) -> dict[str, PatchSet]:
    """Every set of :func:`survey_sets`; raises one DeployError DD108 with every problem of every set."""
    sets, broken = survey_sets(folder)
    problems = [problem for name in sorted(broken) for problem in broken[name]]
    if problems:
        raise as_error(problems, "patch sets")
    return sets


def load_closure(name: str, folder: Traversable) -> tuple[PatchSet, ...]:
    """The set ``name`` below ``folder`` last, before it all that it requires; no other set is looked at.

    Raises DeployError DD107 for an unknown set, one DD108 with every problem of all of them.
    """
    return _closure(name, folder, None)


def _closure(name: str, folder: Traversable, own: PatchSet | None) -> tuple[PatchSet, ...]:
    """:func:`load_closure`; ``own`` is the set if it is loaded already, from elsewhere."""
    known = _names(folder)
    sets: dict[str, PatchSet | None] = {name: own} if own else {}
    problems: list[Problem] = []
    waiting = [name, *(own.requires if own else ())]
    while waiting:
        wanted = waiting.pop()
        if wanted in sets or wanted not in known:
            continue
        loaded, found = _read_set(folder.joinpath(wanted))
        sets[wanted] = loaded
        problems += found
        waiting += loaded.requires if loaded else ()
    problems = problems or (_check_requirements(name, sets) if name in sets else [])
    if problems:
        raise as_error(problems, f"patch set {name}")
    return with_requirements(name, {**dict.fromkeys(known), **sets})


def _names(folder: Traversable) -> list[str]:
    """The names of the sets below ``folder``."""
    entries = sorted(folder.iterdir(), key=lambda item: item.name)
    return [item.name for item in entries if item.is_dir() and not item.name.startswith(".") and item.name != _BYTECODE]


def load_set(folder: Traversable, *, trust_hashes: bool = True) -> PatchSet:
    """The set in ``folder``, checked by itself; ``trust_hashes=False`` for one whose hashes are to be made anew.

    Raises one DeployError DD108 with every problem.
    """
    loaded, problems = _read_set(folder, trust_hashes)
    if loaded is None:
        raise as_error(problems, f"patch set {folder.name}")
    return loaded


def load_adhoc(path: Path, *, strip: int = 1, any_suffix: bool = False) -> PatchSet:
    """An ad-hoc set from a diff or from a folder with a ``series``, whose entries may say ``-pN``.

    Raises DeployError: DD007 unreadable, DD104 and DD105 bad diffs, DD105 paths outside of the package or not
    of its text files (``any_suffix`` allows these), DD108 a bad series.
    """
    patches: list[tuple[str, bytes, int]] = []
    try:
        if path.is_dir():
            where = f"{path.name}/{SERIES}"
            entries, problems = read_series((path / SERIES).read_bytes(), where, strips=True)
            for entry in entries:
                if (path / entry.name).is_file():
                    own = strip if entry.strip is None else entry.strip
                    patches.append((entry.name, (path / entry.name).read_bytes(), own))
                else:
                    problems.append(Problem("DD108", f"{where}:{entry.line}: there is no file {entry.name}"))
            if not entries and not problems:
                problems.append(Problem("DD108", f"{where}: names no patch"))
            if problems:
                raise as_error(problems, where)
        else:
            patches.append((path.name, path.read_bytes(), strip))
    except OSError as error:
        raise DeployError("DD007", f"cannot read {error.filename or path}: {error.strerror}") from None
    stem = path.resolve().name if path.is_dir() else path.stem
    loaded = adhoc_set(stem, patches)
    check_paths(loaded.families[ADHOC_FAMILY].paths, any_suffix=any_suffix)
    return loaded


def adhoc_set(name: str, patches: Sequence[tuple[str, bytes, int]]) -> PatchSet:
    """An ad-hoc set of (patch name, diff, strip level) in order; its paths are safe, no policy is applied.

    The digest, whose beginning is the version, depends on the diffs and strip levels alone. Raises DeployError
    DD104 or DD105 with every problem of every diff.
    """
    read_patches: list[Patch] = []
    problems: list[Problem] = []
    for patch_name, data, strip in patches:
        diffs, found = read(data, strip, patch_name)
        problems += found
        read_patches.append(Patch(patch_name, data, diffs))
    if problems:
        raise as_error(problems, name)
    digest = _digest(part for _, data, strip in patches for part in (b"%d" % strip, data))
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "patch"
    family = Family(ADHOC_FAMILY, (), tuple(read_patches), {}, {}, digest)
    summary = "ad-hoc: " + ", ".join(patch_name for patch_name, _, _ in patches)
    return PatchSet(*(clean, digest[:12], summary, "sglang", ("sglang",), (), {ADHOC_FAMILY: family}, digest, True))


def find_sets(request: str, folder: Traversable, *, strip: int = 1, any_suffix: bool = False) -> tuple[PatchSet, ...]:
    """What ``request`` asks for, in apply order with all that it requires.

    It is the name of a set below ``folder``, or else a path here: a set's folder (its requirements are below
    ``folder``), a folder with a ``series``, or a diff. Raises DeployError DD107 when it is none of these, and
    what the loaders raise.
    """
    path = Path(request)

    def adhoc() -> tuple[PatchSet, ...]:
        loaded = load_adhoc(path, strip=strip, any_suffix=any_suffix)
        if folder.joinpath(loaded.name).is_dir():
            raise DeployError("DD001", f"{request} would be recorded as {loaded.name}, a shipped set", "rename it")
        return (loaded,)

    if path.suffix in (".patch", ".diff") and path.is_file():
        return adhoc()
    if request in _names(folder):
        return _closure(request, folder, None)
    if (path / TOML).is_file():
        own = load_set(path.resolve())
        return _closure(own.name, folder, own)
    if path.is_file() or (path / SERIES).is_file():
        return adhoc()
    if path.exists():
        raise DeployError(
            "DD107", f"{request} is no patch set", "it is a .patch file, or a folder with a series or a patchset.toml"
        )
    return _closure(request, folder, None)


def find_together(
    requests: Sequence[str], folder: Traversable, *, strip: int = 1, any_suffix: bool = False
) -> tuple[PatchSet, ...]:
    """What several requests ask for, each as :func:`find_sets` finds it, together in apply order.

    Raises DeployError DD001 where two of them mean different sets of one name.
    """
    together: dict[str, PatchSet] = {}
    for request in requests:
        for found in find_sets(request, folder, strip=strip, any_suffix=any_suffix):
            if together.setdefault(found.name, found).digest != found.digest:
                raise DeployError("DD001", f"{request}: another set of the name {found.name} is asked for too")
    return in_order(together, together)


def _read_set(folder: Traversable, trust_hashes: bool = True) -> tuple[PatchSet | None, list[Problem]]:
    """The set in a folder, or None and its problems."""
    try:
        return _SetReader(folder, trust_hashes).read()
    except OSError as error:
        return None, [Problem("DD108", f"{folder.name}: cannot be read: {error.strerror}")]


class _SetReader:
    def __init__(self, folder: Traversable, trust_hashes: bool) -> None:
        self.folder = folder
        self.trust_hashes = trust_hashes
        self.name = folder.name
        self.problems: list[Problem] = []

    def problem(self, where: str, text: str) -> None:
        self.problems.append(Problem("DD108", f"{self.name}/{where}: {text}"))

    def read(self) -> tuple[PatchSet | None, list[Problem]]:
        toml = self.folder.joinpath(TOML)
        if not toml.is_file():
            self.problem(TOML, "is missing")
            return None, self.problems
        data = toml.read_bytes()
        declared, self.problems = read_declaration(data, f"{self.name}/{TOML}")
        if declared is None:
            return None, self.problems
        if declared.name != self.name:
            self.problem(TOML, f"the set is named {declared.name}, its folder {self.name}")
        self.check_entries(declared)
        new = dict(_files(self.folder.joinpath(NEW)))
        families = {item.name: self.family(declared, item, new) for item in declared.families.values()}
        self.check_left_out(families)
        for path in sorted(set(new) - {path for item in declared.families.values() for path in item.added}):
            self.problem(f"{NEW}/{path}", "no family adds it")
        if self.problems:
            return None, self.problems
        digest = _digest([data, *(family.digest.encode() for family in families.values())])
        return PatchSet(
            declared.name,
            declared.version,
            declared.summary,
            declared.package,
            declared.roots,
            declared.requires,
            families,
            digest,
            unneeded=declared.unneeded,
        ), []

    def check_entries(self, declared: Declaration) -> None:
        """Every entry of the set's folder must mean something: what is forgotten is a fault."""
        for item in self.folder.iterdir():
            known = item.name in (TOML, NEW, _BYTECODE) or item.name in declared.families
            if not known and not item.name.startswith(".") and not item.name.endswith(_IGNORED_FILES):
                self.problem(item.name, "belongs to no family")

    def family(self, declared: Declaration, item: DeclaredFamily, new: Mapping[str, Traversable]) -> Family:
        hashes = {engine: declared.hashes.get(engine, {}) for engine in item.engines}
        # A set that somebody has just begun does nothing yet; one with hashes is to do something.
        may_be_empty = bool(item.added) or not any(hashes.values()) or not self.trust_hashes
        patches = self.patches(self.folder.joinpath(item.name), may_be_empty)
        added = {}
        for path in item.added:
            if path in new:
                added[path] = new[path].read_bytes()
            else:
                self.problem(f"{NEW}/{path}", f"is missing, and the family {item.name} adds it")
        parts = [declared.name, declared.version, declared.package, *declared.roots, "requires"]
        parts += [*declared.requires, "family", item.name]
        digest = _digest(
            [
                *(part.encode() for part in parts),
                *(part for patch in patches for part in (b"patch", patch.name.encode(), patch.data)),
                *(part for path in sorted(added) for part in (b"added", path.encode(), added[path])),
            ]
        )
        family = Family(item.name, item.engines, tuple(patches), added, hashes, digest, item.left_out)
        if not self.problems and self.trust_hashes:
            self.check_hashes(family)
        return family

    def check_left_out(self, families: Mapping[str, Family]) -> None:
        """What a family does without must be something: a patch of another family, and not its own."""
        known = {patch.name for family in families.values() for patch in family.patches}
        for family in families.values():
            own = {patch.name for patch in family.patches}
            for name in family.left_out:
                where = f"{TOML}: family.{printable(family.name.encode())}.left_out"
                if name in own:
                    self.problem(where, f"{name} is in the family's {SERIES}")
                elif name not in known:
                    self.problem(where, f"no family has a patch {name}")

    def patches(self, folder: Traversable, may_be_empty: bool) -> list[Patch]:
        series = folder.joinpath(SERIES)
        if not series.is_file():
            self.problem(f"{folder.name}/{SERIES}", "is missing")
            return []
        where = f"{self.name}/{folder.name}/{SERIES}"
        entries, problems = read_series(series.read_bytes(), where, strips=False)
        self.problems += problems
        if not entries and not problems and not may_be_empty:
            self.problem(f"{folder.name}/{SERIES}", "names no patch, and the family adds no file")
        listed = {entry.name for entry in entries}
        for item in sorted(folder.iterdir(), key=lambda item: item.name):
            if item.name not in listed and item.name != SERIES and not item.name.startswith("."):
                self.problem(f"{folder.name}/{item.name}", f"is not in the {SERIES}")
        patches = []
        for entry in entries:
            file = folder.joinpath(entry.name)
            if not file.is_file():
                self.problem(f"{folder.name}/{SERIES}:{entry.line}", f"there is no file {entry.name}")
                continue
            data = file.read_bytes()
            diffs, problems_of = read(data, 1, f"{self.name}/{folder.name}/{entry.name}")
            self.problems += [Problem("DD108", problem.text) for problem in problems_of]
            patches.append(Patch(entry.name, data, diffs))
        return patches

    def check_hashes(self, family: Family) -> None:
        """The hashes of every engine version must be of the files that the family touches, no more, no less,
        and agree on which of them are there before and after.
        """
        needs, leaves = self.presence(family)
        for engine in family.engines:
            hashes = family.hashes[engine]
            if family.paths and not hashes:
                self.problem(
                    f"{TOML}: hashes.{printable(engine.encode())}", "is missing, and a family serves that version"
                )
                continue
            for path in sorted(set(family.paths) | set(hashes)):
                where = f'{TOML}: hashes."{engine}"."{path}"'
                if path not in hashes:
                    self.problem(where, "is missing, and the family touches that file")
                elif path not in leaves:
                    self.problem(where, "nothing in the family touches that file")
                else:
                    self.check_file(where, hashes[path], path in needs, leaves[path])
                    if path in family.added and hashes[path].after != sha256(family.added[path]):
                        self.problem(where, f"after is not the sha256 of {NEW}/{path}: refresh the set")

    def check_file(self, where: str, hashes: FileHashes, needed: bool, left: bool) -> None:
        for end, sha, there in (("before", hashes.before, needed), ("after", hashes.after, left)):
            if there and sha is None:
                self.problem(where, f"{end} is missing, and the file is there {end} the set")
            elif sha is not None and not there:
                self.problem(where, f"{end} is given, and the file is not there {end} the set")

    def presence(self, family: Family) -> tuple[set[str], dict[str, bool]]:
        """The paths that must be there before, and for every path whether it is there afterwards."""
        needs: set[str] = set()
        there = dict.fromkeys(family.added, True)
        for patch in family.patches:
            for diff in patch.diffs:
                for path in diff.paths:
                    if path in family.added:
                        self.problem(f"{family.name}/{patch.name}", f"touches {path}, which {NEW}/ holds")
                if diff.kind is Kind.COPY:
                    self.problem(f"{family.name}/{patch.name}", f"copies {diff.old_path}: put the copy into {NEW}/")
                if diff.kind is Kind.MODIFY and diff.new_mode != diff.old_mode:
                    # Hashes could not tell whether it is applied.
                    self.problem(f"{family.name}/{patch.name}", f"changes the mode of {diff.old_path}")
                if diff.old_path is not None:
                    if diff.old_path not in there:
                        needs.add(diff.old_path)
                    there[diff.old_path] = diff.kind in (Kind.MODIFY, Kind.COPY)
                if diff.new_path is not None:
                    there[diff.new_path] = True
        return needs, there


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Path below ``folder`` and file, for every file but bytecode."""
    if not folder.is_dir():
        return
    for item in folder.iterdir():
        if item.is_dir():
            if item.name != _BYTECODE:
                yield from _files(item, f"{prefix}{item.name}/")
        elif not item.name.endswith(".pyc"):
            yield prefix + item.name, item


def _check_requirements(name: str, sets: Mapping[str, PatchSet | None]) -> list[Problem]:
    """What is wrong with the set and those that it requires together; None stands for one that is not sound."""
    try:
        ordered = with_requirements(name, sets)
    except DeployError as error:
        return [Problem(error.code, error.message)]
    return list(dict.fromkeys(problem for engine in ordered[-1].engines for problem in check_chain(ordered, engine)))


def check_chain(ordered: Sequence[PatchSet], engine: str) -> list[Problem]:
    """Problems (DD108) of sets in apply order for one engine version: one that does not serve it although it is
    needed there, or whose hash before is not what the set below it leaves.
    """
    problems = []
    left: dict[str, tuple[str, str | None]] = {}
    for patch_set in ordered:
        family = patch_set.family_for(engine)
        if family is None and engine in patch_set.unneeded:
            continue
        if family is None:
            needed = ordered[-1].name
            problems.append(Problem("DD108", f"{patch_set.name} does not serve {engine}, and {needed} requires it"))
            continue
        for path, hashes in family.hashes.get(engine, {}).items():
            below = left.get(path)
            if below is not None and below[1] != hashes.before:
                problems.append(
                    Problem(
                        "DD108",
                        f"{patch_set.name} on {engine}: {path}: before is {short(hashes.before)}, "
                        f"but {below[0]} leaves {short(below[1])}",
                    )
                )
            left[path] = (patch_set.name, hashes.after)
    return problems


def short(sha: str | None) -> str:
    """A fingerprint as messages show it."""
    return "no file" if sha is None else sha if sha.startswith("link:") else sha[:12]


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()
