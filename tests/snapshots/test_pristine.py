"""Wheels: read and unpacked with every byte checked."""

from __future__ import annotations

import csv
import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.compare import compare
from ddtree_deploy.snapshots.pristine import read_pristine, unpack
from ddtree_deploy.snapshots.pull import pull
from ddtree_deploy.snapshots.store import Store
from tests.snapshots.hosts import session
from tests.snapshots.smallwheel import FILES, INFO, make_wheel, row


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "small.whl")


# Reading.


def test_a_wheel_is_a_mapping(small: Path):
    with read_pristine(small) as tree:
        assert dict(tree) == {**FILES, f"{INFO}/RECORD": tree[f"{INFO}/RECORD"]}
        assert (tree.version, tree.dist_info, len(tree)) == ("0.0.1", INFO, 7)
        assert "sglang/srt/a.py" in tree
        assert "sglang/srt/b.py" not in tree
        with pytest.raises(KeyError):
            tree["sglang/srt/b.py"]
        assert list(tree.entries) == ["sglang/srt/a.py", "sglang/srt/tool.sh"]
        assert (tree.mode("sglang/srt/a.py"), tree.mode("sglang/srt/tool.sh")) == (0o644, 0o755)
        assert tree.sha256("sglang/srt/a.py") == hashlib.sha256(b"A = 1\n").hexdigest()


def changed(**files: bytes | None) -> dict[str, bytes]:
    return {path: data for path, data in {**FILES, **files}.items() if data is not None}


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"../x.py": b""}, "unsafe name"),
        ({"/x.py": b""}, "unsafe name"),
        ({"sglang/../../x.py": b""}, "unsafe name"),
        ({"sglang//x.py": b""}, "unsafe name"),
        ({"sglang/./x.py": b""}, "unsafe name"),
        ({"sglang\\x.py": b""}, "unsafe name"),
        ({f"{INFO}/METADATA": None}, "METADATA"),
        ({f"{INFO}/METADATA": b"Name: sglang\n"}, "names no version"),
        ({"other-1.dist-info/METADATA": b""}, "no dist-info of sglang"),
        ({"sglang-0.0.1.data/scripts/x": b""}, ".data folder"),
    ],
)
def test_an_unsound_wheel(tmp_path: Path, files: dict[str, bytes | None], part: str):
    wheel = make_wheel(tmp_path / "bad.whl", changed(**files))
    with pytest.raises(DeployError) as caught:
        unpack(wheel, tmp_path / "site")
    assert caught.value.code == "DD405"
    assert part in caught.value.message
    assert {path.name for path in tmp_path.iterdir()} == {"bad.whl"}


GOOD = "\n".join(row(*item) for item in FILES.items()) + f"\n{INFO}/RECORD,,\n"


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ("", "differ in 6 files"),
        (GOOD.replace(row("sglang/srt/a.py", b"A = 1\n") + "\n", ""), "the first is sglang/srt/a.py"),
        (GOOD + "sglang/srt/more.py,sha256=AAAA,3\n", "the first is sglang/srt/more.py"),
        (GOOD.replace("sha256=", "md5="), "the row of"),
        (GOOD + row("sglang/srt/a.py", b"A = 1\n"), "the row of sglang/srt/a.py"),
        (GOOD + "one field\n", "cannot be used"),
        (GOOD.replace(",6\n", ",7\n"), "does not have RECORD's hash"),
        (GOOD.replace(row("sglang/srt/a.py", b"A = 1\n"), row("sglang/srt/a.py", b"A = 2\n")), "RECORD's hash"),
        (GOOD.replace("sha256=47DEQ", "sha256=!"), "RECORD"),
    ],
)
def test_an_unsound_record(tmp_path: Path, record: str, part: str):
    wheel = make_wheel(tmp_path / "bad.whl", record=record)
    with pytest.raises(DeployError) as caught:
        unpack(wheel, tmp_path / "site")
    assert caught.value.code == "DD405"
    assert part in caught.value.message
    assert {path.name for path in tmp_path.iterdir()} == {"bad.whl"}


