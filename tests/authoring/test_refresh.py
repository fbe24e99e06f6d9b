from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree_deploy.authoring.refresh import Wishes, _named, refresh
from ddtree_deploy.authoring.series import Series
from ddtree_deploy.authoring.stack import stack_of
from ddtree_deploy.errors import DeployError
from tests.authoring.sets import ENGINE, NEW, F, G, H, a_set, numbered, series, text
from tests.patching.difftools import contents, edits
from tests.patching.test_properties import QUICK

SLOW = settings(QUICK, max_examples=30)


def lines_of(*pairs, count=20):
    """Numbered lines with some replaced: (line number, text or None to delete it)."""
    lines = [str(number) for number in range(1, count + 1)]
    for number, new in pairs:
        lines[number - 1] = new
    return text(*(line for line in lines if line is not None))


def stack_for(trees, **options):
    return stack_of([a_set(trees, **options)], ENGINE, trees[0])


NONE = Wishes()


def refused(code, stack, edited, wishes=NONE):
    with pytest.raises(DeployError) as caught:
        refresh(stack, edited, wishes)
    assert caught.value.code == code
    assert all(line.isprintable() for line in (caught.value.message, *caught.value.details))
    return "\n".join((caught.value.message, *caught.value.details))


def data(family):
    return {patch.name: patch.data for patch in family.patches}


# Patch 1 changes line 5, patch 2 lines 10 and 15 and makes H, patch 3 deletes line 18.
BASE = {F: numbered(20), G: numbered(6, "g")}
ONE = {**BASE, F: lines_of((5, "five"))}
TWO = {**BASE, F: lines_of((5, "five"), (10, "ten"), (15, "fif\nteen")), H: text("h", "i")}
THREE = {**TWO, F: lines_of((5, "five"), (10, "ten"), (15, "fif\nteen"), (18, None))}
STACK = stack_for([BASE, ONE, TWO, THREE])
NAMES = ["0001-p.patch", "0002-p.patch", "0003-p.patch"]


def edited(old, new):
    assert THREE[F].count(old) == 1
    return {F: THREE[F].replace(old, new)}


@pytest.mark.parametrize(
    ("change", "owner"),
    [
        (edited(b"\nfive\n", b"\nFIVE\n"), 1),
        (edited(b"\nfive\n", b"\n5\n"), 1),  # back to what it was: nothing is left of patch 1
        (edited(b"\nfive\n", b"\nfive\nmore\n"), 1),
        (edited(b"\nfive\n", b"\nbefore\nfive\n"), 1),
        (edited(b"\nfive\n", b"\n"), 1),
        (edited(b"\nten\n", b"\nTEN\n"), 2),
        (edited(b"\nfif\nteen\n", b"\nfif\nbetween\nteen\n"), 2),
        (edited(b"\n17\n19\n", b"\n17\n18\n19\n"), 3),  # where it deleted
        (edited(b"\n17\n19\n", b"\n17\neighteen\n19\n"), 3),
        ({H: text("h", "i", "j")}, 2),
        ({H: text("x")}, 2),
        ({H: None}, 2),
        ({H: b""}, 2),
    ],
)
def test_an_edit_goes_to_the_patch_that_owns_the_lines(change, owner):
    done = refresh(STACK, change, Wishes())
    before, after = data(STACK.family), data(done.family)
    for level, name in enumerate(NAMES, 1):
        if level < owner:
            assert after[name] == before[name]
    changed = [name for name in NAMES if after.get(name) != before[name]]
    assert NAMES[owner - 1] in changed
    assert any(line.startswith(NAMES[owner - 1]) for line in done.lines)
    again = stack_of([with_family(done.family)], ENGINE, BASE, trust_hashes=False)
    for path in (F, G, H):
        assert again.final(path) == change.get(path, THREE.get(path))
    # Nothing but the edit was done to the other patches: each still changes its own lines.
    for patch in done.family.patches:
        if patch.name != NAMES[owner - 1]:
            mine = [line for line in patch.data.splitlines() if line.startswith((b"+", b"-")) and line[1:3] != b"++"]
            theirs = [
                line for line in before[patch.name].splitlines() if line[:1] in (b"+", b"-") and line[1:3] != b"++"
            ]
            assert mine == theirs


def with_family(family):
    (item,) = STACK.sets
    return replace(item, families={family.name: family})


