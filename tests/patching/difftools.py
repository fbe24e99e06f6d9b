"""Making diffs for tests: a generator of our own, git's, and an emitter of what the reader understood."""

from __future__ import annotations

import difflib
import os
import subprocess

from hypothesis import strategies as st

from ddtree_deploy.patching.filediff import FileDiff, Kind
from ddtree_deploy.patching.images import FileImage

GIT_ENV = {
    "PATH": os.environ["PATH"],
    "GIT_DIR": "/nonexistent",
    "GIT_CEILING_DIRECTORIES": "/",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "LC_ALL": "C",
}


# -- random contents ---------------------------------------------------------------------------------

# Few different lines, so that blocks repeat; among them what other tools take for something else.
LINES = st.sampled_from(
    [
        *(b"", b"a", b"b", b"c", b"d", b"    return x", b"    pass", b"}", b"-- x", b"++ x", b"- ", b"-"),
        *(b"@@ -1 +1 @@", b"diff --git a/f b/f", b"\\ No newline at end of file", b" ", b"\r", b"a\r"),
        *(b"\x0c", b"x\xc2\x85y", b"x\xe2\x80\xa8y", b"\xff\xfe", b"\xef\xbb\xbfa", b"a\x00b", b"--- a/f"),
    ]
)


@st.composite
def contents(draw, max_lines=24):
    lines = draw(st.lists(LINES, max_size=max_lines))
    end = b"" if lines and lines[-1] and draw(st.booleans()) else b"\n"
    return b"\n".join(lines) + end if lines else b""


@st.composite
def edits(draw, data):
    """``data`` with some lines removed, inserted and replaced; perhaps its last newline too."""
    lines = split(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines)))
        count = draw(st.integers(0, 3))
        lines[at : at + count] = [line + b"\n" for line in draw(st.lists(LINES, max_size=3))]
    joined = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    whole = b"".join(lines) if all(line.endswith(b"\n") for line in lines[:-1]) else joined
    return whole[:-1] if whole.endswith(b"\n") and draw(st.booleans()) else whole


def split(data):
    """Lines with their newline, split at \\n alone."""
    pieces = data.split(b"\n")
    return [piece + b"\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


# -- a generator of unified diffs --------------------------------------------------------------------


def make_diff(path, before, after, context=3):
    """A unified diff without git headers; None for no file."""
    old, new = split(before or b""), split(after or b"")
    name = path.encode()
    head = b"--- %b\n+++ %b\n" % (
        b"/dev/null" if before is None else b"a/" + name,
        b"/dev/null" if after is None else b"b/" + name,
    )
    out = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in _groups(matcher.get_opcodes(), context):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        out.append(b"@@ -%b +%b @@\n" % (_range(i1, i2), _range(j1, j2)))
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                out += [_line(b" ", line) for line in old[a1:a2]]
                continue
            out += [_line(b"-", line) for line in old[a1:a2]]
            out += [_line(b"+", line) for line in new[b1:b2]]
    return head + b"".join(out) if out else b""


def _groups(opcodes, context):
    """Opcodes cut to ``context`` equal lines around changes (difflib's own drops the case of none)."""
    group = []
    for at, (tag, i1, i2, j1, j2) in enumerate(opcodes):
        if tag != "equal":
            group.append((tag, i1, i2, j1, j2))
            continue
        first, last = at == 0, at == len(opcodes) - 1
        lead = 0 if first else min(context, i2 - i1)
        trail = 0 if last else min(context, i2 - i1)
        if not first and not last and lead + trail >= i2 - i1:
            group.append((tag, i1, i2, j1, j2))
            continue
        if group:
            yield [*group, (tag, i1, i1 + lead, j1, j1 + lead)]
        group = [] if last else [(tag, i2 - trail, i2, j2 - trail, j2)]
    if group:
        yield group


def _range(start, end):
    if end == start:
        return b"%d,0" % start
    return b"%d" % (start + 1) if end == start + 1 else b"%d,%d" % (start + 1, end - start)


def _line(kind, line):
    return kind + line if line.endswith(b"\n") else kind + line + b"\n\\ No newline at end of file\n"


# -- what the reader understood, written out again ---------------------------------------------------


def emit(diffs):
    """The diffs as canonical git diffs with quoted names."""
    return b"".join(map(_emit, diffs))


def _emit(diff: FileDiff):
    old, new = diff.old_path or diff.new_path, diff.new_path or diff.old_path
    out = [b"diff --git %b %b\n" % (_quote("a/" + old), _quote("b/" + new))]
    if diff.kind is Kind.CREATE:
        out.append(b"new file mode %o\n" % (diff.new_mode or 0o100644))
    elif diff.kind is Kind.DELETE:
        out.append(b"deleted file mode %o\n" % (diff.old_mode or 0o100644))
    elif diff.new_mode is not None:
        out.append(b"old mode %o\nnew mode %o\n" % (diff.old_mode, diff.new_mode))
    if diff.kind in (Kind.RENAME, Kind.COPY):
        word = diff.kind.value.encode()
        out.append(b"%b from %b\n%b to %b\n" % (word, _quote(old), word, _quote(new)))
    if diff.hunks:
        out.append(b"--- %b\n" % (b"/dev/null" if diff.old_path is None else _quote("a/" + old)))
        out.append(b"+++ %b\n" % (b"/dev/null" if diff.new_path is None else _quote("b/" + new)))
    for hunk in diff.hunks:
        numbers = (hunk.old_start, hunk.old_count, hunk.new_start, hunk.new_count)
        out.append(b"@@ -%d,%d +%d,%d @@\n" % numbers)
        out += [_line(line.kind.encode(), line.text) for line in hunk.lines]
    return b"".join(out)


def _quote(path):
    return b'"' + b"".join(b"\\%03o" % byte if byte in b'"\\' else bytes([byte]) for byte in path.encode()) + b'"'


# -- other tools -------------------------------------------------------------------------------------


def write_tree(folder, images):
    folder.mkdir(parents=True, exist_ok=True)
    for path, image in images.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(image.data)
        target.chmod(image.mode)


def read_tree(folder):
    """Every file below; modes as git keeps them."""
    return {
        path.relative_to(folder).as_posix(): FileImage(
            path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def git_apply(folder, patch, *options):
    """Exit status of ``git apply`` in ``folder``, which is in no repository."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options, "-"],
        cwd=folder,
        input=patch,
        capture_output=True,
        env=GIT_ENV,
    )
    return done.returncode, done.stderr.decode(errors="replace")


class GitTrees:
    """Diffs between whole trees as git makes them, with renames and copies."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**GIT_ENV, "GIT_DIR": str(folder / "git")}
        self.env |= {"GIT_INDEX_FILE": str(folder / "index"), "GIT_WORK_TREE": str(folder / "work")}
        (folder / "work").mkdir(parents=True)
        self.run("init", "-q")

    def run(self, *command):
        return subprocess.run(
            ["git", *command], cwd=self.folder / "work", env=self.env, check=True, capture_output=True
        ).stdout

    def tree(self, images):
        work = self.folder / "work"
        for path in sorted(work.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        write_tree(work, images)
        (self.folder / "index").unlink(missing_ok=True)
        self.run("add", "-A", "-f", ".")
        return self.run("write-tree").decode().strip()

    def diff(self, before, after, context):
        options = ("-r", "-p", "--text", "-M40%", "-C40%", "--find-copies-harder", f"-U{context}")
        return self.run("diff-tree", *options, self.tree(before), self.tree(after))
