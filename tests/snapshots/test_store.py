"""The store: names, look-up, concurrent writers, leftovers."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import store as store_module
from ddtree_deploy.snapshots.entries import BadEntry, FileEntry, Manifest, ManifestReader
from ddtree_deploy.snapshots.places import cache_folder, data_folder
from ddtree_deploy.snapshots.store import Snapshot, Store
from tests.snapshots.hosts import file_line, told


def add(store: Store, host: str, *contents: bytes) -> Snapshot:
    """A snapshot of a host with these files."""
    files = {f"sglang/srt/f{number}.py": data for number, data in enumerate(contents)}
    lines = [file_line(path, data) for path, data in files.items()]
    reader = ManifestReader()
    entries = [reader.read(line) for line in lines]
    with store.incoming() as incoming:
        for entry, data in zip(entries, files.values(), strict=True):
            assert isinstance(entry, FileEntry)
            incoming.put(entry, [data])
        return incoming.commit(host, reader.finish(told("stream", lines)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


def test_ids_sort_by_age_even_within_a_second(store: Store):
    made = [add(store, "box", b"%d" % number) for number in range(4)]
    assert [item.id for item in store.snapshots("box")] == [item.id for item in made]
    newest = store.newest("box")
    assert newest is not None
    assert newest.id == made[-1].id
    assert store.newest("other") is None


def test_ids_sort_by_age_when_the_clock_goes_back(store: Store, monkeypatch: pytest.MonkeyPatch):
    class Clock(datetime):
        year_now = 2031

        @classmethod
        def now(cls, tz=None):
            return datetime(cls.year_now, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(store_module, "datetime", Clock)
    first = add(store, "box", b"1")
    Clock.year_now = 2030
    second = add(store, "box", b"2")
    assert first.name.startswith("20310101T000000Z-")
    assert second.name.startswith("20310101T000001Z-")
    assert second.header.taken.year == 2030
    assert [item.id for item in store.snapshots()] == [first.id, second.id]


def test_objects_are_shared_and_read_only(store: Store):
    add(store, "one", b"same", b"same", b"")
    add(store, "two", b"same")
    objects = [path for path in (store._folder / "objects").rglob("*") if path.is_file()]
    assert len(objects) == 2
    assert {path.stat().st_mode & 0o777 for path in objects} == {0o444}


def test_find(store: Store):
    a1, a2 = add(store, "alpha", b"1"), add(store, "alpha", b"2")
    b1 = add(store, "beta", b"3")
    for text, want in [
        (a1.id, a1),
        ("alpha", a2),
        ("beta", b1),
        ("latest", b1),
        (a1.name, a1),
        (a2.header.tree[:8], a2),
        (a2.header.tree[:4], a2),
        ("be", b1),
        (b1.id[:-4], b1),
    ]:
        assert store.find(text).id == want.id, text
    assert store.find("latest", host="alpha").id == a2.id
    for text, part in [("al", "2 snapshots begin with"), ("nowhere", "there is no"), ("", "there is no")]:
        with pytest.raises(DeployError, match=part) as caught:
            store.find(text)
        assert caught.value.code == "DD401"
    with pytest.raises(DeployError, match="of beta"):
        store.find(a1.id, host="beta")


def test_nothing_stored_yet(store: Store):
    assert store.snapshots() == []
    for text in ("latest", "box"):
        with pytest.raises(DeployError) as caught:
            store.find(text)
        assert caught.value.code == "DD401"


ODD_HOSTS = [
    "user@host.example:2222",
    "local:/opt/venv/lib/python3.12/site-packages",
    "local:/opt/venv_lib",
    "local:/opt/venv/lib",
    "..",
    ".",
    ".hidden",
    "-rf",
    "a/../../b",
    "x" * 400,
    "x" * 400 + "y",
    "é %2F ~ %~",
    "a\nb",
    "\udcff",
]


def test_any_host_name_is_a_folder_of_its_own(store: Store):
    made = {host: add(store, host, host.encode("utf-8", "surrogateescape")) for host in ODD_HOSTS}
    top = store._folder / "hosts"
    assert len(list(top.iterdir())) == len(ODD_HOSTS)
    assert all(path.parent.parent == top for path in top.rglob("*.jsonl"))
    for host, snapshot in made.items():
        assert [item.id for item in store.snapshots(host)] == [snapshot.id]
        assert store.find(snapshot.id).header.host == host
    assert {item.host for item in store.snapshots()} == set(ODD_HOSTS)


@settings(max_examples=100, deadline=None)
@given(one=st.text(max_size=300), other=st.text(max_size=300))
def test_host_folders_are_safe_and_distinct(one: str, other: str):
    store = Store(Path("/nowhere"))
    try:
        names = [store._host_folder(host).name for host in (one, other)]
    except UnicodeEncodeError:
        return
    for name in names:
        assert "/" not in name
        assert not name.startswith((".", "-"))
        assert len(name) <= 255
    assert (names[0] == names[1]) == (one == other)


def test_many_writers_at_once(store: Store):
    failures: list[Exception] = []

    def write(number: int) -> None:
        try:
            for turn in range(5):
                add(store, "box", b"shared", b"%d %d" % (number, turn))
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    every = store.snapshots("box")
    assert len(every) == 20
    assert len({item.id for item in every}) == 20
    for item in every:
        assert item.read("sglang/srt/f0.py") == b"shared"
    assert sorted(path.name for path in store._folder.iterdir()) == ["hosts", "objects"]


def test_a_transfer_that_fails_leaves_nothing(store: Store):
    entry = ManifestReader().read(file_line("sglang/srt/a.py", b"data"))
    assert isinstance(entry, FileEntry)
    with pytest.raises(BadEntry), store.incoming() as incoming:
        incoming.put(entry, [b"other"])
    with pytest.raises(RuntimeError), store.incoming() as incoming:
        incoming.put(entry, [b"da", b"ta"])
        raise RuntimeError
    assert list(store._folder.iterdir()) == []


def test_a_snapshot_without_its_files_is_refused(store: Store):
    line = file_line("sglang/srt/a.py", b"data")
    reader = ManifestReader()
    reader.read(line)
    manifest: Manifest = reader.finish(told("stream", [line]))
    with pytest.raises(BadEntry, match="did not arrive"), store.incoming() as incoming:
        incoming.commit("box", manifest)
    assert store.snapshots() == []


def test_abandoned_transfers_are_swept(store: Store):
    old, young = store._folder / "incoming-1-a", store._folder / "incoming-2-b"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(b"x")
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    add(store, "box", b"1")
    assert not old.exists()
    assert young.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeployError) as caught:
        add(Store(tmp_path / "file" / "snapshots"), "box", b"1")
    assert caught.value.code == "DD007"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda data: b"", "Expecting value"),
        (lambda data: data.replace(b'"schema":1', b'"schema":2'), "schema 2 is of another version"),
        (lambda data: data.replace(b'"schema":1,', b""), "schema"),
        (lambda data: data.replace(b'"facts":{', b'"facts":{"x":1,'), "facts"),
        (lambda data: data.replace(b'"mode":420', b'"mode":493'), "digest"),
        (lambda data: data.replace(b'"version":"0.5.11"', b'"version":"0.5.12"'), "digest"),
        (lambda data: data.rpartition(b'{"content"')[0], "digest"),
        (lambda data: data + data.splitlines(keepends=True)[-1], "comes twice"),
    ],
)
def test_a_damaged_manifest(store: Store, damage, part: str):
    snapshot = add(store, "box", b"1", b"2")
    path = snapshot._path
    path.write_bytes(damage(path.read_bytes()))
    (again,) = store.snapshots()
    with pytest.raises(DeployError) as caught:
        again.entries  # noqa: B018
    assert caught.value.code == "DD402"
    assert part in caught.value.message
    assert store.newest("box") is None


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DDTREE_DEPLOY_DATA", str(tmp_path / "d"))
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(tmp_path / "c"))
    assert (data_folder(), cache_folder()) == (tmp_path / "d", tmp_path / "c")
    assert Store.default()._folder == tmp_path / "d" / "snapshots"
    monkeypatch.delenv("DDTREE_DEPLOY_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "x"))
    assert data_folder().name == "ddtree-deploy"
