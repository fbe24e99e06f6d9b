"""grep and find-def, on a snapshot here or on a host: the same searches, the same findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from ddtree_deploy.agent.definitions import (
    RANKS,
    SUFFIXES,
    Definition,
    Findings,
    FindOptions,
    Reference,
    Unparsed,
    find_def,
)
from ddtree_deploy.agent.grep import GrepOptions, Hit, grep
from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.selection import Selection
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession

if TYPE_CHECKING:
    # A search on the host needs no store.
    from ddtree_deploy.snapshots.store import Snapshot

MAX_LINE = 16 * 1024 * 1024

Finding = TypeVar("Finding", Hit, Definition, Reference, Unparsed)
_FIELDS: dict[type, tuple[Any, ...]] = {
    Hit: (str, str, int, str),
    Definition: (str, str, str, str, int, int, int, list, int, list),
    Reference: (str, int, str, str, str),
    Unparsed: (str, (int, NoneType), str),
}


@dataclass(frozen=True)
class Where:
    """Which files to search: globs over the path's end, and a folder such as ``srt/speculative``."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    under: str | None = None

    def request(self) -> dict[str, Any]:
        """As keys of a request to the agent."""
        return {"include": list(self.include), "exclude": list(self.exclude), "under": self.under}


@contextmanager
def _told() -> Iterator[None]:
    """The searches are the agent's; their errors are told as the client's are."""
    try:
        yield
    except AgentError as error:
        raise DeployError(error.code, error.message, error.hint, error.details) from None


def check_grep(request: Mapping[str, Any]) -> None:
    """Raises DeployError DD008 for a bad pattern or option, before any host is asked."""
    with _told():
        GrepOptions.parse(request)


def check_find(request: Mapping[str, Any]) -> None:
    """Raises DeployError DD008 for a bad symbol or option, before any host is asked."""
    with _told():
        FindOptions.parse(request)


def _snapshot_files(snapshot: Snapshot, where: Where, suffixes: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    selection = Selection(where.include, where.exclude, where.under)
    parts = [str(part) for part in snapshot.header.facts["root"].get("parts") or []]
    present = {
        path[:end] for path in snapshot.entries for end in range(1, len(path) + 1) if path[end : end + 1] in ("/", "")
    }
    starts = selection.starts(parts, present.__contains__)
    prefixes = tuple(start + "/" for start in starts)

    def wants(path: str) -> bool:
        below = path in starts or path.startswith(prefixes)
        return below and (not suffixes or path.endswith(suffixes)) and selection.wants(path)

    return snapshot.files(wants)


def grep_snapshot(snapshot: Snapshot, request: Mapping[str, Any], where: Where) -> Iterator[Hit]:
    """The hits in a snapshot, in path order; ``request`` has the keys of ``GrepOptions``.

    Raises DeployError DD008, DD402.
    """
    with _told():
        yield from grep(_snapshot_files(snapshot, where), GrepOptions.parse(request))


def find_snapshot(snapshot: Snapshot, request: Mapping[str, Any], where: Where) -> Findings:
    """What a snapshot's sources say of a symbol; ``request`` has the keys of ``FindOptions``.

    Raises DeployError DD008, DD402.
    """
    with _told():
        return find_def(_snapshot_files(snapshot, where, SUFFIXES), FindOptions.parse(request))


def grep_host(
    session: HostSession, request: Mapping[str, Any], where: Where, summary: dict[str, Any] | None = None
) -> Iterator[Hit]:
    """As :func:`grep_snapshot`, on the host's live tree, as the hits come in.

    At the end ``summary`` gets ``site``, ``version``, ``searched`` (files), ``hits``, ``matched`` (files). Raises
    DeployError DD3xx, DD406 too.
    """
    for row in _rows(session, "grep", {**request, **where.request()}, summary):
        yield _typed(session, Hit, row)


def find_host(
    session: HostSession, request: Mapping[str, Any], where: Where, summary: dict[str, Any] | None = None
) -> Findings:
    """As :func:`find_snapshot`, on the host's live tree.

    ``summary`` gets ``site``, ``version``, ``searched`` (files) and how many findings of each kind there are.
    Raises DeployError DD3xx, DD406 too.
    """
    found = Findings([], [], [])
    for kind, *row in _rows(session, "find_def", {**request, **where.request()}, summary):
        if kind == "definition":
            definition = _typed(session, Definition, row)
            if definition.kind not in RANKS:
                raise _untrue(session)
            found.definitions.append(definition)
        elif kind == "reference":
            found.references.append(_typed(session, Reference, row))
        elif kind == "unparsed":
            found.unparsed.append(_typed(session, Unparsed, row))
        else:
            raise _untrue(session)
    return found


def _untrue(session: HostSession) -> DeployError:
    return DeployError("DD307", f"{session.target.name}: a finding in the reply is not one")


def _rows(
    session: HostSession, operation: str, request: Mapping[str, Any], summary: dict[str, Any] | None
) -> Iterator[list[Any]]:
    buffer = b""
    with session.exchange(operation, request) as exchange:
        for kind, payload in exchange.frames():
            if kind == "Q" and summary is not None:
                summary.update(payload)
            elif kind == "B":
                *lines, buffer = (buffer + payload).split(b"\n")
                for line in lines:
                    yield _row(session, line)
                if len(buffer) > MAX_LINE:
                    raise _untrue(session)
        if buffer:
            raise _untrue(session)


def _row(session: HostSession, line: bytes) -> list[Any]:
    try:
        row = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        raise _untrue(session) from None
    if not isinstance(row, list) or not row:
        raise _untrue(session)
    return row


def _typed(session: HostSession, kind: type[Finding], row: list[Any]) -> Finding:
    """The row as a finding, if its fields have the finding's types."""
    types = _FIELDS[kind]
    if len(row) != len(types) or not all(map(isinstance, row, types)):
        raise _untrue(session)
    if not all(isinstance(text, str) for field in row if isinstance(field, list) for text in field):
        raise _untrue(session)
    return kind(*row)
