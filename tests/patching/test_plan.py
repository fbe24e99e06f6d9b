from __future__ import annotations

from dataclasses import replace

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.classify import Recorded, State, classify, touched_paths
from ddtree_deploy.patching.declaration import FileHashes
from ddtree_deploy.patching.images import FileImage, LinkImage, fingerprint, sha256
from ddtree_deploy.patching.patchset import adhoc_set, load_set, load_sets, with_requirements
from ddtree_deploy.patching.plan import plan

from .sets import ENGINES, GOOD, changed_copy, images

F, G, ADDED, OLD_FILE = (f"sglang/srt/{name}.py" for name in ("f", "g", "added", "old"))
SETS = load_sets(GOOD)
DEMO, OVER = with_requirements("over", SETS)
BOTH = (DEMO, OVER)
V = "0.5.11"


def after(planned, tree):
    return {**tree, **{path: change.after for path, change in planned.changes.items()}}


def record(planned, *names):
    """What the host's record says after a plan was carried out."""
    entries = []
    for layer in planned.to_apply:
        if not names or layer.patch_set.name in names:
            files = {path: fingerprint(change.after) for path, change in layer.changes.items()}
            entries.append(Recorded(layer.patch_set.name, layer.patch_set.version, layer.digest, files))
    return entries


def states(sets, engine, tree, recorded=()):
    current = {path: fingerprint(image) for path, image in tree.items()}
    return {item.patch_set.name: item.state for item in classify(sets, engine, current, recorded)}


def refusal(*args):
    with pytest.raises(DeployError) as caught:
        plan(*args)
    return caught.value, "\n".join((caught.value.message, *caught.value.details))


PRISTINE = images(BOTH, V)
PLANNED = plan(BOTH, V, PRISTINE)
DONE = after(PLANNED, PRISTINE)
WITH_DEMO = after(plan([DEMO], V, PRISTINE), PRISTINE)


@pytest.mark.parametrize("engine", ENGINES)
def test_requirements_and_set_in_one_plan(engine):
    tree = images(BOTH, engine)
    planned = plan(BOTH, engine, tree)
    assert [(layer.patch_set.name, layer.status.state) for layer in planned.layers] == [
        ("demo", State.PENDING),
        ("over", State.PENDING),
    ]
    done = after(planned, tree)
    assert done[F].data == tree[F].data.replace(b"l10\n", b"NEW\n").replace(b"l15\n", b"OVER\n")
    assert done[OLD_FILE] is None
    assert done[ADDED].data.endswith(b"VALUE = 2\n")  # added by the one, patched by the other
    demo, over = planned.layers
    assert demo.changes[ADDED].after.data == DEMO.family_for(engine).added[ADDED]
    assert over.changes[ADDED].before == demo.changes[ADDED].after
    assert over.changes[F].before == demo.changes[F].after
    again = plan(BOTH, engine, done)
    assert not again.to_apply
    assert not again.changes
    assert {layer.status.state for layer in again.layers} == {State.APPLIED}


def test_offsets_are_told():
    assert plan(BOTH, "0.5.12", images(BOTH, "0.5.12")).notices == (
        f"{F}: hunk 1 (over/all/0001-f.patch) at line 13 (offset +1)",
    )


def test_only_what_is_missing_is_applied():
    planned = plan(BOTH, V, WITH_DEMO)
    assert [layer.patch_set.name for layer in planned.to_apply] == ["over"]
    assert after(planned, WITH_DEMO) == DONE


def test_drift_lists_every_file():
    tree = {**PRISTINE, F: FileImage(b"x\n"), G: None, ADDED: FileImage(b"y\n")}
    error, text = refusal(BOTH, V, tree)
    assert error.code == "DD101"
    assert f"demo: {F}: expected {sha256(PRISTINE[F].data)[:12]} (pending) or " in text
    assert f"found {sha256(b'x' + bytes([10]))[:12]}" in text
    assert f"demo: {G}: expected " in text
    assert "found no file" in text
    assert f"demo: {ADDED}: expected no file (pending)" in text
    assert "status" in error.hint
    assert states(BOTH, V, tree) == {"demo": State.DRIFT, "over": State.DRIFT}