def test_two_owners_in_one_file_at_once():
    change = {F: THREE[F].replace(b"\nfive\n", b"\nFIVE\n").replace(b"\nten\n", b"\nTEN\n")}
    done = refresh(STACK, change, Wishes())
    assert done.lines == (f"{NAMES[0]}: {F}:5 (1 line(s) changed)", f"{NAMES[1]}: {F}:10 (1 line(s) changed)")
    assert b"+FIVE" in data(done.family)[NAMES[0]]
    assert b"+TEN" in data(done.family)[NAMES[1]]
    assert b"FIVE" not in data(done.family)[NAMES[2]]


def test_lines_are_those_that_the_author_sees():
    change = {
        F: THREE[F]
        .replace(b"\nfive\n", b"\nfive\nand\nmore\n")
        .replace(b"\nten\n", b"\nTEN\n")
        .replace(b"\n19\n", b"\n")
    }
    said = refused("DD116", STACK, change)
    assert said.splitlines()[1:] == [
        f"{F}:21 (1 line(s) deleted): not lines of one patch alone; 0003-p.patch is beside them"
    ]
    done = refresh(STACK, change, Wishes(into="3"))
    assert done.lines[:2] == (
        f"{NAMES[0]}: {F}:6-7 (2 line(s) inserted)",
        f"{NAMES[1]}: {F}:12 (1 line(s) changed)",
    )
    assert done.lines[2].endswith("(1 line(s) deleted)")


def test_an_earlier_patch_moves_the_lines_of_later_ones():
    done = refresh(STACK, edited(b"\nfive\n", b"\nfive\nand\nmore\n"), Wishes())
    assert b"@@ -14,5 +14,4 @@" in data(STACK.family)[NAMES[2]] or b"@@ -16,6 +16,5 @@" in data(STACK.family)[NAMES[2]]
    assert data(done.family)[NAMES[2]] != data(STACK.family)[NAMES[2]]
    again = stack_of([with_family(done.family)], ENGINE, BASE, trust_hashes=False)
    assert not Series(again)._moved


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edited(b"\n2\n", b"\ntwo\n"), "F:2 (1 line(s) changed): no patch touches these lines"),
        ({G: None}, "G (deleted): no patch touches these lines"),
        ({G: numbered(7, "g")}, "G:7 (1 line(s) inserted): no patch touches these lines"),
        (edited(b"\n4\nfive\n", b"\nx\n"), "F:4 (2 line(s) changed): not lines of one patch alone; 0001-p.patch"),
        (edited(b"\n6\n", b"\nsix\n"), "F:6 (1 line(s) changed): not lines of one patch alone; 0001-p.patch"),
    ],
)
def test_an_edit_of_nobodys_lines(change, says):
    said = refused("DD116", STACK, change)
    says = says.replace("F:", f"{F}:").replace("G ", f"{G} ").replace("G:", f"{G}:")
    assert says in said
    assert "1 of 1 edit(s)" in said
    for level in (1, 2, 3):
        done = refresh(STACK, change, Wishes(into=str(level)))
        again = stack_of([with_family(done.family)], ENGINE, BASE, trust_hashes=False)
        for path, want in change.items():
            assert again.final(path) == want
        if level > 1:
            assert data(done.family)[NAMES[0]] == data(STACK.family)[NAMES[0]] or G not in change


def test_lines_of_two_patches():
    trees = [{F: numbered(9)}, {F: numbered(9).replace(b"4\n", b"four\n")}]
    trees.append({F: trees[1][F].replace(b"5\n", b"five\n")})
    stack = stack_for(trees)
    change = {F: trees[2][F].replace(b"four\nfive\n", b"4 and 5\n")}
    assert "could be of 0001-p.patch or 0002-p.patch" in refused("DD116", stack, change)
    assert f"later {NAMES[1]} changes these lines" in refused("DD116", stack, change, Wishes(into="1"))
    done = refresh(stack, change, Wishes(into="2"))
    assert data(done.family)[NAMES[0]] == stack.family.patches[0].data
    between = {F: trees[2][F].replace(b"four\nfive\n", b"four\nbetween\nfive\n")}
    assert "could be of 0001-p.patch or 0002-p.patch" in refused("DD116", stack, between)
    assert refresh(stack, between, Wishes(into="1")).lines == (f"{NAMES[0]}: {F}:5 (1 line(s) inserted)",)


