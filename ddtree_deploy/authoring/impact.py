"""What an engine's new version changed of the files and functions that patch sets change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddtree_deploy.authoring.stack import Stack, stack_of
from ddtree_deploy.authoring.upstream import Change, Fate, change_of, whereabouts
from ddtree_deploy.patching.functions import changed_functions
from ddtree_deploy.patching.patchset import PatchSet

REMOVED = "removed"


@dataclass(frozen=True)
class Touched:
    """A function that patches change and upstream changed: ``changed``, ``removed``, or ``added`` by both.

    ``now``: the files that define a function of its name, for one that was removed.
    """

    name: str
    how: str
    patches: tuple[str, ...]
    now: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileImpact:
    """A file of the set, and what upstream did to it. ``others``: how many functions it changed that no patch does."""

    change: Change
    patches: tuple[str, ...]
    touched: tuple[Touched, ...]
    others: int

    @property
    def clean(self) -> bool:
        """Whether the file is as it was: its hashes stay, its patches apply as before."""
        return self.change.fate in (Fate.SAME, Fate.ABSENT)


@dataclass(frozen=True)
class SetImpact:
    """One set between two engine versions."""

    patch_set: PatchSet
    family: str
    files: tuple[FileImpact, ...]

    @property
    def clean(self) -> bool:
        """Whether upstream changed nothing that the set touches."""
        return all(file.clean for file in self.files)


def impact_of(
    sets: Sequence[PatchSet], engine: str, earlier: Mapping[str, bytes], later: Mapping[str, bytes]
) -> SetImpact:
    """The impact on the last of ``sets`` (requirements first), as it is on ``engine``, whose files ``earlier`` holds.

    Raises DeployError: DD109 when the set does not serve ``engine``, and what :func:`stack_of` raises.
    """
    stack = stack_of(sets, engine, earlier)
    item = stack.sets[-1]
    owners = touched_by(stack)
    files = []
    for path in stack.family.paths:
        change = change_of(path, earlier, later, item.roots)
        patches = tuple(patch.name for patch in stack.family.patches if any(path in diff.paths for diff in patch.diffs))
        functions = change.functions
        ways = (
            ("changed", {before.name for before, _ in functions.changed}),
            (REMOVED, {function.name for function in functions.removed}),
            ("added", {function.name for function in functions.added}),
        )
        mine = owners.get(path, {})
        touched = tuple(Touched(name, how, mine[name]) for how, names in ways for name in mine if name in names)
        others = len({name for how, names in ways[:2] for name in names} - set(mine))
        files.append(FileImpact(change, patches, touched, others))
    # Functions of a file that moved as a whole are there.
    lost = [
        one.name for file in files if file.change.fate is not Fate.MOVED for one in file.touched if one.how == REMOVED
    ]
    now = whereabouts(lost, later, item.roots)
    found = (
        replace(file, touched=tuple(replace(one, now=now.get(one.name, ())) for one in file.touched)) for file in files
    )
    return SetImpact(item, stack.family.name, tuple(found))


def touched_by(stack: Stack) -> dict[str, dict[str, tuple[str, ...]]]:
    """Path -> function -> the patches of the stack that add, remove or change it; Python files alone."""
    owners: dict[str, dict[str, tuple[str, ...]]] = {}
    for index, patch in enumerate(stack.family.patches):
        for path in sorted({path for diff in patch.diffs for path in diff.paths if path.endswith(".py")}):
            before = stack.after(index - 1, path) if index else stack.before(path)
            for name in changed_functions(before, stack.after(index, path)).names:
                found = owners.setdefault(path, {})
                found[name] = (*found.get(name, ()), patch.name)
    return owners
