"""Calls to the agent on one host: one exec each, framed both ways, with every failure as one clear error."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddtree_deploy.agent import bundle, protocol
from ddtree_deploy.agent.protocol import MessageReader, MessageWriter, ProtocolError
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.refusals import NoAgent, explain
from ddtree_deploy.hosts.replies import check_progress, check_reply
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.transport import RemoteProcess, Transport
from ddtree_deploy.hosts.watch import SILENT, Watch

Progress = Callable[[int, int, str], None]
DEFAULT_PYTHON = "python3"
#: How long a host may take to start python and the agent in it.
HANDSHAKE_LIMIT_S = 60.0


class ConnectionLost(DeployError):
    """The connection went away after a request was sent: what the host did is not known from here."""

    def __init__(self, host: str) -> None:
        super().__init__("DD308", f"{host}: the connection was lost", "try again; `status` asks the host how it stands")


class InstalledElsewhere(DeployError):
    """The host's one sglang is another interpreter's than the one that was asked: ``python``."""

    def __init__(self, message: str, hint: str | None, python: str, root: str | None) -> None:
        super().__init__("DD311", message, hint)
        self.python = python
        self.root = root


class Exchange:
    """One exec of the agent: a request sent, answers read. Close it when done (a context manager).

    ``user()`` names the account on the host, for what has to be said of sudo.
    """

    def __init__(
        self, target: Target, process: RemoteProcess, user: Callable[[], str] = str, watch: Watch = SILENT
    ) -> None:
        self._target = target
        self._host = target.name
        self._process = process
        self._user = user
        self._watch = watch
        self._begun: float | None = time.monotonic()
        self._what = "exec"
        self._writer = MessageWriter(self._write)
        self._reader = MessageReader(self._read)
        self._ahead = b""
        self._frames: Iterator[tuple[str, Any]] | None = None
        self.bytes_received = 0
        self.bytes_sent = 0

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self.close(worked=kind is None)

    def close(self, *, worked: bool = True) -> None:
        """Drop the exec, and report it as a step."""
        self._process.kill()
        if self._begun is not None:
            traffic = f"{self.bytes_sent} bytes sent, {self.bytes_received} received"
            self._watch.done(f"{self._what}: {traffic}", self._begun, worked)
            self._begun = None

    def _write(self, data: bytes) -> None:
        self._process.write(data)
        self.bytes_sent += len(data)

    def _read(self, size: int) -> bytes:
        if self._ahead:
            piece, self._ahead = self._ahead[:size], self._ahead[size:]
            return piece
        piece = self._process.read(size)
        self.bytes_received += len(piece)
        return piece

    def begin(self, source: bytes, nonce: str, request: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Send the agent's source and the first request; skip the login shell's noise up to the agent's magic."""
        self._what = f"exec {request['op']}"
        try:
            self._write(source)
            self.send(request, blobs)
        except (BrokenPipeError, ConnectionError, EOFError, OSError):
            # Why it went away is read below: the host's own words are on stderr.
            pass
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(HANDSHAKE_LIMIT_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            self._skip_noise(protocol.MAGIC + nonce.encode("ascii") + b"\n", expired)
        finally:
            timer.cancel()

    def _skip_noise(self, magic: bytes, expired: threading.Event) -> None:
        seen = b""
        while magic not in seen:
            piece = self._process.read(4096)
            if not piece and expired.is_set():
                raise DeployError(
                    "DD306",
                    f"{self._host}: no agent after {HANDSHAKE_LIMIT_S} s: {_tail(seen) or 'nothing was said'}",
                    "does the host let you run commands? Try `ssh HOST python3 -V` by hand",
                )
            if not piece:
                raise self._no_answer(seen)
            if len(seen) > protocol.MAX_NOISE:
                # Whatever speaks is not the agent, and need never stop: its end is not waited for.
                self._process.kill()
                raise DeployError(
                    "DD306",
                    f"{self._host}: over {protocol.MAX_NOISE} bytes of noise and no agent: {_tail(seen)}",
                    "look at what the login shell's start-up files print",
                )
            self.bytes_received += len(piece)
            seen += piece
        self._ahead = seen.partition(magic)[2]

    def send(self, request: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send one request message; ``blobs`` travel behind it, announced by size and sha256."""
        announced = [{"sha256": hashlib.sha256(blob).hexdigest(), "size": len(blob)} for blob in blobs]
        self._writer.json(protocol.REQUEST, {**request, "blobs": announced})
        for blob in blobs:
            self._writer.data(blob)
        self._writer.end()

    def peek(self) -> None:
        """Wait for the answer's first frame, so that an error in its place is raised here and now."""
        frames = self.frames()
        first = next(frames, None)
        self._frames = frames if first is None else itertools.chain((first,), frames)

    def frames(self) -> Iterator[tuple[str, Any]]:
        """The frames of one answer: ("P" | "J" | "Q", dict) or ("B", bytes).

        Raises DeployError for an error that the agent reports, :class:`ConnectionLost` when the stream ends
        early, DD307 when it is damaged. The message's digest is checked before this iterator ends.
        """
        peeked, self._frames = self._frames, None
        return self._read_frames() if peeked is None else peeked

    def _read_frames(self) -> Iterator[tuple[str, Any]]:
        try:
            for kind, payload in self._reader.frames():
                if kind == protocol.BLOB:
                    yield "B", payload
                    continue
                value = protocol.decode(payload)
                if kind == protocol.ERROR:
                    raise self._reported(value)
                if kind == protocol.PROGRESS:
                    check_progress(self._host, value)
                yield kind.decode("ascii"), value
        except ProtocolError as error:
            if self._process.wait() is None or "ended" in str(error):
                raise ConnectionLost(self._host) from error
            raise DeployError("DD307", f"{self._host}: {error}", "run it again; if it persists, report it") from error

    def _reported(self, value: Mapping[str, Any]) -> DeployError:
        said = value.get("details")
        details = [str(line) for line in said] if isinstance(said, list) else []
        code = str(value.get("code"))
        if code == "DD901":
            details += self._process.stderr().strip().splitlines()[-3:]
        hint = str(value["hint"]) if value.get("hint") else None
        message = f"{self._host}: {value.get('message')}"
        python, root = value.get("python"), value.get("root")
        if isinstance(python, str) and python.startswith("/") and isinstance(root, str | None):
            return InstalledElsewhere(message, hint, python, root)
        return DeployError(code, message, hint, details)

    def _no_answer(self, seen: bytes) -> DeployError:
        status = self._process.wait()
        said = self._process.stderr().strip()
        if status is None and not said:
            return ConnectionLost(self._host)
        return explain(self._target, NoAgent(status, said, _tail(seen), self._user))


def _tail(seen: bytes) -> str:
    """The last line of what came instead of the agent."""
    lines = seen[-200:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


class HostSession:
    """One open way to a host; each call is one exec of the agent there."""

    def __init__(self, target: Target, connect: Callable[[], Transport], watch: Watch = SILENT) -> None:
        self.target = target
        self._connect = connect
        self._watch = watch
        # Where neither is named, the agent looks whether the python it runs on is the one that is meant.
        self._search = target.python is None and target.root is None
        self._transport = connect()

    def reconnect(self) -> None:
        """Drop the connection and open a new one. Raises DeployError DD30x."""
        self._transport.close()
        self._transport = self._connect()

    def __enter__(self) -> HostSession:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._transport.close()

    def exchange(self, operation: str, args: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> Exchange:
        """Start the agent for ``operation``; the caller reads :meth:`Exchange.frames` and closes it.

        Where the target names neither interpreter nor root and the host's only sglang is another interpreter's
        than ``python3``'s, that one is used, and ``target`` names it from then on.
        """
        if not self._search:
            return self._start(operation, args, blobs)
        exchange = self._start(operation, args, blobs)
        try:
            exchange.peek()
        except InstalledElsewhere as found:
            exchange.close(worked=False)
            self.target = dataclasses.replace(self.target, python=found.python, root=found.root)
            self._watch.notice(f"{self.target.name}: {found.python} is the engine's interpreter, taking that")
            exchange = self._start(operation, args, blobs)
        except BaseException:
            exchange.close(worked=False)
            raise
        self._search = False
        return exchange

    def _start(self, operation: str, args: Mapping[str, Any], blobs: Sequence[bytes]) -> Exchange:
        nonce = secrets.token_hex(8)
        argv = [self.target.python or DEFAULT_PYTHON, "-I", "-c", protocol.LOADER]
        if self.target.sudo and not self.target.container:
            argv = ["sudo", "-n", "--", *argv]
        search = self._search and self.target.python is None and operation != "facts"
        process = self._transport.start(argv)
        exchange = Exchange(self.target, process, lambda: self._transport.user, self._watch)
        try:
            request = {**self.target.options(), "search": search, **args, "op": operation}
            exchange.begin(bundle.payload(operation, nonce, search=search), nonce, request, blobs)
        except BaseException:
            exchange.close(worked=False)
            raise
        return exchange

    def call(
        self,
        operation: str,
        args: Mapping[str, Any],
        blobs: Sequence[bytes] = (),
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Run ``operation`` and return its result object. Raises DeployError."""
        result, _pieces = self.collect(operation, args, blobs, progress)
        return result

    def collect(
        self,
        operation: str,
        args: Mapping[str, Any],
        blobs: Sequence[bytes] = (),
        progress: Progress | None = None,
    ) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """As :meth:`call`, with every other frame of the answer: messages ("J", dict) and data ("B", bytes)."""
        result: dict[str, Any] | None = None
        others: list[tuple[str, Any]] = []
        with self.exchange(operation, args, blobs) as exchange:
            for kind, payload in exchange.frames():
                if kind == "P":
                    if progress:
                        progress(int(payload["done"]), int(payload["total"]), str(payload["what"]))
                elif kind == "Q":
                    result = payload
                else:
                    others.append((kind, payload))
        if result is None:
            raise DeployError("DD307", f"{self.target.name}: the answer holds no result")
        check_reply(self.target.name, operation, args, result, [value for kind, value in others if kind == "J"])
        return result, others


def pieces(frames: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    """The data pieces among frames."""
    for kind, payload in frames:
        if kind == "B":
            yield payload
