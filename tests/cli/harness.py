"""Runs the real entry point in this process, with streams and folders of the test's own."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.cli.main import run
from ddtree_deploy.console import Console
from tests.agent.harness import make_site


@dataclass
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


class Stream(io.TextIOWrapper):
    """A text stream over bytes, as stdout is."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True, newline="")

    def text(self) -> str:
        return self.buffer.getvalue().decode("utf-8", "surrogateescape")


# No family of a shipped set serves it, so that status speaks of the test's own sets alone.
ENGINE = "0.4.0"


class Cli:
    """One user with a small local install."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        for name in ("DATA", "CACHE", "INVENTORY", "PATCHES"):
            monkeypatch.delenv(f"DDTREE_DEPLOY_{name}", raising=False)
        monkeypatch.setenv("DDTREE_DEPLOY_DATA", str(folder / "data"))
        monkeypatch.setenv("HOME", str(folder / "home"))
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(folder)
        self.site = make_site(folder / "host", ENGINE)
        self.state = folder / "state"

    @property
    def host(self) -> list[str]:
        return ["--host", f"local:{self.site}", "--state-dir", str(self.state)]

    def run(self, *arguments: str) -> Result:
        out, err = Stream(), Stream()
        status = run(arguments, Console(out, err))
        return Result(status, out.text(), err.text())

    def on_host(self, *arguments: str) -> Result:
        return self.run(*arguments, *self.host)

    def patch(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)


ONE = """\
--- a/sglang/srt/a.py
+++ b/sglang/srt/a.py
@@ -1 +1 @@
-A = 1
+A = 2
"""
TWO = """\
--- a/sglang/srt/b.py
+++ b/sglang/srt/b.py
@@ -1 +1 @@
-B = 1
+B = 2
--- /dev/null
+++ b/sglang/srt/new/n.py
@@ -0,0 +1 @@
+N = 1
"""
