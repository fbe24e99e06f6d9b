"""Differences between trees: which paths, and diffs that git applies."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.snapshots.compare import compare, unified
from ddtree_deploy.snapshots.entries import Entry, FileEntry, LinkEntry, OtherEntry


class MemoryTree:
    def __init__(self, files: Mapping[str, bytes | str | tuple[bytes, int] | None], content: bool = True) -> None:
        self.data: dict[str, bytes] = {}
        entries: dict[str, Entry] = {}
        for path in sorted(files, key=os.fsencode):
            what = files[path]
            if isinstance(what, str):
                entries[path] = LinkEntry(path, what)
            elif what is None:
                entries[path] = OtherEntry(path)
            else:
                data, mode = what if isinstance(what, tuple) else (what, 0o644)
                self.data[path] = data
                entries[path] = FileEntry(path, mode, len(data), hashlib.sha256(data).hexdigest(), 1, content, None)
        self.entries: Mapping[str, Entry] = entries

    def read(self, path: str) -> bytes:
        return self.data[path]


def text(old: MemoryTree, new: MemoryTree) -> bytes:
    return b"".join(unified(diff, old, new) for diff in compare(old, new))


def test_statuses():
    old = MemoryTree({"a": b"1", "b": b"1", "c": b"1", "d": (b"1", 0o640), "e": "x", "f": "x", "g": b"1", "h": None})
    new = MemoryTree({"b": b"1", "c": b"2", "d": (b"1", 0o644), "e": "x", "f": "y", "g": "x", "h": None, "i": b""})
    assert [(diff.path, diff.status) for diff in compare(old, new)] == [
        ("a", "removed"),
        ("c", "changed"),
        ("d", "mode"),
        ("f", "changed"),
        ("g", "kind"),
        ("i", "added"),
    ]
    assert compare(old, old) == []


def test_inexact_modes_are_about_being_executable():
    old = MemoryTree({"a": (b"1", 0o640), "b": (b"1", 0o644), "c": (b"1", 0o755)})
    new = MemoryTree({"a": (b"1", 0o664), "b": (b"1", 0o744), "c": (b"1", 0o775)})
    assert [diff.path for diff in compare(old, new)] == ["a", "b", "c"]
    assert [diff.path for diff in compare(old, new, exact_modes=False)] == ["b"]


LINES = b"".join(b"line %d\n" % number for number in range(1, 31))

EXAMPLES = {
    "one line": (
        LINES,
        LINES.replace(b"line 10\n", b"LINE 10\n"),
        b"--- a/f\n+++ b/f\n@@ -7,7 +7,7 @@\n line 7\n line 8\n line 9\n-line 10\n+LINE 10\n"
        b" line 11\n line 12\n line 13\n",
    ),
    "two hunks": (
        LINES,
        LINES.replace(b"line 1\n", b"").replace(b"line 30\n", b"line 30\nmore\n"),
        b"--- a/f\n+++ b/f\n@@ -1,4 +1,3 @@\n-line 1\n line 2\n line 3\n line 4\n"
        b"@@ -28,3 +27,4 @@\n line 28\n line 29\n line 30\n+more\n",
    ),
    "no newline at the end": (
        b"a\nb",
        b"a\nb\n",
        b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+b\n",
    ),
    "no newline on both sides": (
        b"a\nb",
        b"c\nb",
        b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a\n+c\n b\n\\ No newline at end of file\n",
    ),
    "carriage returns are text": (b"a\r\n", b"a\n", b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\r\n+a\n"),
    "a lone carriage return ends no line": (b"a\rb\n", b"a\rc\n", b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\rb\n+a\rc\n"),
    "binary": (b"a\0", b"b\0", b"Binary files a/f and b/f differ\n"),
    "not UTF-8": (b"\xff\n", b"\xfe\n", b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-\xff\n+\xfe\n"),
    "one more of the same": (
        b"a\n" * 10,
        b"a\n" * 11,
        b"--- a/f\n+++ b/f\n@@ -8,3 +8,4 @@\n a\n a\n a\n+a\n",
    ),
    "to empty": (b"a\n", b"", b"--- a/f\n+++ b/f\n@@ -1 +0,0 @@\n-a\n"),
    "from empty": (b"", b"a\n", b"--- a/f\n+++ b/f\n@@ -0,0 +1 @@\n+a\n"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_text(name: str):
    old, new, want = EXAMPLES[name]
    assert text(MemoryTree({"f": old}), MemoryTree({"f": new})) == b"diff --git a/f b/f\n" + want


def test_headers():
    old = MemoryTree({"gone": b"x\n", "mode": b"x\n", "link": b"x\n", "both": b"x\n"})
    new = MemoryTree({"new": (b"", 0o755), "mode": (b"x\n", 0o755), "link": "x", "both": (b"y\n", 0o755)})
    assert text(old, new) == (
        b"diff --git a/both b/both\nold mode 100644\nnew mode 100755\n--- a/both\n+++ b/both\n@@ -1 +1 @@\n-x\n+y\n"
        b"diff --git a/gone b/gone\ndeleted file mode 100644\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        b"diff --git a/link b/link\ndeleted file mode 100644\n--- a/link\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        b"diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+x\n"
        b"\\ No newline at end of file\n"
        b"diff --git a/mode b/mode\nold mode 100644\nnew mode 100755\n"
        b"diff --git a/new b/new\nnew file mode 100755\n"
    )


def test_what_is_not_held_is_said_to_differ():
    old, new = MemoryTree({"x.so": b"1"}, content=False), MemoryTree({"x.so": b"2"}, content=False)
    assert text(old, new) == b"diff --git a/x.so b/x.so\nBinary files a/x.so and b/x.so differ\n"


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("a b", b"--- a/a b\t\n"),
        ('q"\\', b'--- "a/q\\"\\\\"\n'),
        ("é", b'--- "a/\\303\\251"\n'),
        ("\udcff", b'--- "a/\\377"\n'),
        ("n\nt\t", b'--- "a/n\\nt\\t"\n'),
    ],
)
def test_odd_names_are_quoted_as_git_does(path: str, header: bytes):
    assert header in text(MemoryTree({path: b"1\n"}), MemoryTree({path: b"2\n"}))


_LINE = st.sampled_from([b"a", b"b", b"", b"c\r", b" ", b"-", b"\\", b"\xff", b"--- x", b"@@ -1 +1 @@"])
_DATA = st.builds(
    lambda lines, last: b"".join(line + b"\n" for line in lines) + last,
    st.lists(_LINE, max_size=25),
    st.sampled_from([b"", b"", b"x"]),
)
_FILE = st.tuples(_DATA, st.sampled_from([0o644, 0o755]))
_TREE = st.dictionaries(st.sampled_from(["a", "b c", "d/é", 'q"', "d/x\ty"]), _FILE, max_size=4)


@pytest.mark.skipif(not shutil.which("git"), reason="no git on PATH")
@settings(max_examples=40, deadline=None)
@given(old=_TREE, new=_TREE)
def test_git_applies_what_is_shown(old, new):
    with tempfile.TemporaryDirectory() as temporary:
        _git_applies(Path(temporary), old, new)


def _git_applies(folder: Path, old, new) -> None:
    for path, (data, mode) in old.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
        (folder / path).chmod(mode)
    patch = text(MemoryTree(old), MemoryTree(new))
    if patch:
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_DIR": "/nonexistent"}
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, env=environment, input=patch, capture_output=True
        )
        assert done.returncode == 0, (done.stderr, patch)
    seen = {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode & 0o755)
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert seen == new
