"""A host over ssh, on paramiko's ``Transport``.

fabric's ``Connection`` is not used: it trusts unknown hosts unless it is told otherwise, reads the ssh
configuration with paramiko's reader, and its help begins where ours ends. What is needed lies below it: the
host key is judged between key exchange and authentication, by known_hosts files that we read, for every hop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import hostkeys
from ddtree_deploy.hosts.hostkeys import KnownHosts, PublicKey
from ddtree_deploy.hosts.sshauth import authenticate
from ddtree_deploy.hosts.sshconfig import SshConfig, effective_config
from ddtree_deploy.hosts.sshsocket import ProxyCommand, connect_tcp
from ddtree_deploy.hosts.stderr import StderrTail
from ddtree_deploy.hosts.target import Destination, Target, parse_destination
from ddtree_deploy.hosts.watch import SILENT, Watch

CONNECT_TIMEOUT = 10.0  # seconds, for each of TCP, key exchange, authentication and opening a channel
WINDOW = 32 * 1024 * 1024  # bytes that may be under way to us: with paramiko's 2 MiB, 100 ms allow 20 MB/s
_KEEPALIVE = 15  # seconds
_MAX_HOPS = 8
_BUSY_RETRIES = 2
_RSA = ("rsa-sha2-512", "rsa-sha2-256")

# Without a handler, logging's last resort would print paramiko's tracebacks on our stderr.
_log = logging.getLogger("paramiko")
_log.addHandler(logging.NullHandler())
_log.propagate = False


def open_ssh(target: Target, *, accept_new: bool = False, watch: Watch = SILENT) -> SshTransport:
    """Connect to ``target``, through its jump hosts if it has any.

    With ``accept_new`` the key of a host (or jump host) that has none is added to the user's known_hosts file.
    Raises DeployError: DD301 no connection, DD302 unknown host key, DD303 changed or revoked host key, DD304 no
    login, DD305 unusable ssh configuration.
    """
    destination = parse_destination(target.ssh or target.name)
    with contextlib.ExitStack() as stack:
        transport = _Opener(target, accept_new, watch, stack).open(destination)
        return SshTransport(target.name, transport, stack.pop_all())


class SshTransport:
    """An authenticated connection; each command is a channel of it."""

    def __init__(self, name: str, transport: paramiko.Transport, resources: contextlib.ExitStack) -> None:
        self._name = name
        self._transport = transport
        self._resources = resources

    @property
    def user(self) -> str:
        """The account on the host."""
        return self._transport.get_username() or ""

    def start(self, argv: Sequence[str]) -> SshProcess:
        """Start ``argv``, quoted for the login shell, without a terminal.

        Raises DeployError DD308 when the connection is gone, DD306 when the host refuses the command.
        """
        try:
            channel = self._transport.open_session(timeout=CONNECT_TIMEOUT)
            with _bounded(channel, CONNECT_TIMEOUT):
                channel.exec_command(shlex.join(argv))
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not self._transport.is_active():
                raise DeployError("DD308", f"{self._name}: the connection was lost") from None
            raise DeployError(
                "DD306",
                f"{self._name}: the host does not run commands: {error}",
                hint="try `ssh HOST true` by hand (a forced command, or too many sessions at once?)",
            ) from None
        return SshProcess(self._transport, channel)

    def close(self) -> None:
        """Close the connection and its hops. Never raises."""
        with contextlib.suppress(Exception):
            self._resources.close()


@contextlib.contextmanager
def _bounded(channel: paramiko.Channel, timeout: float) -> Iterator[None]:
    """Make paramiko's wait for the answer to a request end: by itself it has no limit."""

    def give_up() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            channel.close()
        channel.event.set()

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class SshProcess:
    """A command on the host. Up to ``WINDOW`` bytes of its output wait here while nobody reads."""

    def __init__(self, transport: paramiko.Transport, channel: paramiko.Channel) -> None:
        self._transport = transport
        self._channel = channel
        self._ahead = memoryview(b"")
        self._stderr = StderrTail(channel.recv_stderr)

    def write(self, data: bytes) -> None:
        """Write all of ``data`` to stdin. Raises BrokenPipeError when the command or the connection is gone."""
        # In pieces: paramiko's sendall copies the rest of the data for every packet.
        rest = memoryview(data)
        while rest:
            try:
                sent = self._channel.send(bytes(rest[:32768]))
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise BrokenPipeError(str(error)) from None
            if not sent:
                raise BrokenPipeError("the channel is closed")
            rest = rest[sent:]

    def close_stdin(self) -> None:
        """Send the end of stdin."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes of stdout; ``b""`` at its end, also when the connection was lost."""
        if not self._ahead:
            # All there is at once: paramiko moves the whole rest of its buffer for every piece taken from it.
            try:
                self._ahead = memoryview(self._channel.recv(WINDOW))
            except (OSError, EOFError, paramiko.SSHException):
                return b""
        piece, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        return piece

    def stderr(self) -> str:
        """What came on stderr so far, at most the last 64 KiB, undecodable bytes replaced."""
        return self._stderr.text()

    def wait(self) -> int | None:
        """End stdin, drop unread stdout, then the exit status; negative when a signal ended the command.

        None when the connection was lost before a status came. The status is asked for after the end of stdout
        only: a host that waits for us to read would never send it.
        """
        self.close_stdin()
        while self.read(WINDOW):
            pass
        status = self._channel.recv_exit_status()
        self._stderr.finish(1.0)
        if status == -1:
            # Either the connection died, and its thread is about to end, or a signal ended the command.
            self._transport.join(0.2)
            return -1 if self._transport.is_active() else None
        return status

    def kill(self) -> None:
        """Close the channel: the host closes the command's pipes. Never raises."""
        with contextlib.suppress(Exception):
            self._channel.close()