def test_a_new_patch():
    change = {**edited(b"\n2\n", b"\ntwo\n"), G: None}
    done = refresh(STACK, change, Wishes(new="topic", message="Why this is.\n\nAnd more.\n"))
    *old, new = done.family.patches
    assert [patch.data for patch in old] == [patch.data for patch in STACK.family.patches]
    assert new.name == "0004-topic.patch"
    assert new.data.startswith(b"Why this is.\n\nAnd more.\n\n--- a/sglang/srt/f.py\n")
    assert b"--- a/sglang/srt/g.py\n+++ /dev/null\n" in new.data
    with_number = refresh(STACK, change, Wishes(new="9-x.diff")).family.patches[-1].name
    assert with_number == "9-x.diff"
    both = {F: change[F].replace(b"\nfive\n", b"\nFIVE\n")}
    done = refresh(STACK, both, Wishes(new="topic"))
    assert b"+FIVE" in data(done.family)[NAMES[0]]
    done = refresh(STACK, both, Wishes(new="topic", everything=True))
    assert data(done.family)[NAMES[0]] == data(STACK.family)[NAMES[0]]
    assert b"+FIVE" in done.family.patches[-1].data


def test_wishes_that_make_no_sense():
    change = edited(b"\n2\n", b"\ntwo\n")
    for wishes, says in (
        (Wishes(into="1", new="x"), "exclude one another"),
        (Wishes(message="x"), "--message is the text of a new patch"),
        (Wishes(into="4"), "--into 4 is no patch"),
        (Wishes(into="0"), "--into 0 is no patch"),
        (Wishes(into="000"), "--into 000 is no patch"),
        (Wishes(into="zzz"), "--into zzz is no patch"),
        (Wishes(into="0"), "no patch"),
        (Wishes(new="a b"), "a b.patch is not of letters"),
        (Wishes(new="../x"), "is not of letters"),
        (Wishes(new="0001-p"), "0001-p.patch is there already"),
    ):
        assert says in refused("DD001", STACK, change, wishes)
    owned = edited(b"\nten\n", b"\nTEN\n")
    assert "every edit belongs to a patch already" in refused("DD001", STACK, owned, Wishes(new="x"))
    assert "no patch is concerned" in refused("DD001", STACK, {}, Wishes(new="x"))


def test_patches_are_named_in_many_ways():
    with pytest.raises(DeployError, match="--into fix names several patches"):
        _named("fix", ["fix-a.patch", "fix-b.patch"])
    change = edited(b"\n2\n", b"\ntwo\n")
    one = refresh(STACK, change, Wishes(into="2"))
    for name in ("0002-p.patch", "0002-p", "0002", "0002-"):
        assert refresh(STACK, change, Wishes(into=name)) == one


def test_no_edit_changes_no_byte():
    done = refresh(STACK, {}, Wishes())
    assert done.family == STACK.family
    assert done.lines == ()


def test_a_patch_with_nothing_left_goes():
    done = refresh(STACK, {F: THREE[F].replace(b"\nfive\n", b"\n5\n")}, Wishes())
    assert [patch.name for patch in done.family.patches] == NAMES[1:]
    assert f"{NAMES[0]}: nothing is left of it, it is out of the series" in done.lines


# -- added files -------------------------------------------------------------------------------------


def test_added_files():
    stack = stack_for([BASE, ONE], added={NEW: b"n\n"})
    done = refresh(stack, {NEW: b"N\n", H: b"h\n"}, Wishes())
    assert done.family.added == {NEW: b"N\n", H: b"h\n"}
    assert done.lines == (f"new/{H}: added", f"new/{NEW}: changed")
    assert done.family.patches == stack.family.patches
    gone = refresh(stack, {NEW: None}, Wishes())
    assert (gone.family.added, gone.lines) == ({}, (f"new/{NEW}: deleted",))
    renamed = {G: None, "sglang/srt/g2.py": BASE[G]}
    assert "G (deleted)".replace("G", G) in refused("DD116", stack, renamed)
    done = refresh(stack, renamed, Wishes(new="move"))
    assert done.family.added["sglang/srt/g2.py"] == BASE[G]


