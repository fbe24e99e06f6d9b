"""Run one changing operation on a host and learn its true outcome, also when the connection is cut."""

from __future__ import annotations

import contextlib
import getpass
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_deploy import __version__
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import ConnectionLost, HostSession, Progress

_RECONNECT_DELAYS_S = (0.2, 1.0, 3.0, 10.0)
_RUNNING_LIMIT_S = 900.0


def client_name() -> str:
    """``user@machine`` of whoever runs this command; the host adds the account that it sees."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def transact(
    session: HostSession,
    operation: str,
    args: Mapping[str, Any],
    blobs: Sequence[bytes] = (),
    progress: Progress | None = None,
    outcome: str = "outcome",
) -> dict[str, Any]:
    """Run ``operation`` as a transaction with an id of our own and return what the host read back.

    A lost connection is not an answer: the host is asked, over a new one, what became of that id. Raises
    DeployError; after :class:`ConnectionLost` the message says whether anything was changed, or that the host
    could not be asked. ``outcome``: the operation that answers for a transaction of this kind.
    """
    transaction = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
    request = {**args, "transaction": transaction, "who": client_name(), "client": f"ddtree-deploy {__version__}"}
    try:
        return session.call(operation, request, blobs, progress)
    except ConnectionLost as lost:
        return _settle(session, outcome, {**args, "transaction": transaction}, lost)
    except KeyboardInterrupt:
        raise _interrupted(session, outcome, {**args, "transaction": transaction}) from None


def _interrupted(session: HostSession, operation: str, request: Mapping[str, Any]) -> DeployError:
    """What to say after Ctrl-C: the host does not stop half-way, so it is asked how far it is."""
    host = session.target.name
    try:
        session.reconnect()
        outcome = session.call(operation, _about(request))["outcome"]
    except (DeployError, KeyboardInterrupt):
        outcome = "not known from here"
    words = {
        "unknown": "nothing was changed: the transaction had not begun",
        "running": "the host is still at work on it and will finish or undo it by itself",
        "committed": "the host had finished it: the change is made",
        "undone": "the host has undone it: every file is as before",
    }
    said = words.get(outcome, f"the transaction is {outcome}")
    return DeployError("DD511", f"{host}: interrupted; {said}", "see `ddtree-deploy status` and `history`")


def _about(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the host needs to know to answer for a transaction: its id, and the unit that it is of, if any."""
    return {key: request[key] for key in ("transaction", "unit") if key in request}


def _settle(session: HostSession, operation: str, request: Mapping[str, Any], lost: ConnectionLost) -> dict[str, Any]:
    host, transaction = session.target.name, str(request["transaction"])
    _reconnect(session, transaction, lost)
    deadline = time.monotonic() + _RUNNING_LIMIT_S
    while True:
        answer = session.call(operation, _about(request))
        if answer["outcome"] != "running" or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    outcome = answer["outcome"]
    if outcome == "committed":
        note = "the connection was lost during the transaction; the host finished it"
        return {**answer, "transaction": transaction, "notes": [note], "processes": []}
    if outcome == "undone":
        raise DeployError("DD505", f"{host}: the transaction was undone; see `history`", "every file is as before")
    if outcome == "unknown":
        raise DeployError("DD308", f"{host}: the connection was lost before anything was changed", "try again")
    raise DeployError("DD510", f"{host}: transaction {transaction} is {outcome}", "run `ddtree-deploy recover`")


def _reconnect(session: HostSession, transaction: str, lost: ConnectionLost) -> None:
    for delay in _RECONNECT_DELAYS_S:
        time.sleep(delay)
        with contextlib.suppress(DeployError):
            session.reconnect()
            return
    raise DeployError(
        "DD308",
        f"{session.target.name}: the connection was lost during transaction {transaction} and could not be restored",
        "the host finishes or undoes it by itself; ask it with `ddtree-deploy status`, then `recover` if it says so",
    ) from lost
