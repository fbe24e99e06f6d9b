"""Random trees, edits and damage; the oracle is the generated post-image, forward and back, and git."""

from __future__ import annotations

import io
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import unidiff
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.declaration import read_declaration
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.filediff import reverse
from ddtree_deploy.patching.images import FileImage
from ddtree_deploy.patching.patchset import load_sets

from .cases import CASES
from .difftools import LINES, GitTrees, contents, edits, emit, git_apply, make_diff, read_tree, split, write_tree
from .sets import changed_copy

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
WITH_GIT = settings(QUICK, max_examples=40)
PATHS = st.sampled_from(["f.py", "d/f.py", "d/e/g.py", "a b.py", "d/ü.py", 'q"t.py', "z.md"])


@st.composite
def changes(draw):
    before = draw(contents())
    return before, draw(edits(before).filter(lambda after: after != before))


@st.composite
def trees(draw):
    """A tree and what became of it: files edited, removed, added, renamed, copied, made executable."""
    modes = st.sampled_from([0o644, 0o644, 0o755])

    # Lines that tell files apart, so that git finds renames.
    def body(number):
        return contents(8).map(lambda data: b"".join(b"%d %d\n" % (number, at) for at in range(9)) + data)

    paths = draw(st.lists(PATHS, min_size=1, max_size=4, unique=True))
    before = {path: FileImage(draw(body(at)), draw(modes)) for at, path in enumerate(paths)}
    after = dict(before)
    for path in paths:
        what = draw(st.sampled_from(["edit", "edit", "mode", "delete", "move", "copy", "empty", "keep"]))
        image = after[path]
        if what in ("edit", "mode"):
            after[path] = FileImage(draw(edits(image.data)), draw(modes) if what == "mode" else image.mode)
        elif what in ("move", "copy"):
            after[f"new/{path}"] = FileImage(draw(edits(image.data)), image.mode)
            if what == "move":
                del after[path]
        elif what == "empty":
            after[f"empty/{path}"] = FileImage(b"")
        elif what == "delete":
            del after[path]
    return before, after


def outcome(tree, result):
    return {path: image for path, image in {**tree, **result.images}.items() if image is not None}


@given(changes(), st.integers(0, 4))
@QUICK
def test_forward_and_back(change, context):
    before, after = change
    diffs = parse(make_diff("f.py", before, after, context), source="x.patch")
    there, back = {"f.py": FileImage(before)}, {"f.py": FileImage(after)}
    assert outcome(there, apply_diffs(there, diffs, exact=there)) == back
    assert outcome(back, apply_diffs(back, reverse(diffs), exact=back)) == there
    # Without the hash's word, context decides; only what has none may be refused.
    for tree, wanted, steps in ((there, back, diffs), (back, there, reverse(diffs))):
        try:
            assert outcome(tree, apply_diffs(tree, steps)) == wanted
        except DeployError as error:
            assert context == 0
            text = "".join((error.message, *error.details))
            assert "without any context" in text or "the file goes on" in text


@given(changes(), st.lists(LINES, min_size=1, max_size=4), st.integers(1, 4), st.data())
@QUICK
def test_on_a_file_that_moved_it_is_right_or_refused(change, extra, context, data):
    """Lines put between two hunks, above or below: what is applied is what a person would have meant."""
    before, after = change
    diffs = parse(make_diff("f.py", before, after, context), source="x.patch")
    (diff,) = diffs
    moved, wanted = split(before), split(after)
    # The places outside of hunks, as pairs of line numbers, at which a whole line has ended.
    places, end_old, end_new = [], 0, 0
    for hunk in diff.hunks:
        places += ((at, at - end_old + end_new) for at in range(end_old, hunk.index + 1))
        end_old, end_new = hunk.index + hunk.old_count, hunk.new_index + hunk.new_count
    places += ((at, at - end_old + end_new) for at in range(end_old, len(moved) + 1))
    whole = [
        (old, new)
        for old, new in places
        if all(line.endswith(b"\n") for line in (*moved[max(old - 1, 0) : old], *wanted[max(new - 1, 0) : new]))
    ]
    at_old, at_new = data.draw(st.sampled_from(whole))
    moved[at_old:at_old] = wanted[at_new:at_new] = [line + b"\n" for line in extra]
    try:
        result = apply_diffs({"f.py": FileImage(b"".join(moved))}, diffs)
    except DeployError as error:
        assert error.code in ("DD102", "DD103")
        return
    got = result.images["f.py"].data
    if got != b"".join(wanted):
        # The lines put in look like the hunk's own: then it went to its stated line, where all of it matched.
        assert not result.offsets


