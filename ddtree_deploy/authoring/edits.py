"""Edits of a patched tree, and which patch of the series each of them belongs to.

An edit is a run of lines of one file that were replaced, deleted or inserted. It belongs to the patch that brings
the lines it replaces or deletes. An insertion belongs to the patch that brings a line beside it, that deletes
lines at its place, or that makes the file. Where these are several patches, or none, nobody can tell but the author.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddtree_deploy.authoring.gittools import file_diff
from ddtree_deploy.authoring.series import Series
from ddtree_deploy.authoring.weave import NEVER, OverlapError, Weave
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.problems import Problem

#: The file as a whole was deleted.
WHOLE = -1


@dataclass(frozen=True)
class Edit:
    """A run of lines of a file after the whole series. ``place``: the 0-based line it begins at, or ``WHOLE``;
    ``shown``: the line, from 1, of the edited file.

    ``owner``: the level of the patch it belongs to, None where that cannot be told. ``near``: the levels of the
    patches that have to do with the lines.
    """

    path: str
    weave: Weave
    place: int
    shown: int
    removed: int
    added: tuple[bytes, ...]
    owner: int | None
    near: tuple[int, ...]

    def __str__(self) -> str:
        if self.place == WHOLE:
            return f"{self.path} (deleted)"
        last = self.shown + len(self.added) - 1
        lines = f"{self.shown}" if last <= self.shown else f"{self.shown}-{last}"
        what = "inserted" if not self.removed else "deleted" if not self.added else "changed"
        return f"{self.path}:{lines} ({max(self.removed, len(self.added))} line(s) {what})"


def edits_of(series: Series, edited: Mapping[str, bytes | None]) -> list[Edit]:
    """The edits that make ``edited`` (path -> bytes, None for a deleted file) of the files after the series.

    All paths are there after the series, and none is one that the family adds.
    """
    edits: list[Edit] = []
    for path, after in sorted(edited.items()):
        weave = series.file(path)
        before = weave.image(series.top)
        assert before is not None
        edits += [_deletion(path, weave)] if after is None else _runs(path, weave, before, after)
    return edits


def _deletion(path: str, weave: Weave) -> Edit:
    near = {*weave.touched, *({weave.creator} if weave.creator else ())}
    owner = weave.creator if near == {weave.creator} else None
    return Edit(path, weave, WHOLE, 1, 0, (), owner or None, tuple(sorted(near)))


def _runs(path: str, weave: Weave, before: bytes, after: bytes) -> Iterator[Edit]:
    for hunk in (hunk for diff in parse(file_diff(path, before, after), source=path) for hunk in diff.hunks):
        place, shown, removed, added = hunk.index, hunk.new_index + 1, 0, list[bytes]()
        for kind, text in (*hunk.lines, (" ", b"")):
            if kind == "+":
                added.append(text)
            elif kind == "-":
                removed += 1
            else:
                if removed or added:
                    yield _run(path, weave, place, shown, removed, tuple(added))
                place, shown, removed, added = place + removed + 1, shown + len(added) + 1, 0, []


def _run(path: str, weave: Weave, place: int, shown: int, removed: int, added: tuple[bytes, ...]) -> Edit:
    beside, taken = weave.gap(place)
    if removed:
        levels = weave.owners(place, removed)
        owner = levels.copy().pop() if len(levels) == 1 else 0
        near = levels | (beside | taken if owner == 0 else set())
    else:
        near = (beside | taken) - {0, NEVER} or {weave.creator}
        owner = near.copy().pop() if len(near) == 1 else 0
    return Edit(path, weave, place, shown, removed, added, owner or None, tuple(sorted(near - {0, NEVER})))


def carry_out(edits: Sequence[Edit], levels: Mapping[Edit, int], names: list[str]) -> list[Problem]:
    """Make the edits, each at its level; problems (DD116) of those that a later patch stands in the way of."""
    problems = []
    # From the end of a file to its beginning, so that places stay what they are.
    for edit in sorted(edits, key=lambda edit: (edit.path, -edit.place)):
        try:
            if edit.place == WHOLE:
                edit.weave.delete(levels[edit])
            else:
                edit.weave.replace(levels[edit], edit.place, edit.removed, edit.added)
        except OverlapError as overlap:
            later = names[overlap.level - 1]
            into = names[levels[edit] - 1]
            problems.append(Problem("DD116", f"{edit}: cannot go into {into}: the later {later} changes these lines"))
    for weave in dict.fromkeys(edit.weave for edit in edits):
        torn = weave.torn()
        if torn is not None:
            path = next(edit.path for edit in edits if edit.weave is weave)
            where = names[torn - 1] if torn else "no patch"
            problems.append(
                Problem("DD116", f"{path}: after {where} a line without a newline would not be the last one")
            )
    return problems