@dataclass(frozen=True)
class _Opener:
    """Opens connections on behalf of one target; all that must be closed again goes onto ``stack``."""

    target: Target
    accept_new: bool
    watch: Watch
    stack: contextlib.ExitStack

    def open(
        self,
        destination: Destination,
        *,
        hop: bool = False,
        via: paramiko.Transport | None = None,
        depth: int = 0,
    ) -> paramiko.Transport:
        """An authenticated connection to ``destination``: through ``via``, else as its configuration says."""
        if depth > _MAX_HOPS:
            raise DeployError("DD305", f"{self.target.name}: more than {_MAX_HOPS} jump hosts (a loop?)")
        config = effective_config(destination, self.target.ssh_config)
        if self.target.known_hosts:
            files = (Path(self.target.known_hosts),)
            config = replace(config, user_known_hosts_files=files, global_known_hosts_files=())
        timeout = self.target.connect_timeout or config.connect_timeout or CONNECT_TIMEOUT
        if via is None:
            # As OpenSSH: the first jump host may have its own, every further one is reached through the last.
            for jump in config.proxy_jump:
                via = self.open(_jump(jump), hop=True, via=via, depth=depth + 1)
        known = KnownHosts.load((*config.user_known_hosts_files, *config.global_known_hosts_files))
        hint = None if hop else self.target.unresolved_hint
        transport = self._handshake(config, hostkeys.known_types(config, known), timeout, via, hint)
        shown = transport.get_remote_server_key()
        key = PublicKey(shown.get_name(), shown.asbytes())
        added = hostkeys.verify(config, known, key, accept_new=self.accept_new)
        if added:
            self.watch.notice(f"{config.original}: its {key.type} key {key.fingerprint} was added to {added}")
        identity = Path(self.target.identity_file) if self.target.identity_file and not hop else None
        with self.watch.timed(f"log in to {config.original} as {config.user}"):
            authenticate(transport, config, identity, timeout)
        transport.set_keepalive(_KEEPALIVE)
        return transport

    def _handshake(
        self,
        config: SshConfig,
        known_types: Sequence[str],
        timeout: float,
        via: paramiko.Transport | None,
        unresolved_hint: str | None,
    ) -> paramiko.Transport:
        """Connect and exchange keys; the host is not yet verified.

        A host with too many log-ins under way (MaxStartups) hangs up before its banner: only then try again.
        """
        for attempt in itertools.count():
            proxy = None
            with self.watch.timed(f"connect to {config.hostname} port {config.port}{_way(config, via)}"):
                if via is not None:
                    stream: socket.socket | paramiko.Channel = _through(via, config, timeout)
                elif config.proxy_command:
                    proxy = ProxyCommand(config.proxy_command)
                    self.stack.callback(proxy.close)
                    stream = proxy.socket
                else:
                    stream = connect_tcp(config, timeout, unresolved_hint)
            transport = paramiko.Transport(stream, default_window_size=WINDOW)
            self.stack.callback(_close, transport, stream)
            transport.banner_timeout = transport.handshake_timeout = timeout
            options = transport.get_security_options()
            options.key_types = _known_first(options.key_types, known_types)
            begun = time.monotonic()
            try:
                with self.watch.timed(f"key exchange with {config.original}"):
                    transport.start_client(timeout=timeout)
                    transport.get_remote_server_key()  # start_client returns silently when its time is up
            except (paramiko.SSHException, EOFError, OSError) as error:
                _close(transport, stream)
                late = time.monotonic() - begun >= timeout
                busy = "banner" in str(error) and not late and proxy is None
                if busy and attempt < _BUSY_RETRIES:
                    _pause(attempt)
                    continue
                raise _no_handshake(config, error, timeout, late, proxy) from None
            return transport
        raise AssertionError("the last attempt returns or raises")


