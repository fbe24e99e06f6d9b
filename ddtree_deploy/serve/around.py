"""Change the engine's files around a restart of the service that runs them; and back, if it does not serve then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddtree_deploy.console import Console
from ddtree_deploy.deploy.apply import Applied
from ddtree_deploy.deploy.rollback import undo_apply
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.serve.run import DEADLINE_S, Served, serve


@dataclass(frozen=True)
class Around:
    """``served`` is None where nothing was to change, and so nothing was restarted. ``undone``: sets that were rolled
    back because the service did not serve with them; ``again``: how it went after that.
    """

    applied: Applied
    served: Served | None
    undone: tuple[str, ...] = ()
    again: Served | None = None

    @property
    def failed(self) -> bool:
        """Whether the service did not serve with the sets."""
        return self.served is not None and self.served.failed

    def error(self, host: str) -> DeployError:
        """The failure as one; only where :attr:`failed`."""
        if self.served is None:
            raise ValueError("nothing was restarted")
        first = self.served.error(host)
        if self.again is None:
            if not self.applied.plan.to_apply:
                return first
            name = self.applied.plan.to_apply[0].patch_set.name
            old = self.applied.ground.replaced.get(name)
            back = f"rollback {name}" + (f" --to {old}" if old else "")
            hint = f"{first.hint}; to go back: `{back} --with-dependents`, then `launch --restart`"
            return DeployError(first.code, first.message, hint, first.details)
        now = "does not serve now either" if self.again.failed else "serves again as before"
        message = f"{host}: {', '.join(self.undone)} rolled back: the service did not serve with it, and {now}"
        return DeployError("DD505", message, first.hint, [first.message, *first.details])


def apply_around(
    session: HostSession,
    unit: str,
    console: Console,
    apply: Callable[[bool], Applied],
    *,
    undo: bool = False,
    deadline_s: float = DEADLINE_S,
    wait: float = 0.0,
    reason: str | None = None,
) -> Around:
    """Run ``apply(check)`` between a stop and a start of ``unit``, if a first ``apply(True)`` finds anything to do.

    What is refused leaves the service untouched or, if that shows only after the stop, running as before. With
    ``undo`` the sets are rolled back if the service does not serve with them. Raises DeployError as ``apply`` and
    :func:`~ddtree_deploy.serve.run.serve`; a service that does not get ready is no exception: see :class:`Around`.
    """
    planned = apply(True)
    if not planned.to_do:
        return Around(planned, None)
    serve(session, unit, "stop", console)
    try:
        applied = apply(False)
    except BaseException:
        console.note(f"{session.target.name}: nothing was applied; {unit} is started as it was")
        try:
            serve(session, unit, "start", console, deadline_s=deadline_s)
        except DeployError as error:
            console.note(f"{session.target.name}: {unit} was not started: {error.message}")
        raise
    served = serve(session, unit, "start", console, deadline_s=deadline_s)
    if not served.failed or not undo:
        return Around(applied, served)
    serve(session, unit, "stop", console)
    undone = undo_apply(session, applied, console, wait=wait, reason=reason)
    again = serve(session, unit, "start", console, deadline_s=deadline_s)
    return Around(applied, served, tuple(undone), again)
