"""Moving a patch set to another engine version: three-way, patch by patch and file by file.

For each patch and file: *base* is the file before the patch on the version the set is for, *theirs* the file after
it, *ours* what the earlier patches made of the file on the new version (as ``git rebase`` does it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddtree_deploy.authoring.check import problems_of
from ddtree_deploy.authoring.impact import touched_by
from ddtree_deploy.authoring.merge import Conflict, merge
from ddtree_deploy.authoring.patchtext import FileChange, rewrite
from ddtree_deploy.authoring.settle import hashes_of
from ddtree_deploy.authoring.stack import Stack, applied, stack_of
from ddtree_deploy.authoring.upstream import Fate, change_of, whereabouts
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import compute
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.filediff import FileDiff
from ddtree_deploy.patching.functions import UnparsableError, functions
from ddtree_deploy.patching.images import FileImage, Image
from ddtree_deploy.patching.patchset import Family, Patch, PatchSet
from ddtree_deploy.patching.problems import RefusedError

AS_IT_IS, MERGED, UPSTREAM, CONFLICT = "as it is", "merged", "already upstream", "conflict"
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Clash:
    """A conflict, and the functions at its place that upstream changed."""

    conflict: Conflict
    functions: tuple[str, ...]


@dataclass(frozen=True)
class FilePort:
    """One file of one patch. ``path``: on the earlier version; ``now``: on the later one, None where it is gone.

    ``how``: ``as it is``, ``merged``, ``already upstream`` or ``conflict``. ``problem``: what no text can show.
    ``look``: functions that the patch changes and upstream changed too, merged without a conflict.
    """

    path: str
    now: str | None
    how: str
    clashes: tuple[Clash, ...] = ()
    problem: str | None = None
    look: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchPort:
    """One patch: its files, and the ported patch, None when nothing of it is left to do (or can be done).

    ``why``: the reason for which it is left out on the later version.
    """

    name: str
    files: tuple[FilePort, ...]
    patch: Patch | None
    why: str | None = None

    @property
    def how(self) -> str:
        """What became of the whole patch, in the words of :class:`FilePort`; or ``left out``."""
        if self.why is not None:
            return LEFT_OUT
        ways = {file.how for file in self.files}
        if CONFLICT in ways:
            return CONFLICT
        return ways.pop() if len(ways) == 1 else MERGED


@dataclass(frozen=True)
class Ported:
    """A set on another engine version.

    ``patch_set``: the set with a family for it, or one more version in a family, or said to be unneeded there.
    ``stack``: its images there, our side in every conflict; None when it is unneeded. ``marked``: path -> the file
    with conflict markers. ``family``: the family's name, ``joined`` whether it was there before.
    ``problems``: further reasons why the port is not finished, a line each.
    """

    patch_set: PatchSet
    patches: tuple[PatchPort, ...]
    stack: Stack | None
    marked: Mapping[str, bytes]
    family: str | None
    joined: bool
    problems: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to a person."""
        return not self.problems and all(patch.how != CONFLICT for patch in self.patches)


def port_set(
    sets: Sequence[PatchSet],
    engine: str,
    later: str,
    earlier_tree: Mapping[str, bytes],
    later_tree: Mapping[str, bytes],
    leave_out: Mapping[str, str] | None = None,
) -> Ported:
    """Port the last of ``sets`` (requirements first) from ``engine`` to ``later``, whose pristine files are given.

    ``leave_out``: patches that the later version does not need (name, or how it begins) -> why.

    Raises DeployError: DD109 when the set does not serve ``engine``, or one that it requires does not serve
    ``later``; DD001 when the set has something to say about ``later`` already; what :func:`stack_of` raises.
    """
    item = sets[-1]
    if item.family_for(later) is not None or later in item.unneeded:
        what = "says that it is not needed" if later in item.unneeded else "has a family for it"
        raise DeployError("DD001", f"{item.name} on {later}: the set {what} already", f"`patchset edit {item.name}`")
    for below in sets[:-1]:
        if below.family_for(later) is None and later not in below.unneeded:
            raise DeployError(
                "DD109",
                f"{item.name} requires {below.name}, which does not serve {later}",
                f"port it first: `ddtree-deploy patchset port {below.name} --from {engine} --to {later}`",
            )
    stack = stack_of(sets, engine, earlier_tree)
    base = applied(sets[:-1], later, later_tree)
    reasons = _named(leave_out or {}, [patch.name for patch in stack.family.patches])
    return _Porter(stack, later, earlier_tree, later_tree, _Files(base), reasons).run()


