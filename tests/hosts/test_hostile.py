"""Hosts whose disk, clock, locks or paths are against us: a clear error, and nothing lost.

Every test goes through the commands, against a real agent process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.agent.harness import make_site, tree_of
from tests.cli.harness import ENGINE, ONE, TWO, Cli
from tests.hosts.disks import Disk

YEAR = 365 * 86400


class Box:
    """A user, and an install on a disk of its own; the state lies on the same disk unless said otherwise."""

    def __init__(self, cli: Cli, disk: Disk) -> None:
        self.cli, self.disk = cli, disk
        self.site = make_site(disk.folder, ENGINE)
        self.state = disk.folder / "state"

    def run(self, *arguments: str, site: Path | None = None):
        where = ["--host", f"local:{site or self.site}", "--python", self.disk.python]
        if arguments[0] not in ("snapshot", "grep"):
            where += ["--state-dir", str(self.state)]
        return self.cli.run(*arguments, *where)

    def patch(self, text: str) -> str:
        return self.cli.patch("one.patch", text)


@pytest.fixture(params=["mounted", "stand-in"])
def box(request, tmp_path, monkeypatch):
    """On a mounted file system (a stand-in where none can be mounted), or through the stand-in."""
    (tmp_path / "user").mkdir()
    disk = Disk(tmp_path, mounted=request.param == "mounted")
    yield Box(Cli(tmp_path / "user", monkeypatch), disk)
    disk.close()


TROUBLES = [
    ("mounted", "fill", "state elsewhere"),
    ("mounted", "freeze", "state elsewhere"),
    ("stand-in", "freeze", "state on it"),
]


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Through the stand-in alone: no file system does these things on request."""
    (tmp_path / "user").mkdir()
    return Box(Cli(tmp_path / "user", monkeypatch), Disk(tmp_path, mounted=False))


def one_clear_error(result, codes: set[str], *words: str) -> None:
    assert result.status in (3, 6), result.err
    (line,) = [line for line in result.err.splitlines() if line.startswith("error[")]
    assert line.partition("[")[2].partition("]")[0] in codes, result.err
    assert "hint: " in result.err
    for word in words:
        assert word in result.err


@pytest.mark.parametrize(("box", "trouble", "where"), TROUBLES, indirect=["box"])
def test_a_disk_that_takes_nothing(box, trouble, where):
    big = TWO + "".join(
        f"--- /dev/null\n+++ b/sglang/srt/big{n}.py\n@@ -0,0 +1 @@\n+X = '{'x' * 70000}'\n" for n in "ab"
    )
    if where == "state elsewhere" and box.disk.mounted:
        box.state = box.cli.folder / "state"
    old = tree_of(box.site)
    getattr(box.disk, trouble)()
    words = "No space left" if trouble == "fill" else "Read-only file system"
    one_clear_error(box.run("apply", box.patch(big)), {"DD504", "DD508", "DD505"}, words)
    assert tree_of(box.site) == old
    # What only reads still works.
    assert box.run("status").status == 0
    assert box.run("snapshot").status == 0
    box.disk.mend()
    status = box.run("status", "--json").json
    assert status["interrupted"] is None
    assert status["holder"] is None
    assert box.run("apply", box.patch(big)).status == 0
    # And back, with the disk full again: undone or done, never between.
    new = tree_of(box.site)
    getattr(box.disk, trouble)()
    result = box.run("rollback", "one")
    box.disk.mend()
    assert box.run("recover").status == 0
    assert tree_of(box.site) == (old if result.status == 0 else new)


def test_a_file_system_without_locks(odd):
    """T45 on NFS: flock fails with ENOLCK; nothing is changed without the lock."""
    old = tree_of(odd.site)
    odd.disk.answer("ENOLCK")
    one_clear_error(odd.run("apply", odd.patch(ONE)), {"DD508"}, "cannot lock", "state_dir")
    assert tree_of(odd.site) == old
    odd.disk.mend()
    assert odd.run("apply", odd.patch(ONE)).status == 0


@pytest.mark.parametrize("off", [-YEAR, YEAR])
def test_a_clock_that_is_a_year_off(odd, off):
    old = tree_of(odd.site)
    odd.disk.answer(f"clock {off}")
    assert odd.run("apply", odd.patch(ONE)).status == 0
    # What was written then bears that time, on disk, too.
    then = time.time() + off
    for path in [*odd.state.rglob("*"), *odd.site.rglob("*.py")]:
        os.utime(path, (then, then))
    odd.disk.mend()
    again = odd.cli.patch("two.patch", TWO)
    assert odd.run("apply", again).status == 0
    history = odd.run("history", "--json").json["history"]
    assert [item["sets"][0]["name"] for item in history] == ["one", "two"]
    assert abs(int(history[0]["time"][:4]) - int(history[1]["time"][:4])) == 1
    assert odd.run("rollback", "two").status == 0
    assert odd.run("rollback", "one").status == 0
    assert tree_of(odd.site) == old


def test_a_root_behind_symbolic_links(odd):
    """/opt/current -> /opt/v1: one tree, one state, one lock, by whichever name."""
    links = odd.disk.folder / "links"
    links.mkdir()
    (links / "current").symlink_to(odd.site.parent)
    (links / "again").symlink_to("current")
    through = links / "again" / odd.site.name
    old = tree_of(odd.site)
    assert odd.run("apply", odd.patch(ONE), site=through).status == 0
    assert odd.run("status", "--json").json["root"]["site"] == str(odd.site)
    assert odd.run("status", "--json").json["sets"][0]["state"] == "applied"
    assert len(list(odd.state.iterdir())) == 1
    assert odd.run("rollback", "one").status == 0
    assert tree_of(odd.site) == old
    # The link is turned to another version meanwhile: another root, which knows nothing of the set.
    other = make_site(odd.disk.folder / "v2", ENGINE)
    assert odd.run("apply", odd.patch(ONE), site=through).status == 0
    (links / "current").unlink()
    (links / "current").symlink_to(other.parent)
    status = odd.run("status", "--json", site=through).json
    assert status["root"]["site"] == str(other)
    assert not any(item["state"] == "applied" for item in status["sets"])
    assert odd.run("rollback", "one", site=through).status == 3


def test_a_package_folder_that_is_a_link(odd):
    """site-packages/sglang -> /srv/sglang/python/sglang, as some images have it."""
    real = odd.disk.folder / "srv"
    real.mkdir()
    (odd.site / "sglang").rename(real / "sglang")
    (odd.site / "sglang").symlink_to(real / "sglang")
    assert odd.run("apply", odd.patch(ONE)).status == 0
    assert (real / "sglang/srt/a.py").read_text() == "A = 2\n"
    assert (odd.site / "sglang").is_symlink()
    assert odd.run("status", "--json").json["root"]["site"] == str(real)


def test_links_in_a_circle(odd):
    circle = odd.disk.folder / "circle"
    circle.symlink_to("circle")
    result = odd.run("status", site=circle)
    assert result.status == 2
    assert "[DD007]" in result.err
