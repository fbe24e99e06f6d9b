"""The shape of what the agent answers about installed services; see :mod:`ddtree_deploy.hosts.replies`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_deploy.agent.records import check_unit
from ddtree_deploy.hosts.shapes import (
    FLAG,
    NOTES,
    SETS,
    TEXT,
    Shape,
    amount,
    count,
    entry,
    history,
    host_path,
    kind_of,
    list_of,
    map_of,
    maybe,
    moment,
    one_of,
    seconds,
    table,
)

#: Operations that change the host.
CHANGING = ("unit_install", "unit_restore", "units_recover", "unit_serve", "unit_outcome")


def _unit(value: Any) -> None:
    check_unit(value)


_HOLDER = maybe(kind_of(dict))
_STATE = table(
    manager=TEXT,
    active=TEXT,
    detail=TEXT,
    restarting=FLAG,
    pid=count,
    restarts=count,
    since=maybe(seconds),
    result=TEXT,
    enabled=FLAG,
    loaded=FLAG,
    stop_limit_s=amount,
    invocation=maybe(TEXT),
    notes=NOTES,
)
_INSTALL = table(
    version=TEXT, time=moment, who=TEXT, reason=maybe(TEXT), transaction=maybe(TEXT), service=kind_of(dict)
)
_STANDING = table(
    unit=_unit,
    install=maybe(_INSTALL),
    generations=count,
    edited=list_of(TEXT),
    state=maybe(_STATE),
    interrupted=maybe(history),
    holder=_HOLDER,
)


def _service(value: Any) -> None:
    _STANDING(value)
    if (value["install"] is None) != (value["state"] is None):
        raise ValueError(f"{value['unit']}: an install and a state come together")


def _services(value: Any) -> None:
    list_of(_service)(value)
    units = [item["unit"] for item in value]
    if len(set(units)) != len(units):
        raise ValueError("a unit twice")


_FILES = map_of(entry, host_path)
_LOOK = table(
    booted=FLAG,
    uid=count,
    entries=_FILES,
    texts=map_of(TEXT, host_path),
    edited=list_of(host_path),
    generations=list_of(_INSTALL),
    interrupted=maybe(history),
    holder=_HOLDER,
    state=maybe(_STATE),
    secrets=NOTES,
)


def check_look(args: Mapping[str, Any], look: Mapping[str, Any]) -> None:
    """Every file that was asked for is told. Raises ValueError."""
    if missing := sorted(set(args.get("paths", ())) - look["entries"].keys()):
        raise ValueError(f"it says nothing of /{missing[0]}")


_OUTCOME = table(outcome=TEXT, files=_FILES, state_dir=maybe(TEXT))
_COMMITTED = table(changed=FLAG, saved=NOTES, removed=SETS, left=list_of(_INSTALL))


def _outcome(value: Any) -> None:
    _OUTCOME(value)
    if value["outcome"] == "committed":
        _COMMITTED(value)


def _installed(value: Any) -> None:
    table(changed=FLAG, files=_FILES, notes=NOTES)(value)
    if value["changed"]:
        table(transaction=TEXT)(value)


_RECOVERED = table(unit=_unit, action=one_of(("finished", "undone")), paths=NOTES, notes=NOTES, history=history)
_PROOF = table(
    completion=maybe(table(text=TEXT, tokens=maybe(count))),
    server=kind_of(dict),
    accept_length=map_of(amount),
    metrics=map_of(kind_of(int, float)),
    problems=NOTES,
)

REPLIES: Mapping[str, Shape] = {
    "units": table(services=_services, notes=NOTES),
    "units_recover": table(recovered=list_of(_RECOVERED)),
    "unit_look": _LOOK,
    "unit_install": _installed,
    "unit_restore": table(
        transaction=TEXT, files=_FILES, notes=NOTES, saved=NOTES, removed=SETS, left=list_of(_INSTALL)
    ),
    "unit_outcome": _outcome,
    "unit_serve": table(
        unit=_unit,
        service=table({"verify_tokens": maybe(count)}, algorithm=TEXT),
        state=_STATE,
        endpoint=TEXT,
        elapsed_s=amount,
        failure=maybe(TEXT),
        log=NOTES,
        proof=maybe(_PROOF),
        notes=NOTES,
        generations=count,
    ),
    "unit_log": table(unit=_unit, status=kind_of(int)),
}
MESSAGES: Mapping[str, Shape] = {
    "unit_serve": table(phase=TEXT, elapsed_s=amount),
    "unit_log": table(lines=NOTES),
}
