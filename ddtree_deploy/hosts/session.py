"""Calls to the agent on one host: one exec each, framed both ways, with every failure as one clear error."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddtree_deploy.agent import bundle, protocol
from ddtree_deploy.agent.protocol import MessageReader, MessageWriter, ProtocolError
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.transport import RemoteProcess, Transport

Progress = Callable[[int, int, str], None]
DEFAULT_PYTHON = "python3"
#: How long a host may take to start python and the agent in it.
HANDSHAKE_LIMIT_S = 60.0


class ConnectionLost(DeployError):
    """The connection went away after a request was sent: what the host did is not known from here."""

    def __init__(self, host: str) -> None:
        super().__init__("DD308", f"{host}: the connection was lost", "try again; `status` asks the host how it stands")


class Exchange:
    """One exec of the agent: a request sent, answers read. Close it when done (a context manager)."""

    def __init__(self, host: str, process: RemoteProcess) -> None:
        self._host = host
        self._process = process
        self._writer = MessageWriter(process.write)
        self._reader = MessageReader(self._read)
        self._ahead = b""
        self.bytes_received = 0
        self.bytes_sent = 0

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()

    def _read(self, size: int) -> bytes:
        if self._ahead:
            piece, self._ahead = self._ahead[:size], self._ahead[size:]
            return piece
        piece = self._process.read(size)
        self.bytes_received += len(piece)
        return piece

    def begin(self, source: bytes, nonce: str, request: dict[str, Any], blobs: Sequence[bytes]) -> None:
        """Send the agent's source and the first request; skip the login shell's noise up to the agent's magic."""
        try:
            self._process.write(source)
            self.bytes_sent += len(source)
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

    def frames(self) -> Iterator[tuple[str, Any]]:
        """The frames of one answer: ("P" | "J" | "Q", dict) or ("B", bytes).

        Raises DeployError for an error that the agent reports, :class:`ConnectionLost` when the stream ends
        early, DD307 when it is damaged. The message's digest is checked before this iterator ends.
        """
        try:
            for kind, payload in self._reader.frames():
                if kind == protocol.BLOB:
                    yield "B", payload
                    continue
                value = protocol.decode(payload)
                if kind == protocol.ERROR:
                    raise self._reported(value)
                yield kind.decode("ascii"), value
        except ProtocolError as error:
            if self._process.wait() is None or "ended" in str(error):
                raise ConnectionLost(self._host) from error
            raise DeployError("DD307", f"{self._host}: {error}", "run it again; if it persists, report it") from error

    def _reported(self, value: Mapping[str, Any]) -> DeployError:
        details = [str(line) for line in value.get("details") or []]
        code = str(value.get("code"))
        if code == "DD901":
            details += self._process.stderr().strip().splitlines()[-3:]
        hint = value.get("hint")
        return DeployError(code, f"{self._host}: {value.get('message')}", str(hint) if hint else None, details)

    def _no_answer(self, seen: bytes) -> DeployError:
        status = self._process.wait()
        said = self._process.stderr().strip()
        last = said.splitlines()[-1] if said else ""
        where = self._host
        if "sudo:" in said and ("password" in said or "not allowed" in said or "not in the sudoers" in said):
            return DeployError(
                "DD310",
                f"{where}: {last}",
                "allow it without a password: `USER ALL=(root) NOPASSWD: PYTHON` in sudoers",
            )
        if "sudo: command not found" in said or "sudo: not found" in said:
            return DeployError("DD310", f"{where}: the host has no sudo", "log in as the tree's owner, without sudo")
        if status == 127 or "No such file or directory" in last or "not found" in last.lower():
            return DeployError(
                "DD309",
                f"{where}: no such python: {last}",
                "name it: --python PATH, or python in the inventory",
            )
        if (
            status == 9
            or "SyntaxError" in said
            or "unknown option" in said.lower()
            or "buffer" in last
            or "zlib" in last
        ):
            return DeployError(
                "DD309",
                f"{where}: {last}",
                "the agent needs python 3.8 or later; --python PATH names another",
            )
        if status is None and not said:
            return ConnectionLost(where)
        words = last or _tail(seen) or "nothing was said"
        return DeployError("DD306", f"{where}: the agent did not start: {words}", "try `ssh HOST python3 -V` by hand")


def _tail(seen: bytes) -> str:
    """The last line of what came instead of the agent."""
    lines = seen[-200:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


class HostSession:
    """One open way to a host; each call is one exec of the agent there."""

    def __init__(self, target: Target, connect: Callable[[], Transport]) -> None:
        self.target = target
        self._connect = connect
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
        """Start the agent for ``operation``; the caller reads :meth:`Exchange.frames` and closes it."""
        nonce = secrets.token_hex(8)
        argv = [self.target.python or DEFAULT_PYTHON, "-I", "-c", protocol.LOADER]
        if self.target.sudo:
            argv = ["sudo", "-n", "--", *argv]
        process = self._transport.start(argv)
        exchange = Exchange(self.target.name, process)
        try:
            request = {**self.target.options(), **args, "op": operation}
            exchange.begin(bundle.payload(operation, nonce), nonce, request, blobs)
        except BaseException:
            process.kill()
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
        return result, others


def pieces(frames: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    """The data pieces among frames."""
    for kind, payload in frames:
        if kind == "B":
            yield payload
