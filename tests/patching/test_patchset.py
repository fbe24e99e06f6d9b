from __future__ import annotations

import zipfile

import pytest

from ddtree_deploy.errors import DeployError, ExitStatus
from ddtree_deploy.patching.patchset import (
    adhoc_set,
    find_sets,
    in_order,
    load_adhoc,
    load_set,
    load_sets,
    with_requirements,
)

from .sets import BAD, ENGINES, GOOD, changed_copy

PLAIN = b"--- a/sglang/srt/f.py\n+++ b/sglang/srt/f.py\n@@ -1 +1 @@\n-x\n+y\n"


def refusal(call, *args, **options):
    with pytest.raises(DeployError) as caught:
        call(*args, **options)
    error = caught.value
    assert all(line.isprintable() for line in (error.message, *error.details))
    return error, "\n".join((error.message, *error.details))


@pytest.mark.parametrize("name", BAD)
def test_bad_sets(tmp_path, name):
    case = BAD[name]
    folder = changed_copy(tmp_path / "sets", case.get("edit"), case.get("sub", ()))
    error, text = refusal(load_sets, folder)
    assert error.code == "DD108"
    assert error.exit_status is ExitStatus.USAGE
    for said in case["says"]:
        assert said in text


def test_good_sets(tmp_path):
    sets = load_sets(GOOD)
    assert list(sets) == ["demo", "over"]
    demo, over = sets.values()
    assert (demo.version, demo.summary, demo.roots) == ("1.0.0", "a set for tests", ("sglang/srt",))
    assert over.roots == ("sglang/srt", "sglang/jit_kernel")
    assert sorted(demo.engines) == ENGINES == sorted(over.engines)
    family = demo.family_for("0.5.11")
    assert [patch.name for patch in family.patches] == ["0001-f.patch", "0002-g.patch"]
    assert family.paths == ("sglang/srt/added.py", "sglang/srt/f.py", "sglang/srt/g.py")
    assert demo.family_for("0.5.12") is demo.family_for("0.5.12.post1") is not family
    assert demo.family_for("0.5.10") is None
    assert load_set(GOOD / "demo") == demo


def test_all_problems_of_all_sets_at_once(tmp_path):
    folder = changed_copy(
        tmp_path / "sets",
        {"demo/0.5.11/series": "0001-f.patch\n0002-g.patch\n0009-no.patch\n", "demo/0.5.12/0001-f.patch": "x\n"},
        [("over/patchset.toml", 'package = "sglang"', "package = 1"), ("over/patchset.toml", "after =", "then =")],
    )
    error, _ = refusal(load_sets, folder)
    assert error.message == f"patch sets: {len(error.details)} problems"
    places = [line.split(": ")[0] for line in error.details]
    assert places[:3] == ["demo/0.5.11/series:3", "demo/0.5.12/0001-f.patch", "over/patchset.toml:5"]
    assert [place for place in places if place == "over/patchset.toml:14"]


def test_bytecode_and_notes_are_no_part_of_a_set(tmp_path):
    folder = changed_copy(
        tmp_path / "sets", {"demo/new/sglang/srt/__pycache__/a.pyc": "x", "demo/NOTES.md": "x", ".git/x": "x"}
    )
    assert load_sets(folder) == load_sets(GOOD)


