"""From parts as they were found to the members of a bundle: scrubbed, with a page that says what is what. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import CONTAINER_ENGINES, LOCAL_PREFIX
from ddtree_deploy.support.scrub import Scrubber

if TYPE_CHECKING:
    from ddtree_deploy.hosts.target import Target
    from ddtree_deploy.support.parts import Parts

CONTENTS, ERRORS = "CONTENTS.txt", "errors.json"
_WHO = re.compile(r"(?P<user>[^\s@]+)@(?P<host>\S+)(?: as (?P<account>\S+))?")
_ABOUT = """\
What ddtree-deploy gathered for a bug report. Secrets are taken out (***). Names of machines, people, containers,
domains, addresses and UUIDs are replaced by words with a number: the same word is the same thing in every file.
Values of environment variables are there only where they are settings of the engine and its libraries; logs,
reasons in the history, and keys are not. Read it before you give it away.
"""


def members(parts: Parts, scrubber: Scrubber, targets: list[Target], host: str | None) -> dict[str, tuple[str, str]]:
    """name -> (what it is, text) of every member. ``host``: how the host was named; None where none was asked for."""
    for target in targets:
        _learn_target(scrubber, target)
    for kind, name in parts.names:
        scrubber.name(kind, name)
    for _about, value in parts.found.values():
        _learn(scrubber, value)
    result = {}
    for name, (about, value) in sorted(parts.found.items()):
        try:
            result[name] = (about, _json(scrubber.value(value)))
        except RecursionError:
            parts.failed(name, DeployError("DD307", "it is nested too deeply"))
    if parts.errors:
        result[ERRORS] = ("what could not be had, and why", _json(scrubber.value(parts.errors)))
    contents = "\n".join([_ABOUT, *(f"{name:<20} {about}" for name, (about, _text) in result.items())])
    where = f"The host is {scrubber.text(host)}." if host is not None else "No host was asked for."
    problems = [f"{error['part']}: [{error['code']}] {error['message']}" for error in parts.errors]
    lines = [contents, "", where, *(scrubber.text(f"Not to be had: {line}") for line in problems)]
    return {CONTENTS: ("what is in here", "\n".join(lines) + "\n"), **result}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _learn_target(scrubber: Scrubber, target: Target) -> None:
    if not target.name.startswith(LOCAL_PREFIX):
        engine, _, named = target.name.partition(":")
        scrubber.destination(named.partition("@")[2] if engine in CONTAINER_ENGINES else target.name)
    scrubber.destination(target.ssh)
    if target.container:
        scrubber.name("container", target.container.partition(":")[2])


def _learn(scrubber: Scrubber, value: Any) -> None:
    """The names that stand in the parts themselves."""
    for key, item in _fields(value):
        if key == "who" and isinstance(item, str) and (match := _WHO.search(item)):
            scrubber.name("user", match["user"])
            scrubber.name("host", match["host"])
            scrubber.name("user", match["account"])
        elif key in ("user", "group") and isinstance(item, str):
            scrubber.name("user", item)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) of JSON data, however deep."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield from item.items()
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