def _named(leave_out: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The patches' whole names -> why. Raises DeployError DD001."""
    reasons = {}
    for wanted, why in leave_out.items():
        found = [name for name in names if name == wanted] or [name for name in names if name.startswith(wanted)]
        if len(found) != 1 or not why.strip() or not why.isprintable():
            what = "needs a reason of one line" if len(found) == 1 else "does not name one patch"
            raise DeployError("DD001", f"--leave-out {wanted}: {what}", f"patches: {', '.join(names)}")
        reasons[found[0]] = why.strip()
    return reasons


class _Files:
    """The files on the later version so far: ``clean`` with our side in conflicts, ``marked`` with markers."""

    def __init__(self, below: Mapping[str, Image]) -> None:
        self.below = below
        self.clean: dict[str, bytes | None] = {}
        self.marked: dict[str, bytes] = {}

    def get(self, path: str) -> bytes | None:
        if path in self.clean:
            return self.clean[path]
        image = self.below.get(path)
        return image.data if isinstance(image, FileImage) else None


class _Porter:
    def __init__(
        self,
        stack: Stack,
        later: str,
        earlier_tree: Mapping[str, bytes],
        later_tree: Mapping[str, bytes],
        files: _Files,
        leave_out: Mapping[str, str],
    ) -> None:
        self.stack = stack
        self.later = later
        self.files = files
        self.leave_out = leave_out
        self.pristine = later_tree
        self.item = stack.sets[-1]
        self.changes = {path: change_of(path, earlier_tree, later_tree, self.item.roots) for path in stack.family.paths}
        #: Path on the earlier version -> path on the later one, for what upstream moved.
        self.moved = {
            path: change.now for path, change in self.changes.items() if change.fate is Fate.MOVED and change.now
        }
        self.owners = touched_by(stack)

    def run(self) -> Ported:
        family = self.stack.family
        taken = [path for path in family.added if self.files.get(path) is not None]
        problems = [f"{path}: the set adds it, and sglang {self.later} has a file there" for path in taken]
        self.files.clean.update(family.added)
        patches = tuple(self.patch(index, patch) for index, patch in enumerate(family.patches))
        made = [port.patch for port in patches if port.patch is not None]
        gone = {port.name: port.why or UPSTREAM for port in patches if port.how in (UPSTREAM, LEFT_OUT)}
        if len(gone) == len(patches) and not family.added:
            why = "; ".join(dict.fromkeys([*gone.values(), *family.left_out.values()]))
            wanted = replace(self.item, unneeded={**self.item.unneeded, self.later: why})
            return Ported(wanted, patches, None, {}, None, False, ())
        added = {path: data for path, data in family.added.items() if path not in taken}
        ported = Family(self.later, (self.later,), tuple(made), added, {}, "", {**family.left_out, **gone})
        return self.finished(patches, ported, problems)

    def finished(self, patches: tuple[PatchPort, ...], family: Family, problems: list[str]) -> Ported:
        """The outcome: the stack that the ported patches make, its hashes, the family that it is or joins."""
        own = replace(self.item, families={**self.item.families, self.later: family})
        stack = stack_of((*self.stack.sets[:-1], own), self.later, self.pristine, trust_hashes=False)
        if not any(patch.how == CONFLICT for patch in patches):
            problems += problems_of(stack)
        hashes = hashes_of(stack)
        same = next((other for other in self.item.families.values() if _does_the_same(other, family)), None)
        base = same or replace(family, engines=())
        final = replace(base, engines=(*base.engines, self.later), hashes={**base.hashes, self.later: hashes})
        wanted = replace(self.item, families={**self.item.families, final.name: final})
        stack = replace(stack, sets=(*stack.sets[:-1], wanted), family=final)
        return Ported(wanted, patches, stack, self.files.marked, final.name, same is not None, tuple(problems))

    # -- one patch -----------------------------------------------------------------------------

    def patch(self, index: int, patch: Patch) -> PatchPort:
        if patch.name in self.leave_out:
            return PatchPort(patch.name, (), None, self.leave_out[patch.name])
        groups: dict[tuple[str | None, str | None], list[int]] = {}
        for number, diff in enumerate(patch.diffs):
            groups.setdefault((diff.old_path, diff.new_path), []).append(number)
        files: list[FilePort] = []
        replaced: dict[int, FileChange | None] = {}
        for (old, new), numbers in groups.items():
            port, change = self.file(index, patch, old, new, [patch.diffs[number] for number in numbers])
            files.append(port)
            if port.how != AS_IT_IS:
                replaced.update(dict.fromkeys(numbers))
                replaced[numbers[0]] = change
        data = rewrite(patch, replaced, ()) if replaced else patch.data
        made = Patch(patch.name, data, parse(data, source=patch.name)) if data else None
        return PatchPort(patch.name, tuple(files), made)

    def file(
        self, index: int, patch: Patch, old: str | None, new: str | None, diffs: Sequence[FileDiff]
    ) -> tuple[FilePort, FileChange | None]:
        """Port one file of a patch, and note what it is from now on. The change is None where nothing is left."""
        path = old if old is not None else new
        assert path is not None
        source = self.moved.get(old, old) if old is not None else None
        target = self.moved.get(new, new) if new is not None else None
        base = None if old is None else self.stack.after(index - 1, old) if index else self.stack.before(old)
        theirs = None if new is None else self.stack.after(index, new)
        ours = None if source is None else self.files.get(source)
        there = None if target is None or target == source else self.files.get(target)
        problem = None
        if base is not None and ours is None and theirs is not None:
            problem = self.gone(path)
        elif there is not None and there != theirs:
            problem = f"the patch makes {target}, and sglang {self.later} has another file there"
        elif theirs is None and ours is not None and ours != base:
            problem = "the patch deletes it, and upstream changed it"
        if problem is not None:
            return FilePort(path, source, CONFLICT, problem=problem), None
        if there is not None or (theirs is None and ours is None):
            return FilePort(path, target, UPSTREAM), None
        if base is None or theirs is None or ours is None:
            for made, data in ((source, None), (target, theirs)):
                if made is not None:
                    self.files.clean[made] = data
            if (source, target) == (old, new):
                return FilePort(path, target, AS_IT_IS), None
            return FilePort(path, target, MERGED), FileChange(source, ours, target, theirs)
        assert source is not None and target is not None
        return self.merged(patch, path, source, target, (base, ours, theirs), diffs)

    def merged(
        self,
        patch: Patch,
        path: str,
        source: str,
        target: str,
        sides: tuple[bytes, bytes, bytes],
        diffs: Sequence[FileDiff],
    ) -> tuple[FilePort, FileChange | None]:
        base, ours, theirs = sides
        labels = (f"sglang {self.later}", f"sglang {self.stack.engine}", patch.name)
        merged = merge(base, ours, theirs, labels)
        if merged.conflicts or source in self.files.marked:
            marked = self.files.marked.pop(source, ours)
            self.files.marked[target] = merge(base, marked, theirs, labels).marked
        if source != target:
            self.files.clean[source] = None
        self.files.clean[target] = merged.data
        change = FileChange(source, ours, target, merged.data)
        if merged.conflicts:
            clashes = tuple(Clash(conflict, self.around(path, merged.data, conflict)) for conflict in merged.conflicts)
            return FilePort(path, target, CONFLICT, clashes), None if merged.data == ours else change
        if merged.data == ours and source == target:
            return FilePort(path, target, UPSTREAM), None
        look = () if ours == base else self.both_changed(path, patch)
        if source == target == path and _applied(path, ours, diffs) == merged.data:
            return FilePort(path, target, AS_IT_IS, look=look), None
        return FilePort(path, target, MERGED, look=look), change

    def gone(self, path: str) -> str:
        change = self.changes[path]
        text = f"sglang {self.later} has no such file"
        if change.candidates:
            text += f"; of that name: {', '.join(change.candidates)}"
        for name, files in whereabouts(self.owners.get(path, {}), self.pristine, self.item.roots).items():
            text += f"; {name.rpartition('.')[2]} is in {', '.join(files)}"
        return text

    # -- what upstream did there ---------------------------------------------------------------

    def both_changed(self, path: str, patch: Patch) -> tuple[str, ...]:
        """The functions of a file that the patch and upstream both changed."""
        upstream = {before.name for before, _ in self.changes[path].functions.changed}
        mine = self.owners.get(path, {})
        return tuple(name for name, patches in mine.items() if patch.name in patches and name in upstream)

    def around(self, path: str, data: bytes, conflict: Conflict) -> tuple[str, ...]:
        """The innermost functions at a conflict that upstream changed, removed or added."""
        first = conflict.line
        last = first + max(conflict.ours.count(b"\n") - 1, 0)
        try:
            found = [item for item in functions(data) if item.first <= last and item.last >= first]
        except UnparsableError:
            return ()
        inner = [
            item
            for item in found
            if not any(item is not other and item.first <= other.first and other.last <= item.last for other in found)
        ]
        upstream = set(self.changes[path].functions.names)
        return tuple(item.name for item in inner if item.name in upstream)


def _applied(path: str, data: bytes, diffs: Sequence[FileDiff]) -> bytes | None:
    """What the diffs make of a file without moving a hunk, or None."""
    try:
        result = compute({path: FileImage(data)}, diffs)
    except RefusedError:
        return None
    image = result.images[path]
    return image.data if isinstance(image, FileImage) and not result.offsets else None


def _does_the_same(one: Family, two: Family) -> bool:
    """Whether two families are one: the same patches byte for byte, the same added files, the same left out."""
    patches = [[(patch.name, patch.data) for patch in family.patches] for family in (one, two)]
    return patches[0] == patches[1] and dict(one.added) == dict(two.added) and set(one.left_out) == set(two.left_out)
