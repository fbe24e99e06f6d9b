"""A host over the system's own ssh: for hardware keys, host certificates, second factors, KnownHostsCommand, GSSAPI.

One ssh logs in and stays as a ControlMaster whose socket lies in a private folder; each command is a client of
that socket. ssh itself judges the host keys, of every hop, and always strictly: what must hold stands at the top
of a configuration of ours that includes the user's, since the first value that ssh reads is the one that counts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.local import LocalProcess
from ddtree_deploy.hosts.sshconfig import NO_CONFIG, SYSTEM_CONFIG, account_home, effective_config
from ddtree_deploy.hosts.target import Target, parse_destination
from ddtree_deploy.hosts.terminal import can_ask
from ddtree_deploy.hosts.watch import SILENT, Watch

CONNECT_TIMEOUT = 10  # seconds, for the TCP connection and the greeting of each hop
_LOGIN_LIMIT = 60.0  # seconds beyond that, for a key that has to be touched
_TYPING_LIMIT = 300.0  # seconds, at a terminal
_PERSIST = 900  # seconds that a master which lost us stays
_BUSY_RETRIES = 2
_GONE = 255  # ssh's own exit status for a failure of its own

#: What ssh says when it does not get in, most telling first: (pattern, code, what it means, hint).
_REASONS: tuple[tuple[str, str, str, str | None], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|POSSIBLE DNS SPOOFING|host key for .* has changed",
        "DD303",
        "THE HOST KEY CHANGED, not connecting: someone may be in the middle",
        "if the host was reinstalled, get its new fingerprint from who runs it, then remove the old line with "
        "ssh-keygen -R; no flag accepts a changed key",
    ),
    (
        r"REVOKED|revoked",
        "DD303",
        "the host shows a revoked key, not connecting",
        "ask who runs the host; this cannot be overridden here",
    ),
    (
        r"host key is known for|Host key verification failed|Host certificate invalid|verify host",
        "DD302",
        "the host key is not known, not connecting",
        "connect once by hand with ssh and compare the fingerprint, or run again with --accept-new",
    ),
    (
        r"Permission denied|Too many authentication failures|No supported authentication methods",
        "DD304",
        "could not log in",
        "load the key into the agent (ssh-add) or name it: identity_file in the inventory; what needs a password "
        "or a second factor needs a terminal",
    ),
    (
        r"[Bb]ad configuration option|[Bb]ad number|terminating, \d+ bad|[Cc]an't open user config|no argument after"
        r"|[Mm]issing argument|unsupported option|[Bb]ad (?:key|owner)|Unsupported",
        "DD305",
        "ssh does not accept its configuration",
        None,
    ),
    (
        r"kex_exchange_identification|Connection closed by remote host|Exceeded MaxStartups|banner exchange",
        "DD301",
        "the host hung up without an ssh greeting",
        "too many log-ins under way (MaxStartups), this address is blocked, or no ssh server listens there",
    ),
    (r"Could not resolve hostname", "DD301", "the name is unknown", None),
    (r"timed out|Timeout", "DD301", "no answer", None),
)


def open_openssh(target: Target, *, accept_new: bool = False, watch: Watch = SILENT) -> OpenSshTransport:
    """Log in to ``target`` with the system's ssh, which asks at the terminal, if there is one, for what it needs.

    With ``accept_new`` ssh adds the key of a host that has none. Raises DeployError as the built-in client does:
    DD301 no connection, DD302 unknown host key, DD303 changed or revoked host key, DD304 no login, DD305 no ssh or
    an unusable configuration.
    """
    if shutil.which("ssh") is None:
        raise DeployError("DD305", f"{target.name}: there is no ssh on this machine", "install the OpenSSH client")
    # A socket's path may have about 100 characters, and a user's temporary folder often has more already.
    short = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None  # noqa: S108 - mkdtemp makes it private
    folder = Path(tempfile.mkdtemp(prefix="ddtree-", dir=short))
    try:
        return _log_in(target, folder, accept_new, watch)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _log_in(target: Target, folder: Path, accept_new: bool, watch: Watch) -> OpenSshTransport:
    destination = parse_destination(target.ssh or target.name)
    interactive = can_ask()
    config, log, socket = folder / "config", folder / "log", folder / "s"
    config.write_text("".join(f"{line}\n" for line in _configuration(target, accept_new, interactive)))
    ssh = ["ssh", "-F", str(config), "-E", str(log), "-T"]
    where = ["-i", target.identity_file] if target.identity_file else []
    where += ["-l", destination.user] if destination.user else []
    where += ["-p", str(destination.port)] if destination.port else []
    where += ["--", destination.host]
    master = ["-N", "-o", "ControlMaster=yes", "-o", f"ControlPath={socket}", "-o", f"ControlPersist={_PERSIST}"]
    for attempt in itertools.count():
        with watch.timed(f"connect and log in to {destination} by ssh"):
            status = _run([*ssh, *master, *where], target, interactive, log)
            if status == 0 and socket.exists():
                for line in _said(log):
                    if "Permanently added" in line:
                        watch.notice(f"{target.name}: {line.removeprefix('Warning: ')}")
                return OpenSshTransport(target, folder, socket)
            if any("UNKNOWN port" in line for line in _said(log)):
                # It failed on the way, and beside ControlPersist ssh shows nobody what a jump host's ssh has to say.
                _run([*ssh, "-o", "BatchMode=yes", *where, "true"], target, False, log)
            failure = _failure(target, _said(log), status)
        if "without an ssh greeting" not in failure.message or attempt >= _BUSY_RETRIES:
            raise failure
        log.unlink()
        _pause(attempt)
    raise AssertionError("the last attempt returns or raises")


def _configuration(target: Target, accept_new: bool, interactive: bool) -> Iterator[str]:
    """The lines of our configuration; jump hosts are reached under it, too."""
    timeout = int(target.connect_timeout or CONNECT_TIMEOUT) or 1
    yield f"StrictHostKeyChecking {'accept-new' if accept_new else 'yes'}"
    yield "UpdateHostKeys no"
    yield f"BatchMode {'no' if interactive else 'yes'}"
    yield f"ConnectTimeout {timeout}"
    yield "ServerAliveInterval 15"
    yield "ServerAliveCountMax 4"
    for word in ("ControlMaster", "ForwardAgent", "ForwardX11", "PermitLocalCommand", "RequestTTY"):
        yield f"{word} no"
    yield "ControlPath none"
    yield "RemoteCommand none"
    if target.known_hosts:
        yield f"UserKnownHostsFile {_quoted(target.known_hosts.replace('%', '%%'))}"
        yield "GlobalKnownHostsFile none"
    if target.ssh_config is None:
        yield f"Include {_quoted(str(account_home() / '.ssh/config'))}"
        yield f"Include {_quoted(str(SYSTEM_CONFIG))}"
    elif target.ssh_config != NO_CONFIG:
        if not Path(target.ssh_config).is_file():  # ssh passes over what it cannot include
            raise DeployError("DD305", f"{target.name}: {target.ssh_config} is no file", "see ssh_config")
        yield f"Include {_quoted(target.ssh_config)}"


def _quoted(path: str) -> str:
    if '"' in path or "\n" in path:
        raise DeployError("DD305", f"{path!r} cannot be written into an ssh configuration", "rename it")
    return f'"{path}"'


def _run(command: list[str], target: Target, interactive: bool, log: Path) -> int:
    """ssh's exit status: with ControlPersist it leaves a master behind as soon as it has logged in."""
    limit = _TYPING_LIMIT if interactive else _LOGIN_LIMIT + (target.connect_timeout or CONNECT_TIMEOUT)
    null = subprocess.DEVNULL
    try:
        with log.open("ab") as words:
            ends = (None, None) if interactive else (null, words)
            return subprocess.run(command, stdin=ends[0], stdout=null, stderr=ends[1], timeout=limit).returncode
    except subprocess.TimeoutExpired:
        raise DeployError("DD301", f"{target.name}: no log-in after {limit:g} s") from None
    except OSError as error:
        raise DeployError("DD305", f"ssh could not be run: {error.strerror}") from None


