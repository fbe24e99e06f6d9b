"""What the agent itself does when layers are replaced: its refusals, its books, and state written before it could."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddtree_deploy.agent.layers import KEEP_GENERATIONS
from ddtree_deploy.agent.protocol import AgentError
from tests.agent.harness import THREE, Host, change, entry, layer, tree_of

A, B, C = ("sglang/srt/a.py", "sglang/srt/b.py", "sglang/srt/sub/c.py")
OLD_STATE = Path(__file__).parent.parent / "cases/state/before-upgrades"


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def refused(code: str, action, *args, **keywords) -> AgentError:
    with pytest.raises(AgentError) as caught:
        action(*args, **keywords)
    assert caught.value.code == code, caught.value
    return caught.value


def number(path: str, before: int, after: int):
    name = path[-4].upper()
    return change(path, b"%s = %d\n" % (name.encode(), before), b"%s = %d\n" % (name.encode(), after))


def test_what_is_taken_away_must_be_taken_whole(host):
    host.apply(layer("base", number(A, 1, 2)), layer("top", number(B, 1, 2), requires=["base"]))
    error = refused("DD307", host.apply, layer("base", number(A, 1, 3), version="2"), drop=["base"])
    assert "top would be left without what it builds on" in error.message
    host.apply(layer("free", number(C, 1, 2)))
    host.apply(layer("base", number(A, 1, 3), version="2"), drop=["base", "top"])
    assert [item["set"] for item in host.status()["layers"]] == ["free", "base"]
    assert (host.site / B).read_bytes() == b"B = 1\n"


def test_layers_that_do_not_begin_where_the_replaced_ones_did_are_refused(host):
    host.apply(layer("base", number(A, 1, 2)))
    refused("DD307", host.apply, layer("base", number(A, 2, 3), version="2"), drop=["base"])


def test_taking_away_alone_is_a_transaction_too(host):
    old = tree_of(host.site)
    host.apply(layer("base", *THREE))
    result = host.apply(drop=["base"])
    assert len(result["files"]) == 3
    assert tree_of(host.site) == old
    assert host.run("history")["history"][-1]["sets"] == [{"name": "base", "version": "1.0", "undone": True}]
    refused("DD307", host.apply)


def test_only_what_the_record_names_is_given_out(host):
    host.apply(layer("base", number(A, 1, 2)))
    secret = host.state / "objects" / entry(b"secret\n")["sha256"]
    secret.write_bytes(b"secret\n")
    for path, wanted in ((A, entry(b"secret\n")), (B, entry(b"A = 1\n")), ("../x", entry(b"A = 1\n")), (A, None)):
        refused("DD502", host.run, "stored", wanted=[{"path": path, "entry": wanted}])
    assert host.run("stored", wanted=[{"path": A, "entry": entry(b"A = 1\n")}]) == {"linked": {}, "missing": {}}


def test_no_more_generations_are_kept_than_promised(host):
    host.apply(layer("base", number(A, 1, 2)))
    for value in range(3, 10):
        host.apply(layer("base", number(A, 1, value), version=str(value)), drop=["base"])
    (only,) = host.status()["layers"]
    assert [past["version"] for past in only["replaced"]] == ["8", "7", "6"]
    assert len(only["replaced"]) == KEEP_GENERATIONS
    assert not any("replaced" in past for past in only["replaced"])


def test_owner_and_folders_are_handed_on(host):
    """A file that both versions delete comes back as its owner's; a folder that both use goes with the last."""
    added = "sglang/srt/new/deep/d.py"
    if os.geteuid() == 0:
        os.chown(host.site / C, 1234, 4321)
    owner = (host.site / C).stat().st_uid
    gone = change(C, b"C = 1\n", None)
    host.apply(layer("base", gone, change(added, None, b"D = 1\n")))
    host.apply(layer("base", gone, change(added, None, b"D = 2\n"), version="2"), drop=["base"])
    host.rollback("base")
    assert (host.site / C).stat().st_uid == owner
    assert not (host.site / "sglang/srt/new").exists()


