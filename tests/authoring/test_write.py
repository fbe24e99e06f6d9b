from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.authoring import swap
from ddtree_deploy.authoring.swap import digest, finish, locked, unfinished
from ddtree_deploy.authoring.tomledit import redeclare
from ddtree_deploy.authoring.write import declared, new_folder, read_folder, reseries, write_sets
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.declaration import DeclaredFamily, FileHashes, read_declaration
from ddtree_deploy.patching.patchset import load_set, load_sets
from ddtree_deploy.patching.series import read_series
from tests.agent.test_crash import run_until
from tests.patching.sets import GOOD, changed_copy
from tests.patching.test_properties import QUICK, WITH_GIT


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_patch(item, family, name):
    """The set with one patch of a family gone; its hashes too, as far as they are of files that it alone touched."""
    old = item.families[family]
    patches = tuple(patch for patch in old.patches if patch.name != name)
    new = replace(old, patches=patches)
    hashes = {
        engine: {path: both for path, both in per.items() if path in set(new.added) | touched(patches)}
        for engine, per in old.hashes.items()
    }
    return replace(item, families={**item.families, family: replace(new, hashes=hashes)})


def touched(patches):
    return {path for patch in patches for diff in patch.diffs for path in diff.paths}


@pytest.fixture
def sets(tmp_path):
    return changed_copy(
        tmp_path / "sets",
        {
            "demo/.hidden": "h",
            "demo/0.5.11/.0001.swp": "s",
            "demo/0.5.11/series": "# why\n0001-f.patch\n0002-g.patch\n",
        },
    )


def test_writing_what_was_read_changes_no_byte(sets):
    before = files(sets)
    folders = [read_folder(sets / name) for name in ("demo", "over")]
    assert write_sets([(folder, folder.loaded) for folder in folders]) == tuple(load_sets(sets).values())
    assert files(sets) == before
    assert not [path for path in sets.iterdir() if path.name.startswith(".")]


def test_only_what_changed_changes(sets):
    before = files(sets)
    (sets / "demo" / "0.5.11" / "0001-f.patch").chmod(0o600)
    folder = read_folder(sets / "demo")
    wanted = replace(without_patch(folder.loaded, "0.5.11", "0002-g.patch"), version="1.1.0")
    (written,) = write_sets([(folder, wanted)])
    after = files(sets)
    assert written.version == "1.1.0"
    assert after["demo/0.5.11/series"] == b"# why\n0001-f.patch\n"
    assert {path for path in before if before[path] != after.get(path)} == {
        "demo/patchset.toml",
        "demo/0.5.11/series",
        "demo/0.5.11/0002-g.patch",
    }
    assert not after.keys() - before.keys()
    assert (sets / "demo" / "0.5.11" / "0001-f.patch").stat().st_mode & 0o777 == 0o600


def test_a_family_goes_and_comes(sets):
    folder = read_folder(sets / "demo")
    family = folder.loaded.families["0.5.12"]
    (written,) = write_sets([(folder, replace(folder.loaded, families={"0.5.11": folder.loaded.families["0.5.11"]}))])
    assert list(written.families) == ["0.5.11"]
    assert not (sets / "demo" / "0.5.12").exists()
    again = read_folder(sets / "demo")
    write_sets([(again, replace(again.loaded, families={**again.loaded.families, "0.5.12": family}))])
    assert load_set(sets / "demo").families == folder.loaded.families


def test_a_new_set(sets):
    like = load_set(sets / "demo")
    wanted = replace(like, name="fresh")
    (written,) = write_sets([(new_folder(sets / "fresh"), wanted)])
    assert written == load_set(sets / "fresh")
    assert written.families.keys() == like.families.keys()
    with pytest.raises(DeployError) as caught:
        new_folder(sets / "fresh")
    assert caught.value.code == "DD007"


def test_refusals(sets, tmp_path):
    folder = read_folder(sets / "demo")
    before = files(sets)
    for wanted in (
        replace(folder.loaded, name="other"),
        replace(folder.loaded, summary="a\nb"),
        replace(folder.loaded, families={}),
    ):
        with pytest.raises(DeployError) as caught:
            write_sets([(folder, wanted)])
        assert caught.value.code == "DD108"
        assert files(sets) == before
    (sets / "demo" / "NOTES.md").write_text("mine")
    with pytest.raises(DeployError) as caught:
        write_sets([(folder, folder.loaded)])
    assert caught.value.code == "DD010"
    assert files(sets) == {**before, "demo/NOTES.md": b"mine"}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "demo").symlink_to(sets / "demo")
    with pytest.raises(DeployError) as caught:
        read_folder(tmp_path / "linked" / "demo")
    assert caught.value.code == "DD007"


