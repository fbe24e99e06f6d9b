"""A service's log, as the host keeps it."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.hosts.session import HostSession


def log_lines(session: HostSession, unit: str, *, lines: int, follow: bool) -> Iterator[str]:
    """The last ``lines`` lines of the log, and with ``follow`` all that come until the caller stops.

    What the host knows to be a secret of the service is masked there. Raises DeployError as every call.
    """
    with session.exchange("unit_log", {"unit": unit, "lines": lines, "follow": follow}) as exchange:
        for kind, payload in exchange.frames():
            if kind == "J":
                yield from (str(line) for line in payload["lines"])