@given(trees(), st.integers(0, 3))
@settings(WITH_GIT, max_examples=30)
def test_git_trees_forward_and_back(tmp_path_factory, pair, context):
    before, after = pair
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    try:
        patch = GitTrees(folder).diff(before, after, context)
        if before == after:
            assert not patch
            return
        diffs = parse(patch, source="x.patch")
        assert outcome(before, apply_diffs(before, diffs, exact=before)) == after
        again = parse(emit(diffs), source="x.patch")
        assert outcome(before, apply_diffs(before, again, exact=before)) == after
        undone = apply_diffs(after, reverse(diffs), exact=after)
        assert outcome(after, undone) == before
    finally:
        shutil.rmtree(folder)


@given(changes(), st.integers(0, 4), st.data())
@settings(WITH_GIT, max_examples=100)
def test_git_agrees_wherever_both_apply(tmp_path_factory, change, context, data):
    """The diff on the file it was made for, or on another that is like it."""
    before, after = change
    patch = make_diff("f.py", before, after, context)
    target = data.draw(st.one_of(st.just(before), edits(before)))
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    try:
        tree = {"f.py": FileImage(target)}
        write_tree(folder, tree)
        status, said = git_apply(folder, patch, *(["--unidiff-zero"] if context == 0 else []))
        try:
            ours = outcome(tree, apply_diffs(tree, parse(patch, source="x.patch")))
        except DeployError as error:
            if status == 0:
                assert stricter_than_git(error)
            return
        if status == 0:
            assert read_tree(folder) == ours or git_takes_a_beginning(patch, target)
        else:
            # git ties every hunk that begins at line 1 to the beginning of the file.
            assert "patch does not apply" in said
            assert any(hunk.old_start <= 1 for diff in parse(patch, source="") for hunk in diff.hunks)
    finally:
        shutil.rmtree(folder)


def git_takes_a_beginning(patch, target):
    """git lets a last line without newline match the beginning of a longer line, and glues what follows."""
    olds = [hunk.old for diff in parse(patch, source="") for hunk in diff.hunks]
    return any(old and not old.endswith(b"\n") and old in target[:-1] for old in olds)


def stricter_than_git(error):
    """Every reason for which we refuse what git applies."""
    reasons = (
        "matches at lines",
        "have moved",
        "no context",
        "no leading context",
        "without any context",
        "not after the hunk above it",
        "the file goes on",
        "begins at the beginning",
        # See git_takes_a_beginning.
        "the diff says that the file ends without a newline",
    )
    return all(any(reason in line for reason in reasons) for line in (error.details or (error.message,)))


@given(changes(), st.integers(0, 4))
@QUICK
def test_unidiff_reads_the_same(change, context):
    before, after = change
    patch = make_diff("f.py", before, after, context)
    (ours,) = parse(patch, source="x.patch")
    (theirs,) = unidiff.PatchSet(io.StringIO(patch.decode("utf-8", "surrogateescape"), newline="\n"))
    assert theirs.path == "f.py"
    assert len(ours.hunks) == len(theirs)
    for our, their in zip(ours.hunks, theirs, strict=True):
        assert (our.old_start, our.old_count, our.new_start, our.new_count) == (
            their.source_start,
            their.source_length,
            their.target_start,
            their.target_length,
        )
        lines = []
        for line in their:
            text = line.value.encode("utf-8", "surrogateescape")
            if line.line_type == "\\":
                lines[-1] = (lines[-1][0], lines[-1][1][:-1])
            else:
                lines.append((line.line_type, text))
        assert [tuple(line) for line in our.lines] == lines


APPLIED = [case for case in CASES if case.want is not None]


def damage(patch, dice):
    """A diff with a few bytes changed, lines dropped, doubled or swapped, or its end cut off."""
    data = bytearray(patch)
    for _ in range(dice.randint(1, 3)):
        kind = dice.randrange(6)
        at = dice.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] = dice.choice(b' +-\\@\n\r\t/.,0123456789ab"\x00\xff')
        elif kind == 1:
            data[at:at] = bytes([dice.choice(b' +-\\@\n0129/"')])
        elif kind == 2:
            del data[at : at + dice.randint(1, 3)]
        elif kind == 3:
            del data[at:]
        else:
            lines = split(bytes(data))
            if len(lines) > 1:
                one, two = dice.randrange(len(lines)), dice.randrange(len(lines))
                lines[one : one + 1] = [] if kind == 4 else [lines[two], lines[one]]
            data = bytearray(b"".join(lines))
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_diffs_are_refused_or_mean_what_they_say(seed):
    dice = random.Random(seed)
    accepted = 0
    for _ in range(600):
        case = dice.choice(APPLIED)
        patch = damage(case.patch, dice)
        try:
            diffs = parse(patch, strip=case.strip, source="x.patch")
        except DeployError as error:
            assert error.code in ("DD104", "DD105"), error.message
            continue
        assert diffs
        again = parse(emit(diffs), source="x.patch")
        assert [replace(diff, part=0, line=0, hunks=()) for diff in again] == [
            with_modes(replace(diff, part=0, line=0, hunks=())) for diff in diffs
        ]
        assert apply_or_code(case.files, again) == apply_or_code(case.files, diffs)
        accepted += 1
    assert accepted > 20