def test_a_failing_requirement_is_not_hidden_by_the_sets_above():
    tree = {**PRISTINE, G: FileImage(b"x\n")}
    error, _ = refusal(BOTH, V, tree)
    assert error.message.startswith(f"demo: {G}: expected")
    assert not error.details


def test_partly_applied_is_refused_with_both_lists():
    tree = {**PRISTINE, F: WITH_DEMO[F]}
    error, _ = refusal([DEMO], V, tree)
    assert error.code == "DD101"
    assert error.message == f"demo is partly applied: applied in {F}; not in {ADDED}, {G}"
    assert states([DEMO], V, tree) == {"demo": State.PARTLY}


def test_links():
    error, text = refusal([DEMO], V, {**PRISTINE, F: LinkImage("/cache/f.py")})
    assert error.code == "DD509"
    assert f"{F} is a symbolic link to /cache/f.py" in text
    error, text = refusal([DEMO], V, {**PRISTINE, "sglang/srt": LinkImage("/opt/srt")})
    assert error.code == "DD509"
    assert "sglang/srt is a symbolic link to /opt/srt" in text


def test_every_touched_path_must_be_given():
    tree = dict(PRISTINE)
    del tree[G]
    with pytest.raises(KeyError):
        plan([DEMO], V, tree)


# -- sets that build on one another ------------------------------------------------------------------


def test_a_set_below_an_applied_one_is_applied():
    """By the chain when both are known, by the record when only the lower one is asked for."""
    assert states(BOTH, V, DONE) == {"demo": State.APPLIED, "over": State.APPLIED}
    recorded = record(PLANNED)
    assert states([DEMO], V, DONE, recorded) == {"demo": State.APPLIED}
    assert not plan([DEMO], V, DONE, recorded).to_apply


def test_what_another_set_did_is_named():
    foreign = [Recorded("other", "2", "0" * 64, {F: fingerprint(FileImage(b"x\n"))})]
    error, text = refusal([DEMO], V, {**PRISTINE, F: FileImage(b"x\n")}, foreign)
    assert error.code == "DD101"
    assert text.endswith("as the applied set other left it")
    _, text = refusal([DEMO], V, {**PRISTINE, F: FileImage(b"z\n")}, foreign)
    assert "other" not in text


def test_hashes_that_do_not_meet_are_refused_when_planning(tmp_path):
    """A set loaded by itself, whose before is not what its requirement leaves."""
    old = FileHashes(OVER.family_for(V).hashes[V][F].before, None)
    folder = changed_copy(tmp_path / "sets", sub=[("over/patchset.toml", old.before, sha256(PRISTINE[F].data))])
    error, text = refusal([DEMO, load_set(folder / "over")], V, PRISTINE)
    assert f"over on {V}: {F}: before is {sha256(PRISTINE[F].data)[:12]}, but demo leaves" in text
    assert error.code == "DD108"


def test_a_result_that_is_not_the_recorded_one_is_refused(tmp_path):
    right = DEMO.family_for(V).hashes[V][F].after
    folder = changed_copy(tmp_path / "sets", sub=[("demo/patchset.toml", right, "0" * 64)])
    error, _ = refusal([load_set(folder / "demo")], V, PRISTINE)
    assert error.code == "DD108"
    assert error.message == f"demo: {F}: the set says that 000000000000 results, but it is {right[:12]}"


A, B, C = "a" * 64, "b" * 64, "c" * 64


def chained(name, requires, **hashes):
    """A set of which only the hashes matter."""
    diffs = b"".join(b"--- a/%b\n+++ b/%b\n@@ -1 +1 @@\n-x\n+y\n" % ((path.encode(),) * 2) for path in hashes)
    family = adhoc_set("x", [("x.patch", diffs, 1)]).family_for("")
    hashes = {path: FileHashes(*pair) for path, pair in hashes.items()}
    own = replace(family, engines=(V,), hashes={V: hashes}, digest=name)
    return replace(DEMO, name=name, requires=requires, families={"f": own})


def chain_states(sets, current, *recorded):
    return [item.state for item in classify(sets, V, current, [Recorded(name, "1", name, {}) for name in recorded])]


