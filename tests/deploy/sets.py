"""Small patch sets written as a maintainer would have them, and a host that answers in this process."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path

from ddtree_deploy.agent import protocol
from ddtree_deploy.agent.call import Call
from ddtree_deploy.agent.protocol import AgentError, MessageReader, MessageWriter
from ddtree_deploy.console import Console
from ddtree_deploy.deploy.apply import apply_sets
from ddtree_deploy.deploy.rollback import roll_back
from ddtree_deploy.deploy.status import read_status
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.patching.patchset import find_together, survey_sets
from tests.agent.harness import Host, operation
from tests.cli.harness import Stream

SRT = "sglang/srt/"
#: path below sglang/srt -> (bytes before, bytes after), None for no file.
Files = dict[str, tuple[bytes | None, bytes | None]]


def write_set(folder: Path, name: str, version: str, files: dict[str, Files], requires=(), unneeded=()) -> None:
    """Write the set ``name`` below ``folder``; ``files`` are by engine version, each a family of its own."""
    base = folder / name
    base.mkdir(parents=True, exist_ok=True)
    for path in sorted(base.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    toml = [
        f'schema = 1\nname = "{name}"\nversion = "{version}"\nsummary = "for a test"\npackage = "sglang"',
        f'root = ["sglang/srt"]\nrequires = [{", ".join(chr(34) + item + chr(34) for item in requires)}]',
    ]
    if unneeded:
        toml.append("[unneeded]\n" + "\n".join(f'"{engine}" = "upstream has it"' for engine in unneeded))
    hashes = []
    for engine, changes in files.items():
        added = [SRT + path for path, (before, _after) in changes.items() if before is None]
        toml.append(f'[family."{engine}"]\nengines = ["{engine}"]\nadded = {added!r}'.replace("'", '"'))
        (base / engine).mkdir()
        series = []
        for number, (path, (before, after)) in enumerate(changes.items()):
            ends = "".join(
                f'{end} = "{digest(data)}"\n' for end, data in (("before", before), ("after", after)) if data
            )
            hashes.append(f'[hashes."{engine}"."{SRT}{path}"]\n{ends}')
            if before is None:
                target = base / "new" / (SRT + path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(after)
                continue
            series.append(f"{number:04d}.patch")
            (base / engine / series[-1]).write_bytes(diff(SRT + path, before, after))
        (base / engine / "series").write_text("".join(line + "\n" for line in series))
    (base / "patchset.toml").write_text("\n\n".join([*toml, *hashes]))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def diff(path: str, before: bytes, after: bytes | None) -> bytes:
    new = "/dev/null" if after is None else f"b/{path}"
    old, now = (data.decode().splitlines(keepends=True) for data in (before, after or b""))
    return "".join(difflib.unified_diff(old, now, f"a/{path}", new)).encode()


class InProcess:
    """The part of a session that the deploy room uses, answered by the agent's operations in this process."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.target = Target("box", "local")
        self.calls: list[str] = []

    def call(self, name, args, blobs=(), progress=None):
        return self.collect(name, args, blobs, progress)[0]

    def collect(self, name, args, blobs=(), progress=None):
        self.calls.append(name)
        sent = bytearray()
        request = {**self.host.request(), **args}
        call = Call(request, MessageReader(lambda _n: b""), MessageWriter(sent.extend))
        call.blobs = {digest(blob): blob for blob in blobs}
        try:
            result = operation(name)(call)
        except AgentError as error:
            raise DeployError(error.code, f"box: {error.message}", error.hint, error.details) from None
        call.finish(protocol.REQUEST, result)
        stream = memoryview(bytes(sent))
        at = 0

        def read(size: int) -> bytes:
            nonlocal at
            piece = bytes(stream[at : at + size])
            at += len(piece)
            return piece

        frames = [
            ("B", payload) if kind == protocol.BLOB else (kind.decode(), protocol.decode(payload))
            for kind, payload in MessageReader(read).frames()
        ]
        (answer,) = (payload for kind, payload in frames if kind == "Q")
        return answer, [frame for frame in frames if frame[0] in "JB"]


class Desk:
    """Somebody with a folder of patch sets, and one host."""

    def __init__(self, folder: Path) -> None:
        self.host = Host(folder / "host")
        self.patches = folder / "patches"
        self.patches.mkdir()
        self.session = InProcess(self.host)
        self.console = Console(Stream(), Stream())

    def write(self, name: str, version: str, files: Files, requires=(), engine: str = "0.5.11", **others) -> None:
        write_set(self.patches, name, version, {engine: files}, requires, **others)

    def patch(self, name: str, path: str, before: bytes, after: bytes) -> str:
        file = self.patches.parent / f"{name}.patch"
        file.write_bytes(diff(SRT + path, before, after))
        return str(file)

    def apply(self, *requests: str, **options):
        sets = find_together(requests, self.patches)
        return apply_sets(self.session, sets, self.console, known=lambda: survey_sets(self.patches)[0], **options)

    def rollback(self, name: str, to: str | None = None, **options):
        return roll_back(self.session, name, self.console, to=to, **options)

    def status(self):
        return read_status(self.session, survey_sets(self.patches)[0])

    def line(self, name: str):
        return next(line for line in self.status().sets if line.name == name)

    def applied(self) -> dict[str, str]:
        return {layer["set"]: layer["version"] for layer in self.host.status()["layers"]}

    def read(self, path: str) -> bytes | None:
        file = self.host.site / (SRT + path)
        return file.read_bytes() if file.exists() else None

    def history(self) -> list[str]:
        from ddtree_deploy.deploy.recover import say_sets

        return [f"{item['kind']} {say_sets(item)}" for item in self.host.run("history")["history"]]
