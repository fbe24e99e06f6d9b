"""A patch file as text: what its author wrote before the diffs, and the diff of each file, replaced one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddtree_deploy.authoring.gittools import file_diff
from ddtree_deploy.authoring.weave import split
from ddtree_deploy.patching.filediff import FileDiff
from ddtree_deploy.patching.patchset import Patch

# Lines of other tools that belong to the diff below them.
_BEFORE = (b"Index: ", b"=====", b"diff ")


@dataclass(frozen=True)
class Section:
    """One file's diff: its bytes as they are, and the text that follows it."""

    diff: FileDiff
    data: bytes
    tail: bytes


@dataclass(frozen=True)
class PatchText:
    """``head``: the text before the first diff."""

    head: bytes
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class FileChange:
    """What a patch is to do to one file: its path and bytes before and after; None is no file."""

    old_path: str | None
    before: bytes | None
    new_path: str | None
    after: bytes | None

    @property
    def path(self) -> str:
        """The path by which the change is sorted."""
        path = self.new_path or self.old_path
        assert path is not None
        return path


def read_text(patch: Patch) -> PatchText:
    """The text of a patch in pieces: head, sections and tails together are its bytes."""
    lines = split(patch.data)
    starts: list[int] = []
    done = 0
    for diff, after in zip(patch.diffs, [*(diff.line - 1 for diff in patch.diffs[1:]), len(lines)], strict=True):
        start = diff.line - 1
        while start > done and lines[start - 1].startswith(_BEFORE):
            start -= 1
        starts.append(start)
        done = _stop(diff, after)
    sections = []
    for diff, start, end in zip(patch.diffs, starts, [*starts[1:], len(lines)], strict=True):
        stop = _stop(diff, end)
        sections.append(Section(diff, b"".join(lines[start:stop]), b"".join(lines[stop:end])))
    return PatchText(b"".join(lines[: starts[0]]), tuple(sections))


def _stop(diff: FileDiff, end: int) -> int:
    """The line after the last one of the diff, which ``end`` is without hunks."""
    if not diff.hunks:
        return end
    last = diff.hunks[-1]
    markers = sum(not line.text.endswith(b"\n") for line in last.lines)
    return min(last.line + len(last.lines) + markers, end)


def rewrite(patch: Patch, replaced: Mapping[int, FileChange | None], more: Sequence[FileChange]) -> bytes:
    """The patch with the sections of these numbers (from 0) made anew, or left out for None, and ``more`` put in
    by path; every other byte stays. Empty when no diff is left.
    """
    text = read_text(patch)
    pieces: list[tuple[str, bytes, bytes]] = []
    for number, section in enumerate(text.sections):
        if number not in replaced:
            pieces.append((section.diff.paths[-1], section.data, section.tail))
        elif (change := replaced[number]) is not None:
            pieces.append((change.path, diff_of(change), section.tail))
    for change in sorted(more, key=lambda change: change.path):
        at = next((at for at, piece in enumerate(pieces) if piece[0] > change.path), len(pieces))
        tail = b""
        if at == len(pieces) and pieces:  # the text at the very end stays there
            path, data, tail = pieces[-1]
            pieces[-1] = (path, data, b"")
        pieces.insert(at, (change.path, diff_of(change), tail))
    if not pieces:
        return b""
    return text.head + b"".join(data + tail for _, data, tail in pieces)


def compose(head: str, changes: Sequence[FileChange]) -> bytes:
    """A new patch: its text, an empty line, and the changes by path."""
    body = b"".join(diff_of(change) for change in sorted(changes, key=lambda change: change.path))
    text = head.strip()
    return (text.encode() + b"\n\n" if text else b"") + body


def diff_of(change: FileChange) -> bytes:
    """The diff of one change; a rename as git writes it."""
    if change.old_path is None or change.new_path is None or change.old_path == change.new_path:
        return file_diff(change.path, change.before, change.after)
    old, new = change.old_path.encode(), change.new_path.encode()
    head = b"diff --git a/%b b/%b\nrename from %b\nrename to %b\n" % (old, new, old, new)
    if change.before == change.after:
        return head + b"\n"
    body = file_diff(change.new_path, change.before, change.after).split(b"\n", 2)[2]
    return head + b"--- a/%b\n+++ b/%b\n%b" % (old, new, body)
