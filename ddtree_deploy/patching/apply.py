"""Applying file diffs to a tree of images: all of them or none, in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddtree_deploy.patching.filediff import EXECUTABLE, FileDiff, Kind, reverse
from ddtree_deploy.patching.hunks import Placement, apply_hunks
from ddtree_deploy.patching.images import FileImage, Image, LinkImage
from ddtree_deploy.patching.problems import Problem, RefusedError, as_error


@dataclass(frozen=True, slots=True)
class Offset:
    """A hunk that went elsewhere than its header says."""

    path: str
    source: str
    placement: Placement

    def __str__(self) -> str:
        hunk = self.placement
        return f"{self.path}: hunk {hunk.number} ({self.source}) at line {hunk.line} (offset {hunk.offset:+d})"


@dataclass(frozen=True, slots=True)
class Result:
    """``images``: every touched path and what it holds afterwards. ``offsets``: hunks that were moved."""

    images: dict[str, Image]
    offsets: tuple[Offset, ...]


def apply_diffs(tree: Mapping[str, Image], diffs: Sequence[FileDiff], *, exact: Collection[str] = ()) -> Result:
    """Apply ``diffs`` in order to ``tree`` (path -> image; a path that is not in it holds nothing).

    A later diff sees what earlier ones made of its path; a copy takes its source as it was when its part of
    the input began. Creating a file that is there with the same bytes changes nothing. ``exact`` names paths
    whose whole content in ``tree`` is known, by hash, to be what the diffs were made for.

    A mode change sets or clears the execute bits where the read bits are; new files get 0644 or 0755.
    Raises one DeployError with every problem (DD102 and DD103 hunks, DD106 presence, DD509 links); ``tree``
    is never changed.
    """
    try:
        return compute(tree, diffs, exact)
    except RefusedError as refused:
        subject = ", ".join(dict.fromkeys(diff.source for diff in diffs))
        raise as_error(refused.problems, subject, refused.hint) from None


def compute(tree: Mapping[str, Image], diffs: Sequence[FileDiff], exact: Collection[str] = ()) -> Result:
    """:func:`apply_diffs` for a caller that collects problems from several inputs: raises RefusedError."""
    try:
        return _apply(tree, diffs, exact)
    except RefusedError as refused:
        if not _undoes(tree, diffs):
            raise
        hint = "it looks already applied: the reverse of the whole diff applies to these files"
        raise RefusedError(refused.problems, hint) from None


def _apply(tree: Mapping[str, Image], diffs: Sequence[FileDiff], exact: Collection[str]) -> Result:
    work = _Work(tree, exact)
    hints: dict[str, None] = {}
    for diff in diffs:
        if any(path in work.failed for path in diff.paths):
            work.failed.update(diff.paths)
            continue
        try:
            work.take(diff)
        except RefusedError as refused:
            work.failed.update(diff.paths)
            work.problems.extend(refused.problems)
            if refused.hint:
                hints[refused.hint] = None
    if work.problems:
        raise RefusedError(work.problems, "; ".join(hints) or None)
    return Result(dict(work.now), tuple(work.offsets))


def _undoes(tree: Mapping[str, Image], diffs: Sequence[FileDiff]) -> bool:
    try:
        _apply(tree, reverse(diffs), ())
    except RefusedError:
        return False
    return True


class _Work:
    """The tree so far: what the diffs made of the paths they touched, over what was there."""

    def __init__(self, tree: Mapping[str, Image], exact: Collection[str]) -> None:
        self.tree = tree
        self.exact = exact
        self.now: dict[str, Image] = {}
        self.part_began: dict[str, Image] = {}
        self.part: int | None = None
        self.failed: set[str] = set()
        self.problems: list[Problem] = []
        self.offsets: list[Offset] = []

    def get(self, path: str) -> Image:
        return self.now[path] if path in self.now else self.tree.get(path)

    def take(self, diff: FileDiff) -> None:
        """Apply one diff or raise RefusedError, with nothing changed."""
        if diff.part != self.part:
            self.part, self.part_began = diff.part, dict(self.now)
        where = f"{diff.source}:{diff.line}"
        for path in diff.paths:
            self.check_way(path, where)
        if diff.kind is Kind.CREATE:
            self.create(diff, where)
            return
        assert diff.old_path is not None
        before = self.source(diff, diff.old_path, where)
        data, placements = apply_hunks(
            before.data,
            diff.hunks,
            path=diff.old_path,
            source=diff.source,
            exact=diff.old_path in self.exact,
        )
        after: Image = self.with_mode(FileImage(data, before.mode), diff, where)
        if diff.kind is Kind.DELETE:
            if data:
                raise _refuse("DD106", f"{diff.old_path} has content that {where} does not delete")
            after = None
        if diff.kind in (Kind.RENAME, Kind.COPY):
            assert diff.new_path is not None
            self.check_free(diff.new_path, where)
            self.now[diff.new_path] = after
        if diff.kind in (Kind.RENAME, Kind.UNCOPY):
            self.now[diff.old_path] = None
        elif diff.kind is not Kind.COPY:
            self.now[diff.old_path] = after
        self.offsets += [Offset(diff.old_path, diff.source, place) for place in placements if place.offset]

    def create(self, diff: FileDiff, where: str) -> None:
        path = diff.new_path
        assert path is not None
        data = diff.hunks[0].new if diff.hunks else b""
        mode = 0o755 if diff.new_mode == EXECUTABLE else 0o644
        there = self.get(path)
        if isinstance(there, FileImage):
            same_mode = diff.new_mode is None or there.executable == (diff.new_mode == EXECUTABLE)
            if there.data != data or not same_mode:
                what = "other content" if there.data != data else "another mode"
                raise _refuse("DD106", f"{path} exists with {what}; {where} creates it")
            self.now[path] = there
            return
        self.check_free(path, where)
        self.now[path] = FileImage(data, mode)

    def source(self, diff: FileDiff, path: str, where: str) -> FileImage:
        """What the diff starts from."""
        image = self.get(path)
        if diff.kind is Kind.COPY:
            began = self.part_began[path] if path in self.part_began else self.tree.get(path)
            image = began if began is not None else image
        if not isinstance(image, FileImage):
            raise _refuse("DD106", f"{path} does not exist; {where} is to {diff.kind} it")
        return image

    def with_mode(self, image: FileImage, diff: FileDiff, where: str) -> FileImage:
        if diff.kind is Kind.DELETE or diff.new_mode is None or diff.old_mode is None:
            return image
        if image.executable != (diff.old_mode == EXECUTABLE):
            have = "executable" if image.executable else "not executable"
            raise _refuse("DD102", f"{diff.old_path} is {have}; {where} changes its mode from {diff.old_mode:o}")
        return image.with_executable(diff.new_mode == EXECUTABLE)

    def check_way(self, path: str, where: str) -> None:
        """No link and no file may be where the path needs a folder, and no link where it needs a file."""
        components = path.split("/")
        for depth in range(1, len(components) + 1):
            prefix = "/".join(components[:depth])
            images = (self.get(prefix), self.tree.get(prefix))
            link = next((image for image in images if isinstance(image, LinkImage)), None)
            if link is not None:
                through = "" if prefix == path else f", which {path} lies behind"
                raise _refuse("DD509", f"{prefix} is a symbolic link to {link.target}{through}; {where} is not applied")
            if prefix != path and any(image is not None for image in images):
                raise _refuse("DD106", f"{prefix} is a file; {where} needs a folder there for {path}")

    def check_free(self, path: str, where: str) -> None:
        if self.get(path) is not None:
            raise _refuse("DD106", f"{path} exists; {where} creates it")
        below = path + "/"
        if any(known.startswith(below) and self.holds(known) for known in _chain(self.tree, self.now)):
            raise _refuse("DD106", f"{path} is a folder; {where} creates a file there")

    def holds(self, path: str) -> bool:
        """Whether the path holds something, or did before: a folder is not removed with its last file."""
        return self.get(path) is not None or self.tree.get(path) is not None


def _chain(*mappings: Mapping[str, Image]) -> Iterable[str]:
    for mapping in mappings:
        yield from mapping


def _refuse(code: str, text: str) -> RefusedError:
    return RefusedError([Problem(code, text)])
