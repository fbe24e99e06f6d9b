"""Taking snapshots: from the real agent on a small tree, and from hosts that lie."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.entries import BadEntry, FileEntry, ManifestReader
from ddtree_deploy.snapshots.pull import pull
from ddtree_deploy.snapshots.store import Store
from tests.snapshots.hosts import FACTS, FILES, ScriptedSession, file_line, make_site, raw_line, session, told

CASES = tomllib.loads((Path(__file__).parent.parent / "cases/snapshots/entries.toml").read_text("utf-8"))["case"]
HELD = {path: data for path, data in FILES.items() if not path.endswith(".so")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data" / "snapshots")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# An honest host.


def test_the_first_snapshot_is_the_tree(store: Store, site: Path):
    (site / "sglang/srt/l").symlink_to("a.py")
    with session(site) as host:
        pulled = pull(host, store)
    snapshot = pulled.snapshot
    assert dict(snapshot.files()) == HELD
    assert list(snapshot.entries) == sorted([*FILES, "sglang/srt/l"], key=os.fsencode)
    assert (pulled.same, pulled.earlier, pulled.added) == (False, None, tuple(snapshot.entries))
    assert pulled.bytes_received > 0
    assert snapshot.id.startswith("box/")
    assert snapshot.header.facts["root"]["site"] == str(site)
    assert list((store._folder).glob("incoming-*")) == []


def test_an_unchanged_host_says_so_in_one_small_answer(store: Store, site: Path):
    with session(site) as host:
        first = pull(host, store)
        again = pull(host, store)
    assert again.same
    assert again.snapshot.id == first.snapshot.id
    assert again.bytes_received < 400
    assert [item.id for item in store.snapshots()] == [first.snapshot.id]


def test_only_what_changed_travels(store: Store, site: Path):
    with session(site) as host:
        pull(host, store)
        (site / "sglang/srt/a.py").write_bytes(b"A = 2\n")
        (site / "sglang/srt/empty.py").chmod(0o755)
        (site / "sglang/srt/a/b.py").unlink()
        (site / "sglang/srt/new.py").write_bytes(b"")
        (site / "sglang/srt/l").symlink_to("a.py")
        pulled = pull(host, store)
    assert pulled.added == ("sglang/srt/l", "sglang/srt/new.py")
    assert pulled.changed == ("sglang/srt/a.py", "sglang/srt/empty.py")
    assert pulled.removed == ("sglang/srt/a/b.py",)
    assert pulled.files_fetched == 1
    assert pulled.snapshot.read("sglang/srt/a.py") == b"A = 2\n"
    assert pulled.earlier is not None
    assert pulled.earlier.read("sglang/srt/a.py") == b"A = 1\n"
    assert [item.id for item in store.snapshots("box")] == [pulled.earlier.id, pulled.snapshot.id]


def test_what_changed_is_not_told_by_time_or_size(store: Store, site: Path):
    target = site / "sglang/srt/a.py"
    with session(site) as host:
        pull(host, store)
        info = target.stat()
        target.write_bytes(b"A = 9\n")
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
        assert pull(host, store).changed == ("sglang/srt/a.py",)


def test_a_second_host_with_the_same_files_sends_none(store: Store, site: Path, tmp_path: Path):
    with session(site) as host:
        first = pull(host, store)
    with session(make_site(tmp_path / "other"), name="second") as host:
        second = pull(host, store)
    assert second.files_fetched == 0
    assert second.snapshot.header.tree == first.snapshot.header.tree
    assert second.earlier is None


def test_what_is_known_of_the_files_is_part_of_the_snapshot(store: Store, site: Path, tmp_path: Path):
    with session(site) as host:
        pull(host, store)
        os.link(site / "sglang/srt/a.py", tmp_path / "cache")
        pulled = pull(host, store)
    entry = pulled.snapshot.entries["sglang/srt/a.py"]
    assert isinstance(entry, FileEntry)
    assert (pulled.same, pulled.changed, pulled.files_fetched, entry.nlink) == (False, (), 0, 2)


def test_binaries_come_when_asked_for(store: Store, site: Path):
    with session(site) as host:
        plain = pull(host, store).snapshot
        with pytest.raises(DeployError) as caught:
            plain.read("sglang/srt/built.so")
        assert caught.value.code == "DD401"
        full = pull(host, store, binaries=True)
    assert full.files_fetched == 1
    assert full.snapshot.read("sglang/srt/built.so") == FILES["sglang/srt/built.so"]


def test_binaries_on_the_first_snapshot(store: Store, site: Path):
    with session(site) as host:
        assert dict(pull(host, store, binaries=True).snapshot.files()) == FILES


def _torn(store: Store, site: Path, damage: Callable[[Path], None]) -> None:
    with session(site) as host:
        snapshot = pull(host, store).snapshot
        entry = snapshot.entries["sglang/srt/a.py"]
        assert isinstance(entry, FileEntry)
        damage(Path(store._object(entry.sha256)))
        with pytest.raises(DeployError) as caught:
            dict(snapshot.files())
        assert caught.value.code == "DD402"
        assert "again" in (caught.value.hint or "")
        healed = pull(host, store)
    assert not healed.same
    assert snapshot.read("sglang/srt/a.py") == FILES["sglang/srt/a.py"]
    assert healed.files_fetched == 1


def test_a_torn_object_is_noticed_and_mended(store: Store, site: Path):
    def damage(path: Path) -> None:
        path.chmod(0o644)
        path.write_bytes(b"A = ")

    _torn(store, site, damage)


def test_an_object_of_the_right_size_is_noticed_and_mended(store: Store, site: Path):
    def damage(path: Path) -> None:
        path.chmod(0o644)
        path.write_bytes(b"\0" * 6)

    _torn(store, site, damage)


def test_a_lost_object_is_mended(store: Store, site: Path):
    _torn(store, site, Path.unlink)


def test_a_damaged_manifest_is_passed_over(store: Store, site: Path):
    with session(site) as host:
        first = pull(host, store).snapshot
        first._path.write_bytes(first._path.read_bytes()[:-20])
        (damaged,) = store.snapshots()
        with pytest.raises(DeployError) as caught:
            damaged.entries  # noqa: B018
        assert caught.value.code == "DD402"
        pulled = pull(host, store)
    assert not pulled.same
    assert dict(pulled.snapshot.files()) == HELD


def test_an_error_on_the_host_leaves_nothing(store: Store, site: Path, tmp_path: Path):
    (site / "sglang/jit_kernel").rename(tmp_path / "elsewhere")
    (site / "sglang/jit_kernel").symlink_to(tmp_path / "elsewhere")
    with session(site) as host, pytest.raises(DeployError) as caught:
        pull(host, store)
    assert caught.value.code == "DD509"
    assert everything(store._folder) == {}


NAMES = st.text(alphabet="xy.é\udcff\n ", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))


CONTENTS = st.tuples(st.binary(max_size=4), st.sampled_from([1, 30_000]))


@settings(max_examples=12, deadline=None)
@given(trees=st.lists(st.dictionaries(NAMES, CONTENTS, max_size=6), min_size=1, max_size=3))
def test_any_series_of_trees_comes_out_as_it_was(trees: list[dict[str, tuple[bytes, int]]]):
    with tempfile.TemporaryDirectory() as temporary:
        _series(Path(temporary), trees)


def _series(folder: Path, trees: list[dict[str, tuple[bytes, int]]]) -> None:
    store, site = Store(folder / "store"), folder / "site"
    taken = []
    site.mkdir()
    with session(site) as host:
        for tree in trees:
            shutil.rmtree(site, ignore_errors=True)
            files = {"sglang/srt/__init__.py": b""}
            files.update({f"sglang/srt/sub/{name}": data * times for name, (data, times) in tree.items()})
            for path, data in files.items():
                target = os.fsencode(site) + b"/" + path.encode("utf-8", "surrogateescape")
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as handle:
                    handle.write(data)
            taken.append((pull(host, store).snapshot, files))
    for snapshot, files in taken:
        assert dict(snapshot.files()) == files


# A host that lies: nothing is written.


def refused(store: Store, host: ScriptedSession, part: str) -> None:
    before = everything(store._folder)
    with pytest.raises(DeployError) as caught:
        pull(host, store)  # type: ignore[arg-type]
    assert caught.value.code == "DD307", caught.value
    assert part in caught.value.message
    assert everything(store._folder) == before


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_entries_that_cannot_be_true(case: dict[str, Any]):
    reader = ManifestReader()
    lines = [raw_line(text) for text in case["lines"]]
    if "reason" not in case:
        assert [reader.read(line) for line in lines]
        return
    for line in lines[:-1]:
        reader.read(line)
    with pytest.raises(BadEntry, match=case["reason"]):
        reader.read(lines[-1])


@pytest.mark.parametrize("case", [case for case in CASES if "reason" in case], ids=lambda case: case["name"])
def test_a_stream_with_such_an_entry_leaves_nothing(store: Store, case: dict[str, Any]):
    lines = [raw_line(text) for text in case["lines"]]
    refused(store, ScriptedSession([(b"B", b"".join(lines)), (b"Q", {"answer": "stream"})]), "cannot be true")


@pytest.mark.parametrize("case", [case for case in CASES if "reason" in case], ids=lambda case: case["name"])
def test_a_manifest_with_such_an_entry_leaves_nothing(store: Store, case: dict[str, Any]):
    lines = [raw_line(text) for text in case["lines"]]
    refused(store, ScriptedSession([(b"J", {"answer": "manifest"}), (b"B", b"".join(lines))]), "cannot be true")


A, B = "sglang/srt/a.py", "sglang/srt/b.py"
LINE_A, LINE_B = file_line(A, b"aa\n"), file_line(B, b"bbb\n")
GOOD = LINE_A + b"aa\n" + LINE_B + b"bbb\n"


def test_the_scripted_host_can_be_honest(store: Store):
    host = ScriptedSession([(b"B", GOOD), (b"Q", told("stream", [LINE_A, LINE_B]))])
    assert dict(pull(host, store).snapshot.files()) == {A: b"aa\n", B: b"bbb\n"}  # type: ignore[arg-type]
    assert host.requests[0]["stream"] is True
    host = ScriptedSession(
        [(b"J", told("manifest", [LINE_A, file_line(B, b"new\n")])), (b"B", LINE_A + file_line(B, b"new\n"))],
        [(b"B", b"new\n"), (b"Q", {"answer": "contents"})],
    )
    assert pull(host, store).snapshot.read(B) == b"new\n"  # type: ignore[arg-type]
    assert host.requests[0]["stream"] is False


HONEST = told("stream", [LINE_A, LINE_B])


@pytest.mark.parametrize(
    ("data", "end", "part"),
    [
        (GOOD + b"x", HONEST, "ends inside an entry"),
        (GOOD[:-1], HONEST, "ends inside a file"),
        (GOOD[:-8], HONEST, "ends inside an entry"),
        (LINE_A + b"aa\n", HONEST, "digest"),
        (LINE_A + b"ab\n" + LINE_B + b"bbb\n", HONEST, "size and hash"),
        (LINE_A + b"bbb\n" + LINE_B + b"aa\n", HONEST, "size and hash"),
        (GOOD, {**HONEST, "tree": "0" * 64}, "digest"),
        (GOOD, {**HONEST, "state": "0" * 64}, "digest"),
        (GOOD, {**HONEST, "count": 3}, "digest"),
        (GOOD, {**HONEST, "facts": {"root": {}, "record": {"missing": []}}}, "digest"),
        (GOOD, {**HONEST, "facts": {**FACTS, "more": 1}}, "facts"),
        (GOOD, {**HONEST, "facts": {"root": [], "record": {}}}, "facts"),
        (GOOD, {**HONEST, "facts": {"root": {}, "record": {"missing": [1]}}}, "missing"),
        (GOOD, {"answer": "stream"}, "facts"),
        (b"x" * 1_000_000, HONEST, "too long"),
    ],
)
def test_a_stream_that_lies(store: Store, data: bytes, end: dict[str, Any], part: str):
    refused(store, ScriptedSession([(b"B", data), (b"Q", end)]), part)


MANIFEST = told("manifest", [LINE_A, LINE_B])


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ([(b"B", b"aa\nbbb"), (b"Q", {})], "ends inside a file"),
        ([(b"B", b"aa\nbbb\nx"), (b"Q", {})], "longer than announced"),
        ([(b"B", b"bbb\naa\n"), (b"Q", {})], "size and hash"),
        ([(b"Q", {"answer": "same"})], "do not follow"),
        ([(b"Q", {"answer": "contents"})], "ends inside a file"),
    ],
)
def test_contents_that_lie(store: Store, contents: Any, part: str):
    refused(store, ScriptedSession([(b"J", MANIFEST), (b"B", LINE_A + LINE_B)], contents), part)


def test_a_reply_that_says_same_of_nothing(store: Store):
    refused(store, ScriptedSession([(b"Q", {"answer": "same"})]), "nothing was known")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(at: int, bit: int):
    def spoil(said: bytes) -> bytes:
        damaged = bytearray(said)
        damaged[at % len(said)] ^= 1 << bit
        return bytes(damaged)

    _spoiled(spoil)


def _spoiled(spoil: Callable[[bytes], bytes]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        store = Store(Path(temporary) / "store")
        with pytest.raises(DeployError) as caught:
            pull(ScriptedSession([(b"B", GOOD), (b"Q", HONEST)], spoil=spoil), store)  # type: ignore[arg-type]
        assert caught.value.code in ("DD307", "DD308", "DD901")
        assert everything(store._folder) == {}


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10_000))
def test_any_cut_is_found(at: int):
    _spoiled(lambda said: said[: at % len(said)])
