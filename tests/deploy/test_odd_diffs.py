"""The odd diffs through the command itself: paths below sglang/srt/, a real agent, a tree on disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ddtree_deploy.patching.images import LinkImage
from tests.agent.harness import tree_of
from tests.cli.harness import Cli
from tests.patching.cases import CASES, load

BELOW = b"sglang/srt/"
HANDED = {case.name for case in load("odd-diffs.json")}
_HEADER = re.compile(rb'^((?:--- |\+\+\+ )"?[ab]/|rename (?:from|to) |copy (?:from|to) |Index: )(?!/)', re.MULTILINE)
_GIT = re.compile(rb'^(diff --git "?a/)(.*?)("? "?b/)', re.MULTILINE)


def below(patch: bytes, strip: int) -> bytes:
    """The diff with every path that it names put below the engine's folder."""
    patch = _HEADER.sub(rb"\g<1>" + BELOW, patch)
    patch = _GIT.sub(rb"\g<1>" + BELOW + rb"\g<2>\g<3>" + BELOW, patch)
    if strip == 0:
        patch = re.sub(rb"^(--- |\+\+\+ )(?=[fn]\.py)", rb"\g<1>" + BELOW, patch, flags=re.MULTILINE)
    return patch


@pytest.fixture
def cli(tmp_path, monkeypatch):
    return Cli(tmp_path, monkeypatch)


def lay_out(cli: Cli, files: dict) -> None:
    for name in ("a.py", "b.py"):
        (cli.site / "sglang/srt" / name).unlink()
    for name, image in files.items():
        path = cli.site / "sglang/srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, LinkImage):
            path.symlink_to(image.target)
        else:
            path.write_bytes(image.data)
            path.chmod(image.mode)


def as_found(image) -> tuple:
    return ("link", image.target) if isinstance(image, LinkImage) else (image.mode, image.data)


# What is odd about a few is where their paths begin; put below the engine's folder they are other cases.
PUT_BELOW = [
    case
    for case in CASES
    if case.name != "drive letter" and (case.want is None or BELOW in below(case.patch, case.strip))
]


@pytest.mark.parametrize("case", PUT_BELOW, ids=[case.name for case in PUT_BELOW])
def test_odd_diff(cli, case):
    lay_out(cli, case.files)
    patch = cli.folder / "odd.patch"
    patch.write_bytes(below(case.patch, case.strip))
    before = tree_of(cli.site)
    around = sorted(os.listdir(cli.folder))
    arguments = ("apply", str(patch), "--strip", str(case.strip), "--any-suffix")
    result = cli.on_host(*arguments)
    after = tree_of(cli.site)
    if case.want is None:
        assert result.status in (2, 3), result
        assert result.err.startswith("error[DD")
        assert "Traceback" not in result.err
        assert after == before
        assert sorted(os.listdir(cli.folder)) == around
        assert not Path("/tmp/ddtree-evil.py").exists()
        return
    assert result.status == 0, result.err
    wanted = {key: value for key, value in before.items() if key not in {f"sglang/srt/{name}" for name in case.files}}
    wanted |= {f"sglang/srt/{name}": as_found(image) for name, image in case.want.items()}
    folders = ("dir",)
    assert {key: value for key, value in after.items() if value != folders} == {
        key: value for key, value in wanted.items() if value != folders
    }
    if case.name not in HANDED:
        return  # the planner's own tests go forward and back with every case
    # And back: the tree is, to the mode, what it was.
    again = cli.on_host(*arguments)
    assert again.status == 0
    assert "already applied" in again.out
    if after == before:
        return  # it was so already: nothing was recorded, nothing is to be undone
    undone = cli.on_host("rollback", "odd")
    assert undone.status == 0, undone.err
    assert tree_of(cli.site) == before
