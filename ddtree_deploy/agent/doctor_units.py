"""systemd units of engine services: the file on the host, what systemd loaded, what runs. No secret leaves the host."""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import Dict, List, Optional

from .doctor_probe import Fact, command_of, find_program, listing, mask, read, run, version_in

_SECONDS = 10.0
_FOLDER = "/etc/systemd/system"
_OURS = re.compile(r"sglang-[A-Za-z0-9._-]+\.service\Z")
_MAX_UNITS = 64
_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NeedDaemonReload",
    "FragmentPath",
    "DropInPaths",
    "UnitFileState",
    "MainPID",
    "NRestarts",
    "User",
    "LimitMEMLOCK",
    "LimitNOFILE",
    "ExecStart",
    "ExecMainStartTimestampMonotonic",
)


def gather(asked: List[str]) -> Fact:
    """``manager`` (why systemd cannot be asked, or None) and ``units`` by name: those asked for and those found."""
    names = list(dict.fromkeys([*asked, *(name for name in listing(_FOLDER) if _OURS.match(name))]))[:_MAX_UNITS]
    units: Dict[str, Fact] = {name: {"file": _file(os.path.join(_FOLDER, name)), "loaded": None} for name in names}
    if not os.path.isdir("/run/systemd/system"):
        return {"manager": "systemd does not run here", "units": units}
    program = find_program("systemctl")
    if program is None or not names:
        return {"manager": None if program else "systemctl: not found", "units": units}
    answer = run([program, "show", "--no-pager", "--property=" + ",".join(_PROPERTIES), "--", *names], _SECONDS)
    for block, name in zip(answer["out"].strip("\n").split("\n\n"), names):
        units[name]["loaded"] = loaded(block)
    return {"manager": answer["error"], "units": units}


def loaded(text: str) -> Fact:
    """One unit's properties, with the masked argument vector of its main process.

    ``command``: the words of ExecStart as systemd shows them, without quotes: good for finding flags, no more.
    """
    values = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    pid = values.get("MainPID", "0")
    started = values.get("ExecMainStartTimestampMonotonic", "0")
    return {
        "load": values.get("LoadState"),
        "active": values.get("ActiveState"),
        "sub": values.get("SubState"),
        "result": values.get("Result"),
        "reload": values.get("NeedDaemonReload") == "yes",
        "drop_ins": values.get("DropInPaths", "").split(),
        "enabled": values.get("UnitFileState"),
        "pid": int(pid) if pid.isdigit() and pid != "0" else None,
        "command": mask((version_in(values.get("ExecStart", ""), r"argv\[\]=(.*?) ; ignore_errors=") or "").split()),
        "argv": command_of(int(pid)) if pid.isdigit() and pid != "0" else None,
        "restarts": int(values["NRestarts"]) if values.get("NRestarts", "").isdigit() else None,
        "user": values.get("User") or None,
        "memlock": _limit(values.get("LimitMEMLOCK")),
        "nofile": _limit(values.get("LimitNOFILE")),
        "age": _age(started),
    }


def _limit(text: Optional[str]) -> Optional[int]:
    """A resource limit: -1 for none, None where it is not known."""
    if text == "infinity":
        return -1
    return int(text) if text and text.isdigit() else None


def _age(started: str) -> Optional[float]:
    """Seconds since a monotonic time stamp in microseconds."""
    uptime = (read("/proc/uptime") or "").split()
    if not started.isdigit() or started == "0" or not uptime:
        return None
    return round(float(uptime[0]) - int(started) / 1e6, 1)


def _file(path: str) -> Optional[Fact]:
    """A unit file: its hash and age; None where there is none."""
    try:
        with open(path, "rb") as handle:
            data = handle.read(1024 * 1024)
            changed = os.fstat(handle.fileno()).st_mtime
    except OSError:
        return None
    return {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "age": round(time.time() - changed, 1)}


def environment_file(path: str, secret: bool) -> Optional[Fact]:
    """An environment file: mode, owner and the *names* that it sets; None where it cannot be found.

    ``names`` is None where the agent's user may not read it. No value leaves the host, nor, of a file with
    secrets, its hash.
    """
    try:
        info = os.stat(path)
    except OSError:
        return None
    facts: Fact = {"mode": info.st_mode & 0o7777, "uid": info.st_uid, "sha256": None, "names": None}
    text = read(path)
    if text is not None:
        if not secret:
            facts["sha256"] = hashlib.sha256(text.encode("utf-8")).hexdigest()
        facts["names"] = sorted(set(re.findall(r"(?m)^\s*([A-Za-z_][A-Za-z0-9_]*)=\S", text)))
    return facts