def test_links_and_doubles_in_a_wheel(tmp_path: Path):
    with pytest.raises(DeployError, match="symbolic link"):
        read_pristine(make_wheel(tmp_path / "link.whl", links=("sglang/srt/a.py",)))
    wheel = make_wheel(tmp_path / "double.whl")
    with zipfile.ZipFile(wheel, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("sglang/srt/a.py", b"A = 1\n")
    with pytest.raises(DeployError, match=r"holds sglang/srt/a\.py twice"):
        read_pristine(wheel)


def test_damaged_files_are_no_wheels(small: Path, tmp_path: Path):
    data = small.read_bytes()
    for number, damaged in enumerate((b"", b"text", data[:-40], data[: len(data) // 2])):
        path = tmp_path / f"{number}.whl"
        path.write_bytes(damaged)
        with pytest.raises(DeployError) as caught:
            read_pristine(path)
        assert caught.value.code == "DD405"
    with pytest.raises(DeployError):
        read_pristine(tmp_path / "absent.whl")


def test_every_flipped_byte_of_a_wheel_is_harmless_or_found(small: Path, tmp_path: Path):
    """Whatever is damaged, what comes out is an error or exactly the files: never other bytes."""
    data = small.read_bytes()
    path, found = tmp_path / "flipped.whl", 0
    for at in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        try:
            with read_pristine(path) as tree:
                out = {name: tree[name] for name in tree if not name.startswith(INFO)}
        except DeployError as error:
            assert error.code == "DD405"
            found += 1
        else:
            assert out == {name: text for name, text in FILES.items() if not name.startswith(INFO)}
    assert found > len(data) / 6


# Unpacking.


def test_unpack_is_an_install(small: Path, tmp_path: Path):
    site = unpack(small, tmp_path / "deep" / "site", installer="pip")
    for path, data in FILES.items():
        assert (site / path).read_bytes() == data
    assert (site / INFO / "INSTALLER").read_text() == "pip\n"
    rows = {line[0]: line[1:] for line in csv.reader((site / INFO / "RECORD").read_text().splitlines())}
    assert rows[f"{INFO}/INSTALLER"] == row("", b"pip\n").split(",")[1:]
    assert rows.keys() == {*FILES, f"{INFO}/RECORD", f"{INFO}/INSTALLER"}
    assert os.access(site / "sglang/srt/tool.sh", os.X_OK)
    assert (site / "sglang/srt/a.py").stat().st_mode & 0o777 == 0o644
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"site"}


def test_unpack_overwrites_nothing(small: Path, tmp_path: Path):
    site = tmp_path / "site"
    site.mkdir()
    unpack(small, site)
    (site / "mine").write_text("x")
    with pytest.raises(DeployError) as caught:
        unpack(small, site)
    assert caught.value.code == "DD007"
    assert (site / "mine").read_text() == "x"
    assert {path.name for path in tmp_path.iterdir()} == {"site", "small.whl"}


# The published wheel.


@pytest.mark.wheel
def test_the_published_wheel_unpacks_as_record_says(wheel: Path, wheel_site: Path):
    record = wheel_site / "sglang-0.5.11.dist-info" / "RECORD"
    rows = list(csv.reader(record.read_text().splitlines()))
    assert len(rows) == 2537
    for path, told, size in rows:
        data = (wheel_site / path).read_bytes()
        if path != "sglang-0.5.11.dist-info/RECORD":
            assert row(path, data) == f"{path},{told},{size}"
    with read_pristine(wheel) as tree:
        assert tree.version == "0.5.11"
        assert len(tree.entries) == 1872


@pytest.mark.wheel
def test_a_snapshot_of_the_published_engine_is_pristine(wheel: Path, wheel_site: Path, tmp_path: Path):
    with session(wheel_site) as host:
        snapshot = pull(host, Store(tmp_path / "store")).snapshot
    assert snapshot.header.facts["record"] == {
        "state": "present",
        "problem": None,
        "counts": {"ok": 1872},
        "missing": [],
    }
    with read_pristine(wheel) as tree:
        assert compare(tree, snapshot, exact_modes=False) == []
        assert snapshot.read("sglang/srt/server_args.py") == tree["sglang/srt/server_args.py"]


@pytest.mark.wheel
def test_an_edit_shows_against_the_published_engine(wheel: Path, copy_site: Path, tmp_path: Path):
    target = copy_site / "sglang/srt/server_args.py"
    target.write_bytes(target.read_bytes() + b"# edited\n")
    (copy_site / "sglang/srt/managers/scheduler.py").unlink()
    (copy_site / "sglang/srt/new.py").write_bytes(b"")
    with session(copy_site) as host:
        snapshot = pull(host, Store(tmp_path / "store")).snapshot
    with read_pristine(wheel) as tree:
        found = [(diff.path, diff.status) for diff in compare(tree, snapshot, exact_modes=False)]
    assert found == [
        ("sglang/srt/managers/scheduler.py", "removed"),
        ("sglang/srt/new.py", "added"),
        ("sglang/srt/server_args.py", "changed"),
    ]
    assert snapshot.header.facts["record"]["missing"] == ["sglang/srt/managers/scheduler.py"]
    assert snapshot.header.facts["record"]["counts"] == {"ok": 1870, "differs": 1, "unlisted": 1}
