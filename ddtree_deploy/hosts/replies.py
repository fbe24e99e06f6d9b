"""What an agent's result must look like before anything believes it: the shape of each operation's reply.

A host may be broken or hostile. What has no right shape here is refused as a whole, with the place that is wrong;
members that are not named here are passed on as they came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.records import check_entry, check_record, is_history, package_path
from ddtree_deploy.errors import DeployError

#: Raises ValueError (or what the agent's own checks raise) for a value that has not the shape.
Shape = Callable[[Any], None]

MAX_SIZE = 1 << 40  # bytes of one file
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_WRONG = (AgentError, ValueError, KeyError, TypeError)
#: Operations that change the host: after them a reply that cannot be read leaves open what was done.
CHANGING = frozenset(("apply", "rollback", "recover"))


def check_reply(
    host: str, operation: str, args: Mapping[str, Any], result: Mapping[str, Any], messages: Sequence[Any] = ()
) -> None:
    """Raises DeployError DD307 for a result, or for messages before it, that ``operation`` cannot have."""
    shape = REPLIES.get(operation)
    if shape is None:
        return
    try:
        shape(result)
        for message in messages:
            MESSAGES[operation](message)
        if shape is _STATUS:
            _check_whole(args, result, messages)
    except _WRONG as error:
        hint = "run it again; if it persists, look at the host's python"
        if operation in CHANGING:
            hint = "the change may have been made: `ddtree-deploy status` and `history` say how the host stands"
        raise DeployError("DD307", f"{host}: the reply cannot be true: {error}", hint) from None


def _check_whole(args: Mapping[str, Any], status: Mapping[str, Any], messages: Sequence[Any]) -> None:
    """Everything that was asked for, or that the record names, is told; and the contents of what is a file."""
    entries, linked = status["entries"], status["linked"]
    named = {item["path"] for layer in status["layers"] for item in layer["files"]}
    if missing := sorted((named | set(args.get("paths", ()))) - entries.keys()):
        raise ValueError(f"it says nothing of {missing[0]}")
    if not args.get("contents"):
        return
    sent = {path for message in messages for path in message["contents"]}
    for path in args.get("paths", ()):
        entry = linked.get(path, entries[path])
        if entry is not None and entry["kind"] == "file" and path not in sent:
            raise ValueError(f"the content of {path} is missing")


def _kind(*kinds: type) -> Shape:
    names = " or ".join(kind.__name__ for kind in kinds)

    def check(value: Any) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{str(value)[:60]!r} is not {names}")

    return check


def _maybe(shape: Shape) -> Shape:
    def check(value: Any) -> None:
        if value is not None:
            shape(value)

    return check


def _at(where: str, shape: Shape, value: Any) -> None:
    try:
        shape(value)
    except _WRONG as error:
        raise ValueError(f"{where}: {error}") from None


def _list(shape: Shape) -> Shape:
    def check(value: Any) -> None:
        _kind(list)(value)
        for at, item in enumerate(value):
            _at(str(at), shape, item)

    return check


def _map(shape: Shape, key: Shape | None = None) -> Shape:
    def check(value: Any) -> None:
        _kind(dict)(value)
        for name, item in value.items():
            if key is not None:
                key(name)
            _at(name, shape, item)

    return check


def _table(optional: Mapping[str, Shape] | None = None, **fields: Shape) -> Shape:
    def check(value: Any) -> None:
        _kind(dict)(value)
        for name, shape in fields.items():
            if name not in value:
                raise ValueError(f"{name} is missing")
            _at(name, shape, value[name])
        for name, shape in (optional or {}).items():
            if name in value:
                _at(name, shape, value[name])

    return check


def _path(value: Any) -> None:
    package_path(value)


def _no_twice(value: Any) -> None:
    _list(_path)(value)
    if len(set(value)) != len(value):
        raise ValueError("a path twice")


def _entry(value: Any) -> None:
    if isinstance(value, dict) and value.get("kind") == "other":
        return
    check_entry(value)
    if value is not None and value["kind"] == "file" and not 0 <= value["size"] <= MAX_SIZE:
        raise ValueError(f"a file of {value['size']} bytes")


def _layers(value: Any) -> None:
    check_record({"layers": value})
    names = [layer["set"] for layer in value]
    if len(set(names)) != len(names):
        raise ValueError("a set twice")


def _sha256(value: Any) -> None:
    if not isinstance(value, str) or not _SHA256.match(value):
        raise ValueError(f"{str(value)[:70]!r} is no sha256")


def _history(value: Any) -> None:
    if not is_history(value):
        raise ValueError("no line of a history")
    told = {"kind": _TEXT, "time": _TEXT, "who": _TEXT, "outcome": _TEXT, "reason": _maybe(_TEXT)}
    _table(told)(value)


_TEXT, _NUMBER, _FLAG = _kind(str), _kind(int), _kind(bool)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")


def _last(value: Any) -> None:
    _history(value)
    if not _MOMENT.match(str(value.get("time"))):
        raise ValueError("time: no moment")


_ROOT = _table(
    site=_TEXT,
    parts=_list(_path),
    version=_maybe(_TEXT),
    python=_map(_kind(str)),
    foreign_python=_maybe(_TEXT),
    editable=_FLAG,
)
_PROCESS = _table(pid=_NUMBER, command=_TEXT, why=_TEXT, certain=_FLAG, started=_maybe(_kind(int, float)))
_GIT = _table({"problem": _TEXT})
_HEAD = _table(commit=_TEXT, files=_NUMBER, differs=_no_twice, untracked=_no_twice, missing=_no_twice)


def _git(value: Any) -> None:
    (_GIT if isinstance(value, dict) and "problem" in value else _HEAD)(value)


_RECORD = _table(
    {"hashes": _map(_sha256, _path), "git": _maybe(_git)},
    state=_TEXT,
    files=_NUMBER,
    differs=_no_twice,
    unlisted=_no_twice,
    missing=_no_twice,
)
_STATUS = _table(
    root=_ROOT,
    state_dir=_maybe(_TEXT),
    layers=_layers,
    reinstalled=_list(_TEXT),
    survivors=_list(_path),
    back=_map(_list(_TEXT)),
    entries=_map(_entry, _path),
    linked=_map(_entry, _path),
    record=_maybe(_RECORD),
    processes=_list(_PROCESS),
    holder=_maybe(_kind(dict)),
    interrupted=_maybe(_history),
    last=_maybe(_last),
)
_FILES = _map(_entry, _path)
_NOTES = _list(_TEXT)
_SETS = _list(_table(name=_TEXT, version=_TEXT))

REPLIES: Mapping[str, Shape] = {
    "status": _STATUS,
    "plan": _STATUS,
    "stored": _table(linked=_map(_entry), missing=_map(_TEXT)),
    "apply": _table(files=_FILES, notes=_NOTES, processes=_list(_PROCESS), transaction=_TEXT),
    "rollback": _table(
        {"back": _SETS, "removed": _SETS, "left": _SETS, "saved": _list(_TEXT)},
        files=_FILES,
        notes=_NOTES,
        processes=_list(_PROCESS),
    ),
    "recover": _table({"history": _history}, action=_TEXT, paths=_list(_path), notes=_NOTES),
    "outcome": _table(outcome=_TEXT, files=_FILES, state_dir=_maybe(_TEXT)),
    "history": _table(root=_ROOT, history=_list(_history)),
}
MESSAGES: Mapping[str, Shape] = {
    "plan": _table(contents=_no_twice),
    "stored": _table(contents=_list(_NUMBER)),
}
