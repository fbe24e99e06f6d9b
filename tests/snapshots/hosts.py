"""Hosts for the snapshot tests: the real agent on a folder here, and a host whose replies are scripted."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree_deploy.agent.manifest import entry_line, facts_line
from ddtree_deploy.agent.protocol import MessageWriter
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.session import Exchange, HostSession
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.snapshots.entries import ManifestReader, tree_digest

FILES = {
    "sglang/srt/__init__.py": b"",
    "sglang/srt/a.py": b"A = 1\n",
    "sglang/srt/a/b.py": b"def b():\n    return 1\n",
    "sglang/srt/empty.py": b"",
    "sglang/srt/built.so": b"\x7fELF\0",
    "sglang/jit_kernel/k.cu": b"kernel\n" * 1000,
}


def make_site(site: Path, files: dict[str, bytes] = FILES) -> Path:
    for path, data in files.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o644)
    return site


def session(site: Path, name: str = "box", python: str = sys.executable) -> HostSession:
    return HostSession(Target(name=name, kind="local", root=str(site), python=python), LocalTransport)


class _Script:
    """A process that has said everything it will say."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self.heard = b""

    def write(self, data: bytes) -> None:
        self.heard += data

    def close_stdin(self) -> None:
        pass

    def read(self, size: int) -> bytes:
        piece, self._said = self._said[:size], self._said[size:]
        return piece

    def stderr(self) -> str:
        return ""

    def wait(self) -> int | None:
        return 0

    def kill(self) -> None:
        pass


Message = Sequence[tuple[bytes, Any]]


class ScriptedSession:
    """A host that answers with these messages, whatever it is asked: lists of (frame type, payload)."""

    def __init__(self, *messages: Message, spoil: Callable[[bytes], bytes] = lambda said: said) -> None:
        self.target = Target(name="box", kind="ssh")
        self.requests: list[dict[str, Any]] = []
        said: list[bytes] = []
        writer = MessageWriter(said.append)
        for message in messages:
            for kind, payload in message:
                if kind == b"B":
                    writer.data(payload)
                else:
                    writer.json(kind, payload)
            writer.end()
        self._said = spoil(b"".join(said))

    def exchange(self, _operation: str, args: dict[str, Any], _blobs: Sequence[bytes] = ()) -> Exchange:
        self.requests.append(args)
        return Exchange(self.target, _Script(self._said))


FACTS: dict[str, Any] = {
    "root": {"parts": ["sglang/srt", "sglang/jit_kernel"], "version": "0.5.11", "site": "/opt/site"},
    "record": {"state": "absent", "problem": None, "counts": {}, "missing": []},
}


def told(answer: str, lines: Sequence[bytes], facts: dict[str, Any] = FACTS) -> dict[str, Any]:
    """What an honest host says of these (sound) lines."""

    reader = ManifestReader()
    entries = [reader.read(line) for line in lines]
    state = hashlib.sha256(b"".join(lines) + facts_line(facts)).hexdigest()
    return {"answer": answer, "tree": tree_digest(entries), "state": state, "count": len(lines), "facts": facts}


def file_line(path: str, data: bytes, **changed: Any) -> bytes:

    entry = {
        "path": path,
        "kind": "file",
        "mode": 0o644,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "nlink": 1,
        "content": True,
        "record": None,
    }
    return entry_line({**entry, **changed})


def raw_line(text: str) -> bytes:
    """A line of a case file: ``FILE(path)`` is a sound entry, with the path's JSON escapes read."""
    if text.startswith("FILE("):
        return file_line(json.loads(f'"{text[5:-1]}"'), b"")
    if text == "DEEP":
        return b"[" * 100_000 + b"\n"
    return text.encode("ascii") + b"\n"
