"""What is written in a host's state, checked before it is believed: shapes, paths, hashes.

Everything here raises AgentError, ValueError, KeyError or TypeError for what is not as this tool writes it.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Dict

from .protocol import AgentError
from .root import PACKAGE
from .tree import TEMP_PREFIX, check_path

STATES = ("prepared", "staged", "committed", "undone")
#: Checks a path of the state's own tree: returns it, or raises AgentError DD105.
PathCheck = Callable[[Any], str]
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\.service\Z")


def _is(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError("%s is not %s" % (what, kind.__name__))
    return value


def check_entry(value: Any) -> None:
    """An entry as the tree module describes it; "other" is never written."""
    if value is None:
        return
    _is(value, dict, "an entry")
    if value["kind"] == "file":
        if not _SHA256.match(_is(value["sha256"], str, "sha256")):
            raise ValueError("bad sha256 %r" % value["sha256"])
        if not 0 <= _is(value["mode"], int, "mode") <= 0o7777:
            raise ValueError("bad mode %r" % value["mode"])
        _is(value["size"], int, "size")
    elif value["kind"] == "link":
        _is(value["target"], str, "a link's target")
    else:
        raise ValueError("unknown kind %r" % (value["kind"],))


def _check_owner(value: Any) -> None:
    if value is not None:
        uid, gid = _is(value, list, "owner")
        _is(uid, int, "uid")
        _is(gid, int, "gid")


def package_path(path: Any) -> str:
    """``path`` if it is a clean one below the package folder; raises AgentError DD105."""
    return check_path(path, PACKAGE)


def check_unit(name: Any) -> str:
    """``name`` if a unit of ours may be called so; raises AgentError DD307."""
    if isinstance(name, str) and _UNIT.match(name):
        return name
    raise AgentError("DD307", "bad unit name %r" % (name,))


def check_layer(layer: Any, check: PathCheck = package_path) -> None:
    """One applied set of a record."""
    _is(layer, dict, "a layer")
    for name in ("set", "version", "digest"):
        _is(layer[name], str, name)
    for name in _is(layer["requires"], list, "requires"):
        _is(name, str, "a required set")
    for item in _is(layer["files"], list, "files"):
        check(_is(item, dict, "a file")["path"])
        check_entry(item["before"])
        check_entry(item["after"])
        _check_owner(item.get("owner"))
    for folder in _is(layer.get("folders", []), list, "folders"):
        check(folder)
    if not isinstance(layer.get("install"), (dict, type(None))):
        raise ValueError("install is not dict")
    for past in _is(layer.get("replaced", []), list, "replaced"):
        _check_past(past, check)


def _check_past(past: Any, check: PathCheck) -> None:
    """A layer that another version of its set replaced; it holds no such layers itself."""
    if "replaced" in _is(past, dict, "a replaced layer"):
        raise ValueError("a replaced layer in a replaced one")
    check_layer(past, check)
    _is(_is(past["replaced_by"], dict, "replaced_by")["transaction"], str, "a transaction")


def check_record(value: Any, check: PathCheck = package_path) -> None:
    """The whole record."""
    for layer in _is(_is(value, dict, "the record")["layers"], list, "layers"):
        check_layer(layer, check)


def is_history(value: Any) -> bool:
    """Whether this is a line of the history that can be shown."""
    if not isinstance(value, dict) or not isinstance(value.get("sets", []), list):
        return False
    return all(isinstance(item, dict) and "name" in item and "version" in item for item in value.get("sets", []))


def check_journal(value: Any, transaction: str, check: PathCheck = package_path) -> None:
    """The journal of ``transaction``: every path that a recovery would touch is a clean one."""
    _is(value, dict, "the journal")
    if value["id"] != transaction or value["state"] not in STATES:
        raise ValueError("it is of another transaction, or in an unknown state")
    _is(value["smoke"], bool, "smoke")
    if not is_history(value["history"]):
        raise ValueError("its history line is not one")
    check_record(value["record"], check)
    for index, operation in enumerate(_is(value["operations"], list, "operations")):
        _check_operation(operation, "%s%s-%d.tmp" % (TEMP_PREFIX, transaction, index), check)
    for name in ("folders", "emptied"):
        for folder in _is(value[name], list, name):
            check(folder)


def _check_operation(operation: Dict[str, Any], temporary: str, check: PathCheck) -> None:
    check(_is(operation, dict, "an operation")["path"])
    check_entry(operation["before"])
    check_entry(operation["after"])
    _check_owner(operation.get("owner"))
    if operation["temporary"] != temporary:
        raise ValueError("an operation's temporary name is not ours")