def _said(log: Path) -> list[str]:
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", "replace").splitlines()
        return [line.strip() for line in lines if line.strip() and not set(line) <= set("@\r ")]
    return []


def _failure(target: Target, said: Sequence[str], status: int) -> DeployError:
    """What went wrong, from ssh's own words."""
    for pattern, code, meaning, hint in _REASONS:
        line = next((line for line in said if re.search(pattern, line)), None)
        if line is not None:
            instead = target.unresolved_hint if code == "DD301" else None
            message = f"{target.name}: {meaning}: {line}"
            return DeployError(code, message, hint or instead, said[-8:] if len(said) > 1 else ())
    last = said[-1] if said else f"ssh ended with status {status}"
    return DeployError("DD301", f"{target.name}: {last}", target.unresolved_hint, said[-8:-1])


def _pause(attempt: int) -> None:
    """Wait before another try, by chance, so that several clients do not come back together."""
    time.sleep((attempt + 1) * random.uniform(0.2, 0.6))  # noqa: S311 - nothing secret


class OpenSshTransport:
    """A master that is logged in; each command is a client of its socket."""

    def __init__(self, target: Target, folder: Path, socket: Path) -> None:
        self._target = target
        self._folder = folder
        self._socket = socket
        self._count = itertools.count()

    @property
    def user(self) -> str:
        """The account on the host."""
        destination = parse_destination(self._target.ssh or self._target.name)
        return effective_config(destination, self._target.ssh_config).user

    def _client(self, *options: str) -> list[str]:
        # Without its master this client must fail at once, and not connect by itself.
        alone = ("-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "LogLevel=ERROR")
        return ["ssh", "-F", "none", "-S", str(self._socket), *alone, *options, "--", "host"]

    def start(self, argv: Sequence[str]) -> OpenSshProcess:
        """Start ``argv``, quoted for the login shell, without a terminal.

        Raises DeployError DD308 when the connection is gone. That the host refuses the command shows when the
        process is read.
        """
        if not self._socket.exists():
            raise DeployError("DD308", f"{self._target.name}: the connection was lost")
        log = self._folder / f"log{next(self._count)}"
        command = [*self._client("-E", str(log), "-T", "-e", "none"), shlex.join(argv)]
        return OpenSshProcess(self, command, log)

    def alive(self) -> bool:
        """Whether the master still runs."""
        return self._socket.exists() and self._control("check") == 0

    def _control(self, word: str) -> int:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            ends = subprocess.DEVNULL
            command = self._client("-O", word)
            return subprocess.run(command, stdin=ends, stdout=ends, stderr=ends, timeout=5).returncode
        return _GONE

    def close(self) -> None:
        """End the master, and with it every command. Never raises."""
        if self._socket.exists():
            self._control("exit")
        shutil.rmtree(self._folder, ignore_errors=True)


class OpenSshProcess(LocalProcess):
    """A client of the master: the command's own streams, and its exit status."""

    def __init__(self, transport: OpenSshTransport, command: Sequence[str], log: Path) -> None:
        super().__init__(command)
        self._transport = transport
        self._log = log

    def stderr(self) -> str:
        """What came on stderr so far, and what ssh itself had to say."""
        own = "".join(f"{line}\n" for line in _said(self._log))
        return super().stderr() + own

    def wait(self) -> int | None:
        """End stdin, drop unread stdout, then the exit status; 255 when a signal ended the command.

        None when the connection was lost before a status came.
        """
        status = super().wait()
        return None if status == _GONE and not self._transport.alive() else status