def test_what_a_set_cannot_hold():
    crlf = THREE[F].replace(b"\n", b"\r\n")
    removed = stack_for([BASE, {F: BASE[F]}])
    for stack, change, says in (
        (STACK, {"sglang/lang/x.py": b"x\n"}, "it is outside sglang/srt/"),
        (STACK, {"sglang/srt/x.so": b"x\n"}, "files of the kind .so"),
        (STACK, {"sglang/srt/a b.py": b"x\n"}, "names in a set are of letters"),
        (STACK, {"sglang/srt/\x1b[1m.py": b"x\n"}, "it has a control character"),
        (STACK, {F: b"a\0b\n"}, "it holds a NUL byte"),
        (STACK, {NEW: b"a\0b\n"}, "it holds a NUL byte"),
        (STACK, {F: crlf}, "its line ends became CRLF"),
        (STACK, {F: THREE[F] + b"<<<<<<< ours\n"}, f"{F}:21: a conflict marker"),
        (STACK, {NEW: b">>>>>>> theirs\n"}, f"{NEW}:1: a conflict marker"),
        (removed, {G: b"back\n"}, "0001-p.patch takes it away"),
    ):
        assert says in refused("DD118", stack, change)
    many = refused("DD118", STACK, {F: b"\0", "sglang/srt/x.so": b"x", G: b"<<<<<<< \n"})
    assert "3 problems" in many
    windows = stack_for([{F: crlf}, {F: crlf + b"x\r\n"}])
    assert "its line ends became LF" in refused("DD118", windows, {F: (crlf + b"x\r\n").replace(b"\r\n", b"\n")})
    assert refresh(windows, {F: crlf + b"y\r\n"}, Wishes()).family.patches[0].data.endswith(b"+y\r\n")


def test_files_without_a_last_newline():
    trees = [{F: b"a\nb"}, {F: b"a\nb\nc"}]
    stack = stack_for(trees)
    done = refresh(stack, {F: b"a\nb\nc\n"}, Wishes())
    assert len(done.family.patches) == 1
    trees.append({F: b"a\nb\nc\nd"})
    stack = stack_for(trees)
    assert refresh(stack, {F: b"a\nb\nc\nd\ne"}, Wishes()).lines[0].startswith(NAMES[1])
    # Line b has no newline at first: what follows it cannot have been there then.
    trees = [{F: b"a\nb"}, {F: b"a\nb", G: b""}, {F: b"a\nb\nc\n", G: b""}]
    stack = stack_for(trees)
    said = refused("DD116", stack, {F: b"a\nb\nx\nc\n"}, Wishes(into="1", everything=True))
    assert f"{F}: after 0001-p.patch a line without a newline would not be the last one" in said


# -- texts -------------------------------------------------------------------------------------------

HEAD = "Subject: [PATCH] x\n\nWhy.\n---\n f.py | 2 +-"


def test_the_authors_text_stays():
    item = a_set([BASE, ONE, TWO], heads=[HEAD, HEAD])
    family = item.families["f"]
    first = replace(family.patches[0], data=family.patches[0].data + b"-- \n2.39.5\n\n")
    item = replace(item, families={"f": replace(family, patches=(first, family.patches[1]))})
    stack = stack_of([item], ENGINE, BASE, trust_hashes=False)
    done = refresh(stack, {F: TWO[F].replace(b"\nfive\n", b"\nFIVE\n"), G: None}, Wishes(into="1"))
    text_now = done.family.patches[0].data
    assert text_now.startswith(HEAD.encode() + b"\n\n--- a/sglang/srt/f.py")
    assert text_now.endswith(b"+++ /dev/null\n@@ -1,6 +0,0 @@\n-g1\n-g2\n-g3\n-g4\n-g5\n-g6\n-- \n2.39.5\n\n")
    assert done.family.patches[1].data.startswith(HEAD.encode() + b"\n\n--- ")


def test_other_tools_headers_go_with_their_diff():
    svn = b"Index: sglang/srt/f.py\n" + b"=" * 67 + b"\n"
    item = a_set([BASE, {**ONE, G: b"g\n"}])
    family = item.families["f"]
    (patch,) = family.patches
    whole = patch.data.replace(b"--- a/sglang/srt/g.py", svn.replace(b"f.py", b"g.py") + b"--- a/sglang/srt/g.py")
    whole = whole.replace(b"--- a/sglang/srt/f.py", svn + b"--- a/sglang/srt/f.py")
    from ddtree_deploy.patching.diff import parse

    patch = replace(patch, data=whole, diffs=parse(whole, source="x"))
    item = replace(item, families={"f": replace(family, patches=(patch,))})
    stack = stack_of([item], ENGINE, BASE, trust_hashes=False)
    done = refresh(stack, {F: BASE[F]}, Wishes())
    assert done.family.patches[0].data.count(b"Index: ") == 1
    assert b"f.py" not in done.family.patches[0].data


