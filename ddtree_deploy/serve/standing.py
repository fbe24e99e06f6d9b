"""The services that are installed on a host, and how they stand."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ddtree_deploy.hosts.session import HostSession


def services(session: HostSession) -> tuple[list[dict[str, Any]], list[str]]:
    """Every installed service as plain data, and notes on what could not be read."""
    answer = session.call("units", {})
    return list(answer["services"]), list(answer["notes"])


def describe(service: Mapping[str, Any], changed: str | None = None) -> tuple[str, list[str]]:
    """One line on an installed service, and notes. ``changed``: when the engine's tree was last changed (ISO 8601)."""
    unit, state, install = service["unit"], service["state"], service["install"]
    notes = [f"{unit}: {path} was edited since it was installed" for path in service["edited"]]
    if service["interrupted"]:
        kind = service["interrupted"].get("kind", "transaction")
        notes.append(f"{unit}: a transaction ({kind}) was interrupted: run `ddtree-deploy recover`")
    if service["holder"]:
        notes.append(f"{unit}: at work right now: {service['holder'].get('who')} ({service['holder'].get('command')})")
    if not state:
        return f"{unit}  not installed", notes
    notes += [f"{unit}: {note}" for note in state["notes"]]
    since = state["since"]
    if state["active"] == "active" and since:
        for what, when in (("install", install["time"]), ("engine's files", changed)):
            if when and since < _moment(when):
                notes.append(f"{unit}: started before the {what} changed: `launch --restart` takes it up")
    words = [unit, f"  {state['active']}"]
    if since and state["active"] == "active":
        words.append(f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M} UTC, pid {state['pid']}")
    if state["restarts"]:
        words.append(f", restarted {state['restarts']} time(s)")
    if state["active"] == "failed":
        words.append(f": {state['result']}")
    words.append(f"  install {install['version']} of {install['time']}")
    if state["manager"] == "script":
        words.append(" (supervised script: no systemd here)")
    return "".join(words), notes


def _moment(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