def _way(config: SshConfig, via: paramiko.Transport | None) -> str:
    if via is not None:
        return " through the jump host"
    return " by ProxyCommand" if config.proxy_command else ""


def _close(transport: paramiko.Transport, stream: socket.socket | paramiko.Channel) -> None:
    """Close a connection and see its thread off, which only looks up from time to time unless the stream ends."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        stream.shutdown(socket.SHUT_RDWR)
    transport.close()
    if transport.is_alive():
        transport.join(1.0)


def _pause(attempt: int) -> None:
    """Wait before another try, by chance, so that several clients do not come back together."""
    time.sleep((attempt + 1) * random.uniform(0.2, 0.6))  # noqa: S311 - nothing secret


def _through(via: paramiko.Transport, config: SshConfig, timeout: float) -> paramiko.Channel:
    """A forwarded connection from a jump host to the next one."""
    place = (config.hostname, config.port)
    try:
        return via.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=timeout)
    except (paramiko.SSHException, EOFError, OSError) as error:
        reason = error.args[-1] if isinstance(error, paramiko.ChannelException) else error
        raise DeployError(
            "DD301", f"{config.original}: the jump host does not reach {place[0]} port {place[1]}: {reason}"
        ) from None


def _known_first(offered: Sequence[str], known_types: Sequence[str]) -> tuple[str, ...]:
    """Key algorithms to ask for: those of the known keys first, so that the host shows a key we can judge."""
    first = [name for kind in known_types for name in (_RSA if kind == "ssh-rsa" else (kind,))]
    return tuple(dict.fromkeys([name for name in first if name in offered] + list(offered)))


def _jump(text: str) -> Destination:
    try:
        return parse_destination(text)
    except ValueError as error:
        raise DeployError("DD305", f"ProxyJump {text!r}: {error}") from None


def _no_handshake(
    config: SshConfig, error: Exception, timeout: float, late: bool, proxy: ProxyCommand | None
) -> DeployError:
    where = f"{config.hostname} port {config.port}"
    if isinstance(error, IncompatiblePeer):
        return DeployError("DD301", f"{where}: no algorithm in common: {error}")
    words = proxy.last_words() if proxy else ""
    if words:
        return DeployError("DD301", f"{where}: ProxyCommand failed: {words}")
    if late:
        return DeployError("DD301", f"{where}: connected, but no ssh answer in {timeout:g} s")
    if "banner" in str(error) or "protocol version" in str(error):
        return DeployError(
            "DD301",
            f"{where}: the host hung up without an ssh greeting",
            hint="too many log-ins under way (MaxStartups), this address is blocked, or no ssh server listens there",
        )
    return DeployError("DD301", f"{where}: the key exchange failed: {str(error) or 'the host hung up'}")
