"""A small tree and the agent's operations on it, called in this process (or, to be killed, in another)."""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
from pathlib import Path

from ddtree_deploy.agent import main
from ddtree_deploy.agent.call import Call
from ddtree_deploy.agent.layers import identity
from ddtree_deploy.agent.protocol import MessageReader, MessageWriter

FILES = {
    "sglang/__init__.py": b"",
    "sglang/srt/__init__.py": b"",
    "sglang/srt/a.py": b"A = 1\n",
    "sglang/srt/b.py": b"B = 1\n",
    "sglang/srt/sub/__init__.py": b"",
    "sglang/srt/sub/c.py": b"C = 1\n",
}


def entry(data: bytes | None, mode: int = 0o644):
    if data is None:
        return None
    return {"kind": "file", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "mode": mode}


def change(path: str, before: bytes | None, after: bytes | None, mode: int = 0o644):
    return {
        "path": path,
        "before": entry(before, mode),
        "after": entry(after, mode),
        "_data": (before, after),
    }


def layer(name: str, *changes, requires=(), version="1.0"):
    return {
        "set": name,
        "version": version,
        "digest": "d",
        "family": None,
        "requires": list(requires),
        "files": [{key: item[key] for key in ("path", "before", "after")} for item in changes],
        "_blobs": [data for item in changes for data in item["_data"] if data is not None],
    }


def make_site(folder: Path, version: str = "0.5.11") -> Path:
    site = folder / "site-packages"
    for path, data in FILES.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o644)
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in FILES))
    (info / "INSTALLER").write_text("pip\n")
    return site


def tree_of(site: Path) -> dict[str, tuple]:
    """Everything below the package but bytecode: path -> (mode, bytes or link target)."""
    found = {}
    for folder, folders, names in os.walk(site / "sglang"):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in [*names, *folders]:
            path = Path(folder) / name
            key = path.relative_to(site).as_posix()
            if path.is_symlink():
                found[key] = ("link", os.readlink(path))
            elif path.is_dir():
                found[key] = ("dir",)
            else:
                found[key] = (path.stat().st_mode & 0o7777, path.read_bytes())
    return found


def operation(name: str):
    """The agent's function for an operation."""
    module, function = main.OPERATIONS[name]
    return getattr(importlib.import_module("ddtree_deploy.agent." + module), function)


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = make_site(folder)
        self.state_dir = folder / "state"

    @property
    def state(self) -> Path:
        (only,) = self.state_dir.iterdir()
        return only

    def request(self, **args):
        return {
            "root": str(self.site),
            "state_dir": str(self.state_dir),
            "transaction": "t-" + secrets.token_hex(6),
            "who": "tester@client",
            "client": "test",
            "reason": "because",
            **args,
        }

    def run(self, name: str, blobs=(), **args):
        call = Call(self.request(**args), MessageReader(lambda _n: b""), MessageWriter(lambda _data: None))
        call.blobs = {hashlib.sha256(blob).hexdigest(): blob for blob in blobs}
        return operation(name)(call)

    def apply_request(self, *layers, **args):
        recorded = self.status()["layers"]
        return {
            "layers": [{key: item for key, item in one.items() if key != "_blobs"} for one in layers],
            "expect": [identity(item) for item in recorded],
            "engine": "0.5.11",
            **args,
        }, [blob for one in layers for blob in one["_blobs"]]

    def apply(self, *layers, **args):
        request, blobs = self.apply_request(*layers, **args)
        return self.run("apply", blobs, **request)

    def status(self, **args):
        return self.run("status", **args)

    def rollback(self, name: str, **args):
        return self.run("rollback", set=name, **args)

    def recover(self, **args):
        return self.run("recover", **args)


THREE = (
    change("sglang/srt/a.py", b"A = 1\n", b"A = 2\n"),
    change("sglang/srt/sub/c.py", b"C = 1\n", None),
    change("sglang/srt/new/deep/d.py", None, b"D = 1\n"),
)
