"""Upgrades as a person types and reads them."""

from __future__ import annotations

import pytest

from tests.agent.harness import tree_of
from tests.cli.harness import ENGINE, ONE
from tests.deploy.sets import SRT, write_set

A1, A2, A3 = b"A = 1\n", b"A = 2\n", b"A = 3\n"


@pytest.fixture
def sets(cli, monkeypatch):
    """A folder of sets that the commands find, and a way to write one of them."""
    monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(cli.folder / "sets"))

    def write(name: str, version: str, files, requires=()):
        write_set(cli.folder / "sets", name, version, {ENGINE: files}, requires)

    write("base", "1.0", {"a.py": (A1, A2)})
    write("top", "1.0", {"a.py": (A2, A2 + b"TOP = 1\n")}, ["base"])
    return write


def newer(write) -> None:
    write("base", "2.0", {"a.py": (A1, A3), "n.py": (None, b"N = 1\n")})
    write("top", "1.0", {"a.py": (A3, A3 + b"TOP = 1\n")}, ["base"])


def test_from_status_to_upgrade_and_back(cli, sets):
    assert cli.on_host("apply", "top").status == 0
    newer(sets)
    status = cli.on_host("status")
    assert status.status == 1
    assert "base 1.0  superseded  2.0 is known here" in status.out
    before = tree_of(cli.site)
    checked = cli.on_host("apply", "base", "--check")
    assert checked.status == 0
    assert "base 1.0 -> 2.0  would be applied  2 file(s)" in checked.out
    assert "checked only, nothing was written" in checked.out
    assert tree_of(cli.site) == before
    applied = cli.on_host("apply", "base", "-m", "the second fault")
    assert applied.status == 0, applied.err
    assert applied.out.splitlines()[1:] == [
        f"base 1.0 -> 2.0  applied  2 file(s), family {ENGINE}",
        f"top 1.0  applied  1 file(s), family {ENGINE}",
        f"  change {SRT}a.py",
        f"  add    {SRT}n.py",
        f"local:{cli.site}: 2 file(s) read back, each with the planned sha256",
    ]
    assert "note: top comes along: it builds on what is replaced" in applied.err
    status = cli.on_host("status")
    assert status.status == 0
    assert "base 2.0  applied  can go back to 1.0\n" in status.out
    refused = cli.on_host("rollback", "base", "--to", "1.0")
    assert refused.status == 3
    assert "[DD110]" in refused.err
    back = cli.on_host("rollback", "base", "--to", "1.0", "--with-dependents")
    assert back.status == 0, back.err
    assert back.out.splitlines() == [
        "base back from 2.0 to 1.0",
        "top stays at 1.0",
        f"  {SRT}a.py: restored",
        f"  {SRT}n.py: removed",
        f"local:{cli.site}: now at base 1.0, top 1.0",
    ]
    assert tree_of(cli.site) == before
    history = [line.split("  ") for line in cli.on_host("history").out.splitlines()[1:]]
    assert [[word.strip() for word in line if word.strip()][1:3] for line in history] == [
        ["apply", "base 1.0, top 1.0"],
        ["apply", "base 1.0 -> 2.0, top 1.0"],
        ["rollback", "base 2.0 -> 1.0, top 1.0"],
    ]


def test_a_downgrade_is_asked_for(cli, sets):
    newer(sets)
    cli.on_host("apply", "base")
    sets("base", "1.0", {"a.py": (A1, A2)})
    refused = cli.on_host("apply", "base")
    assert refused.status == 3
    assert "[DD114]" in refused.err
    assert "hint: get the newer set here, or give --downgrade to replace it by the older one" in refused.err
    assert cli.on_host("apply", "base", "--downgrade").status == 0
    assert (cli.site / SRT / "a.py").read_bytes() == A2


def test_several_sets_and_files_at_once(cli, sets):
    one = cli.patch("one.patch", ONE.replace("srt/a.py", "srt/b.py").replace("A =", "B ="))
    result = cli.on_host("apply", one, "top", "--json")
    assert result.status == 0, result.err
    assert [item["name"] for item in result.json["sets"]] == ["one", "base", "top"]
    again = cli.on_host("apply", "base", "top", one)
    assert "already applied" in again.out
    assert cli.on_host("apply", one, str(cli.patch("x.patch", ONE)), "--check").status == 3
    (cli.folder / "other").mkdir()
    other = cli.patch("other/one.patch", ONE)
    clash = cli.on_host("apply", one, other)
    assert clash.status == 2
    assert "another set of the name one is asked for too" in clash.err


def test_a_patch_file_is_replaced_by_its_next_version(cli):
    first = cli.on_host("apply", cli.patch("one.patch", ONE), "--json").json["sets"][0]["version"]
    second = cli.on_host("apply", cli.patch("one.patch", ONE.replace("A = 2", "A = 3")), "--json").json
    assert second["sets"][0]["from"] == first
    assert (cli.site / SRT / "a.py").read_bytes() == A3
    back = cli.on_host("rollback", "one.patch", "--to", first, "--json").json
    assert back["back"] == [{"name": "one", "version": first, "from": second["sets"][0]["version"]}]
    assert (cli.site / SRT / "a.py").read_bytes() == A2


def test_a_version_that_the_host_does_not_keep(cli, sets):
    cli.on_host("apply", "base")
    result = cli.on_host("rollback", "base", "--to", "0.9")
    assert result.status == 3
    assert "error[DD115]" in result.err
    assert "base cannot go back to 0.9: this host keeps no such version" in result.err


def test_links_are_kept_through_an_upgrade(cli, sets):
    cache = cli.folder / "cache.py"
    cache.write_bytes(A1)
    path = cli.site / SRT / "a.py"
    path.unlink()
    path.symlink_to(cache)
    assert cli.on_host("apply", "base", "--break-links").status == 0
    newer(sets)
    refused = cli.on_host("apply", "base")
    assert refused.status == 3
    assert "[DD509]" in refused.err
    result = cli.on_host("apply", "base", "--break-links")
    assert result.status == 0, result.err
    assert (path.read_bytes(), cache.read_bytes()) == (A3, A1)
    assert cli.on_host("rollback", "base").status == 0
    assert path.readlink() == cache
