"""The GPUs as the driver shows them: devices, who holds them, how they are linked."""

from __future__ import annotations

import csv
import functools
import os
import re
from typing import Any, Dict, List, Optional, Sequence

from .doctor_probe import Fact, command_of, find_program, listing, number, read, run, together

_SECONDS = 20.0
# Field of the query -> (name here, how it is read). The first group is known to every driver that matters.
_CORE = {
    "index": ("index", "number"),
    "name": ("name", "text"),
    "uuid": ("uuid", "text"),
    "serial": ("serial", "text"),
    "driver_version": ("driver", "text"),
    "compute_cap": ("capability", "text"),
    "memory.total": ("memory_mib", "number"),
    "memory.used": ("used_mib", "number"),
    "pci.bus_id": ("bus_id", "text"),
}
_MORE = {
    "mig.mode.current": ("mig", "text"),
    "compute_mode": ("compute_mode", "text"),
    "persistence_mode": ("persistence", "text"),
    "pcie.link.width.current": ("pcie_width", "number"),
    "pcie.link.width.max": ("pcie_width_max", "number"),
    "pcie.link.gen.max": ("pcie_gen_max", "number"),
    "ecc.errors.uncorrected.volatile.total": ("ecc_uncorrected", "number"),
    "power.limit": ("power_limit_w", "number"),
}
_ABSENT = re.compile(r"^\[?(N/A|Not Supported|Unknown Error|GPU requires reset|Requested functionality.*)\]?$", re.I)


def gather() -> Fact:
    """Devices, holders, links and the module; what the driver does not say is ``{"error": why}``."""
    program = find_program("nvidia-smi")
    module = read("/proc/driver/nvidia/version")
    facts: Fact = {
        "smi": {"path": program, "error": None if program else "nvidia-smi: not found"},
        "module": None if module is None else _module(module),
        "driver": None,
        "devices": {"error": "nvidia-smi: not found"},
        "holders": _holders_by_files(),
        "links": {"error": "nvidia-smi: not found"},
        "p2p": {"error": "nvidia-smi: not found"},
    }
    if program is None:
        return facts
    answers = together(
        {
            "devices": functools.partial(_query, program, {**_CORE, **_MORE}),
            "apps": functools.partial(
                run, [program, *_csv("compute-apps", ("pid", "gpu_uuid", "used_memory"))], _SECONDS
            ),
            "links": functools.partial(run, [program, "topo", "-m"], _SECONDS),
            "p2p": functools.partial(run, [program, "topo", "-p2p", "r"], _SECONDS),
        },
        _SECONDS + 5,
    )
    devices = {"rows": None, **answers["devices"]}
    if devices["error"] and "not a valid field" in devices["error"]:
        devices = _query(program, _CORE)
    facts["smi"]["error"] = devices["error"]
    facts["devices"] = {"error": devices["error"]} if devices["error"] else devices["rows"]
    if devices["rows"]:
        facts["driver"] = devices["rows"][0]["driver"]
    facts["holders"] = _merge(facts["holders"], _apps(answers["apps"].get("out", "")))
    for name in ("links", "p2p"):
        why = answers[name]["error"] or "nvidia-smi topo shows no table"
        facts[name] = matrix(answers[name].get("out", "")) or {"error": why}
    return facts


def _csv(what: str, fields: Sequence[str]) -> List[str]:
    return ["--query-%s=%s" % (what, ",".join(fields)), "--format=csv,noheader,nounits"]


def _query(program: str, fields: Dict[str, Any]) -> Fact:
    answer = run([program, *_csv("gpu", list(fields))], _SECONDS)
    if answer["error"] or answer["status"] != 0:
        said = (answer["out"] + answer["err"]).strip().splitlines()
        why = answer["error"] or (said[0] if said else "exit status %s" % answer["status"])
        return {"error": why[:300], "rows": None}
    return {"error": None, "rows": rows(answer["out"], fields)}


def rows(text: str, fields: Dict[str, Any]) -> List[Fact]:
    """The lines of a csv answer as objects; what a device does not have is None, and so is what was not asked."""
    found = []
    for line in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(line) != len(fields):
            continue
        device: Fact = {name: None for name, _kind in (*_CORE.values(), *_MORE.values())}
        for cell, (name, kind) in zip(line, fields.values()):
            value = cell.strip()
            if not _ABSENT.match(value):
                device[name] = value if kind == "text" else number(value)
        found.append(device)
    return found


def matrix(text: str) -> Optional[Fact]:
    """A table of ``nvidia-smi topo`` as ``{"GPU0": {"GPU1": "PIX", ...}}``, GPUs alone; None without a table."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    table: Fact = {}
    names: List[str] = []
    for line in text.splitlines():
        cells = line.split()
        if not names:
            names = [cell for cell in cells if re.match(r"^GPU\d+$", cell)]
            if not cells or cells[0] not in names:
                names = []
            continue
        if cells and cells[0] in names and len(cells) > len(names):
            row = dict(zip(names, cells[1:]))
            row.pop(cells[0], None)
            table[cells[0]] = row
    return table or None


def _module(text: str) -> Fact:
    match = re.search(r"Kernel Module\b.*?(\d+(?:\.\d+)+)", text)
    return {"version": match.group(1) if match else None, "open": "Open Kernel Module" in text}


def _apps(text: str) -> List[Fact]:
    found = []
    for line in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(line) == 3 and line[0].strip().isdigit():
            found.append({"pid": int(line[0]), "gpu": line[1].strip(), "used_mib": number(line[2])})
    return found


def _holders_by_files() -> List[Fact]:
    """Processes with a GPU's device file open: those of other users are seen as root alone."""
    found = []
    for name in listing("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        devices = set()
        for descriptor in listing("/proc/%s/fd" % name):
            try:
                target = os.readlink("/proc/%s/fd/%s" % (name, descriptor))
            except OSError:
                continue
            if re.match(r"/dev/nvidia\d+\Z", target):
                devices.add(target)
        if devices:
            found.append({"pid": int(name), "gpu": None, "used_mib": None})
    return found


def _merge(by_files: List[Fact], by_driver: List[Fact]) -> List[Fact]:
    known = {holder["pid"] for holder in by_driver}
    holders = by_driver + [holder for holder in by_files if holder["pid"] not in known]
    for holder in holders:
        argv = command_of(holder["pid"])
        holder["command"] = None if argv is None else " ".join(argv)[:300]
        holder["cgroup"] = unit_of(holder["pid"])
    # Monitors and the persistence daemon open every device and hold no memory.
    return [h for h in holders if h["used_mib"] or not re.search(r"nvidia-|dcgm", h["command"] or "")]


def unit_of(pid: int) -> Optional[str]:
    """The systemd unit that a process belongs to, None where there is none."""
    match = re.search(r"/([^/\n]+\.(?:service|scope))(?:/|$)", read("/proc/%d/cgroup" % pid) or "", re.MULTILINE)
    return match.group(1) if match else None
