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
from dataclasses import dataclass, replace
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
from ddtree_deploy.patching.problems import Problem, as_error
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
    bytes. ``digest`` changes with anything that changes what applying it means.
    """

    name: str
    engines: tuple[str, ...]
    patches: tuple[Patch, ...]
    added: Mapping[str, bytes]
    hashes: Mapping[str, Mapping[str, FileHashes]]
    digest: str

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
    """A loaded and checked set. ``digest`` covers its declaration and every family."""

    name: str
    version: str
    summary: str
    package: str
    roots: tuple[str, ...]
    requires: tuple[str, ...]
    families: Mapping[str, Family]
    digest: str
    adhoc: bool = False

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


def in_order(names: Iterable[str], sets: Mapping[str, PatchSet]) -> tuple[PatchSet, ...]:
    """The named sets and all that they require, each once, requirements first, else in the given order.

    Raises DeployError DD107 for an unknown set, DD108 for a required set that is unknown or a cycle.
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
            if above:
                raise DeployError("DD108", f"the patch set {above[-1]} requires {name}, which is unknown")
            close = difflib.get_close_matches(name, sets, 1)
            known = f"did you mean {close[0]}?" if close else "known: " + (", ".join(sorted(sets)) or "none")
            raise DeployError("DD107", f"there is no patch set {name}", known)
        for required in found.requires:
            visit(required, (*above, name))
        ordered[name] = found

    for name in names:
        visit(name, ())
    return tuple(ordered.values())


def with_requirements(name: str, sets: Mapping[str, PatchSet]) -> tuple[PatchSet, ...]:
    """The set ``name`` last, before it all that it requires: see :func:`in_order`."""
    return in_order([name], sets)


# -- loading -----------------------------------------------------------------------------------------


def load_sets(folder: Traversable) -> dict[str, PatchSet]:
    """Every set below ``folder``, by name, in sorted order; plain files and hidden folders are none.

    Raises one DeployError DD108 with every problem of every set: also required sets that are unknown, that
    require one another, or whose hashes do not fit those of the sets built on them.
    """
    sets: dict[str, PatchSet] = {}
    problems: list[Problem] = []
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if not item.is_dir() or item.name.startswith(".") or item.name == _BYTECODE:
            continue
        loaded, found = _read_set(item)
        problems += found
        if loaded is not None:
            sets[item.name] = loaded
    if not problems:
        problems = _check_requirements(sets)
    if problems:
        raise as_error(problems, "patch sets")
    return sets


def load_set(folder: Traversable) -> PatchSet:
    """The set in ``folder``, checked by itself. Raises one DeployError DD108 with every problem."""
    loaded, problems = _read_set(folder)
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
    sets = load_sets(folder)
    if request in sets:
        return with_requirements(request, sets)
    if (path / TOML).is_file():
        own = load_set(path.resolve())
        sets = {**sets, own.name: own}
        problems = _check_requirements(sets)
        if problems:
            raise as_error(problems, request)
        return with_requirements(own.name, sets)
    if path.is_file() or (path / SERIES).is_file():
        return adhoc()
    if path.exists():
        raise DeployError(
            "DD107", f"{request} is no patch set", "it is a .patch file, or a folder with a series or a patchset.toml"
        )
    return with_requirements(request, sets)


def _read_set(folder: Traversable) -> tuple[PatchSet | None, list[Problem]]:
    """The set in a folder, or None and its problems."""
    try:
        return _SetReader(folder).read()
    except OSError as error:
        return None, [Problem("DD108", f"{folder.name}: cannot be read: {error.strerror}")]


class _SetReader:
    def __init__(self, folder: Traversable) -> None:
        self.folder = folder
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
        ), []

    def check_entries(self, declared: Declaration) -> None:
        """Every entry of the set's folder must mean something: what is forgotten is a fault."""
        for item in self.folder.iterdir():
            known = item.name in (TOML, NEW, _BYTECODE) or item.name in declared.families
            if not known and not item.name.startswith(".") and not item.name.endswith(_IGNORED_FILES):
                self.problem(item.name, "belongs to no family")

    def family(self, declared: Declaration, item: DeclaredFamily, new: Mapping[str, Traversable]) -> Family:
        patches = self.patches(self.folder.joinpath(item.name), bool(item.added))
        added = {}
        for path in item.added:
            if path in new:
                added[path] = new[path].read_bytes()
            else:
                self.problem(f"{NEW}/{path}", f"is missing, and the family {item.name} adds it")
        hashes = {engine: declared.hashes[engine] for engine in item.engines}
        parts = [declared.name, declared.version, declared.package, *declared.roots, "requires"]
        parts += [*declared.requires, "family", item.name]
        digest = _digest(
            [
                *(part.encode() for part in parts),
                *(part for patch in patches for part in (b"patch", patch.name.encode(), patch.data)),
                *(part for path in sorted(added) for part in (b"added", path.encode(), added[path])),
            ]
        )
        family = Family(item.name, item.engines, tuple(patches), added, hashes, digest)
        if not self.problems:
            self.check_hashes(family)
        return family

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


def _check_requirements(sets: Mapping[str, PatchSet]) -> list[Problem]:
    problems = []
    for patch_set in sets.values():
        try:
            ordered = with_requirements(patch_set.name, sets)
        except DeployError as error:
            problems.append(Problem(error.code, error.message))
            continue
        for engine in patch_set.engines:
            problems += check_chain(ordered, engine)
    return list(dict.fromkeys(problems))


def check_chain(ordered: Sequence[PatchSet], engine: str) -> list[Problem]:
    """Problems (DD108) of sets in apply order for one engine version: one that does not serve it, or whose
    hash before is not what the set below it leaves.
    """
    problems = []
    left: dict[str, tuple[str, str | None]] = {}
    for patch_set in ordered:
        family = patch_set.family_for(engine)
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