def with_modes(diff):
    """What :func:`emit` writes where a plain diff says nothing of modes."""
    if diff.old_path is None and diff.new_mode is None:
        return replace(diff, new_mode=0o100644)
    if diff.new_path is None and diff.old_mode is None:
        return replace(diff, old_mode=0o100644)
    return diff


def apply_or_code(tree, diffs):
    # Copies depend on the parts of the input, which the emitter does not write.
    diffs = [replace(diff, part=0) for diff in diffs]
    try:
        return outcome(tree, apply_diffs(tree, diffs))
    except DeployError as error:
        return error.code


@pytest.mark.parametrize("seed", range(2))
def test_damaged_diffs_that_git_takes(tmp_path, seed):
    """Where git and we both take a damaged diff, the files are the same."""
    dice = random.Random(1000 + seed)
    both = 0
    for number in range(200):
        case = dice.choice([case for case in APPLIED if case.strip == 1])
        patch = damage(case.patch, dice)
        folder = tmp_path / str(number)
        try:
            ours = outcome(case.files, apply_diffs(case.files, parse(patch, source="x.patch")))
        except DeployError:
            continue
        write_tree(folder, case.files)
        status, _ = git_apply(folder, patch)
        if status == 0 and not any(b"copy from" in line for line in split(patch)):
            assert {path: image.data for path, image in read_tree(folder).items()} == {
                path: image.data for path, image in ours.items()
            }, patch
            both += 1
    assert both > 5


@given(st.binary(max_size=400))
@QUICK
def test_any_bytes(data):
    try:
        assert parse(data, source="x.patch")
    except DeployError as error:
        assert error.code in ("DD104", "DD105")


BEGUN = [b"--- a/f.py", b"+++ b/f.py", b"@@ -1 +1 @@", b"-a", b"+b"]
PARTS = [
    *BEGUN,
    *(b"@@ -1,2 +1,2 @@", b"@@ -5,2 +5,2 @@", b"@@ -0,0 +1 @@", b" c", b"", b"\\ No newline", b"-- ", b"--"),
    *(b"diff --git a/f.py b/f.py", b"new file mode 100644", b"deleted file mode 100644", b"old mode 100644"),
    *(b"new mode 100755", b"rename from f.py\nrename to g.py", b"index 1..2 100644", b"--- /dev/null"),
    *(b"+++ /dev/null", b"GIT binary patch", b"diff -u a/f.py b/f.py"),
]


@given(st.lists(st.sampled_from(PARTS), max_size=12))
@settings(QUICK, max_examples=400)
def test_no_line_of_a_diff_is_lost(lines):
    """After a first hunk nothing that looks like a line of one is skipped: it is in a hunk, or refused."""
    lines = [*BEGUN, *lines]
    try:
        diffs = parse(b"".join(line + b"\n" for line in lines), source="x.patch")
    except DeployError:
        return
    hunks = [hunk for diff in diffs for hunk in diff.hunks]
    for sign in "-+":
        inside = sum(line.kind == sign for hunk in hunks for line in hunk.lines)
        headers = sum(bool(diff.hunks) for diff in diffs)
        assert sum(line.startswith(sign.encode()) for line in lines) == inside + headers
    assert sum(line.startswith(b"@@") for line in lines) == len(hunks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("victim", ["demo/patchset.toml", "over/patchset.toml", "demo/0.5.11/series"])
def test_damaged_sets_are_refused_or_load(tmp_path, victim, seed):
    dice = random.Random(seed)
    folder = changed_copy(tmp_path / "sets")
    good = (folder / victim).read_bytes()
    refused = 0
    for _ in range(70):
        (folder / victim).write_bytes(damage(good, dice))
        try:
            load_sets(folder)
        except DeployError as error:
            assert error.code == "DD108", error.message
            refused += 1
    assert refused > 25


TOML_VALUES = st.recursive(
    st.sampled_from(["1", "true", '"x"', '"0.5.11"', '"sglang/srt"', "1.5", "1979-05-27", '""']),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(lambda items: "[" + ", ".join(items) + "]"),
        st.dictionaries(st.sampled_from(["engines", "added", "before", "x"]), inner, max_size=2).map(
            lambda items: "{" + ", ".join(f"{key} = {value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=4,
)
TOML_KEYS = ["name", "version", "summary", "package", "root", "requires", "family", "hashes", 'family."0.5.11"']


@given(st.dictionaries(st.sampled_from(TOML_KEYS), TOML_VALUES, max_size=9))
@QUICK
def test_any_declaration(values):
    text = "schema = 1\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
    declared, problems = read_declaration(text.encode(), "x.toml")
    assert (declared is None) == bool(problems)
    assert all(problem.text.startswith("x.toml") for problem in problems)
