from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ddtree_deploy.authoring.settle import bumped, settle, versioned
from ddtree_deploy.authoring.stack import Pristine, stack_of
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.images import sha256
from ddtree_deploy.patching.patchset import check_chain
from tests.authoring.sets import NEW, F, G, a_patch, a_set, numbered
from tests.authoring.test_refresh import lines_of

ONE, TWO, THREE = "0.5.11", "0.5.12", "0.5.13"
# The second version has a line more at the top, the third another line where the later change is.
PRISTINE = {
    ONE: {F: numbered(20), G: numbered(5, "g")},
    TWO: {F: b"top\n" + numbered(20), G: numbered(5, "g")},
    THREE: {F: lines_of((15, "quinze")), G: numbered(5, "g")},
}
FIVE, AND_FIFTEEN = lines_of((5, "five")), lines_of((5, "five"), (15, "fifteen"))
BASE = PRISTINE[ONE]
SHARED = a_set([BASE, {**BASE, F: FIVE}], engines=(ONE, TWO, THREE), pristine=PRISTINE, added={NEW: b"n\n"})


def pristine_of(engine):
    return Pristine(PRISTINE[engine])


def changed(item, trees, **options):
    """The set with other patches and the hashes that it had."""
    family = item.families["f"]
    patches = tuple(
        a_patch(f"{at:04d}-p.patch", one, two) for at, (one, two) in enumerate(itertools.pairwise(trees), 1)
    )
    return replace(item, families={**item.families, "f": replace(family, patches=patches, **options)})


def refused(code, *arguments, **options):
    with pytest.raises(DeployError) as caught:
        settle(*arguments, pristine_of, **options)
    assert caught.value.code == code
    return "\n".join((caught.value.message, *caught.value.details, caught.value.hint or ""))


def sound(item, below=()):
    for engine in item.engines:
        stack_of([*below, item], engine, PRISTINE[engine])
        assert not check_chain([*below, item], engine)


def test_every_version_of_the_family_gets_its_hashes():
    new = changed(SHARED, [BASE, {**BASE, F: FIVE.replace(b"five", b"FIVE")}])
    settled = settle(new, ["f"], {"demo": SHARED}, pristine_of)
    (item,) = settled.sets
    hashes = item.families["f"].hashes
    assert {engine: hashes[engine][F].before for engine in hashes} == {
        engine: sha256(tree[F]) for engine, tree in PRISTINE.items()
    }
    assert len({hashes[engine][F].after for engine in hashes}) == 3
    sound(item)
    assert settle(SHARED, ["f"], {"demo": SHARED}, pristine_of).sets == (SHARED,)


def test_a_version_that_does_not_take_it():
    new = changed(SHARED, [BASE, {**BASE, F: AND_FIFTEEN}])
    said = refused("DD102", new, ["f"], {"demo": SHARED})
    assert "do not apply to 0.5.13 (family f)" in said
    assert "0.5.13: sglang/srt/f.py: hunk 2" in said
    assert "--split NAME" in said
    settled = settle(new, ["f"], {"demo": SHARED}, pristine_of, split="g")
    (item,) = settled.sets
    assert {name: family.engines for name, family in item.families.items()} == {"f": (THREE,), "g": (ONE, TWO)}
    assert item.families["f"].patches == SHARED.families["f"].patches
    assert item.families["f"].hashes == {THREE: SHARED.families["f"].hashes[THREE]}
    sound(item)
    assert "0.5.13 keep(s) the patches of the family f" in settled.notices[0]
    with_new = changed(SHARED, [BASE, {**BASE, F: AND_FIFTEEN}], added={NEW: b"N\n"})
    (item,) = settle(with_new, ["f"], {"demo": SHARED}, pristine_of, split="g").sets
    assert item.families["f"].added == item.families["g"].added == {NEW: b"N\n"}
    sound(item)
    assert "has a family f" in refused("DD001", new, ["f"], {"demo": SHARED}, split="f")
    fine = changed(SHARED, [BASE, {**BASE, F: FIVE.replace(b"five", b"FIVE")}])
    assert "apply to every version" in refused("DD001", fine, ["f"], {"demo": SHARED}, split="g")
    nowhere = changed(SHARED, [{F: b"x\n"}, {F: b"y\n"}])
    assert "0.5.11, 0.5.12, 0.5.13" in refused("DD102", nowhere, ["f"], {"demo": SHARED}, split="g")


def test_an_added_file_that_an_engine_has():
    there = {**PRISTINE, TWO: {**PRISTINE[TWO], NEW: b"upstream\n"}}
    with pytest.raises(DeployError) as caught:
        settle(SHARED, ["f"], {"demo": SHARED}, lambda engine: Pristine(there[engine]))
    assert caught.value.code == "DD106"
    assert f"0.5.12: demo adds {NEW}, which is there before it" in caught.value.details


