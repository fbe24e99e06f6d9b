"""Transactions over a real sshd: the whole round, and connections that are cut while the host works."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.agent import protocol
from ddtree_deploy.console import Console
from ddtree_deploy.deploy.apply import apply_sets
from ddtree_deploy.deploy.recover import recover
from ddtree_deploy.deploy.rollback import roll_back
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.patching.patchset import adhoc_set, find_together
from tests.agent.harness import make_site, tree_of
from tests.cli.harness import ONE, TWO, Stream
from tests.deploy.sets import write_set

SLOW = ONE.replace("+A = 2", "+import time\n+A = 2\n+time.sleep(3)").replace("@@ -1 +1 @@", "@@ -1 +1,3 @@")


class Box:
    """A small install behind sshd."""

    def __init__(self, sshd, folder: Path) -> None:
        self.sshd = sshd
        self.site = make_site(folder)
        self.state = folder / "state"
        self.target = replace(sshd.target(), python=sys.executable, root=str(self.site), state_dir=str(self.state))
        self.console = Console(Stream(), Stream())

    def session(self) -> HostSession:
        return HostSession(self.target, lambda: connect(self.target))

    def apply(self, *patches: str, **options):
        sets = [adhoc_set("one", [(f"{at}.patch", text.encode(), 1) for at, text in enumerate(patches)])]
        with self.session() as session:
            return apply_sets(session, sets, self.console, **options)

    def status(self):
        with self.session() as session:
            return session.call("status", {})

    def cut_when(self, begun) -> threading.Thread:
        """Cut every connection, at the server, as soon as ``begun()``."""

        def work() -> None:
            deadline = time.monotonic() + 20
            while not begun() and time.monotonic() < deadline:
                time.sleep(0.02)
            for pid in self.sshd.children():
                os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def kill_agent(self) -> bool:
        """Kill the agent that holds the lock; returns whether there was one."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            command = Path(f"/proc/{pid}/cmdline")
            try:
                words = command.read_bytes().split(b"\0")
            except OSError:
                continue
            if protocol.LOADER.encode() in words:
                lock = next(self.state.glob("*/lock"))
                if f'"pid": {pid}' in lock.read_text():
                    os.kill(int(pid), signal.SIGKILL)
                    return True
        return False

    def journal_holds(self, text: str) -> bool:
        return any(text in path.read_text() for path in self.state.glob("*/transactions/*/journal.json"))


@pytest.fixture
def box(start_sshd, tmp_path):
    return Box(start_sshd(), tmp_path)


def test_the_whole_round(box):
    old = tree_of(box.site)
    applied = box.apply(ONE, TWO)
    assert set(applied.result["files"]) == {"sglang/srt/a.py", "sglang/srt/b.py", "sglang/srt/new/n.py"}
    assert [item["set"] for item in box.status()["layers"]] == ["one"]
    with box.session() as session:
        roll_back(session, "one", box.console)
    assert tree_of(box.site) == old


def test_a_connection_cut_during_the_commit_is_answered_by_the_host(box):
    """T60: the host goes on, the client asks it, and is told the truth."""
    cutter = box.cut_when(lambda: (box.site / "sglang/srt/a.py").read_text() != "A = 1\n")
    applied = box.apply(SLOW, smoke=True)
    cutter.join()
    assert applied.result is not None
    assert "the host finished it" in applied.result["notes"][0]
    assert (box.site / "sglang/srt/a.py").read_text() == "import time\nA = 2\ntime.sleep(3)\n"
    assert [item["set"] for item in box.status()["layers"]] == ["one"]


def test_a_cut_connection_and_a_failing_commit(box):
    old = tree_of(box.site)
    cutter = box.cut_when(lambda: (box.site / "sglang/srt/a.py").read_text() != "A = 1\n")
    failing = SLOW.replace("+time.sleep(3)", "+time.sleep(2) or 1 / 0")
    with pytest.raises(DeployError) as caught:
        box.apply(failing, smoke=True)
    cutter.join()
    assert caught.value.code == "DD505"
    assert tree_of(box.site) == old


