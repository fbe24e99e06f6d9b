"""A family's series on one engine version as weaves: edited line by line, then written back as patches."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_deploy.authoring.patchtext import FileChange, compose, rewrite
from ddtree_deploy.authoring.stack import Stack
from ddtree_deploy.authoring.weave import Weave, Weaves
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.filediff import FileDiff, Kind
from ddtree_deploy.patching.hunks import apply_hunks
from ddtree_deploy.patching.patchset import Patch


class Series:
    """The patches of a stack. Level k of the weaves is what patch k (from 1) leaves; level 0 is before the set."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.weaves = Weaves()
        self._patches: list[Patch] = []
        self._added: dict[int, tuple[str, str]] = {}
        # (level, the section's number in the patch) -> the file it is about
        self._sections: dict[tuple[int, int], Weave] = {}
        self._moved: set[tuple[int, int]] = set()  # those with hunks at other lines than they state
        #: What each hunk builds on: (its level, what it is, the levels whose lines or gaps it spans).
        self.leanings: list[tuple[int, str, frozenset[int]]] = []
        for patch in stack.family.patches:
            self._weave(patch)
        self._before = {weave: self._changes(weave) for weave in self.weaves}
        self._check()

    @property
    def names(self) -> list[str]:
        """The patches' names in order."""
        return [*(patch.name for patch in self._patches), *(name for name, _ in self._added.values())]

    @property
    def top(self) -> int:
        """The last level."""
        return len(self._patches) + len(self._added)

    def file(self, path: str) -> Weave:
        """The file that is at ``path`` after the whole series, or that is nowhere in it."""
        return self.weaves.take(path, self._untouched(path), self.top)

    def append(self, name: str, head: str) -> int:
        """Add an empty patch at the end; returns its level."""
        self.weaves.grow()
        level = self.top + 1
        self._added[level] = (name, head)
        return level

    def patches(self, *, renumber: bool = False) -> list[Patch]:
        """The series as it is now. Patches and sections whose effect is as it was are byte for byte as they were;
        a patch that has nothing left to do is left out. ``renumber``: hunks state the lines at which they stand.
        """
        written: list[Patch] = []
        for level, patch in enumerate(self._patches, 1):
            data = self._rewritten(level, patch, renumber)
            written += [patch] if data == patch.data else self._written(patch.name, data)
        for level, (name, head) in self._added.items():
            changes = [change for weave in self.weaves if (change := _change(weave, level)) is not None]
            written += self._written(name, compose(head, changes) if changes else b"")
        return written

    # -- from patches --------------------------------------------------------------------------

    def _weave(self, patch: Patch) -> None:
        self.weaves.grow()
        self._patches.append(patch)
        level = self.top
        for number, diff in enumerate(patch.diffs):
            start = diff.old_path if diff.old_path is not None else diff.new_path
            assert start is not None
            now = self.weaves.now.get(start)
            data = now.image(level) if now else self._untouched(start)
            places: Sequence[int] = [0] * len(diff.hunks)
            if diff.kind is not Kind.CREATE:
                _, placed = apply_hunks(data or b"", diff.hunks, path=start, source=diff.source, exact=True)
                places = [placement.line - 1 for placement in placed]
                if any(placement.offset for placement in placed):
                    self._moved.add((level, number))
                self._lean(diff, self.weaves.take(start, data, level), places)
            self._sections[level, number] = self.weaves.patch(diff, data, places, level)

    def _untouched(self, path: str) -> bytes | None:
        """What a path holds that is no file of the series now: nothing, where a patch took it away."""
        return None if self.weaves.named(path) else self.stack.before(path)

    def _lean(self, diff: FileDiff, weave: Weave, places: Sequence[int]) -> None:
        for hunk, place in zip(diff.hunks, places, strict=True):
            what = f"hunk {hunk.number} of {diff.old_path}"
            self.leanings.append((self.top, what, frozenset(weave.spanned(place, len(hunk.old_lines)))))

    def _check(self) -> None:
        for weave in self.weaves:
            for level, name in enumerate(weave.names):
                if name is not None and weave.image(level) != self.stack.at(level, name):
                    raise DeployError("DD901", f"{name}: the lines after patch {level} are not the file's")

    # -- to patches ----------------------------------------------------------------------------

    def _rewritten(self, level: int, patch: Patch, renumber: bool) -> bytes:
        replaced: dict[int, FileChange | None] = {}
        more: list[FileChange] = []
        for weave in self.weaves:
            numbers = [at for (of, at), about in self._sections.items() if of == level and about is weave]
            change = _change(weave, level)
            moved = renumber and not self._moved.isdisjoint((level, at) for at in numbers)
            if weave in self._before and self._before[weave][level] == change and not moved:
                continue
            if numbers:
                replaced.update(dict.fromkeys(numbers))
                replaced[numbers[0]] = change
            elif change is not None:
                more.append(change)
        return rewrite(patch, replaced, more) if replaced or more else patch.data

    @staticmethod
    def _written(name: str, data: bytes) -> list[Patch]:
        return [Patch(name, data, parse(data, source=name))] if data else []

    def _changes(self, weave: Weave) -> list[FileChange | None]:
        return [None, *(_change(weave, level) for level in range(1, self.top + 1))]


def _change(weave: Weave, level: int) -> FileChange | None:
    """What the patch of that level does to the file, or None."""
    change = FileChange(weave.names[level - 1], weave.image(level - 1), weave.names[level], weave.image(level))
    same = change.old_path == change.new_path and change.before == change.after
    return None if same else change
