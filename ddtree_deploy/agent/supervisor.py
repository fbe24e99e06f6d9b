"""A supervisor for one service on a host without systemd: restarts within a limit, one log, nothing left behind.

It is installed beside the service's files and run as ``python supervisor.py CONFIG``; no other module of ours is
needed. ``CONFIG`` is JSON: ``command`` (argv), ``secrets_file`` or null, ``folder`` (below), ``user`` and ``group``
or null, ``restart_s``, ``burst`` starts within ``interval_s``, ``stop_s``. The folder holds::

    lock         held with flock for as long as the supervisor lives; its pid
    state.json   {"active", "pid", "restarts", "since", "result", "run"}, replaced whole
    log, log.1   what the service prints, and before that; a line "=== run N ..." begins each run

SIGTERM ends it: the service's main process gets SIGTERM; after ``stop_s`` seconds all that is left gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import grp
import json
import os
import pwd
import re
import resource
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

LOG_LIMIT = 256 << 20  # bytes, looked at when a run begins
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PRCTL = ctypes.CDLL(None).prctl
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SPACE = " \t\n\r"
_KEY, _BEFORE, _VALUE, _ESCAPE, _SINGLE, _DOUBLE, _DOUBLE_ESCAPE, _COMMENT = range(8)


def assignments(text: str) -> Dict[str, str]:
    """The variables of an environment file, read as systemd's ``EnvironmentFile=`` reads it (systemd.exec(5)).

    Quoted parts may span lines; a backslash escapes outside quotes, and in double quotes what a shell would escape.
    """
    found: Dict[str, str] = {}
    state, key, value, kept = _KEY, "", "", 0

    def finish() -> None:
        # White space at the end counts only where it was quoted or escaped.
        name = key.strip(_SPACE)
        if _NAME.match(name):
            found[name] = value[:kept] + value[kept:].rstrip(_SPACE)

    for char in text:
        if state == _KEY:
            if char == "\n":
                key = ""
            elif char == "=":
                state, value, kept = _BEFORE, "", 0
            elif char in "#;" and not key:
                state = _COMMENT
            elif key or char not in _SPACE:
                key += char
        elif state == _COMMENT:
            if char == "\n":
                state = _KEY
        elif state in (_BEFORE, _VALUE):
            if char == "\n":
                finish()
                state, key = _KEY, ""
            elif char == "\\":
                state = _ESCAPE
            elif state == _BEFORE and char in "'\"":
                state = _SINGLE if char == "'" else _DOUBLE
            elif state == _VALUE or char not in _SPACE:
                state, value = _VALUE, value + char
        elif state == _ESCAPE:
            state = _VALUE
            if char != "\n":
                value += char
                kept = len(value)
        elif state == _SINGLE or (state == _DOUBLE and char == '"'):
            if char == ("'" if state == _SINGLE else '"'):
                state, kept = _BEFORE, len(value)
            else:
                value += char
        elif state == _DOUBLE:
            if char == "\\":
                state = _DOUBLE_ESCAPE
            else:
                value += char
        else:
            state = _DOUBLE
            if char in '"\\`$':
                value += char
            elif char != "\n":
                value += "\\" + char
    if state not in (_KEY, _COMMENT):
        kept = kept if state in (_BEFORE, _VALUE) else len(value)
        finish()
    return found


def secrets(path: Optional[str]) -> Dict[str, str]:
    """The variables of the secrets file, None for none. Raises OSError."""
    if path is None:
        return {}
    with open(path, encoding="utf-8", errors="replace", newline="") as handle:
        return assignments(handle.read())


def descendants(pid: int) -> List[int]:
    """All processes below ``pid``, children before their own."""
    found = []
    waiting = [pid]
    while waiting:
        current = waiting.pop(0)
        try:
            for task in os.listdir("/proc/%d/task" % current):
                with open("/proc/%d/task/%s/children" % (current, task)) as handle:
                    below = [int(word) for word in handle.read().split()]
                found.extend(below)
                waiting.extend(below)
        except OSError:
            continue
    return found


class Supervisor:
    """One service, kept running."""

    def __init__(self, config: Dict[str, Any]) -> None:
        self.config = config
        self.folder = config["folder"]
        self.state: Dict[str, Any] = {
            "active": "inactive",
            "pid": 0,
            "restarts": 0,
            "since": None,
            "result": "",
            "run": 0,
        }
        self.account = pwd.getpwnam(config["user"]) if config.get("user") else None
        self.group = grp.getgrnam(config["group"]).gr_gid if config.get("group") else None
        self.starts: List[float] = []
        self.stopping = False
        self.child: Optional[subprocess.Popen[bytes]] = None

    def tell(self, **changes: Any) -> None:
        """Write the state, whole."""
        self.state.update(changes)
        path = os.path.join(self.folder, "state.json")
        with open(path + ".new", "w") as handle:
            json.dump(self.state, handle)
        os.replace(path + ".new", path)

    def open_log(self) -> int:
        """The log, begun anew when it has grown too long."""
        path = os.path.join(self.folder, "log")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        if os.fstat(fd).st_size > LOG_LIMIT:
            os.replace(path, path + ".1")
            os.close(fd)
            return self.open_log()
        return fd

    def _in_child(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for kind, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)):
            # What is not ours to raise stays: the service says so itself if it needs more.
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (wanted, wanted))
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if self.account is not None and os.geteuid() == 0:
            group = self.account.pw_gid if self.group is None else self.group
            os.initgroups(self.account.pw_name, group)
            os.setgid(group)
            os.setuid(self.account.pw_uid)
        # Without its supervisor nobody would stop it. (Set last: a change of user forgets it.)
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.umask(0o077)

    def start(self) -> None:
        """Begin a run. Raises OSError."""
        account = self.account or pwd.getpwuid(os.geteuid())
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": account.pw_dir,
            "USER": account.pw_name,
            "LANG": os.environ.get("LANG") or "C.UTF-8",
        }
        environment.update(secrets(self.config.get("secrets_file")))
        run = self.state["run"] + 1
        log = self.open_log()
        try:
            os.write(log, ("=== run %d, %s\n" % (run, time.strftime("%Y-%m-%dT%H:%M:%S%z"))).encode())
            self.child = subprocess.Popen(
                self.config["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd="/",
                start_new_session=True,
                preexec_fn=self._in_child,  # noqa: PLW1509 - there are no threads here
            )
        finally:
            os.close(log)
        self.starts.append(time.monotonic())
        self.tell(active="active", pid=self.child.pid, since=time.time(), run=run, result="")

    def await_signal(self, limit_s: float) -> None:
        """Wait for a signal, at most so long; remember if it asks to stop. Collect the dead."""
        got = signal.sigtimedwait(_SIGNALS, max(0.0, limit_s))
        if got is not None and got.si_signo in _STOPPING:
            self.stopping = True

    def reap(self) -> None:
        """Collect processes that the service left to us; the main process is left to :meth:`watch`."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or (
                self.child is not None and self.child.returncode is None and found.si_pid == self.child.pid
            ):
                return
            os.waitpid(found.si_pid, 0)

    def watch(self) -> str:
        """Until the run ends; says how it ended."""
        assert self.child is not None
        asked: Optional[float] = None
        while self.child.poll() is None:
            if self.stopping and asked is None:
                asked = time.monotonic()
                self.tell(active="deactivating")
                # To the main process alone: it drains its requests, for which it needs the others.
                self.child.send_signal(signal.SIGTERM)
            left = 3600.0 if asked is None else asked + self.config["stop_s"] - time.monotonic()
            if left <= 0:
                self.kill_all()
                left = 1.0
            self.await_signal(left)
            self.reap()
        status = self.child.returncode
        return "signal %d" % -status if status < 0 else "exit status %d" % status

    def kill_all(self) -> None:
        """SIGKILL for every process of the service."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def clear(self) -> None:
        """End whatever outlived the main process: it would keep a GPU's memory."""
        for _attempt in range(100):
            self.reap()
            if not descendants(os.getpid()):
                return
            self.kill_all()
            time.sleep(0.1)

    def run(self) -> None:
        """Keep the service running until it is told to stop or fails too often."""
        while not self.stopping:
            try:
                self.start()
                result = self.watch()
            except (OSError, KeyError, subprocess.SubprocessError) as error:
                result = "it could not be started: %s" % error
            self.clear()
            if self.stopping:
                break
            now = time.monotonic()
            self.starts = [moment for moment in self.starts if now - moment < self.config["interval_s"]]
            if len(self.starts) >= self.config["burst"] or result.startswith("it could not"):
                self.tell(active="failed", pid=0, result=result)
                return
            self.tell(active="activating", pid=0, result=result, restarts=self.state["restarts"] + 1)
            deadline = time.monotonic() + self.config["restart_s"]
            while not self.stopping and time.monotonic() < deadline:
                self.await_signal(deadline - time.monotonic())
        self.tell(active="inactive", pid=0)


def main(path: str) -> int:
    """Take the lock, leave the caller's session, and supervise; the caller's process ends once that has begun."""
    with open(path, encoding="utf-8") as handle:
        supervisor = Supervisor(json.load(handle))
    os.makedirs(supervisor.folder, mode=0o750, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(os.path.join(supervisor.folder, "lock"), flags, 0o640)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write("it is running already\n")
        return 1
    begun, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(begun, 1) else 1
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(begun)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # A Python process drops SIGCHLD unless someone listens; a blocked and handled one waits to be fetched.
    signal.signal(signal.SIGCHLD, lambda _kind, _frame: None)
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    supervisor.tell(active="activating")
    os.write(tell, b"+")
    os.close(tell)
    supervisor.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