def test_sets_load_from_a_zip(tmp_path):
    """As importlib.resources gives them in an installed archive."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for path in GOOD.rglob("*"):
            if path.is_file():
                archive.write(path, path.relative_to(GOOD))
    assert load_sets(zipfile.Path(tmp_path / "x.zip")) == load_sets(GOOD)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("demo/0.5.11/0001-f.patch", "- why", "- because"),
        ("demo/patchset.toml", 'version = "1.0.0"', 'version = "1.0.1"'),
        ("demo/patchset.toml", "a set for tests", "a set"),
    ],
)
def test_digest_covers_what_defines_the_set(tmp_path, path, old, new):
    changed = load_sets(changed_copy(tmp_path / "sets", sub=[(path, old, new)]))
    plain = load_sets(GOOD)
    assert changed["demo"].digest != plain["demo"].digest
    assert changed["over"].digest == plain["over"].digest
    families = [sets["demo"].family_for("0.5.12").digest for sets in (changed, plain)]
    assert (families[0] == families[1]) == ("version" not in old)


def test_order():
    sets = load_sets(GOOD)
    demo, over = sets.values()
    assert with_requirements("over", sets) == (demo, over)
    assert with_requirements("demo", sets) == (demo,)
    assert in_order(["over", "demo"], sets) == (demo, over)
    error, text = refusal(with_requirements, "ovr", sets)
    assert (error.code, error.hint) == ("DD107", "did you mean over?")
    error, _ = refusal(with_requirements, "zzz", sets)
    assert error.hint == "known: demo, over"
    error, text = refusal(with_requirements, "over", {"over": over})
    assert error.code == "DD108"
    assert "over requires demo, which is unknown" in text


def test_diamond_is_applied_once():
    one = adhoc_set("one", [("x.patch", PLAIN, 1)])
    graph = {"a": ("b", "c"), "b": ("d",), "c": ("d",), "d": ()}
    sets = {name: type(one)(*(name, "1", "s", "sglang", (), needs, {}, name)) for name, needs in graph.items()}
    assert [item.name for item in with_requirements("a", sets)] == ["d", "b", "c", "a"]


# -- ad-hoc sets -------------------------------------------------------------------------------------


def test_adhoc_file(tmp_path):
    path = tmp_path / "my fix (2).patch"
    path.write_bytes(PLAIN)
    found = load_adhoc(path)
    assert (found.name, found.adhoc, found.requires) == ("my-fix-2", True, ())
    assert found.version == found.digest[:12]
    assert found.family_for("9.9.9").paths == ("sglang/srt/f.py",)
    other = tmp_path / "other.patch"
    other.write_bytes(PLAIN)
    assert load_adhoc(other).digest == found.digest
    assert load_adhoc(other).name == "other"
    other.write_bytes(PLAIN.replace(b"+y", b"+z"))
    assert load_adhoc(other).digest != found.digest


def test_adhoc_digest_tells_one_patch_from_two():
    first, second = PLAIN + b"\n", b"\n# second\n" + PLAIN.replace(b"x", b"y")
    two = adhoc_set("a", [("1", first, 1), ("2", second, 1)])
    one = adhoc_set("a", [("1", first + b"1" + second, 1)])
    assert len(one.family_for("1").diffs) == len(two.family_for("1").diffs) == 2
    assert one.digest != two.digest


@pytest.mark.parametrize("name", [".patch", "--.patch", "...", "é.patch", "-x"])
def test_adhoc_names_are_clean(name):
    clean = adhoc_set(name, [("x.patch", PLAIN, 1)]).name
    assert clean
    assert not clean.startswith((".", "-"))
    assert clean.isascii()


def test_adhoc_folder(tmp_path):
    (tmp_path / "series").write_text("# quilt's\nb.patch -p0\n\na.patch # and then\n")
    (tmp_path / "a.patch").write_bytes(PLAIN)
    (tmp_path / "b.patch").write_bytes(PLAIN.replace(b"a/s", b"s").replace(b"b/s", b"s"))
    (tmp_path / "unused.patch").write_text("x")
    found = load_adhoc(tmp_path)
    assert [patch.name for patch in found.family_for("1").patches] == ["b.patch", "a.patch"]
    assert [diff.part for diff in found.family_for("1").diffs] == [0, 1]
    (tmp_path / "series").write_text("a.patch -R\nc.patch\n")
    _, text = refusal(load_adhoc, tmp_path)
    assert "series:1: unknown option '-R' after a.patch" in text
    assert "series:2: there is no file c.patch" in text
    (tmp_path / "series").write_text("# none\n")
    _, text = refusal(load_adhoc, tmp_path)
    assert "names no patch" in text


def test_adhoc_strip(tmp_path):
    path = tmp_path / "x.patch"
    path.write_bytes(PLAIN.replace(b"a/s", b"x/y/s").replace(b"b/s", b"x/y/s"))
    assert load_adhoc(path, strip=2).family_for("1").paths == ("sglang/srt/f.py",)
    error, text = refusal(load_adhoc, path)
    assert error.code == "DD105"
    assert "y/sglang/srt/f.py': it is outside sglang/" in text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("vllm/x.py", "outside sglang/"),
        ("sglangx/x.py", "outside sglang/"),
        ("sglang/srt/x.so", "of the kind .so"),
        ("sglang/srt/Makefile", "of the kind (no suffix)"),
        ("sglang/srt/.py", "of the kind (no suffix)"),
        ("sglang/srt/__pycache__/x.py", "bytecode"),
        ("sglang/srt/x.pyc", "bytecode"),
        ("sglang/.ddtree-x/x.py", "temporary files"),
        ("sglang/x.dist-info/RECORD.txt", "installer's own record"),
    ],
)
def test_adhoc_policy(tmp_path, path, says):
    file = tmp_path / "x.patch"
    file.write_bytes(PLAIN.replace(b"sglang/srt/f.py", path.encode()))
    error, text = refusal(load_adhoc, file)
    assert error.code == "DD105"
    assert says in text
    if "of the kind" in says:
        assert load_adhoc(file, any_suffix=True).family_for("1").paths == (path,)
    else:
        refusal(load_adhoc, file, any_suffix=True)


def test_adhoc_errors(tmp_path):
    error, text = refusal(load_adhoc, tmp_path / "none.patch")
    assert error.code == "DD007"
    assert "none.patch" in text
    (tmp_path / "d").mkdir()
    error, _ = refusal(load_adhoc, tmp_path / "d")
    assert error.code == "DD007"
    error, text = refusal(adhoc_set, "two", [("a.patch", b"", 1), ("b.patch", b"@@ -1 +1 @@\n", 1)])
    assert error.code == "DD104"
    assert "a.patch: the diff is empty" in text
    assert "b.patch:1: a hunk header without" in text


# -- what a request means ----------------------------------------------------------------------------


def test_requests(tmp_path, monkeypatch):
    sets = load_sets(GOOD)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a set's name is stronger than a folder here
    assert find_sets("over", GOOD) == (sets["demo"], sets["over"])
    assert find_sets("demo", GOOD) == (sets["demo"],)
    (tmp_path / "x.patch").write_bytes(PLAIN)
    assert [item.name for item in find_sets("x.patch", GOOD)] == ["x"]
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "series").write_text("x.patch\n")
    (tmp_path / "q" / "x.patch").write_bytes(PLAIN)
    assert [item.name for item in find_sets("q", GOOD)] == ["q"]
    error, _ = refusal(find_sets, "nothing.patch", GOOD)
    assert error.code == "DD107"


def test_a_set_in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Its requirements come from the known sets."""
    mine = changed_copy(tmp_path / "sets")
    (mine / "over").rename(tmp_path / "over")
    text = (tmp_path / "over" / "patchset.toml").read_text()
    monkeypatch.chdir(tmp_path)
    assert find_sets("./over", mine) == tuple(load_sets(GOOD).values())
    (tmp_path / "over" / "patchset.toml").write_text(text.replace('["demo"]', '["gone"]'))
    _, said = refusal(find_sets, "./over", mine)
    assert "over requires gone, which is unknown" in said