def test_two_writers(sets):
    with locked(sets), pytest.raises(DeployError) as caught, locked(sets):
        pass
    assert caught.value.code == "DD010"
    with locked(sets):
        pass


# -- crashes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_change_of_the_disk(tmp_path, monkeypatch, exchange):
    """Two sets at once: with the next writer's help both are old or both are new, whole."""
    if not exchange:
        monkeypatch.setattr(swap, "_exchanged", lambda one, other: False)
    sets = tmp_path / "sets"
    sets.mkdir()
    for name in ("one", "two"):
        (sets / name / "e").mkdir(parents=True)
        (sets / name / "e" / "series").touch()
        text = COMMENTED.replace(b"'demo'", b"'%b'" % name.encode()).replace(b'[family."0.5.11"]', b"[family.e]")
        (sets / name / "patchset.toml").write_bytes(
            text[: text.index(b"# the hashes")] + text[text.index(b"[family") :]
        )
    old = files(sets)

    def action():
        folders = [read_folder(sets / name) for name in ("one", "two")]
        write_sets([(folder, replace(folder.loaded, version="2.0.0")) for folder in folders])

    shutil.copytree(sets, tmp_path / "kept")
    assert run_until(None, action)[0] is False
    new = files(sets)
    assert old != new
    seen, count, killed = set(), 0, True
    while killed:
        count += 1
        shutil.rmtree(sets)
        shutil.copytree(tmp_path / "kept", sets)
        killed, _ = run_until(count, action)
        waits = unfinished(sets)
        if exchange:
            # Every folder by itself is whole even before anybody helps.
            for name in ("one/", "two/"):
                assert below(files(sets), name) in (below(old, name), below(new, name))
        again = 1
        while waits and run_until(again, lambda: finish(sets))[0]:  # the helper may die too
            again += 1
        finish(sets)
        assert files(sets) in (old, new)
        assert not waits or files(sets) == new
        seen.add(files(sets) == new)
    assert seen == {True, False}
    assert count > 20


def below(tree, prefix):
    return {path: data for path, data in tree.items() if path.startswith(prefix)}


def test_an_edit_after_a_crash_is_not_lost(tmp_path, monkeypatch):
    sets = changed_copy(tmp_path / "sets")
    folder = read_folder(sets / "demo")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(swap, "_swap", stop)
        with pytest.raises(KeyboardInterrupt):
            write_sets([(folder, replace(folder.loaded, version="2.0.0"))])
    assert unfinished(sets)
    (sets / "demo" / "NOTES.md").write_text("mine")
    with pytest.raises(DeployError) as caught, locked(sets):
        pass
    assert caught.value.code == "DD010"
    assert "changed after the writing of patch sets was interrupted" in caught.value.message
    (sets / "demo" / "NOTES.md").unlink()
    with locked(sets):
        assert load_set(sets / "demo").version == "2.0.0"
    assert not unfinished(sets)


