"""What upstream did to the files and functions of a set: small trees, and the published engines."""

from __future__ import annotations

import pytest

from ddtree_deploy.authoring.impact import impact_of
from ddtree_deploy.authoring.upstream import Fate, change_of, similarity
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.patchset import load_closure
from ddtree_deploy.resources import patches_dir
from tests.authoring.sets import ENGINE, NEW, F, G, a_set

ROOTS = ("sglang/srt",)
BODY = b"import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n\n\ndef h():\n    return 3\n"
PATCHED = BODY.replace(b"return 1", b"return 10")


def test_what_became_of_a_file():
    old = {F: BODY, G: b"x = 1\n"}
    assert change_of(F, old, old, ROOTS).fate is Fate.SAME
    assert change_of(F, old, {**old, F: BODY + b"# more\n"}, ROOTS).fate is Fate.CHANGED
    assert change_of(NEW, old, old, ROOTS).fate is Fate.ABSENT
    assert change_of(NEW, old, {**old, NEW: b""}, ROOTS).fate is Fate.APPEARED
    gone = change_of(F, old, {G: b""}, ROOTS)
    assert (gone.fate, gone.now, gone.candidates) == (Fate.GONE, None, ())
    assert {item.name for item in gone.functions.removed} == {"<module>", "f", "g", "h"}


def test_a_moved_file_is_followed_when_it_is_the_only_similar_one():
    moved, other = "sglang/kernels/f.py", "sglang/srt/deep/f.py"
    old = {F: BODY}
    found = change_of(F, old, {moved: PATCHED, other: b"def z(): pass\n"}, ROOTS)
    assert (found.fate, found.now) == (Fate.MOVED, moved)
    assert [before.name for before, _ in found.functions.changed] == ["f"]
    two = change_of(F, old, {moved: PATCHED, other: BODY}, ROOTS)
    assert (two.fate, two.candidates) == (Fate.GONE, (other, moved))
    unlike = change_of(F, old, {moved: b"def z(): pass\n"}, ROOTS)
    assert (unlike.fate, unlike.candidates) == (Fate.GONE, (moved,))
    # One that was there before is another file; so is one of another package.
    assert change_of(F, {F: BODY, moved: BODY}, {moved: BODY}, ROOTS).fate is Fate.GONE
    assert change_of(F, old, {"other/f.py": BODY}, ROOTS).candidates == ()


def test_similarity_is_of_the_lines_that_say_something():
    assert similarity(BODY, BODY.replace(b"    ", b"\t").replace(b"\n\n", b"\n")) == 1
    assert similarity(BODY, b"}\n{\n\n") == 0
    assert similarity(b"", b"") == 1
    assert similarity(b"a\nb\n", b"a\nc\n") == 0.5


def test_functions_that_both_changed_are_named_with_their_patches():
    patched = PATCHED.replace(b"return 2", b"return 20") + b"\n\ndef mine():\n    pass\n"
    item = a_set([{F: BODY}, {F: PATCHED}, {F: patched}])
    later = BODY.replace(b"return 2", b"return 22").replace(b"return 3", b"return 33")
    (file,) = impact_of([item], ENGINE, {F: BODY}, {F: later}).files
    assert [(one.name, one.how, one.patches) for one in file.touched] == [("g", "changed", ("0002-p.patch",))]
    assert (file.others, file.clean) == (1, False)
    both = later + b"\n\ndef mine():\n    return 'theirs'\n"
    (file,) = impact_of([item], ENGINE, {F: BODY}, {F: both}).files
    assert [(one.name, one.how) for one in file.touched] == [("g", "changed"), ("mine", "added")]
    assert impact_of([item], ENGINE, {F: BODY}, {F: BODY, G: b""}).clean


def test_where_a_removed_function_went():
    item = a_set([{F: BODY}, {F: PATCHED}])
    later = {
        F: BODY.replace(b"def f():\n    return 1\n\n\n", b""),
        G: b"async  def f(x):\n    pass\n\ndef ff(): pass\n",
    }
    (file,) = impact_of([item], ENGINE, {F: BODY}, later).files
    assert [(one.name, one.how, one.now) for one in file.touched] == [("f", "removed", (G,))]
    crowd = {**later, **{f"sglang/srt/{number}.py": b"def f(): pass\n" for number in range(3)}}
    (file,) = impact_of([item], ENGINE, {F: BODY}, crowd).files
    assert file.touched[0].now == ()


def test_added_files_that_upstream_now_has():
    item = a_set([{F: BODY}, {F: PATCHED}], added={NEW: b"mine\n"})
    found = impact_of([item], ENGINE, {F: BODY}, {F: BODY, NEW: b"theirs\n"})
    assert [(file.change.path, file.change.fate) for file in found.files if not file.clean] == [(NEW, Fate.APPEARED)]


def test_a_set_that_does_not_serve_the_version():
    with pytest.raises(DeployError) as caught:
        impact_of([a_set([{F: BODY}, {F: PATCHED}])], "0.0.0", {F: BODY}, {F: BODY})
    assert caught.value.code == "DD109"


# -- the published engines ----------------------------------------------------------------------------


@pytest.mark.wheel
def test_the_shipped_sets_between_published_engines(engine_tree):
    fixes, ddtree = (load_closure(name, patches_dir()) for name in ("dflash-fixes", "ddtree"))

    def files(closure, engine, later):
        found = impact_of(closure, engine, engine_tree(engine), engine_tree(later))
        return {file.change.path.rpartition("/")[2]: file for file in found.files}

    assert all(file.clean for file in files(fixes, "0.5.12", "0.5.12.post1").values())
    assert all(file.clean for file in files(fixes, "0.5.13", "0.5.13.post1").values())
    found = files(ddtree, "0.5.11", "0.5.13")
    assert {name for name, file in found.items() if file.change.fate is Fate.GONE} == {"scheduler_metrics_mixin.py"}
    checks = next(one for one in found["scheduler.py"].touched if one.name == "validate_dflash_request")
    assert (checks.how, checks.patches) == ("removed", ("0009-request-checks.patch",))
    assert checks.now == ("sglang/srt/speculative/dflash_utils.py",)
    found = files(ddtree, "0.5.11", "0.5.18")
    moved = found["fused_kv_materialize.py"].change
    assert (moved.fate, moved.now) == (Fate.MOVED, "sglang/kernels/ops/speculative/fused_kv_materialize.py")
    assert found["dflash_worker.py"].change.fate is Fate.GONE