def test_new_is_shared_by_families():
    other = replace(SHARED.families["f"], name="g", engines=(THREE,))
    other = replace(other, hashes={THREE: SHARED.families["f"].hashes[THREE]})
    first = SHARED.families["f"]
    first = replace(first, engines=(ONE, TWO), hashes={engine: first.hashes[engine] for engine in (ONE, TWO)})
    both = replace(SHARED, families={"f": first, "g": other})
    new = replace(both, families={"f": replace(first, added={NEW: b"N\n"}), "g": other})
    settled = settle(new, ["f"], {"demo": both}, pristine_of)
    (item,) = settled.sets
    assert item.families["g"].added == {NEW: b"N\n"}
    assert item.families["g"].hashes[THREE][NEW].after == sha256(b"N\n")
    sound(item)
    assert f"the family g takes {NEW} too" in settled.notices[0]
    gone = replace(both, families={"f": replace(first, added={}), "g": other})
    (item,) = settle(gone, ["f"], {"demo": both}, pristine_of).sets
    assert item.families["g"] == other
    sound(item)


def test_a_note_about_a_patch_that_is_gone():
    first = SHARED.families["f"]
    other = replace(
        first, name="g", engines=(THREE,), hashes={THREE: first.hashes[THREE]}, left_out={"0002-p.patch": "x"}
    )
    first = replace(first, engines=(ONE,), hashes={ONE: first.hashes[ONE]})
    both = replace(SHARED, families={"f": first, "g": other})
    settled = settle(both, ["f"], {"demo": both}, pristine_of)
    assert settled.sets[0].families["g"].left_out == {}
    assert settled.notices == ("the family g no longer says why it does without 0002-p.patch",)
    known = replace(other, left_out={"0001-p.patch": "x"}, patches=())
    both = replace(both, families={"f": first, "g": known})
    assert settle(both, ["f"], {"demo": both}, pristine_of).sets == (both,)


# -- dependents --------------------------------------------------------------------------------------

DEMO = a_set([BASE, {**BASE, F: FIVE}])
OVER = a_set([{**BASE, F: FIVE}, {**BASE, F: FIVE.replace(b"\n10\n", b"\nten\n")}], name="over", requires=("demo",))
TOP = a_set(
    [{**BASE, F: FIVE.replace(b"\n10\n", b"\nten\n")}, {**BASE, F: FIVE.replace(b"\n10\n", b"\nten\nX\n")}],
    name="top",
    requires=("over",),
)
ASIDE = a_set([BASE, {**BASE, G: b"g\n"}], name="aside", requires=("demo",))
KNOWN = {"aside": ASIDE, "demo": DEMO, "over": OVER, "top": TOP}


def test_sets_that_require_it():
    new = changed(DEMO, [BASE, {**BASE, F: FIVE.replace(b"five\n", b"five\nand a half\n")}])
    said = refused("DD117", new, ["f"], KNOWN)
    assert "over on 0.5.11 builds on files that demo now leaves otherwise" in said
    assert "--with-dependents" in said
    settled = settle(new, ["f"], KNOWN, pristine_of, with_dependents=True)
    demo, over, top = settled.sets
    assert [item.name for item in settled.sets] == ["demo", "over", "top"]
    sound(demo)
    sound(over, [demo])
    sound(top, [demo, over])
    # Their hunks state the lines at which they now stand.
    assert b"@@ -8,7 +8,7 @@" in over.families["f"].patches[0].data
    assert settled.notices == ("over: hashes made anew on 0.5.11", "top: hashes made anew on 0.5.11")


def test_a_dependent_that_no_longer_applies():
    new = changed(DEMO, [BASE, {**BASE, F: FIVE.replace(b"\n10\n", b"\nzehn\n")}])
    said = refused("DD117", new, ["f"], KNOWN, with_dependents=True)
    assert "over no longer applies to 0.5.11" in said
    assert f"0.5.11: {F}: hunk 1" in said


def test_a_change_that_no_dependent_sees():
    new = changed(DEMO, [BASE, {**BASE, F: FIVE, G: numbered(6, "g")}])
    without = {name: item for name, item in KNOWN.items() if name != "aside"}
    assert [item.name for item in settle(new, ["f"], without, pristine_of).sets] == ["demo"]
    assert "aside on 0.5.11" in refused("DD117", new, ["f"], KNOWN)
    untouched = changed(DEMO, [BASE, {**BASE, G: numbered(6, "g")}])
    assert f"0.5.11: {F}: before was" in refused("DD117", untouched, ["f"], without)


# -- versions ----------------------------------------------------------------------------------------


def test_versions():
    assert [bumped("1.2.3", part) for part in ("patch", "minor", "major")] == ["1.2.4", "1.3.0", "2.0.0"]
    for version in ("1.2", "1.2.3rc1", "x", "1.2.3.4"):
        with pytest.raises(DeployError) as caught:
            bumped(version, "patch")
        assert caught.value.code == "DD001"
    new = changed(DEMO, [BASE, {**BASE, F: FIVE.replace(b"five\n", b"five\nand a half\n")}])
    settled = settle(new, ["f"], KNOWN, pristine_of, with_dependents=True)

    def after(part, exact):
        done = versioned(settled, KNOWN, part, exact)
        return [item.version for item in done.sets], [line for line in done.notices if "did not" in line]

    assert after("minor", None) == (["1.1.0", "1.0.1", "1.0.1"], [])
    assert after(None, "7") == (["7", "1.0.1", "1.0.1"], [])
    versions, notices = after(None, None)
    assert versions == ["1.0.0"] * 3
    assert notices == [
        f"{n}: the content changed and the version did not: still 1.0.0" for n in ("demo", "over", "top")
    ]
    same = settle(DEMO, ["f"], KNOWN, pristine_of)
    assert versioned(same, KNOWN, None, None).notices == ()
