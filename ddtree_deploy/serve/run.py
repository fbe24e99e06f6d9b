"""Start, restart and stop an installed service, following it until it serves as it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.replies import check_message, check_reply
from ddtree_deploy.hosts.session import ConnectionLost, HostSession
from ddtree_deploy.serve.causes import Cause, find_cause, telling_lines
from ddtree_deploy.serve.verdict import Verdict, judge

DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Served:
    """How it went. ``verdict`` is None where it did not get so far, ``cause`` where it is not known or went well."""

    result: Mapping[str, Any]
    verdict: Verdict | None
    cause: Cause | None

    @property
    def failed(self) -> bool:
        """Whether it does not serve, or not as it should."""
        return self.result["failure"] is not None or (self.verdict is not None and not self.verdict.sound)

    def error(self, host: str) -> DeployError:
        """The failure as one; only where :attr:`failed`."""
        unit = self.result["unit"]
        back = (
            "; `launch --previous --restart` goes back to the install before" if self.result["generations"] > 1 else ""
        )
        if self.result["failure"] is None and self.verdict is not None:
            wrong = [finding for finding in self.verdict.findings if finding.severity == "error"]
            return DeployError(
                "DD609",
                f"{host}: {unit} is up, but {wrong[0].what}",
                f"{wrong[0].mend}{back}",
                [f.what for f in wrong[1:]],
            )
        message = f"{host}: {unit} did not get ready: {self.result['failure']}"
        lines = telling_lines(self.result["log"])
        if self.cause is None:
            return DeployError("DD608", message, f"the whole log: `ddtree-deploy logs`{back}", lines)
        details = [f"cause: {self.cause.what}", f"  {self.cause.line}", *lines]
        return DeployError("DD608", message, f"{self.cause.mend}{back}", details)


def serve(
    session: HostSession,
    unit: str,
    action: str,
    console: Console,
    *,
    deadline_s: float = DEADLINE_S,
    enable: bool = True,
) -> Served:
    """``start``, ``restart`` or ``stop`` the service of ``unit`` and say what is waited for.

    Raises DeployError: ``DD605`` the host cannot, ``DD607`` nothing installed, ``DD308`` the connection was lost
    (the service goes on). That it did not get ready is no exception: see :class:`Served`.
    """
    host = session.target.name
    args = {"unit": unit, "action": action, "deadline_s": deadline_s, "enable": enable}
    result: dict[str, Any] | None = None
    with console.progress(f"{action} {unit}") as progress:
        try:
            with session.exchange("unit_serve", args) as exchange:
                for kind, payload in exchange.frames():
                    if kind == "P":
                        progress(int(payload["done"]), int(payload["total"]), str(payload["what"]))
                    elif kind == "J":
                        check_message(host, "unit_serve", payload)
                        console.note(f"{host}: {payload['elapsed_s']:>6} s  {payload['phase']}")
                    elif kind == "Q":
                        check_reply(host, "unit_serve", args, payload)
                        result = payload
        except ConnectionLost:
            raise DeployError(
                "DD308",
                f"{host}: the connection was lost while {unit} was on its way",
                f"the host goes on with it; `launch --{action}` again follows it",
            ) from None
        except KeyboardInterrupt:
            raise DeployError(
                "DD511",
                f"{host}: interrupted; {unit} is left as it is",
                f"`launch --{action}` again goes on from there",
            ) from None
    if result is None:
        raise DeployError("DD307", f"{host}: the answer holds no result")
    verdict = None if result["proof"] is None else judge(result["service"], result["proof"])
    cause = find_cause(result["log"]) if result["failure"] is not None else None
    return Served(result, verdict, cause)
