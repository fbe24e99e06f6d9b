"""What the case files cannot say: the whole-file hash known, placements, hints."""

from __future__ import annotations

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.hunks import Placement, apply_hunks
from ddtree_deploy.patching.images import FileImage

HEADER = b"--- a/f.py\n+++ b/f.py\n"


def apply(data, hunks, **options):
    (diff,) = parse(HEADER + hunks, source="x.patch")
    return apply_hunks(data, diff.hunks, path="f.py", source="x.patch", **options)


def refusal(data, hunks, exact=False):
    diffs = parse(HEADER + hunks, source="x.patch")
    with pytest.raises(DeployError) as caught:
        apply_diffs({"f.py": FileImage(data)}, diffs, exact={"f.py"} if exact else ())
    return caught.value


@pytest.mark.parametrize(
    ("data", "hunks", "after"),
    [
        (b"a\nb\n", b"@@ -1,0 +2 @@\n+x\n", b"a\nx\nb\n"),
        (b"a\nb\n", b"@@ -0,0 +1 @@\n+x\n", b"x\na\nb\n"),
        (b"a\nb\n", b"@@ -2,0 +3 @@\n+x\n", b"a\nb\nx\n"),
        (b"a\nb\n", b"@@ -2,0 +3 @@\n+x\n\\ No newline at end of file\n", b"a\nb\nx"),
        (b"a\nb\nc\n", b"@@ -1,2 +1,2 @@\n a\n-b\n+x\n", b"a\nx\nc\n"),  # no trailing context, yet not the end
    ],
)
def test_exact(data, hunks, after):
    assert apply(data, hunks, exact=True)[0] == after
    refusal(data, hunks)


@pytest.mark.parametrize(
    ("data", "hunks", "says"),
    [
        (b"a\nb", b"@@ -2,0 +3 @@\n+x\n", "without any context at line 3"),  # would glue b and x
        (b"a\nb\n", b"@@ -3,0 +4 @@\n+x\n", "without any context at line 4"),
        (b"a\nb\n", b"@@ -1 +1 @@\n-a\n+x\n\\ No newline at end of file\n", "the file goes on after line 1"),
        (b"a\nc\n", b"@@ -1,2 +1,2 @@\n a\n-b\n+x\n", "expected 'b', found 'c'"),
    ],
)
def test_exact_is_no_fuzz(data, hunks, says):
    assert says in refusal(data, hunks, exact=True).message


def test_placements():
    data = b"z\n" + b"".join(b"l%d\n" % number for number in range(1, 10))
    after, places = apply(data, b"@@ -2,3 +2,3 @@\n l2\n-l3\n+x\n l4\n@@ -6,3 +6,3 @@\n l6\n-l7\n+y\n l8\n")
    assert after == data.replace(b"l3", b"x").replace(b"l7", b"y")
    assert places == (Placement(1, 3, 1), Placement(2, 7, 1))


def test_many_matches_are_counted_no_further():
    error = refusal(b"a\nb\n" * 50, b"@@ -2,2 +2,2 @@\n a\n-b\n+x\n")
    assert error.code == "DD103"
    assert error.message.endswith("matches at lines 1, 3, 5, 7, 9 and more")


def test_the_nearest_place_is_compared():
    """The message points at where the hunk belongs, not at its stated line."""
    data = b"x\n" * 40 + b"def f():\n    a = 1\n    b = 2\n    return a\n"
    error = refusal(data, b"@@ -3,4 +3,4 @@\n def f():\n-    a = 0\n+    a = 3\n     b = 2\n     return a\n")
    assert "at line 42: expected '    a = 0', found '    a = 1'" in error.message


def test_only_what_has_no_place_is_told():
    """A hunk that is right at its stated line is not called ambiguous because another one is wrong."""
    data = b"a\nX\nb\nm\na\nX\nb\nu1\nu2\nu3\n"
    error = refusal(data, b"@@ -1,3 +1,3 @@\n a\n-X\n+Y\n b\n@@ -8,3 +8,3 @@\n u1\n-other\n+U\n u3\n")
    assert "hunk 2" in error.message
    assert not error.details


def test_one_of_two_files_looks_already_patched():
    patch = HEADER + b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"
    diffs = parse(patch + patch.replace(b"f.py", b"g.py"), source="x.patch")
    with pytest.raises(DeployError) as caught:
        apply_diffs({"f.py": FileImage(b"a\nb\nc\n"), "g.py": FileImage(b"a\nB\nc\n")}, diffs)
    assert caught.value.hint == "g.py looks already patched: the reverse matches it"
    with pytest.raises(DeployError) as caught:
        apply_diffs({"f.py": FileImage(b"a\nB\nc\n"), "g.py": FileImage(b"a\nB\nc\n")}, diffs)
    assert caught.value.hint == "it looks already applied: the reverse of the whole diff applies to these files"


def test_long_lines_and_control_characters_are_shown_safely():
    line = b"\x1b[2J" + b"x" * 5000
    error = refusal(b"a\n" + line + b"\nc\n", b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n")
    assert "found '\\x1b[2Jxxx" in error.message
    assert len(error.message) < 400
    assert error.message.isprintable()


def test_every_problem_is_listed_up_to_a_limit():
    bad = b"".join(b"--- a/f%d.py\n+++ b/f%d.py\n@@ -1 @@\n-a\n+b\n" % (at, at) for at in range(100))
    with pytest.raises(DeployError) as caught:
        parse(bad, source="x.patch")
    assert caught.value.message == "x.patch: 100 problems"
    assert len(caught.value.details) == 61
    assert caught.value.details[-1] == "and 40 more"


def test_modes():
    """Execute bits follow the read bits; nothing else of a host's mode changes."""
    diffs = parse(b"diff --git a/f.py b/f.py\nold mode 100644\nnew mode 100755\n", source="x.patch")
    for before, after in ((0o644, 0o755), (0o640, 0o750), (0o600, 0o700), (0o2664, 0o2775)):
        assert apply_diffs({"f.py": FileImage(b"", before)}, diffs).images["f.py"].mode == after
    with pytest.raises(DeployError):
        apply_diffs({"f.py": FileImage(b"", 0o755)}, diffs)
