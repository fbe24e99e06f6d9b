"""Finding wheels: in a wheelhouse, in the cache, by an explicit download; never another file than the pinned one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import wheels
from ddtree_deploy.snapshots.pins import Pin
from ddtree_deploy.snapshots.wheels import Sources, brought, examine, find_wheel, keep, tags_of
from tests.snapshots.smallwheel import FILES, INFO, make_wheel

TAGS = "cp312-cp312-manylinux_2_34_x86_64"
ASKED = Sources(download=True)


def fetch(version: str, *tags: str) -> Path:
    return find_wheel(version, *tags, sources=ASKED)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "small.whl")


@pytest.fixture
def pinned(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    pin = Pin("0.0.1", TAGS, hashlib.sha256(small.read_bytes()).hexdigest(), small.stat().st_size)
    monkeypatch.setattr(wheels, "pins", lambda: (pin,))
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(tmp_path / "cache"))
    return pin


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, serves: bytes | None, returncode: int = 0, stderr: str = ""
) -> list[list[str]]:
    """A pip that "downloads" these bytes; the commands that it was given."""
    commands: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if serves is not None:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "sglang-0.0.1-cp312-cp312-manylinux_2_34_x86_64.whl").write_bytes(serves)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return commands


def test_a_download_is_kept(pinned: Pin, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands = fake_pip(monkeypatch, small.read_bytes())
    wheel = fetch("0.0.1")
    assert wheel == tmp_path / "cache/wheels" / pinned.filename
    assert wheel.read_bytes() == small.read_bytes()
    assert fetch("0.0.1") == wheel
    (command,) = commands
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert command[-1] == "sglang==0.0.1"
    for option, value in (("--python-version", "3.12"), ("--abi", "cp312"), ("--platform", "manylinux_2_34_x86_64")):
        assert command[command.index(option) + 1] == value
    assert {path.name for path in wheel.parent.iterdir()} == {pinned.filename}


def test_another_file_than_the_pinned_never_lands(
    pinned: Pin, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_pip(monkeypatch, small.read_bytes() + b"x")
    with pytest.raises(DeployError) as caught:
        fetch("0.0.1")
    assert caught.value.code == "DD405"
    assert list((tmp_path / "cache/wheels").iterdir()) == []


def test_a_damaged_cache_is_fetched_again(pinned: Pin, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands = fake_pip(monkeypatch, small.read_bytes())
    wheel = fetch("0.0.1")
    wheel.write_bytes(b"damaged")
    assert fetch("0.0.1").read_bytes() == small.read_bytes()
    assert len(commands) == 2


def test_no_network(pinned: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_pip(monkeypatch, None, 1, "Looking in indexes: https://me:secret@index/simple\nERROR: no route to host\n")
    with pytest.raises(DeployError) as caught:
        fetch("0.0.1")
    assert caught.value.code == "DD404"
    assert "wheel add FILE" in (caught.value.hint or "")
    assert caught.value.details == (
        "Looking in indexes: https://***@index/simple",
        "ERROR: no route to host",
    )
    assert list((tmp_path / "cache/wheels").iterdir()) == []


def test_a_download_that_takes_too_long(pinned: Pin, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **_options: object) -> None:
        raise subprocess.TimeoutExpired(command, 600)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    with pytest.raises(DeployError) as caught:
        fetch("0.0.1")
    assert caught.value.code == "DD404"


def test_no_pip(pinned: Pin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(DeployError) as caught:
        fetch("0.0.1")
    assert caught.value.code == "DD404"
    assert "wheel add FILE" in (caught.value.hint or "")


def test_another_pip_serves(pinned: Pin, small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: "/usr/bin/" + name)
    commands = fake_pip(monkeypatch, small.read_bytes())
    fetch("0.0.1")
    assert commands[0][0] == "/usr/bin/pip3"


def test_a_wheel_that_was_brought(pinned: Pin, small: Path, tmp_path: Path):
    assert brought(small, "0.0.1") == small
    other = make_wheel(tmp_path / "other.whl", {**FILES, "sglang/srt/a.py": b"A = 2\n"})
    with pytest.raises(DeployError) as caught:
        brought(other, "0.0.1")
    assert caught.value.code == "DD405"
    with pytest.raises(DeployError) as caught:
        brought(tmp_path / "absent.whl", "0.0.1")
    assert caught.value.code == "DD404"
    assert not (tmp_path / "cache").exists()


def test_a_version_without_a_pin(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wheels, "pins", lambda: ())
    with pytest.raises(DeployError) as caught:
        fetch("0.0.1")
    assert caught.value.code == "DD404"
    assert brought(small, "0.0.1") == small
    with pytest.raises(DeployError, match=r"is sglang 0\.0\.1, not 0\.0\.2") as caught:
        brought(small, "0.0.2")
    assert caught.value.code == "DD405"


def test_tags_without_a_pin_take_the_same_platform(monkeypatch: pytest.MonkeyPatch, small: Path, tmp_path: Path):
    digest = hashlib.sha256(small.read_bytes()).hexdigest()
    every = tuple(
        Pin("0.0.1", f"{tag}-{tag}-manylinux_2_34_{machine}", digest, 1)
        for machine in ("aarch64", "x86_64")
        for tag in ("cp310", "cp312")
    )
    monkeypatch.setattr(wheels, "pins", lambda: every)
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(tmp_path / "cache"))
    fake_pip(monkeypatch, small.read_bytes())
    assert fetch("0.0.1", "cp312", "manylinux_2_34_x86_64").name == every[3].filename
    assert fetch("0.0.1", "cp38", "manylinux_2_34_x86_64").name == every[2].filename
    assert fetch("0.0.1", "cp312", "macosx_arm64").name == every[1].filename


def test_tags_of_a_host():
    assert tags_of({"python": {"tag": "cp312", "machine": "x86_64"}}) == ("cp312", "manylinux_2_34_x86_64")
    assert tags_of({"python": {"tag": "cp311", "machine": "arm64"}}) == ("cp311", "manylinux_2_34_aarch64")


# No hidden download.


def test_nothing_is_downloaded_unasked(pinned: Pin, monkeypatch: pytest.MonkeyPatch):
    commands = fake_pip(monkeypatch, None)
    with pytest.raises(DeployError) as caught:
        find_wheel("0.0.1")
    assert (caught.value.code, commands) == ("DD404", [])
    assert "wheel fetch 0.0.1" in caught.value.hint
    with pytest.raises(DeployError) as caught:
        find_wheel("0.0.1", sources=Sources(download=True, offline=True))
    assert (caught.value.code, commands) == ("DD404", [])
    assert "offline" in caught.value.message
    assert "wheel fetch" not in caught.value.hint


def test_the_hint_names_the_tags_that_would_help(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    every = tuple(Pin("0.0.1", f"{tag}-{tag}-manylinux_2_34_x86_64", "0" * 64, 1) for tag in ("cp311", "cp312"))
    monkeypatch.setattr(wheels, "pins", lambda: every)
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DeployError) as caught:
        find_wheel("0.0.1", "cp311")
    assert "wheel fetch 0.0.1 --tags cp311-cp311-manylinux_2_34_x86_64`" in caught.value.hint
    with pytest.raises(DeployError) as caught:
        find_wheel("0.0.1", "cp311", any_tags=True)
    assert "wheel fetch 0.0.1`" in caught.value.hint


def test_a_download_is_announced(pinned: Pin, small: Path, monkeypatch: pytest.MonkeyPatch):
    fake_pip(monkeypatch, small.read_bytes())
    said: list[str] = []
    asked = Sources(download=True, announce=said.append)
    find_wheel("0.0.1", sources=asked)
    find_wheel("0.0.1", sources=asked)
    assert said == [f"downloading {pinned.filename} (0.0 MB)"]


def test_a_wheelhouse_comes_first_and_is_checked(pinned: Pin, small: Path, tmp_path: Path):
    house = tmp_path / "house"
    house.mkdir()
    sources = Sources((tmp_path / "empty", house))
    kept = keep(small, pinned)
    assert find_wheel("0.0.1", sources=sources) == kept
    (house / pinned.filename).write_bytes(b"something else")
    assert find_wheel("0.0.1", sources=sources) == kept
    (house / pinned.filename).write_bytes(small.read_bytes())
    assert find_wheel("0.0.1", sources=sources) == house / pinned.filename


def test_any_wheel_of_the_version_will_do_where_only_sources_count(
    monkeypatch: pytest.MonkeyPatch, small: Path, tmp_path: Path
):
    digest = hashlib.sha256(small.read_bytes()).hexdigest()
    every = tuple(Pin("0.0.1", f"{tag}-{tag}-manylinux_2_34_aarch64", digest, 1) for tag in ("cp310", "cp311"))
    monkeypatch.setattr(wheels, "pins", lambda: every)
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(tmp_path / "cache"))
    kept = keep(small, every[1])
    assert find_wheel("0.0.1", any_tags=True) == kept
    with pytest.raises(DeployError):
        find_wheel("0.0.1", "cp310", "manylinux_2_34_aarch64")


@pytest.mark.parametrize(
    ("value", "offline"), [("", False), ("0", False), ("False", False), (" no ", False), ("1", True), ("yes", True)]
)
def test_offline_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool):
    monkeypatch.setenv("DDTREE_DEPLOY_OFFLINE", value)
    assert wheels.offline_by_environment() is offline


def test_wheelhouses_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", "/a::/b")
    assert wheels.wheelhouses_by_environment() == (Path("/a"), Path("/b"))


# Adding.


def test_examine_knows_a_pinned_wheel_by_its_bytes(pinned: Pin, small: Path):
    assert examine(small) == (pinned, True)


def test_examine_a_wheel_that_is_not_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wheels, "pins", lambda: ())
    file = make_wheel(tmp_path / f"sglang-0.0.1-{TAGS}.whl")
    found, known = examine(file)
    assert not known
    assert found == Pin("0.0.1", TAGS, hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("x.whl", "Invalid wheel filename"),
        (f"sglang-0.0.2-{TAGS}.whl", "named as sglang 0.0.2, but holds sglang 0.0.1"),
        (f"other-0.0.1-{TAGS}.whl", "named as other 0.0.1"),
        (f"sglang-0.0.1-{TAGS}.zip", "Invalid wheel filename"),
    ],
)
def test_examine_refuses_a_name_that_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str
):
    monkeypatch.setattr(wheels, "pins", lambda: ())
    with pytest.raises(DeployError) as caught:
        examine(make_wheel(tmp_path / name))
    assert caught.value.code == "DD405"
    assert part in caught.value.message


def test_examine_refuses_other_bytes_under_a_pinned_name(pinned: Pin, tmp_path: Path):
    file = make_wheel(tmp_path / pinned.filename, {**FILES, "sglang/srt/a.py": b"A = 2\n"})
    with pytest.raises(DeployError, match="pinned is") as caught:
        examine(file)
    assert caught.value.code == "DD405"


def test_examine_reads_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wheels, "pins", lambda: ())
    good = make_wheel(tmp_path / "good.whl")
    with wheels.PristineTree(good) as tree:
        record = tree[f"{INFO}/RECORD"].decode()
    file = make_wheel(tmp_path / f"sglang-0.0.1-{TAGS}.whl", {**FILES, "sglang/lang/x.py": b"y\n"}, record)
    with pytest.raises(DeployError, match="does not have RECORD's hash"):
        examine(file)


def test_keep_refuses_what_is_not_the_pin(pinned: Pin, small: Path, tmp_path: Path):
    small.write_bytes(small.read_bytes() + b"x")
    with pytest.raises(DeployError, match="changed while"):
        keep(small, pinned)
    assert list((tmp_path / "cache/wheels").iterdir()) == []
