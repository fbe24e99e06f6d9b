"""A service that the installed supervisor keeps, on a host without systemd."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from typing import Any, Dict, List, Optional

from .managers import SCRIPT, Manager, find
from .protocol import AgentError

START_LIMIT_S = 30.0
_TAIL = 1 << 20


class Supervised(Manager):
    """The service whose supervisor reads the configuration file ``config_path``."""

    kind = SCRIPT

    def __init__(self, config_path: str, supervisor_path: str) -> None:
        self.config_path = config_path
        self.supervisor_path = supervisor_path

    def _config(self) -> Dict[str, Any]:
        try:
            with open(self.config_path, encoding="utf-8") as handle:
                value: Dict[str, Any] = json.load(handle)
        except (OSError, ValueError) as error:
            raise AgentError("DD605", "%s cannot be used: %s" % (self.config_path, error), "install it again") from None
        return value

    @property
    def folder(self) -> str:
        """Where the supervisor keeps lock, state and log."""
        return str(self._config()["folder"])

    def _supervisor(self) -> Optional[int]:
        """The pid of the supervisor at work; its lock goes with it."""
        try:
            fd = os.open(os.path.join(self.folder, "lock"), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(fd)
        return None

    def state(self) -> Dict[str, Any]:
        config = self._config()
        told: Dict[str, Any] = {}
        try:
            with open(os.path.join(config["folder"], "state.json"), encoding="utf-8") as handle:
                told = json.load(handle)
        except (OSError, ValueError):
            pass
        alive = self._supervisor()
        active = str(told.get("active", "inactive"))
        result = str(told.get("result", ""))
        if alive is None and active not in ("inactive", "failed"):
            active, result = "failed", "the supervisor is gone (killed, or the machine restarted)"
        return {
            "manager": SCRIPT,
            "active": active,
            "restarting": active == "activating" and bool(told.get("run")),
            "detail": "supervisor pid %d" % alive if alive else "",
            "pid": int(told.get("pid") or 0) if alive else 0,
            "restarts": int(told.get("restarts") or 0),
            "since": told.get("since") if alive else None,
            "result": result,
            "enabled": False,
            "loaded": True,
            "stop_limit_s": float(config["stop_s"]),
            "invocation": "run %s" % told.get("run", 0),
            "notes": [],
        }

    def start(self) -> None:
        try:
            done = subprocess.run(
                [sys.executable, "-I", self.supervisor_path, self.config_path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=START_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise AgentError("DD605", "the supervisor did not start within %d s" % START_LIMIT_S) from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise AgentError("DD605", "the supervisor did not start: %s" % (said[-1] if said else "it said nothing"))

    def begin_stop(self) -> None:
        pid = self._supervisor()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)

    def enable(self, wanted: bool) -> bool:  # noqa: ARG002 - nothing here starts it at boot
        return False

    def recent(self, lines: int) -> List[str]:
        try:
            with open(os.path.join(self.folder, "log"), "rb") as handle:
                handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL))
                text = handle.read().decode("utf-8", "replace")
        except OSError:
            return []
        return text.rpartition("\n=== run ")[2].splitlines()[1:][-lines:]

    def log_command(self, lines: int, follow: bool) -> List[str]:
        path = os.path.join(self.folder, "log")
        # -F goes on with the new file when the log was begun anew.
        return [find("tail") or "tail", "-n", str(lines), *(["-F"] if follow else []), path]
