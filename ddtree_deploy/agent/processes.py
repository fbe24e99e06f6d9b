"""Which processes of this host run engine code from a root: read from /proc, so Linux alone."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List, Optional

from .root import Root

_ARGV_LIMIT = 300


def _read(pid: str, name: str) -> bytes:
    try:
        with open("/proc/%s/%s" % (pid, name), "rb") as handle:
            return handle.read()
    except OSError:
        return b""


def _link(pid: str, name: str) -> str:
    try:
        return os.readlink("/proc/%s/%s" % (pid, name))
    except OSError:
        return ""


def _started(pid: str, boot_time: float) -> Optional[float]:
    # Field 22 of stat, counted after the command in parentheses, which may itself hold spaces.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    try:
        return boot_time + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return None


def _boot_time() -> float:
    with open("/proc/stat", "rb") as handle:
        for line in handle:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    return 0.0


def _ancestors() -> List[str]:
    pids, pid = [], str(os.getpid())
    while pid not in ("0", "") and pid not in pids:
        pids.append(pid)
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        pid = fields[1].decode() if len(fields) > 1 else ""
    return pids


def _environment(pid: str) -> Dict[bytes, bytes]:
    pairs = (item.partition(b"=") for item in _read(pid, "environ").split(b"\0"))
    return {name: value for name, _, value in pairs}


def _runs_from(pid: str, argv: List[bytes], site: bytes, prefix: Optional[bytes]) -> Optional[str]:
    """Why the process counts as running from the root, or None.

    ``prefix``: the environment whose interpreter imports the engine from this root by itself, if ours does.
    """
    if not os.path.basename(_link(pid, "exe")).startswith("python"):
        return None
    inside = site.rstrip(b"/") + b"/"
    maps = _read(pid, "maps")
    if inside in maps:
        return "has files of the root mapped"
    if any(inside in item + b"/" for item in argv[1:]):
        return "names the root on its command line"
    environment = _environment(pid)
    if any(os.path.realpath(item) == site for item in environment.get(b"PYTHONPATH", b"").split(b":") if item):
        return "has the root on PYTHONPATH"
    named = b"sglang" in b"\0".join(argv)
    if not named:
        return None
    if _link(pid, "cwd").encode() == site:
        return "runs in the root"
    if prefix is None:
        return None
    mine = os.path.realpath(prefix)
    program = argv[0] if argv else b""
    if program.startswith(b"/") and os.path.realpath(os.path.dirname(os.path.dirname(program))) == mine:
        return "is run by the root's interpreter"
    if os.path.realpath(environment.get(b"VIRTUAL_ENV", b"")) == mine and environment.get(b"VIRTUAL_ENV"):
        return "runs in the root's environment"
    if program.startswith(b"sglang::"):
        # The engine renames its workers and so hides the interpreter's path; their parent is listed too.
        return "is an engine worker"
    if _link(pid, "exe") == os.path.realpath(sys.executable) and not os.path.isfile(prefix + b"/pyvenv.cfg"):
        return "is run by the root's interpreter"
    return None


def running(root: Root) -> List[Dict[str, Any]]:
    """Engine processes of ``root``: pid, user id, command line, why, start time; the agent's own are left out.

    Pure Python modules leave no trace in a process's maps, so the command line and environment decide;
    environments of other users are seen only as root.
    """
    try:
        pids = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)
    except OSError:
        return []
    mine = set(_ancestors())
    boot = _boot_time()
    site, found = os.fsencode(root.site), []
    prefix = os.fsencode(sys.prefix) if root.is_imported() else None
    for pid in pids:
        if pid in mine:
            continue
        argv = [item for item in _read(pid, "cmdline").split(b"\0") if item]
        if not argv:
            continue
        why = _runs_from(pid, argv, site, prefix)
        if why:
            try:
                owner = os.stat("/proc/" + pid).st_uid
            except OSError:
                continue
            command = b" ".join(argv).decode("utf-8", "replace")
            found.append(
                {
                    "pid": int(pid),
                    "uid": owner,
                    "command": command[:_ARGV_LIMIT],
                    "why": why,
                    "started": _started(pid, boot),
                }
            )
    return found