def test_a_set_that_brings_back_an_earlier_content():
    """The same hash stands twice in the chain: the set's other files decide, then the record."""
    sets = [chained("one", (), f=(A, B)), chained("two", ("one",), f=(B, A))]
    assert chain_states(sets, {"f": A}) == [State.PENDING, State.PENDING]
    assert chain_states(sets, {"f": A}, "one", "two") == [State.APPLIED, State.APPLIED]
    assert chain_states(sets, {"f": B}, "one") == [State.APPLIED, State.PENDING]
    sets = [chained("one", (), f=(A, B), g=(None, B)), chained("two", ("one",), f=(B, C), g=(B, None))]
    assert chain_states(sets, {"f": A, "g": None}) == [State.PENDING, State.PENDING]
    assert chain_states(sets, {"f": B, "g": B}) == [State.APPLIED, State.PENDING]
    assert chain_states(sets, {"f": C, "g": None}) == [State.APPLIED, State.APPLIED]


# -- older versions ----------------------------------------------------------------------------------

OLD = FileImage(b"as version 0.9 left it\n")


def older(files):
    return [Recorded("demo", "0.9", "1" * 64, {path: fingerprint(image) for path, image in files.items()})]


def test_superseded():
    tree = {**PRISTINE, F: OLD}
    recorded = older({F: OLD})
    assert states([DEMO], V, tree, recorded) == {"demo": State.SUPERSEDED}
    error, _ = refusal([DEMO], V, tree, recorded)
    assert error.code == "DD101"
    assert f"demo: {F}: the set says that " in error.message
    (status,) = classify([DEMO], V, {path: fingerprint(image) for path, image in tree.items()}, recorded)
    assert {file.path: file.state for file in status.files} == {
        ADDED: State.PENDING,
        F: State.SUPERSEDED,
        G: State.PENDING,
    }


def test_superseded_needs_the_records_hash():
    tree = {**PRISTINE, F: FileImage(b"edited since\n")}
    assert states([DEMO], V, tree, older({F: OLD})) == {"demo": State.DRIFT}


def test_an_older_version_that_was_undone_by_hand_is_pending():
    assert states([DEMO], V, PRISTINE, older({F: OLD})) == {"demo": State.PENDING}


def test_an_older_version_that_touched_other_files():
    more = "sglang/srt/more.py"
    recorded = older({more: OLD})
    assert more in touched_paths([DEMO], recorded)
    assert states([DEMO], V, {**PRISTINE, more: OLD}, recorded) == {"demo": State.SUPERSEDED}
    assert states([DEMO], V, {**PRISTINE, more: None}, recorded) == {"demo": State.PENDING}
    assert states([DEMO], V, {**WITH_DEMO, more: OLD}, recorded) == {"demo": State.SUPERSEDED}


def test_an_older_version_to_the_same_effect_is_applied():
    recorded = older({path: WITH_DEMO[path] for path in (F, G, ADDED)})
    assert states([DEMO], V, WITH_DEMO, recorded) == {"demo": State.APPLIED}


# -- engine versions that no family lists ------------------------------------------------------------


def test_unlisted_version_with_the_same_files():
    tree = images(BOTH, "0.5.12.post1")
    planned = plan(BOTH, "0.5.13", tree)
    assert planned.notices[:1] == ("demo: no family lists 0.5.13, but every file's hash is that of 0.5.12.post1",)
    assert after(planned, tree) == after(plan(BOTH, "0.5.12.post1", tree), tree)
    assert not plan(BOTH, "0.5.13", after(planned, tree)).to_apply
    assert [layer.status.version for layer in planned.layers] == ["0.5.12.post1"] * 2
    # The requirement alone, with the other set on top of it: only the record can tell.
    assert not plan([DEMO], "0.5.13", after(planned, tree), record(planned)).to_apply
    error, _ = refusal([DEMO], "0.5.13", after(planned, tree))
    assert error.code == "DD109"


def test_unlisted_version_with_other_files():
    tree = {**images(BOTH, "0.5.12"), F: FileImage(b"rewritten\n")}
    error, text = refusal(BOTH, "0.5.13", tree)
    assert error.code == "DD109"
    assert f"demo: no family serves 0.5.13, only 0.5.11, 0.5.12, 0.5.12.post1; not as in 0.5.12.post1: {F}" in text
    assert states(BOTH, "0.5.13", tree) == {"demo": State.UNSERVED, "over": State.UNSERVED}


