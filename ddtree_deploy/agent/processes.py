"""Which processes of this host run engine code from a root: read from /proc, so Linux alone."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List, Optional, Tuple

from .protocol import LOADER
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


def _runs_from(pid: str, argv: List[bytes], site: bytes, prefix: Optional[bytes]) -> Tuple[Optional[str], bool]:
    """Why the process counts as running from the root (or None), and whether that is certain.

    ``prefix``: the environment whose interpreter imports the engine from this root by itself, if ours does.
    """
    if not os.path.basename(_link(pid, "exe")).startswith("python"):
        return None, False
    if LOADER.encode() in argv:
        return None, False  # another deployer's agent: the lock keeps it in order
    if site.rstrip(b"/") + b"/" in _read(pid, "maps"):
        return "has files of the root mapped", True
    if any(item.startswith(site.rstrip(b"/") + b"/sglang/") for item in argv[1:]):
        return "runs a file of the root", True
    environment = _environment(pid)
    if any(os.path.realpath(item) == site for item in environment.get(b"PYTHONPATH", b"").split(b":") if item):
        return "has the root on PYTHONPATH", True
    named = b"sglang" in b"\0".join(argv)
    if named and _link(pid, "cwd").encode() == site:
        return "runs in the root", True
    if prefix is None:
        return None, False
    mine = os.path.realpath(prefix)
    program = argv[0] if argv else b""
    if program.startswith(b"/") and os.path.realpath(os.path.dirname(os.path.dirname(program))) == mine:
        return "is run by the root's interpreter", named
    if environment.get(b"VIRTUAL_ENV") and os.path.realpath(environment[b"VIRTUAL_ENV"]) == mine:
        return "runs in the root's environment", named
    if program.startswith(b"sglang::"):
        # The engine renames its workers and so hides the interpreter's path; their parent is listed too.
        return "is an engine worker", True
    if named and _link(pid, "exe") == os.path.realpath(sys.executable) and not os.path.isfile(prefix + b"/pyvenv.cfg"):
        return "is run by the root's interpreter", True
    return None, False


def running(root: Root) -> List[Dict[str, Any]]:
    """Engine processes of ``root``: pid, user id, command line, why, start time; the agent's own are left out.

    ``certain`` is False for a process of the root's interpreter that may or may not use the engine.

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
        why, certain = _runs_from(pid, argv, site, prefix)
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
                    "certain": certain,
                    "started": _started(pid, boot),
                }
            )
    return found