def test_a_link_stays_a_link_below_an_upgrade(host):
    """--break-links, twice: the pre-image is the link, and what is patched is what it leads to."""
    cache = host.folder / "cache.py"
    cache.write_bytes(b"A = 1\n")
    (host.site / A).unlink()
    (host.site / A).symlink_to(cache)
    link = {"kind": "link", "target": str(cache)}
    host.apply(layer("base", dict(number(A, 1, 2), before=link)), break_links=True)
    assert host.run("stored", wanted=[{"path": A, "entry": link}])["linked"] == {"0": entry(b"A = 1\n")}
    host.apply(layer("base", dict(number(A, 1, 3), before=link), version="2"), drop=["base"])
    assert (host.site / A).read_bytes() == b"A = 3\n"
    host.rollback("base")
    assert os.readlink(host.site / A) == str(cache)


def old_state(host: Host) -> None:
    """The state as the release before this wrote it: no layer says what it replaced."""
    top = layer("top", number(A, 2, 3), requires=["base"])
    host.apply(layer("base", *THREE), top)
    (written,) = host.state.glob("transactions/*")
    shutil.rmtree(written)
    transaction = host.state / "transactions/20261130T120000Z-01020304"
    transaction.mkdir()
    for name, target in (("record.json", host.state), ("history.jsonl", host.state), ("journal.json", transaction)):
        # The owner of a deleted file is whoever runs this, as it was then.
        text = (OLD_STATE / name).read_text()
        owner = f'"owner": [\n      {os.geteuid()},\n      {os.getegid()}\n     ]'
        (target / name).write_text(text.replace('"owner": [\n      0,\n      0\n     ]', owner))


def test_state_from_before_upgrades_is_read_upgraded_and_gone_back_to(host):
    pristine = tree_of(host.site)
    old_state(host)
    status = host.status()
    assert [(item["set"], item["version"]) for item in status["layers"]] == [("base", "1.0"), ("top", "1.0")]
    assert status["reinstalled"] == []
    assert status["back"] == {"base": [], "top": []}
    assert [item["kind"] for item in host.run("history")["history"]] == ["apply"]
    assert host.recover()["action"] == "nothing"
    host.apply(layer("base", number(A, 1, 5), version="2.0"), drop=["base", "top"])
    assert host.status()["back"] == {"base": ["1.0"]}
    host.rollback("base", to="1.0")
    assert host.status()["layers"][0]["version"] == "1.0"
    host.rollback("base")
    assert tree_of(host.site) == pristine


def test_state_from_before_upgrades_can_be_rolled_back(host):
    pristine = tree_of(host.site)
    old_state(host)
    host.rollback("base", with_dependents=True)
    assert tree_of(host.site) == pristine


def test_the_smoke_child_goes_with_a_killed_agent(host):
    marker = host.folder / "smoking"
    slow = b"import os, time\nopen(%r, 'w').write(str(os.getpid()))\ntime.sleep(60)\n" % str(marker)
    pid = os.fork()
    if pid == 0:
        host.apply(layer("slow", change(A, b"A = 1\n", slow)), smoke=True)
        os._exit(0)
    deadline = time.monotonic() + 20
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(marker.read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    def alive() -> bool:
        try:
            # Nobody may be left to wait for it: a zombie is as good as gone.
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    while alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive()
    assert host.recover()["action"] == "undone"


def test_a_smoke_child_that_comes_too_late_does_nothing():
    """The agent was gone before the child could ask the kernel to be told."""
    from ddtree_deploy.agent import commit

    late = subprocess.run(
        ["python3", "-c", commit._SMOKE, "1", "/nowhere", "json"], capture_output=True, text=True, timeout=20
    )
    assert late.returncode == 1
    assert late.stderr.strip() == "the agent is gone"
    assert late.stdout == ""


def test_the_record_is_plain_json_that_names_what_was_replaced(host):
    host.apply(layer("base", number(A, 1, 2)), transaction="t-1")
    host.apply(layer("base", number(A, 1, 3), version="2"), drop=["base"], transaction="t-2")
    (only,) = json.loads((host.state / "record.json").read_text())["layers"]
    (past,) = only["replaced"]
    assert (past["version"], past["transaction"], past["replaced_by"]["transaction"]) == ("1.0", "t-1", "t-2")
