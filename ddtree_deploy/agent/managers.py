"""What runs services on this host, behind one face: systemd, or the supervisor that this tool installs.

A manager's :meth:`~Manager.state` is plain data: ``active`` ("active", "activating", "deactivating", "inactive"
or "failed"), ``restarting`` (a run ended, the next one is waited for), ``pid`` of the main process (0 for none),
``restarts`` since the start, ``since`` (seconds since the epoch, None where unknown), ``result`` (how the last run
ended, in words), ``invocation`` (which run it is), ``notes``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, Optional

from .protocol import AgentError

SYSTEMD, SCRIPT = "systemd", "script"
COMMAND_LIMIT_S = 60.0
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHOWN = (
    "LoadState,ActiveState,SubState,Job,UnitFileState,FragmentPath,DropInPaths,NeedDaemonReload,MainPID,NRestarts,"
    "Result,ExecMainCode,ExecMainStatus,ExecMainStartTimestampMonotonic,InvocationID,ControlGroup,TimeoutStopUSec"
)


class Manager:
    """What starts, stops and watches one service."""

    kind = ""

    def state(self) -> Dict[str, Any]:
        """How the service stands; see the module."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to start it; returns once it was begun. Raises AgentError DD605."""
        raise NotImplementedError

    def begin_stop(self) -> None:
        """Begin to stop it; :meth:`state` tells when it has. Raises AgentError DD605."""
        raise NotImplementedError

    def settle(self) -> None:
        """Before a start and after a stop that was asked for: forget how earlier runs ended."""

    def enable(self, wanted: bool) -> bool:
        """Have it started at boot, or not; False where this manager cannot."""
        raise NotImplementedError

    def recent(self, lines: int) -> List[str]:
        """The last log lines of the current or last run, oldest first."""
        raise NotImplementedError

    def log_command(self, lines: int, follow: bool) -> List[str]:
        """The command that prints the log."""
        raise NotImplementedError


def booted() -> bool:
    """Whether systemd is this machine's service manager."""
    return os.path.isdir("/run/systemd/system") and find("systemctl") is not None


def find(program: str) -> Optional[str]:
    """The path of a program of the system; the caller's PATH may be a service's or sudo's."""
    return shutil.which(program, path=_SEARCH_PATH)


def run_program(argv: List[str], limit_s: float = COMMAND_LIMIT_S) -> "subprocess.CompletedProcess[str]":
    """Run a program of the system in the C locale. Raises AgentError DD605 if it is absent or takes too long."""
    program = find(argv[0])
    if program is None:
        raise AgentError("DD605", "the host has no %s" % argv[0])
    environment = {"PATH": _SEARCH_PATH, "LC_ALL": "C", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}
    try:
        return subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=limit_s,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise AgentError("DD605", "`%s` did not end within %d s" % (" ".join(argv[:2]), limit_s)) from None


