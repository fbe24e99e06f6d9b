"""One user's day: every command that gives a JSON document, run for real on small trees, wheels and services."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.snapshots import pins, wheels
from tests.agent.harness import make_site
from tests.cli.harness import ENGINE, ONE, TWO, Cli, Result
from tests.cli.test_apply import interrupt_apply
from tests.deploy.sets import SRT, write_set
from tests.doctor.cases import FOLDER
from tests.serve.test_without_systemd import Box
from tests.snapshots import smallwheel
from tests.snapshots.test_index import GOOD, Index

TAGS = "cp312-cp312-manylinux_2_34_x86_64"
OLD, NEAR, FAR = "0.0.1", "0.0.2", "0.0.3"
MODELS = FOLDER.parent / "launch/models"
A1, A2 = b"A = 1\n", b"A = 2\n"


def lines(*changed: str) -> bytes:
    """A module of twelve functions, some of them changed."""
    text = "".join(f"def f{number}():\n    return {number}\n\n\n" for number in range(12))
    for old_new in changed:
        old, new = old_new.split(" -> ")
        text = text.replace(f"return {old}\n", f"return {new}\n")
    return text.encode()


class Day:
    """Runs commands and keeps their documents, by kind."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.documents: dict[str, list[dict]] = {}
        self.cli = Cli(folder, monkeypatch)

    def run(self, *words: str, status: int = 0, cli: Cli | None = None, host: bool = False) -> Result:
        """One command with ``--json``; its exit status is as expected."""
        one = cli or self.cli
        # What only reads the tree keeps no state on the host.
        where = one.host[:2] if words[0] in ("snapshot", "grep", "find-def") else one.host
        result = one.run(*words, "--json", *(where if host else ()))
        assert result.status == status, f"{words}: {result.status}\n{result.out}\n{result.err}"
        documents = (
            [json.loads(result.out)] if result.out.startswith("{\n") else map(json.loads, result.out.splitlines())
        )
        for document in documents:
            kind = document["schema"].removeprefix("ddtree-deploy.").rpartition("/")[0]
            self.documents.setdefault(kind, []).append(document)
        return result

    def explanations(self) -> None:
        for words in (["explain"], ["explain", "DD101"], ["explain", "DD201"]):
            self.run(*words)
        self.run("explain", "DD999", status=2)

    def inventories(self) -> None:
        for words in (["list"], ["check"], ["show", "rtx"], ["show", "qwen-ddtree"]):
            self.run("inventory", *words)
        (self.folder / "own.toml").write_text(f'[hosts.a]\nlocal = "{self.cli.site}"\n')
        self.run("inventory", "list", "--inventory", "own.toml")
        self.run("inventory", "list", "--inventory", "gone.toml", status=2)

    def wheels(self) -> None:
        """Small wheels of three engines, the later two with changes upstream."""
        self.monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(self.folder / "cache"))
        self.monkeypatch.setattr(pins, "checkout_file", lambda: None)
        self.run("wheel", "add", self.wheel(OLD, lines()), status=3)
        added = [self.wheel(OLD, lines()), self.wheel(NEAR, lines("9 -> 90")), self.wheel(FAR, lines("2 -> 22"))]
        self.run("wheel", "add", "--pin", *added)
        self.run("wheel", "list")
        self.run("wheel", "fetch", OLD, "--offline")
        server = Index()
        try:
            server.body = json.dumps(GOOD).encode()
            self.run("wheel", "pin", "9.9.9", "--index", server.url)
        finally:
            server.close()

    def wheel(self, version: str, source: bytes) -> str:
        info = f"sglang-{version}.dist-info"
        files = {
            "sglang/__init__.py": b"",
            "sglang/srt/__init__.py": b"",
            "sglang/srt/a.py": source,
            "sglang/srt/b.py": b"B = 1\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\n",
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(smallwheel, "INFO", info)
            return str(smallwheel.make_wheel(self.folder / f"sglang-{version}-{TAGS}.whl", files))

    def authoring(self) -> None:
        sets = self.folder / "authored"
        self.monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(sets))
        write_set(sets, "demo", "1.0.0", {OLD: {"a.py": (lines(), lines("2 -> 20")), "b.py": (b"B = 1\n", b"B = 2\n")}})
        write_set(sets, "idle", "1.0.0", {OLD: {"n.py": (None, b"N = 1\n")}}, unneeded=[NEAR])
        self.run("patchset", "list")
        (sets / "bad").mkdir()
        (sets / "bad/patchset.toml").write_text("schema = 1\n")
        self.run("patchset", "list", status=2)
        shutil.rmtree(sets / "bad")
        self.run("patchset", "check", "--all")
        series = sets / "demo" / OLD / "0000.patch"
        sound = series.read_bytes()
        series.write_bytes(sound.replace(b"+    return 20", b"+    return (20"))
        self.run("patchset", "check", "demo", status=1)
        series.write_bytes(sound)
        self.run("impact", "--from", OLD, "--to", FAR, status=1)
        self.run("impact", "idle", "--from", OLD, "--to", NEAR)
        self.run("patchset", "port", "demo", "--from", OLD, "--to", NEAR, "--check")
        self.run("patchset", "port", "demo", "--from", OLD, "--to", FAR, "--into", str(self.folder / "torn"), status=1)
        self.run("patchset", "port", "demo", "--from", OLD, "--to", NEAR, "--bump", "minor")
        self.run("patchset", "new", "fresh", "--engine", OLD, "--summary", "new", "--requires", "demo")
        tree = self.folder / "scratch"
        self.run("patchset", "edit", "demo", "--engine", OLD, "--into", str(tree))
        self.run("patchset", "refresh", "demo", "--from", str(tree))
        module = tree / SRT / "a.py"
        module.write_bytes(module.read_bytes().replace(b"return 20", b"return 200"))
        self.run("patchset", "refresh", "demo", "--from", str(tree), "--bump", "patch")
        self.run("patchset", "reorder", "demo", "--engine", OLD, "--move", "0000.patch", "--bump", "patch")
        self.run("patchset", "drop", "demo", "0001.patch", "--engine", OLD, "--bump", "patch")

    def hosts(self) -> None:
        """Apply, search, drift, an interruption, a fleet."""
        sets = self.folder / "sets"
        self.monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(sets))
        write_set(sets, "base", "1.0", {ENGINE: {"a.py": (A1, A2)}})
        write_set(sets, "top", "1.0", {ENGINE: {"n.py": (None, b"N = 1\n")}}, ["base"])
        write_set(sets, "other", "1.0", {"9.9.9": {"a.py": (A1, A2)}})
        self.run("status", host=True)
        self.run("history", host=True)
        self.run("recover", host=True)
        self.run("snapshot", host=True)
        self.run("apply", "top", "--check", host=True)
        self.run("apply", "top", "-m", "why", host=True)
        self.run("apply", "top", host=True)
        write_set(sets, "base", "2.0", {ENGINE: {"a.py": (A1, b"A = 3\n")}})
        self.run("status", status=1, host=True)
        self.run("apply", "base", host=True)
        self.with_an_engine()
        self.run("snapshot", "--into", str(self.folder / "laid"), host=True)
        self.run("snapshots")
        self.run("diff", *(item["id"] for item in self.documents["snapshots"][0]["snapshots"]), status=1)
        write_set(sets, "base", "3.0", {ENGINE: {"a.py": (A1, b"A = 4\n")}})
        self.run("apply", "base", host=True)
        self.run("rollback", "base", "--to", "2.0", "--with-dependents", host=True)
        self.run("rollback", "base", status=3, host=True)
        self.run("rollback", "base", "--with-dependents", "-m", "no more", host=True)
        for where in ([], ["--snapshot", "latest"]):
            self.run("grep", "A = ", *where, host=not where)
            self.run("find-def", "A", "--refs", *where, host=not where)
        self.run("grep", "A = ", "-C", "1", host=True)
        self.run("grep", "A", "-c", host=True)
        self.run("grep", "A", "-l", host=True)
        (self.cli.site / SRT / "broken.py").write_text("def A(:\n")
        (self.cli.site / SRT / "user.py").write_text("from sglang.srt.a import A\n\n\ndef f():\n    return A\n")
        self.run("find-def", "A", "--refs", host=True)
        (self.cli.site / SRT / "b.py").write_text("B = 7\n")
        self.run("apply", self.cli.patch("two.patch", TWO), status=3, host=True)
        (self.cli.site / SRT / "b.py").write_text("B = 1\n")
        record = self.cli.site / f"sglang-{ENGINE}.dist-info/RECORD"
        record.write_text(record.read_text() + smallwheel.row(f"{SRT}user.py", b"as installed") + "\n")
        interrupt_apply(self.cli, "x")
        self.run("status", status=1, host=True)
        self.run("recover", host=True)
        self.run("history", host=True)
        self.fleet()
        self.run("support-bundle", *self.cli.host)
        self.run("support-bundle", "--list", "--host", "nobody@127.0.0.1:1")

    def with_an_engine(self) -> None:
        """Status and a change while a process runs from the tree."""
        program = "import sglang.srt.a, time; print('up', flush=True); time.sleep(60)"
        environment = dict(os.environ, PYTHONPATH=str(self.cli.site))
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as engine:
            assert engine.stdout.readline() == b"up\n"
            self.run("status", host=True)
            self.run("apply", "base", "--downgrade", "--live", host=True)
            self.run("rollback", "base", "--with-dependents", "--live", host=True)
            engine.kill()
        self.run("apply", "top", host=True)

    def fleet(self) -> None:
        text = ""
        for name in ("one", "two"):
            site = make_site(self.folder / name, ENGINE)
            text += f'[hosts.{name}]\nlocal = "{site}"\nstate_dir = "{self.folder / name}-s"\n'
        (self.folder / "fleet.toml").write_text(text)
        next((self.folder / "one").rglob("a.py")).write_text("A = 9\n")
        hosts = ["--host", "one", "--host", "two", "--serial", "1", "--inventory", "fleet.toml"]
        self.run("apply", self.cli.patch("one.patch", ONE), *hosts, status=3)

    def doctor(self) -> None:
        self.run("doctor", "--facts", str(FOLDER / "rtx-pro-6000.json"))
        facts = json.loads((FOLDER / "rtx-pro-6000.json").read_text())
        for devices, status in (([], 1), ("gone", 0)):  # no GPU, and nothing known of GPUs
            facts["gpu"]["devices"] = devices
            (self.folder / "facts.json").write_text(json.dumps(facts))
            self.run("doctor", "--facts", "facts.json", status=status)

    def launches(self) -> None:
        self.run("launch", "--service", "qwen-ddtree", "--tp", "8")
        configs = [
            "--model-config",
            str(MODELS / "qwen3.6-27b.json"),
            "--draft-config",
            str(MODELS / "qwen3.6-27b-dflash.json"),
        ]
        self.run("launch", "--service", "qwen-ddtree", *configs, "--out", str(self.folder / "out"))

    def services(self, folder: Path) -> None:
        """A service that is installed, started, asked, found wrong and taken away."""
        folder.mkdir()
        box = Box(folder, self.monkeypatch)
        hosts = ["--inventory", str(folder / "hosts.toml")]
        try:
            self.run("launch", "--install", "--no-systemd", "--check", *hosts, cli=box)
            self.run("launch", "--install", "--no-systemd", *hosts, cli=box)
            self.run("launch", "--start", *hosts, cli=box)
            self.run("status", *hosts, status=1, cli=box)
            self.run("logs", *hosts, cli=box)
            self.run("snapshot", *hosts, cli=box)
            self.run("launch", *hosts, cli=box)  # checked against the snapshot
            self.run("apply", box.patch("one.patch", ONE), "--restart", "svc", *hosts, cli=box)
            box.save(STANDIN="crash")
            self.run("launch", "--install", "--no-systemd", "-m", "why", *hosts, cli=box)
            self.run("apply", box.patch("two.patch", TWO), "--restart", "svc", "--undo", *hosts, status=6, cli=box)
            self.run("launch", "--restart", *hosts, status=1, cli=box)
            self.run("launch", "--previous", *hosts, cli=box)
            self.run("launch", "--stop", "--uninstall", *hosts, cli=box)
        finally:
            lock = box.etc / "svc.run/lock"
            if lock.exists() and lock.read_text().strip():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(lock.read_text()), signal.SIGTERM)


def the_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict]]:
    """The documents of all commands, by kind."""
    monkeypatch.delenv("DDTREE_DEPLOY_WHEELHOUSE", raising=False)
    monkeypatch.delenv("DDTREE_DEPLOY_OFFLINE", raising=False)
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("a download"))
    day = Day(folder, monkeypatch)
    day.explanations()
    day.inventories()
    day.wheels()
    day.authoring()
    day.hosts()
    day.doctor()
    day.launches()
    day.services(folder / "box")
    return day.documents