def test_the_agent_dies_with_the_connection(box):
    old = tree_of(box.site)

    def begun() -> bool:
        return (box.site / "sglang/srt/a.py").read_text() != "A = 1\n" and box.kill_agent()

    cutter = box.cut_when(begun)
    with pytest.raises(DeployError) as caught:
        box.apply(SLOW, smoke=True)
    cutter.join()
    assert caught.value.code == "DD510"
    assert "recover" in caught.value.hint
    with box.session() as session:
        assert recover(session)["action"] == "undone"
    assert tree_of(box.site) == old


def test_a_connection_cut_before_the_request_was_whole_changed_nothing(box, monkeypatch):
    old = tree_of(box.site)
    from ddtree_deploy.hosts.session import Exchange

    real = Exchange.send

    def send(self, request, blobs=()):
        if request.get("op") == "apply":
            self._process.write(b"Q\0\0\0\x20{")
            for pid in box.sshd.children():
                os.kill(pid, signal.SIGKILL)
            raise BrokenPipeError
        real(self, request, blobs)

    monkeypatch.setattr(Exchange, "send", send)
    with pytest.raises(DeployError) as caught:
        box.apply(ONE)
    assert caught.value.code == "DD308"
    assert "before anything was changed" in caught.value.message
    assert tree_of(box.site) == old


@pytest.mark.parametrize("survives", [True, False], ids=["the host finishes", "the agent dies"])
def test_an_upgrade_and_a_downgrade_of_a_live_set_over_a_cut_connection(box, tmp_path, survives):
    """The host's truth is the new version as a whole, or, where its agent died too, the old one after recovery."""
    folder, module = tmp_path / "sets", box.site / "sglang/srt/a.py"
    pause = b"import time\ntime.sleep(1)\n"
    versions = {"1.0": b"A = 2\n" + pause, "2.0": b"A = 3\n" + pause}

    def apply(version: str, **options):
        write_set(folder, "base", version, {"0.5.11": {"a.py": (b"A = 1\n", versions[version])}})
        with box.session() as session:
            return apply_sets(session, find_together(["base"], folder), box.console, **options)

    apply("1.0")
    trees = {"1.0": tree_of(box.site)}
    for old, new, options in (("1.0", "2.0", {}), ("2.0", "1.0", {"downgrade": True})):

        def begun(new=new) -> bool:
            written = module.read_bytes() == versions[new]
            return written and (survives or box.kill_agent())

        cutter = box.cut_when(begun)
        if survives:
            applied = apply(new, smoke=True, **options)
            assert "the host finished it" in applied.result["notes"][0]
        else:
            with pytest.raises(DeployError) as caught:
                apply(new, smoke=True, **options)
            assert caught.value.code == "DD510"
            with box.session() as session:
                assert recover(session)["action"] == "undone"
            assert tree_of(box.site) == trees[old]
            assert [item["version"] for item in box.status()["layers"]] == [old]
            apply(new, **options)
        cutter.join()
        trees.setdefault(new, tree_of(box.site))
        assert module.read_bytes() == versions[new]
        assert tree_of(box.site) == trees[new]
        status = box.status()
        assert [item["version"] for item in status["layers"]] == [new]
        assert status["back"]["base"] == [old]
    cutter = box.cut_when(lambda: box.journal_holds('"rollback"'))
    with box.session() as session:
        roll_back(session, "base", box.console, to="2.0")
    cutter.join()
    assert tree_of(box.site) == trees["2.0"]


def test_two_deployers_at_once(box):
    """Exactly one of them changes the tree; the other is told why not."""
    outcomes: list[str] = []

    def deploy(patch: str) -> None:
        try:
            box.apply(patch)
            outcomes.append("done")
        except DeployError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=deploy, args=(ONE.replace("A = 2", f"A = {number}"),)) for number in range(5, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("done") == 1, outcomes
    assert set(outcomes) - {"done"} <= {"DD501", "DD502", "DD114", "DD102"}
    status = box.status()
    assert len(status["layers"]) == 1
    assert all(status["entries"][item["path"]] == item["after"] for item in status["layers"][0]["files"])
