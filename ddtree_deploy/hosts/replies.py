"""What an agent's result must look like before anything believes it: the shape of each operation's reply.

A host may be broken or hostile. What has no right shape here is refused as a whole, with the place that is wrong;
members that are not named here are passed on as they came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_deploy.agent.records import check_record, package_path
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import unit_replies
from ddtree_deploy.hosts.shapes import (
    FLAG,
    NOTES,
    NUMBER,
    SETS,
    TEXT,
    WRONG,
    Shape,
    count,
    entry,
    history,
    kind_of,
    list_of,
    map_of,
    maybe,
    moment,
    one_of,
    table,
)

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
#: What to do about a reply that cannot be read, of operations that change the host: it leaves open what was done.
_MADE = "the change may have been made: `ddtree-deploy status` and `history` say how the host stands"
CHANGING = {
    **dict.fromkeys(("apply", "rollback", "recover"), _MADE),
    **dict.fromkeys(unit_replies.CHANGING, "it may have been done: `ddtree-deploy status` says how the service stands"),
}


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
        elif operation == "unit_look":
            unit_replies.check_look(args, result)
    except WRONG as error:
        raise _refused(host, operation, error) from None


def check_message(host: str, operation: str, message: Any) -> None:
    """Raises DeployError DD307 for a message that ``operation`` cannot send on its way."""
    try:
        MESSAGES[operation](message)
    except WRONG as error:
        raise _refused(host, operation, error) from None


def check_progress(host: str, value: Any) -> None:
    """Raises DeployError DD307 for what is no progress of any operation."""
    try:
        _PROGRESS(value)
    except WRONG as error:
        raise _refused(host, "", error) from None


def _refused(host: str, operation: str, error: Exception) -> DeployError:
    hint = CHANGING.get(operation, "run it again; if it persists, look at the host's python")
    return DeployError("DD307", f"{host}: the reply cannot be true: {error}", hint)


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


def _path(value: Any) -> None:
    package_path(value)


def _no_twice(value: Any) -> None:
    list_of(_path)(value)
    if len(set(value)) != len(value):
        raise ValueError("a path twice")


def _layers(value: Any) -> None:
    check_record({"layers": value})
    names = [layer["set"] for layer in value]
    if len(set(names)) != len(names):
        raise ValueError("a set twice")


def _sha256(value: Any) -> None:
    if not isinstance(value, str) or not _SHA256.match(value):
        raise ValueError(f"{str(value)[:70]!r} is no sha256")


def _last(value: Any) -> None:
    history(value)
    moment(value["time"])


_ROOT = table(
    site=TEXT,
    parts=list_of(_path),
    version=maybe(TEXT),
    python=map_of(kind_of(str)),
    foreign_python=maybe(TEXT),
    editable=FLAG,
)
_PROCESS = table(pid=NUMBER, command=TEXT, why=TEXT, certain=FLAG, started=maybe(kind_of(int, float)))
_GIT = table({"problem": TEXT})
_HEAD = table(commit=TEXT, files=NUMBER, differs=_no_twice, untracked=_no_twice, missing=_no_twice)


def _git(value: Any) -> None:
    (_GIT if isinstance(value, dict) and "problem" in value else _HEAD)(value)


_RECORD = table(
    {"hashes": map_of(_sha256, _path), "git": maybe(_git)},
    state=TEXT,
    files=NUMBER,
    differs=_no_twice,
    unlisted=_no_twice,
    missing=_no_twice,
)
_STATUS = table(
    root=_ROOT,
    state_dir=maybe(TEXT),
    layers=_layers,
    reinstalled=list_of(TEXT),
    survivors=list_of(_path),
    back=map_of(list_of(TEXT)),
    entries=map_of(entry, _path),
    linked=map_of(entry, _path),
    record=maybe(_RECORD),
    processes=list_of(_PROCESS),
    holder=maybe(kind_of(dict)),
    interrupted=maybe(history),
    last=maybe(_last),
)
_FILES = map_of(entry, _path)
_PROGRESS = table(done=count, total=count, what=TEXT)
_RECOVERED = table(history=history, action=one_of(("finished", "undone")), paths=list_of(_path), notes=NOTES)
_NOTHING = table(action=one_of(("nothing",)), paths=list_of(_path), notes=NOTES)


def _recover(value: Any) -> None:
    (_NOTHING if isinstance(value, dict) and value.get("action") == "nothing" else _RECOVERED)(value)


REPLIES: Mapping[str, Shape] = {
    "status": _STATUS,
    "plan": _STATUS,
    "stored": table(linked=map_of(entry), missing=map_of(TEXT)),
    "apply": table(files=_FILES, notes=NOTES, processes=list_of(_PROCESS), transaction=TEXT),
    "rollback": table(
        {"back": SETS, "removed": SETS, "left": SETS, "saved": list_of(TEXT)},
        files=_FILES,
        notes=NOTES,
        processes=list_of(_PROCESS),
    ),
    "recover": _recover,
    "outcome": table(outcome=TEXT, files=_FILES, state_dir=maybe(TEXT)),
    "history": table(root=_ROOT, history=list_of(history)),
    **unit_replies.REPLIES,
}
MESSAGES: Mapping[str, Shape] = {
    "plan": table(contents=_no_twice),
    "stored": table(contents=list_of(NUMBER)),
    **unit_replies.MESSAGES,
}
