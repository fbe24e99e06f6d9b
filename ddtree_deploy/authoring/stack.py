"""The images of a patch set on one engine version: every file before it, after each of its patches, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching import images
from ddtree_deploy.patching.apply import compute
from ddtree_deploy.patching.images import FileImage, Image, fingerprint
from ddtree_deploy.patching.patchset import Family, PatchSet, check_chain, short
from ddtree_deploy.patching.problems import Problem, RefusedError, as_error


class Pristine(Mapping[str, Image]):
    """A pristine tree (path -> bytes) as images.

    ``modes``: path -> permission bits where they are not 0644. ``sha256``: a file's hash, where that is known
    without reading the file.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        modes: Mapping[str, int] | None = None,
        sha256: Callable[[str], str] | None = None,
    ) -> None:
        self._files = files
        self._modes = modes or {}
        self.sha256 = sha256 or (lambda path: images.sha256(files[path]))

    def executable(self, path: str) -> bool:
        """Whether the file is executable."""
        return bool(self._modes.get(path, 0) & images.EXECUTABLE)

    def __getitem__(self, path: str) -> Image:
        return FileImage(self._files[path], self._modes.get(path, 0o644))

    def __contains__(self, path: object) -> bool:
        return path in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _Overlay(Mapping[str, Image]):
    """What was made of some paths, over the tree below; a path that now holds nothing maps to None."""

    def __init__(self, below: Mapping[str, Image], changed: Mapping[str, Image]) -> None:
        self._below = below
        self.changed = changed

    def __getitem__(self, path: str) -> Image:
        return self.changed[path] if path in self.changed else self._below[path]

    def __contains__(self, path: object) -> bool:
        return path in self.changed or path in self._below

    def __iter__(self) -> Iterator[str]:
        yield from self.changed
        yield from (path for path in self._below if path not in self.changed)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Stack:
    """The last set of ``sets`` on ``engine``: its family's patches are counted from 0.

    ``levels``: the trees before the set (pristine and what the sets below it made of it), after its first
    patch, ... after its last one; the files that it adds are in all but the first.
    """

    sets: tuple[PatchSet, ...]
    engine: str
    family: Family
    levels: tuple[Mapping[str, Image], ...]

    def at(self, level: int, path: str) -> bytes | None:
        """The file at a level: 0 before the set, k after its k-th patch. None: not there."""
        return _data(self.levels[level].get(path))

    def before(self, path: str) -> bytes | None:
        """The file before the set: pristine, with the required sets applied. None: not there."""
        return self.at(0, path)

    def after(self, index: int, path: str) -> bytes | None:
        """The file after the patch of that number."""
        if not 0 <= index < len(self.family.patches):
            raise IndexError(index)
        return self.at(index + 1, path)

    def final(self, path: str) -> bytes | None:
        """The file with the whole set applied."""
        return self.at(-1, path)


def stack_of(
    sets: Sequence[PatchSet], engine: str, pristine: Mapping[str, bytes] | Pristine, *, trust_hashes: bool = True
) -> Stack:
    """The stack of the last of ``sets`` (requirements first, in order) on the pristine files of ``engine``.

    Every file is held against the sets' hashes before and after each set; ``trust_hashes=False`` leaves out
    those of the last set, which are about to be made anew. Raises one DeployError with every problem: DD109 no
    family, DD108 hashes that do not fit, DD102 DD103 DD106 diffs that do not apply.
    """
    return stack_on(applied(sets[:-1], engine, pristine), sets, engine, trust_hashes=trust_hashes)


def stack_on(ground: Mapping[str, Image], sets: Sequence[PatchSet], engine: str, *, trust_hashes: bool = True) -> Stack:
    """:func:`stack_of` on what the sets below the last one leave."""
    tree, top = ground, sets[-1]
    family = family_of(top, engine)
    levels: list[Mapping[str, Image]] = [tree]
    if trust_hashes:
        _check(top, engine, tree, "before")
    tree = with_added(top, family, tree)
    for patch in family.patches:
        try:
            # Whole files are known by hash, or are to be: stated lines count as `apply` would count them.
            result = compute(tree, patch.diffs, family.paths)
        except RefusedError as refused:
            raise as_error(refused.problems, f"{top.name} on {engine}: {patch.name}", refused.hint) from None
        tree = _Overlay(tree, result.images)
        levels.append(tree)
    if not family.patches:
        levels.append(tree)
    if trust_hashes:
        _check(top, engine, tree, "after")
    return Stack(tuple(sets), engine, family, tuple(levels))


def applied(sets: Sequence[PatchSet], engine: str, pristine: Mapping[str, bytes] | Pristine) -> Mapping[str, Image]:
    """The tree with all of ``sets`` applied in order, hashes checked. Raises as :func:`stack_of`."""
    tree: Mapping[str, Image] = pristine if isinstance(pristine, Pristine) else Pristine(pristine)
    problems = check_chain(sets, engine)
    if problems:
        raise as_error(problems, f"patch sets on {engine}")
    for item in sets:
        if item.family_for(engine) is None:
            continue
        family = family_of(item, engine)
        _check(item, engine, tree, "before")
        tree = with_added(item, family, tree)
        try:
            tree = _Overlay(tree, compute(tree, family.diffs, family.paths).images)
        except RefusedError as refused:
            raise as_error(refused.problems, f"{item.name} on {engine}", refused.hint) from None
        _check(item, engine, tree, "after")
    return tree


def family_of(item: PatchSet, engine: str) -> Family:
    """The set's family for the version. Raises DeployError DD109."""
    family = item.family_for(engine)
    if family is None:
        if engine in item.unneeded:
            raise DeployError("DD109", f"{item.name} is not needed on {engine}: {item.unneeded[engine]}")
        serves = ", ".join(item.engines) or "no version"
        raise DeployError("DD109", f"{item.name} has no family for {engine}", f"it serves {serves}")
    return family


def with_added(item: PatchSet, family: Family, tree: Mapping[str, Image]) -> Mapping[str, Image]:
    """The tree with the files that the family adds. Raises DeployError DD106 where another is there."""
    there = [path for path in family.added if tree.get(path) is not None]
    if there:
        problems = [Problem("DD106", f"{item.name} adds {path}, which is there before it") for path in there]
        raise as_error(problems, item.name)
    return _Overlay(tree, {path: FileImage(data) for path, data in family.added.items()})


def _check(item: PatchSet, engine: str, tree: Mapping[str, Image], end: str) -> None:
    hashes = family_of(item, engine).hashes.get(engine, {})
    problems = [
        Problem("DD108", f"{item.name} on {engine}: {path}: {end} is {short(said)}, but the file is {short(found)}")
        for path, said, found in (
            (path, getattr(both, end), fingerprint(tree.get(path))) for path, both in sorted(hashes.items())
        )
        if said != found
    ]
    if problems:
        raise as_error(problems, f"{item.name} on {engine}")


def _data(image: Image) -> bytes | None:
    return image.data if isinstance(image, FileImage) else None
