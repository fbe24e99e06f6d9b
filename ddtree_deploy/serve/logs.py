"""A service's log, as the host keeps it."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.hosts.replies import check_message, check_reply
from ddtree_deploy.hosts.session import HostSession


def log_lines(session: HostSession, unit: str, *, lines: int, follow: bool) -> Iterator[str]:
    """The last ``lines`` lines of the log, and with ``follow`` all that come until the caller stops.

    What the host knows to be a secret of the service is masked there. Raises DeployError as every call.
    """
    args = {"unit": unit, "lines": lines, "follow": follow}
    with session.exchange("unit_log", args) as exchange:
        for kind, payload in exchange.frames():
            if kind == "J":
                check_message(session.target.name, "unit_log", payload)
                yield from payload["lines"]
            elif kind == "Q":
                check_reply(session.target.name, "unit_log", args, payload)
