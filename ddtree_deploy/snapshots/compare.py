"""What differs between two trees (snapshots, or a published wheel), as unified diffs in git's format."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ddtree_deploy.snapshots.entries import Entry, FileEntry, LinkEntry, OtherEntry, path_bytes

CONTEXT = 3
_NO_NEWLINE = b"\\ No newline at end of file\n"

Status = Literal["added", "removed", "changed", "mode", "kind"]


class Tree(Protocol):
    """A snapshot or a pristine wheel."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Path -> entry, in the order of the paths' bytes."""

    def read(self, path: str) -> bytes:
        """A file's bytes."""


@dataclass(frozen=True)
class FileDiff:
    """One path that differs.

    ``status`` is "changed" for other bytes or another link target (the mode may differ too), "mode" for the mode
    alone, "kind" when a file became a link or the like.
    """

    path: str
    status: Status
    old: Entry | None
    new: Entry | None


def compare(old: Tree, new: Tree, *, exact_modes: bool = True) -> list[FileDiff]:
    """Every path that differs, in path order.

    Without ``exact_modes`` only whether a file is executable counts: the rest is the installer's umask, which a
    wheel does not know.
    """
    before, after = old.entries, new.entries
    found = []
    for path in sorted(before.keys() | after.keys(), key=path_bytes):
        one, other = before.get(path), after.get(path)
        status = _status(one, other, exact_modes)
        if status:
            found.append(FileDiff(path, status, one, other))
    return found


def _status(old: Entry | None, new: Entry | None, exact_modes: bool) -> Status | None:
    if old is None:
        return "added"
    if new is None:
        return "removed"
    if isinstance(old, FileEntry) and isinstance(new, FileEntry):
        if old.sha256 != new.sha256:
            return "changed"
        same = old.mode == new.mode if exact_modes else _mode(old) == _mode(new)
        return None if same else "mode"
    if isinstance(old, LinkEntry) and isinstance(new, LinkEntry):
        return None if old.target == new.target else "changed"
    return None if isinstance(old, OtherEntry) and isinstance(new, OtherEntry) else "kind"


def unified(diff: FileDiff, old: Tree, new: Tree) -> bytes:
    """The difference as one file's part of a git diff. Raises DeployError DD402 for damaged contents.

    Bytes that are binary (they hold a NUL), or that a snapshot does not hold, are said to differ, not shown.
    """
    if diff.status == "kind":
        # As git does: the old thing goes, the new one comes.
        gone, come = FileDiff(diff.path, "removed", diff.old, None), FileDiff(diff.path, "added", None, diff.new)
        return unified(gone, old, new) + unified(come, old, new)
    name = path_bytes(diff.path)
    head = [b"diff --git " + _quoted(b"a/" + name) + b" " + _quoted(b"b/" + name) + b"\n"]
    before, after = _mode(diff.old), _mode(diff.new)
    if diff.old is None:
        head.append(b"new file mode %s\n" % after)
    elif diff.new is None:
        head.append(b"deleted file mode %s\n" % before)
    elif before != after:
        head.append(b"old mode %s\nnew mode %s\n" % (before, after))
    if diff.status == "mode":
        return b"".join(head)
    one, other = _content(diff.old, old), _content(diff.new, new)
    if one is None or other is None or b"\0" in one or b"\0" in other:
        sides = [
            b"/dev/null" if diff.old is None else _quoted(b"a/" + name),
            b"/dev/null" if diff.new is None else _quoted(b"b/" + name),
        ]
        head.append(b"Binary files " + b" and ".join(sides) + b" differ\n")
        return b"".join(head)
    hunks = list(_hunks(_lines(one), _lines(other)))
    if hunks:
        tab = b"\t" if b" " in name else b""
        head.append(b"--- " + (b"/dev/null" if diff.old is None else _quoted(b"a/" + name) + tab) + b"\n")
        head.append(b"+++ " + (b"/dev/null" if diff.new is None else _quoted(b"b/" + name) + tab) + b"\n")
    return b"".join(head + hunks)


def _mode(entry: Entry | None) -> bytes:
    if isinstance(entry, LinkEntry):
        return b"120000"
    return b"100755" if isinstance(entry, FileEntry) and entry.mode & 0o111 else b"100644"


def _content(entry: Entry | None, tree: Tree) -> bytes | None:
    if entry is None:
        return b""
    if isinstance(entry, LinkEntry):
        return path_bytes(entry.target)
    return tree.read(entry.path) if isinstance(entry, FileEntry) and entry.content else None


def _quoted(name: bytes) -> bytes:
    """The name as git writes it: in quotes, with C escapes, if it holds anything but printable ASCII."""
    out = bytearray()
    for byte in name:
        if byte in b'"\\':
            out += b"\\" + bytes([byte])
        elif 0x20 <= byte < 0x7F:
            out.append(byte)
        else:
            out += {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r"}.get(
                byte, b"\\%03o" % byte
            )
    return name if out == name else b'"' + bytes(out) + b'"'


def _lines(data: bytes) -> list[bytes]:
    """The lines with their newline; a line ends at ``\\n`` alone."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _hunks(old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[bytes]:
    # What is equal at both ends is most of the file, and costs nothing to pass over.
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    start, end = max(0, start - CONTEXT), max(0, end - CONTEXT)
    one, other = old[start : len(old) - end], new[start : len(new) - end]
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        first, last = group[0], group[-1]
        out = [
            b"@@ -%s +%s @@\n"
            % (_range(start + first[1], last[2] - first[1]), _range(start + first[3], last[4] - first[3]))
        ]
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                out += [_marked(b" ", line) for line in one[a1:a2]]
            else:
                out += [_marked(b"-", line) for line in one[a1:a2]]
                out += [_marked(b"+", line) for line in other[b1:b2]]
        yield b"".join(out)


def _marked(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE


def _range(start: int, length: int) -> bytes:
    # An empty range is named by the line before it.
    first = start + 1 if length else start
    return b"%d" % first if length == 1 else b"%d,%d" % (first, length)