# -- renames -----------------------------------------------------------------------------------------


def test_a_renamed_file_keeps_its_rename():
    data_ = (
        b"diff --git a/sglang/srt/g.py b/sglang/srt/h.py\nrename from sglang/srt/g.py\nrename to sglang/srt/h.py\n"
        b"--- a/sglang/srt/g.py\n+++ b/sglang/srt/h.py\n@@ -1,4 +1,4 @@\n-g1\n+one\n g2\n g3\n g4\n"
    )
    from ddtree_deploy.patching.diff import parse
    from ddtree_deploy.patching.patchset import Patch

    item = a_set([BASE, ONE])
    family = item.families["f"]
    patch = Patch("0002-p.patch", data_, parse(data_, source="x"))
    item = replace(item, families={"f": replace(family, patches=(*family.patches, patch))})
    stack = stack_of([item], ENGINE, BASE, trust_hashes=False)
    now = stack.final(H)
    assert stack.final(G) is None
    done = refresh(stack, {H: now.replace(b"one\n", b"ONE\n")}, Wishes())
    assert done.family.patches[1].data == data_.replace(b"+one", b"+ONE").replace(b"-1,4 +1,4", b"-1,4 +1,4")
    done = refresh(stack, {H: BASE[G]}, Wishes())
    assert b"rename to" in done.family.patches[1].data
    assert b"@@" not in done.family.patches[1].data
    assert "takes it away" in refused("DD118", stack, {G: b"x\n"})
    deep = refresh(stack, {H: now + b"g7\n"}, Wishes(into="1"))
    assert b"+g7" in deep.family.patches[0].data
    assert b"g7" not in deep.family.patches[1].data


# -- properties --------------------------------------------------------------------------------------


@st.composite
def edited_series(draw):
    trees = draw(series().filter(lambda trees: len(trees) > 1))
    last = trees[-1]
    paths = draw(st.lists(st.sampled_from([F, G, H, NEW]), min_size=1, max_size=3, unique=True))
    change = {}
    for path in paths:
        if path not in last:
            change[path] = draw(contents(5))
        elif draw(st.integers(0, 7)) == 0:
            change[path] = None
        else:
            change[path] = draw(edits(last[path]))
    return trees, {path: data for path, data in change.items() if data != last.get(path)}


def try_refresh(stack, change, wishes):
    try:
        return refresh(stack, change, wishes)
    except DeployError as error:
        assert error.code in ("DD001", "DD116", "DD118")
        if error.code == "DD118":
            said = "\n".join((error.message, *error.details))
            assert "NUL" in said or "line ends" in said or "takes it away" in said
        return None


@given(edited_series(), st.sampled_from(["owners", "into", "new", "all"]), st.integers(1, 4))
@example(([{F: b"", G: b""}, {G: b""}], {G: None}), "into", 1)  # a patch takes up the edit of a file it did not touch
@SLOW
def test_any_edit_is_given_back_exactly_or_refused(case, how, number):
    trees, change = case
    stack = stack_for(trees)
    wishes = {
        "owners": Wishes(),
        "into": Wishes(into=str(min(number, len(trees) - 1))),
        "new": Wishes(new="x"),
        "all": Wishes(new="x", everything=True),
    }[how]
    done = try_refresh(stack, change, wishes)
    if done is None:
        return
    item = replace(stack.sets[0], families={"f": done.family})
    again = stack_of([item], ENGINE, trees[0], trust_hashes=False)
    for path in (F, G, H, NEW):
        assert again.final(path) == (change[path] if path in change else trees[-1].get(path))
    before, after = data(stack.family), data(done.family)
    levels = {before_name: level for level, before_name in enumerate(before, 1)}
    named = [levels[line.split(": ")[0]] for line in done.lines if line.split(": ")[0] in levels]
    # What is before every edit, and what touches none of the edited files, is byte for byte as it was.
    for patch in stack.family.patches:
        paths = {path for diff in patch.diffs for path in diff.paths}
        elsewhere = levels[patch.name] not in named and not paths & set(change)
        if levels[patch.name] < min(named, default=99) or elsewhere:
            assert after[patch.name] == before[patch.name]
    if how == "all":
        assert {name: after[name] for name in before} == before


@given(series())
@SLOW
def test_a_refresh_without_edits_is_nothing(trees):
    stack = stack_for(trees)
    assert refresh(stack, {}, Wishes()).family == stack.family
