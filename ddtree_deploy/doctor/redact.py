"""Facts without what names a machine or a person, so that they can be shown to others and kept as test data.

Replaced everywhere, also inside longer texts: the host's name, user names, serial numbers and UUIDs of GPUs, home
folders' owners, and addresses that a port is bound to. Of the kernel's command line only what a check reads is kept.
Same values stay same: the first GPU's UUID becomes ``GPU-1`` wherever it stands. Left as they are: versions, paths
below a home folder, model names, names of units and services, process ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_HOME = re.compile(r"/home/([^/\s:]+)")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_ADDRESS = re.compile(r"\b(?!127\.)(?!0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.)")
_BOOT_OPTION = re.compile(r"(?:iommu|intel_iommu|amd_iommu|pci|pcie_\w+)(?:=\S*)?")
_SHORTEST = 3  # a shorter name would be found inside other words
_SYSTEM_USERS = frozenset(("root", "sglang"))


def redact(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the facts with every name and number of a machine or a person replaced."""
    names = dict(_replacements(facts))
    # Whole words alone: a host named "gpu" must not eat the key of the same name, nor a part of a path.
    words = sorted((name for name in names if len(name) >= _SHORTEST), key=len, reverse=True)
    pattern = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, words)) + r")(?![\w-])") if words else None
    uuids: dict[str, str] = {}

    def text(value: str) -> str:
        if pattern is not None:
            value = pattern.sub(lambda match: names[match.group()], value)
        value = _HOME.sub(lambda match: "/home/" + names.get(match.group(1), "user"), value)
        return _UUID.sub(lambda match: uuids.setdefault(match.group(), f"GPU-{len(uuids) + 1}"), value)

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {text(name) if "/" in name else name: walk(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, key) for item in value]
        if not isinstance(value, str):
            return value
        if key == "serial":
            return "0"
        if key == "cmdline":
            return " ".join(word for word in value.split() if _BOOT_OPTION.fullmatch(word))
        if key in ("address", "bind"):
            return _ADDRESS.sub("192.0.2.1", value)
        return text(value)

    result = walk(dict(facts), "")
    assert isinstance(result, dict)
    return result


def _replacements(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, by what) of the names that the facts themselves give."""
    host = _at(facts, "host", "name")
    for name in (host, host.partition(".")[0], _at(facts, "target")):
        if name:
            yield name, "host"
    target = _at(facts, "target")
    user, at, place = target.rpartition("@")
    if at:
        yield user, "user"
        yield place.partition(":")[0], "host"
    name = _at(facts, "agent", "user")
    if name and name not in _SYSTEM_USERS:
        yield name, "user"


def _at(facts: Mapping[str, Any], *keys: str) -> str:
    value: Any = facts
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