def test_a_crash_after_the_exchange_stands_in_nobodys_way(tmp_path, monkeypatch):
    """What was exchanged is done: edits made before the old folders are cleared away are just edits."""
    sets = changed_copy(tmp_path / "sets")
    folder = read_folder(sets / "demo")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(swap.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            write_sets([(folder, replace(folder.loaded, version="2.0.0"))])
    (sets / "demo" / "NOTES.md").write_text("mine")
    with locked(sets):
        pass
    assert load_set(sets / "demo").version == "2.0.0"
    assert sorted(path.name for path in sets.iterdir()) == ["demo", "over"]


def test_exchange_is_what_this_system_does(tmp_path):
    """Else the parametrised test above would test one way twice."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if os.uname().sysname == "Linux":
        assert swap._exchanged(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "a" / "b").exists()
    with pytest.raises(FileNotFoundError):
        swap._exchanged(tmp_path / "a", tmp_path / "none")


def test_digest(tmp_path):
    assert digest(tmp_path / "none") is None
    (tmp_path / "d").mkdir()
    seen = {digest(tmp_path / "d")}
    (tmp_path / "d" / "a").write_text("x")
    seen.add(digest(tmp_path / "d"))
    (tmp_path / "d" / "a").write_text("y")
    seen.add(digest(tmp_path / "d"))
    (tmp_path / "d" / "a").rename(tmp_path / "d" / "b")
    seen.add(digest(tmp_path / "d"))
    (tmp_path / "d" / "b").unlink()
    (tmp_path / "d" / "b").symlink_to("y")
    seen.add(digest(tmp_path / "d"))
    assert len(seen) == 5


# -- texts -------------------------------------------------------------------------------------------

COMMENTED = b"""\
# whose this is
schema = 1
name = 'demo'   # quoted so
version = "1.0.0"
package = "sglang"
root = ["sglang/srt"]
summary = "x"

# the hashes first
[hashes."0.5.11"."sglang/srt/f.py"]  # f
before = "%b"
# after all
after = "%b"

[family."0.5.11"]
engines = [
    "0.5.11",  # the first
]
""" % (b"1" * 64, b"2" * 64)


def test_the_authors_text_stays():
    wanted, _ = read_declaration(COMMENTED, "x")
    assert redeclare(COMMENTED, wanted) == COMMENTED
    two = replace(
        wanted,
        version="1.0.1",
        hashes={"0.5.11": {**wanted.hashes["0.5.11"], "sglang/srt/g.py": FileHashes(None, "3" * 64)}},
    )
    text = redeclare(COMMENTED, two)
    for line in COMMENTED.splitlines():
        assert line in text.splitlines() or line.startswith(b"version")
    assert read_declaration(text, "x") == (two, [])
    back = redeclare(text, wanted)
    assert back.split() == COMMENTED.split()


HASHES = st.sampled_from(["1" * 64, "2" * 64, "3" * 64])
REASONS = st.sampled_from(["fixed", 'says "so"', "because of \\ and é"])
ENGINES = ["0.5.11", "0.5.12", "0.5.12.post1"]
PATHS = [f"sglang/srt/{name}.py" for name in "abc"]


@st.composite
def declarations(draw):
    base, _ = read_declaration(COMMENTED, "x")
    engines = draw(st.lists(st.sampled_from(ENGINES), min_size=1, unique=True))
    cut = draw(st.integers(0, len(engines) - 1))
    groups = [group for group in (engines[:cut], engines[cut:]) if group]
    families = {}
    for group in groups:
        added = draw(st.lists(st.sampled_from(PATHS), max_size=2, unique=True))
        left_out = draw(st.dictionaries(st.sampled_from(["0001-x.patch", "y"]), REASONS, max_size=2))
        families[group[0]] = DeclaredFamily(group[0], tuple(group), tuple(added), left_out)
    hashes = {}
    for engine in engines:
        per = {}
        for path in draw(st.lists(st.sampled_from(PATHS), max_size=3, unique=True)):
            before, after = draw(st.tuples(st.none() | HASHES, st.none() | HASHES).filter(lambda two: two[0] != two[1]))
            per[path] = FileHashes(before, after)
        if per:
            hashes[engine] = per
    unneeded = draw(st.dictionaries(st.sampled_from(["0.5.20", "0.5.21"]), REASONS, max_size=2))
    return replace(
        base,
        version=draw(st.sampled_from(["1.0.0", "2.0.0"])),
        summary=draw(REASONS),
        roots=draw(st.sampled_from([("sglang/srt",), ("sglang/srt", "sglang/kernels")])),
        requires=draw(st.sampled_from([(), ("other",), ("other", "more")])),
        families=families,
        hashes=hashes,
        unneeded=unneeded,
    )


@given(st.lists(declarations(), min_size=1, max_size=3), st.booleans())
@WITH_GIT
def test_any_declaration_is_written_and_read_back(steps, fresh):
    text = b"" if fresh else COMMENTED
    for wanted in steps:
        text = redeclare(text, wanted)
        assert read_declaration(text, "x") == (wanted, [])
        assert redeclare(text, wanted) == text


NAMES = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True)


@given(NAMES, NAMES, st.data())
@QUICK
def test_series(old, new, data):
    comments = st.sampled_from([[], ["# one"], ["", "# two", ""], ["#"]])
    lines = [line for name in old for line in (*data.draw(comments), name + data.draw(st.sampled_from(["", " # c"])))]
    text = "".join(line + "\n" for line in (*lines, *data.draw(comments))).encode()
    if data.draw(st.booleans()):
        text = text.removesuffix(b"\n")
    changed = reseries(text, new)
    entries, problems = read_series(changed, "x", strips=False)
    assert ([entry.name for entry in entries], problems) == (new, [])
    if old == new:
        assert changed == text
    if set(old) <= set(new):
        assert sorted(line for line in text.split(b"\n") if b"#" in line) == sorted(
            line for line in changed.split(b"\n") if b"#" in line
        )


def test_what_is_declared_of_a_loaded_set():
    for name in ("demo", "over"):
        wanted, _ = read_declaration((GOOD / name / "patchset.toml").read_bytes(), "x")
        assert declared(load_set(GOOD / name)) == wanted
