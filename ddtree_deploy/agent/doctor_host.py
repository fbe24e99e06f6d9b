"""The host around the engine: memory, limits, folders, clock, ports, and what the PCIe bus does to peer transfers."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import struct
import time
from typing import Any, Dict, List, Optional

from .doctor_gpu import unit_of
from .doctor_probe import Fact, command_of, listing, read, version_in

_SHM = "/dev/shm"  # noqa: S108 - NCCL's and the engine's choice
_TIME_ERROR = 5  # what adjtimex returns for a clock that nothing synchronises
_ACS_CAPABILITY = 0x000D
_ACS_REDIRECT = 0x04 | 0x08  # request and completion redirect
_BRIDGE_CLASS = "0x0604"
_MAX_CAPABILITIES = 64


def gather(request: Dict[str, Any], folders: List[str]) -> Fact:
    """Everything but PCIe; ``folders`` are looked at for space and for whether programs can run there."""
    cpus = len(os.sched_getaffinity(0))
    return {
        "name": platform.node(),
        "system": version_in(read("/etc/os-release") or "", r'(?m)^PRETTY_NAME="?([^"\n]+)'),
        "kernel": platform.release(),
        "cpus": cpus,
        "nodes": sum(name.startswith("node") and name[4:].isdigit() for name in listing("/sys/devices/system/node")),
        "memory": _memory(),
        "shm": _space(_SHM),
        "limits": {name: _limit(getattr(resource, "RLIMIT_" + name.upper())) for name in ("memlock", "nofile")},
        "clock": {"epoch": time.time(), "synchronised": _synchronised()},
        "folders": {folder: _folder(folder) for folder in folders},
        "ports": {str(port): _listener(port) for port in request.get("ports") or []},
    }


def gather_bus() -> Fact:
    """IOMMU groups and their kinds, bridges that redirect peer transfers, and the memory module's HMM switch."""
    kinds: Dict[str, int] = {}
    for group in listing("/sys/kernel/iommu_groups"):
        kind = (read("/sys/kernel/iommu_groups/%s/type" % group) or "unknown").strip()
        kinds[kind] = kinds.get(kind, 0) + 1
    bridges, redirecting, readable = 0, [], True
    for name in listing("/sys/bus/pci/devices"):
        folder = "/sys/bus/pci/devices/" + name
        if not (read(folder + "/class") or "").startswith(_BRIDGE_CLASS):
            continue
        bridges += 1
        control = acs_control(_config_space(folder + "/config"))
        if control is None:
            readable = False
        elif control & _ACS_REDIRECT:
            redirecting.append(name)
    hmm = read("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    return {
        "cmdline": (read("/proc/cmdline") or "").strip(),
        "iommu": kinds,
        "bridges": bridges,
        "acs_readable": readable,
        "acs_redirecting": redirecting,
        "uvm_disable_hmm": None if hmm is None else hmm.strip(),
    }


def _config_space(path: str) -> bytes:
    try:
        with open(path, "rb") as handle:
            return handle.read(4096)
    except OSError:
        return b""


def acs_control(space: bytes) -> Optional[int]:
    """The ACS control register of a PCIe configuration space: 0 without the capability, None where it is hidden.

    The kernel shows the extended space, which begins at byte 256, to root alone. Layout: PCI Express base
    specification, "ACS Extended Capability".
    """
    if len(space) <= 256:
        return None
    position = 256
    for _step in range(_MAX_CAPABILITIES):
        if position < 256 or position + 8 > len(space):
            return 0
        (header,) = struct.unpack_from("<I", space, position)
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int(struct.unpack_from("<H", space, position + 6)[0])
        position = header >> 20
    return 0


def _memory() -> Fact:
    text = read("/proc/meminfo") or ""
    found = {name: version_in(text, r"(?m)^%s:\s+(\d+) kB" % name) for name in ("MemTotal", "MemAvailable")}
    return {
        "total": int(found["MemTotal"] or 0) * 1024 or None,
        "available": int(found["MemAvailable"] or 0) * 1024 or None,
    }


def _space(path: str) -> Optional[Fact]:
    try:
        info = os.statvfs(path)
    except OSError:
        return None
    return {"total": info.f_blocks * info.f_frsize, "free": info.f_bavail * info.f_frsize}


def _limit(which: int) -> int:
    """The soft limit, -1 for none."""
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _synchronised() -> Optional[bool]:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _folder(path: str) -> Fact:
    """``there``; of the nearest folder that is there: space, ``exec`` and ``writable`` for the agent's user."""
    near = path
    while near != "/" and not os.path.isdir(near):
        near = os.path.dirname(near)
    space = _space(near)
    noexec = space is not None and bool(os.statvfs(near).f_flag & os.ST_NOEXEC)
    return {
        "there": near == path,
        "free": space["free"] if space else None,
        "exec": not noexec,
        "writable": os.access(near, os.W_OK),
    }


def _listener(port: int) -> Optional[Fact]:
    """Who listens on a TCP port: address, pid and unit as far as they can be seen; None where nobody does."""
    for name, size in (("tcp", 8), ("tcp6", 32)):
        for line in (read("/proc/net/" + name, 4 * 1024 * 1024) or "").splitlines()[1:]:
            cells = line.split()
            if len(cells) < 10 or cells[3] != "0A" or int(cells[1].rpartition(":")[2], 16) != port:
                continue
            words = bytes.fromhex(cells[1][:size])
            address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
            pid = _owner(cells[9])
            argv = command_of(pid) if pid else None
            return {
                "address": socket.inet_ntop(socket.AF_INET if size == 8 else socket.AF_INET6, address),
                "pid": pid,
                "command": " ".join(argv)[:300] if argv else None,
                "unit": unit_of(pid) if pid else None,
            }
    return None


def _owner(inode: str) -> Optional[int]:
    wanted = "socket:[%s]" % inode
    for name in listing("/proc"):
        if not name.isdigit():
            continue
        for descriptor in listing("/proc/%s/fd" % name):
            try:
                if os.readlink("/proc/%s/fd/%s" % (name, descriptor)) == wanted:
                    return int(name)
            except OSError:
                continue
    return None