class Systemd(Manager):
    """The unit ``name`` of the system's own manager."""

    kind = SYSTEMD

    def __init__(self, name: str) -> None:
        self.name = name

    def properties(self) -> Dict[str, str]:
        """What ``systemctl show`` says of the unit."""
        done = self._systemctl("show", "--property", _SHOWN, self.name)
        pairs = (line.partition("=") for line in done.stdout.splitlines())
        return {name: value for name, separator, value in pairs if separator}

    def _systemctl(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> "subprocess.CompletedProcess[str]":
        done = run_program(["systemctl", "--no-ask-password", *arguments], limit_s)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "status %d" % done.returncode).splitlines()
            raise AgentError("DD605", "systemctl %s: %s" % (arguments[0], said[0]), None, said[1:])
        return done

    def state(self) -> Dict[str, Any]:
        shown = self.properties()
        notes = []
        if shown.get("LoadState") not in ("loaded", None):
            notes.append("the unit is %s" % shown["LoadState"])
        if shown.get("NeedDaemonReload") == "yes":
            notes.append("the unit on disk is not the one that systemd has loaded: `systemctl daemon-reload`")
        if shown.get("DropInPaths"):
            notes.append("drop-ins change this unit: %s" % shown["DropInPaths"])
        active = shown.get("ActiveState", "inactive")
        waits = shown.get("SubState", "").startswith("auto-restart")
        # A start that was asked for, but has not begun, is a job.
        queued = active in ("inactive", "failed") and shown.get("Job", "0") not in ("", "0")
        if waits or queued:
            active = "activating"
        return {
            "manager": SYSTEMD,
            "active": active,
            "detail": shown.get("SubState", ""),
            "restarting": waits,
            "pid": int(shown.get("MainPID") or 0),
            "restarts": int(shown.get("NRestarts") or 0),
            "since": _since(shown.get("ExecMainStartTimestampMonotonic")),
            "result": _result(shown),
            "enabled": shown.get("UnitFileState") in ("enabled", "enabled-runtime"),
            "loaded": shown.get("LoadState") == "loaded",
            "stop_limit_s": _seconds(shown.get("TimeoutStopUSec"), 90.0),
            "invocation": shown.get("InvocationID") or None,
            "notes": notes,
        }

    def start(self) -> None:
        self._systemctl("start", "--no-block", self.name)

    def begin_stop(self) -> None:
        self._systemctl("stop", "--no-block", self.name)

    def settle(self) -> None:
        # The engine ends itself by SIGKILL also when it was asked to stop, which counts as a failure. And starts that
        # were asked for count towards the unit's start limit, which is there for crashes.
        done = run_program(["systemctl", "--no-ask-password", "reset-failed", self.name])
        if done.returncode and "not loaded" not in done.stderr:
            raise AgentError("DD605", "systemctl reset-failed: %s" % done.stderr.strip())

    def enable(self, wanted: bool) -> bool:
        self._systemctl("enable" if wanted else "disable", "--quiet", self.name)
        return True

    def reload(self) -> None:
        """Have systemd read its units anew; the unit must then be loaded as it is on disk, if it is there."""
        self._systemctl("daemon-reload")

    def verify(self, path: str) -> List[str]:
        """What the host's own ``systemd-analyze verify`` has to say about the unit; nothing for a sound one.

        Its exit status is 0 for most mistakes, so every line that names the unit counts.
        """
        version = run_program(["systemd-analyze", "--version"]).stdout.split()
        recursive = ["--recursive-errors=one"] if len(version) > 1 and _number(version[1]) >= 250 else []
        done = run_program(["systemd-analyze", "--man=no", *recursive, "verify", path])
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        if done.returncode:
            return lines or ["systemd-analyze verify ended with status %d" % done.returncode]
        return [line for line in lines if self.name in line]

    def recent(self, lines: int) -> List[str]:
        invocation = self.properties().get("InvocationID")
        # Without one the unit has not run since boot: what is there of it is of an earlier boot.
        chosen = ["_SYSTEMD_INVOCATION_ID=" + invocation, "+", "INVOCATION_ID=" + invocation] if invocation else []
        command = ["journalctl", "--no-pager", "--quiet", "--output=cat", "--lines=%d" % lines]
        return run_program(command + (chosen or ["--unit=" + self.name])).stdout.splitlines()

    def log_command(self, lines: int, follow: bool) -> List[str]:
        command = [find("journalctl") or "journalctl", "--no-pager", "--quiet", "--output=short-iso"]
        return [*command, "--lines=%d" % lines, "--unit=" + self.name] + (["--follow"] if follow else [])


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 0


def _since(monotonic_us: Optional[str]) -> Optional[float]:
    """Seconds since the epoch of a moment that systemd gives in microseconds since boot; 0 is "never"."""
    import time

    if not monotonic_us or not monotonic_us.isdigit() or monotonic_us == "0":
        return None
    return time.time() - time.monotonic() + int(monotonic_us) / 1e6


def _seconds(span: Optional[str], default: float) -> float:
    """A time span as ``systemctl show`` prints it ("2min", "1min 30s", "infinity")."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    total, found = 0.0, False
    for number, unit in re.findall(r"([0-9.]+)(us|ms|min|s|h|d|w)\b", span or ""):
        total, found = total + float(number) * units[unit], True
    return total if found else default


def _result(shown: Dict[str, str]) -> str:
    """How the last run ended."""
    kinds = {"1": "exit status", "2": "signal", "3": "signal"}
    result = shown.get("Result", "")
    code = kinds.get(shown.get("ExecMainCode", ""))
    ended = "%s %s" % (code, shown.get("ExecMainStatus", "?")) if code else ""
    # The engine's way to end itself counts as a success, and says nothing.
    return ended or result if result == "success" else "%s (%s)" % (result, ended) if ended else result
