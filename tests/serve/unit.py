"""A service without systemd in a folder of the test's own, and the agent's operations on it, called in this process."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

from ddtree_deploy.agent import install
from ddtree_deploy.agent.call import Call
from ddtree_deploy.agent.protocol import MessageReader, MessageWriter

UNIT = "sglang-svc.service"


class Unit:
    """``folder/etc`` is where the service's files go, ``folder/state`` what the host remembers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc = folder / "etc"
        self.state_dir = folder / "state"
        self.etc.parent.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> str:
        return str(self.etc / name).lstrip("/")

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "name": "svc",
            "manager": "script",
            "address": "127.0.0.1",
            "port": 1,
            "model": "m",
            "algorithm": "none",
            "metrics": True,
            "secrets": [],
            "config": str(self.etc / "svc.json"),
            "supervisor": str(self.etc / "svc.py"),
        }

    def run(self, operation: str, blobs=(), **args):
        request = {
            "unit": UNIT,
            "state_dir": str(self.state_dir),
            "transaction": "t-" + secrets.token_hex(6),
            "who": "tester@client",
            "client": "test",
            **args,
        }
        call = Call(request, MessageReader(lambda _n: b""), MessageWriter(lambda _data: None))
        call.blobs = {hashlib.sha256(blob).hexdigest(): blob for blob in blobs}
        return getattr(install, "run_" + operation)(call)

    def look(self, *names: str):
        return self.run("unit_look", paths=[self.path(name) for name in names])

    def install(self, force: bool = False, **files: str):
        """Install files by name (``svc_sh`` stands for svc.sh), planned on what is there now."""
        named = {name.replace("_", "."): text.encode() for name, text in files.items()}
        before = self.look(*named)["entries"]
        wire = [
            {
                "path": self.path(name),
                "before": before[self.path(name)],
                "mode": 0o755 if name.endswith(".sh") else 0o600,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            for name, data in named.items()
        ]
        version = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
        return self.run(
            "unit_install", list(named.values()), service=self.facts, files=wire, version=version, force=force
        )

    def previous(self, **args):
        return self.run("unit_restore", **args)

    def uninstall(self, **args):
        return self.run("unit_restore", all=True, **args)

    def recover(self, **args):
        return self.run("units_recover", **args)["recovered"]

    def tree(self) -> dict[str, tuple[int, bytes]]:
        """Every file below the service's folder: name -> (mode, bytes)."""
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mode & 0o7777, path.read_bytes())
            for path in sorted(self.etc.rglob("*"))
            if path.is_file()
        }


ONE = {"svc_json": '{"folder": "/nowhere", "stop_s": 1}', "svc_sh": "exec true\n", "svc_env": "A=1\n"}
TWO = {"svc_json": '{"folder": "/nowhere", "stop_s": 2}', "svc_sh": "exec false\n", "svc_py": "pass\n"}
