"""Writing a snapshot out: atomically, inside the folder, and over nothing of the user's."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import export as export_module
from ddtree_deploy.snapshots.export import MARK, _stays_inside, export
from ddtree_deploy.snapshots.pull import pull
from ddtree_deploy.snapshots.store import Snapshot, Store
from tests.snapshots.hosts import FILES, make_site, session


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def take(store: Store, site: Path) -> Snapshot:
    with session(site) as host:
        return pull(host, store).snapshot


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != MARK
    }


def neighbours(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


WANT = {path: data for path, data in FILES.items() if not path.endswith(".so")}


def test_a_plain_tree(store: Store, site: Path, tmp_path: Path):
    (site / "sglang/srt/a.py").chmod(0o4777)
    (site / "sglang/srt/empty.py").chmod(0o440)
    exported = export(take(store, site), tmp_path / "new" / "out")
    out = exported.into
    assert contents(out) == WANT
    assert (exported.files, [path for path, _why in exported.left_out]) == (len(WANT), ["sglang/srt/built.so"])
    assert (out / "sglang/srt/a.py").stat().st_mode & 0o7777 == 0o755
    assert (out / "sglang/srt/empty.py").stat().st_mode & 0o7777 == 0o640
    assert neighbours(out) == {"out"}


def test_into_an_empty_folder(store: Store, site: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert contents(export(take(store, site), tmp_path / "out").into) == WANT


def test_an_earlier_export_is_replaced(store: Store, site: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(take(store, site), out)
    (out / "sglang/srt/__pycache__").mkdir()
    (out / "sglang/srt/__pycache__/x.pyc").write_bytes(b"")
    (site / "sglang/srt/a/b.py").unlink()
    (site / "sglang/srt/new.py").write_bytes(b"new\n")
    export(take(store, site), out)
    want = {**WANT, "sglang/srt/new.py": b"new\n"}
    del want["sglang/srt/a/b.py"]
    assert contents(out) == want
    assert neighbours(out) == {"out", "site", "store"}


def _edit(out: Path) -> None:
    (out / "sglang/srt/a.py").write_bytes(b"mine\n")


def _add(out: Path) -> None:
    (out / "notes.txt").write_bytes(b"mine\n")


def _remove(out: Path) -> None:
    (out / "sglang/srt/a.py").unlink()


def _link(out: Path) -> None:
    (out / "folder").symlink_to("/etc")


@pytest.mark.parametrize("change", [_edit, _add, _remove, _link])
def test_an_edited_export_is_kept(store: Store, site: Path, tmp_path: Path, change):
    out = tmp_path / "out"
    snapshot = take(store, site)
    export(snapshot, out)
    change(out)
    before = contents(out)
    with pytest.raises(DeployError, match="was edited") as caught:
        export(snapshot, out)
    assert caught.value.code == "DD007"
    assert len(caught.value.details) == 1
    assert contents(out) == before


def test_a_folder_of_the_users_is_kept(store: Store, site: Path, tmp_path: Path):
    snapshot = take(store, site)
    for mark in (None, "{}", '{"schema": 1, "files": []}', '{"schema": 2, "files": {}}', "not JSON"):
        out = tmp_path / f"out-{abs(hash(mark))}"
        out.mkdir()
        (out / "precious").write_bytes(b"x")
        if mark is not None:
            (out / MARK).write_text(mark)
        with pytest.raises(DeployError, match="no earlier snapshot") as caught:
            export(snapshot, out)
        assert caught.value.code == "DD007"
        assert contents(out) == {"precious": b"x"}


def test_files_and_links_are_no_folders(store: Store, site: Path, tmp_path: Path):
    snapshot = take(store, site)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for name in ("file", "link", "file/below"):
        with pytest.raises(DeployError) as caught:
            export(snapshot, tmp_path / name)
        assert caught.value.code == "DD007"
    assert list((tmp_path / "target").iterdir()) == []


def test_a_damaged_snapshot_leaves_nothing(store: Store, site: Path, tmp_path: Path):
    snapshot = take(store, site)
    Path(store._object(snapshot.entries["sglang/srt/a.py"].sha256)).unlink()  # type: ignore[union-attr]
    with pytest.raises(DeployError) as caught:
        export(snapshot, tmp_path / "out")
    assert caught.value.code == "DD402"
    assert neighbours(tmp_path / "out") == {"site", "store"}


def test_a_failure_at_the_last_step_keeps_the_earlier_export(
    store: Store, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    snapshot = take(store, site)
    export(snapshot, out)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target == out and "-old-" not in self.name:
            raise OSError(28, "No space left on device", str(target))
        return real(self, target)

    monkeypatch.setattr(export_module.Path, "rename", rename)
    with pytest.raises(DeployError, match="No space left"):
        export(snapshot, out)
    monkeypatch.undo()
    assert contents(out) == WANT
    assert neighbours(out) == {"out", "site", "store"}


def test_links_that_stay_inside_are_written(store: Store, site: Path, tmp_path: Path):
    srt = site / "sglang/srt"
    for name, target in {
        "in": "a.py",
        "up": "../jit_kernel/k.cu",
        "out": "../../../../etc/passwd",
        "absolute": "/etc/passwd",
        "sly": "a/../../../../etc",
        "dangling": "nowhere",
    }.items():
        (srt / name).symlink_to(target)
    os.mkfifo(srt / "pipe")
    exported = export(take(store, site), tmp_path / "out")
    srt = exported.into / "sglang/srt"
    assert {path.name: os.readlink(path) for path in srt.iterdir() if path.is_symlink()} == {
        "in": "a.py",
        "up": "../jit_kernel/k.cu",
        "dangling": "nowhere",
    }
    assert [path.rpartition("/")[2] for path, _why in exported.left_out] == [
        "absolute",
        "built.so",
        "out",
        "pipe",
        "sly",
    ]


NAMES = st.sampled_from(["a", "b", "c"])
TARGETS = st.lists(st.sampled_from(["..", ".", "a", "b", "c", ""]), min_size=1, max_size=6).map("/".join)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@settings(max_examples=150, deadline=None)
@given(links=st.dictionaries(PATHS, TARGETS, max_size=6), folders=st.lists(PATHS, max_size=4))
def test_no_set_of_allowed_links_leads_out(links: dict[str, str], folders: list[str]):
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(os.path.realpath(temporary)) / "top"
        top.mkdir()
        for path in folders:
            (top / path).mkdir(parents=True, exist_ok=True)
        made = []
        for path, target in links.items():
            beyond = any((top / parent).is_symlink() for parent in Path(path).parents)
            if not beyond and _stays_inside(path, target):
                with suppress(OSError):
                    (top / path).parent.mkdir(parents=True, exist_ok=True)
                    (top / path).symlink_to(target)
                    made.append(path)
        for path in made:
            # What leads nowhere, or round in circles, leads out of nothing.
            with suppress(OSError, RuntimeError):
                real = os.path.realpath(top / path, strict=True)
                assert real == str(top) or real.startswith(f"{top}/"), (path, links)
