"""Writing rendered files: all or none, whole, with the right permissions, and no edited file lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.render import RenderedFile
from ddtree_deploy.launch.write import Outcome, write_files

FILES = (
    RenderedFile("s.env", 0o600, 'A="ü"\n', "/etc/sglang/s.env"),
    RenderedFile("sglang-s.service", 0o644, "[Unit]\n", "/etc/systemd/system/sglang-s.service"),
    RenderedFile("s.sh", 0o755, "#!/bin/sh\n", None),
)
NEWER = tuple(RenderedFile(file.name, file.mode, file.text + "# new\n", file.install_path) for file in FILES)


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in the folder, hidden files too."""
    return {path.name: (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) for path in folder.iterdir()}


def wanted(files: tuple[RenderedFile, ...]) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.mode, file.text.encode()) for file in files}


@pytest.fixture(params=[0o022, 0o077, 0o000])
def umask(request: pytest.FixtureRequest):
    old = os.umask(request.param)
    yield
    os.umask(old)


def test_new_files_whatever_the_umask(tmp_path: Path, umask: None) -> None:
    folder = tmp_path / "a" / "b"
    assert write_files(FILES, folder) == [Outcome(folder / file.name, "written") for file in FILES]
    assert state(folder) == wanted(FILES)


def test_again_is_unchanged_and_writes_nothing(tmp_path: Path) -> None:
    write_files(FILES, tmp_path)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert {one.outcome for one in write_files(FILES, tmp_path)} == {"unchanged"}
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_an_edited_file_is_kept_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "sglang-s.service").write_text("mine\n")
    before = state(tmp_path)
    with pytest.raises(DeployError) as caught:
        write_files(FILES, tmp_path)
    assert caught.value.code == "DD603"
    assert "sglang-s.service" in caught.value.message
    assert "s.env" not in caught.value.message
    assert "--force" in str(caught.value.hint)
    assert state(tmp_path) == before


def test_force_replaces(tmp_path: Path) -> None:
    write_files(FILES[:2], tmp_path)
    outcomes = write_files((NEWER[0], FILES[1], NEWER[2]), tmp_path, force=True)
    assert [one.outcome for one in outcomes] == ["replaced", "unchanged", "written"]
    assert state(tmp_path) == wanted((NEWER[0], FILES[1], NEWER[2]))


def test_permissions_that_are_too_wide_are_mended_without_force(tmp_path: Path) -> None:
    write_files(FILES, tmp_path)
    (tmp_path / "s.env").chmod(0o644)
    outcomes = write_files(FILES, tmp_path)
    assert [one.outcome for one in outcomes] == ["replaced", "unchanged", "unchanged"]
    assert state(tmp_path) == wanted(FILES)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["link", "broken link", "folder"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, kind: str, force: bool) -> None:
    target = tmp_path / "elsewhere"
    folder = tmp_path / "out"
    folder.mkdir()
    if kind == "folder":
        (folder / "s.sh").mkdir()
    else:
        if kind == "link":
            target.write_text("precious\n")
        (folder / "s.sh").symlink_to(target)
    with pytest.raises(DeployError) as caught:
        write_files(FILES, folder, force=force)
    assert caught.value.code == "DD007"
    assert [path.name for path in folder.iterdir()] == ["s.sh"]
    assert kind != "link" or target.read_text() == "precious\n"


@pytest.mark.parametrize("step", ["mkstemp", "fsync", "replace"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("old", [(), FILES])
def test_a_failure_at_any_step_leaves_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, old: tuple[RenderedFile, ...]
) -> None:
    import tempfile

    write_files(old, tmp_path)
    before = state(tmp_path)
    owner = {"mkstemp": tempfile, "fsync": os, "replace": Path}[step]
    real = getattr(owner, step)
    calls = 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, step, failing)
    with pytest.raises(DeployError) as caught:
        write_files(NEWER, tmp_path, force=True)
    assert caught.value.code == "DD007"
    assert "No space left on device" in caught.value.message
    assert calls >= number
    assert state(tmp_path) == before


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(DeployError) as caught:
        write_files(FILES, tmp_path / "x")
    assert caught.value.code == "DD007"