def test_version_listed_by_the_requirement_alone():
    """The set itself borrows the hashes of another version; they must meet those of the requirement."""
    over = replace(OVER, families={"all": replace(OVER.family_for(V), engines=("0.5.12",))})
    error, text = refusal((DEMO, over), "0.5.12.post1", images(BOTH, "0.5.12.post1"))
    assert error.code == "DD101"
    left = DEMO.family_for("0.5.12").hashes["0.5.12.post1"][F].after
    assert text.startswith("over: sglang/srt/f.py: the set says that ")
    assert text.endswith(f"stands before it, but it is {left[:12]}")


# -- ad-hoc sets -------------------------------------------------------------------------------------

PATCH = b"--- a/sglang/srt/g.py\n+++ b/sglang/srt/g.py\n@@ -3,3 +3,3 @@\n g3\n-g4\n+four\n g5\n"
FIX = adhoc_set("fix", [("fix.patch", PATCH, 1)])


def test_adhoc_twice_with_a_record_is_a_no_op():
    planned = plan([FIX], V, PRISTINE)
    done = after(planned, PRISTINE)
    assert done[G].data == PRISTINE[G].data.replace(b"g4\n", b"four\n")
    recorded = record(planned)
    again = plan([FIX], V, done, recorded)
    assert not again.to_apply
    assert again.layers[0].status.state is State.APPLIED
    renamed = adhoc_set("other-name", [("x.patch", PATCH, 1)])
    assert not plan([renamed], V, done, recorded).to_apply
    error, _ = refusal([FIX], V, done)
    assert error.code == "DD102"
    assert "looks already applied" in error.hint


def test_adhoc_changed_since():
    planned = plan([FIX], V, PRISTINE)
    tree = {**PRISTINE, G: FileImage(b"edited\n")}
    error, _ = refusal([FIX], V, tree, record(planned))
    assert (error.code, error.message) == ("DD101", f"fix: {G} changed since the set was applied")


def test_adhoc_of_the_same_name_but_other_content():
    planned = plan([FIX], V, PRISTINE)
    other = adhoc_set("fix", [("fix.patch", PATCH.replace(b"four", b"vier"), 1)])
    assert states([other], V, after(planned, PRISTINE), record(planned)) == {"fix": State.SUPERSEDED}


def test_adhoc_on_top_of_a_set():
    other = adhoc_set("o", [("o.patch", PATCH.replace(b"g4", b"G4"), 1)])
    stacked = plan([other], V, WITH_DEMO)
    done = after(stacked, WITH_DEMO)
    recorded = [*record(plan([DEMO], V, PRISTINE)), *record(stacked)]
    assert states([DEMO, other], V, done, recorded) == {"demo": State.APPLIED, "o": State.APPLIED}


def test_every_broken_file_of_a_series_is_told():
    patches = [
        ("1.patch", PATCH.replace(b"-g4", b"-gg"), 1),
        ("2.patch", b"--- /dev/null\n+++ b/sglang/srt/f.py\n@@ -0,0 +1 @@\n+x\n", 1),
        ("3.patch", PATCH.replace(b"-g4", b"-four"), 1),  # rests on the first: says nothing new
    ]
    error, _ = refusal([adhoc_set("s", patches)], V, PRISTINE)
    assert error.message == "s: 2 problems"
    assert error.details == (
        f"{G}: hunk 1 (1.patch:3) does not match at line 4: expected 'gg', found 'g4'",
        f"{F} exists with other content; 2.patch:1 creates it",
    )


# -- what the whole-file hash allows -----------------------------------------------------------------


def test_hunks_without_context_when_the_hash_is_known():
    bare = b"--- a/sglang/srt/g.py\n+++ b/sglang/srt/g.py\n@@ -4,0 +5 @@\n+inserted\n"
    loose = adhoc_set("bare", [("bare.patch", bare, 1)])
    error, _ = refusal([loose], V, PRISTINE)
    assert "without any context" in error.message
    want = PRISTINE[G].data.replace(b"g4\n", b"g4\ninserted\n")
    hashes = {V: {G: FileHashes(sha256(PRISTINE[G].data), sha256(want))}}
    family = replace(loose.family_for(V), engines=(V,), hashes=hashes)
    known = replace(DEMO, name="bare", families={"f": family})
    assert plan([known], V, PRISTINE).changes[G].after.data == want
