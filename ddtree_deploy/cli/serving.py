"""What ``launch`` does on a host: install, start, restart, stop, go back; and ``apply`` around a restart."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddtree_deploy.console import Console
    from ddtree_deploy.deploy.apply import Applied
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.launch.argv import Command
    from ddtree_deploy.launch.render import Rendering
    from ddtree_deploy.launch.service import Service
    from ddtree_deploy.serve.around import Around
    from ddtree_deploy.serve.install import Installed
    from ddtree_deploy.serve.run import Served

InstallOption = Annotated[
    bool, typer.Option("--install", help="Write unit and environment file on the host, checked by its own systemd.")
]
NoSystemdOption = Annotated[
    bool,
    typer.Option(
        "--no-systemd", help="With --install: a supervised script, though the host has systemd; takes no root."
    ),
]
CheckOption = Annotated[bool, typer.Option("--check", help="With --install: show the difference, write nothing.")]
StartOption = Annotated[bool, typer.Option("--start", help="Start it on the host and follow it until it serves.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Stop and start it, through the same checks.")]
StopOption = Annotated[bool, typer.Option("--stop", help="Stop it on the host.")]
PreviousOption = Annotated[bool, typer.Option("--previous", help="Bring back the install before the last one.")]
UninstallOption = Annotated[
    bool, typer.Option("--uninstall", help="Take every install back: the host has what it had before the first.")
]
DeadlineOption = Annotated[
    float,
    typer.Option("--deadline", metavar="SECONDS", min=1, max=86400, help="How long it may take until it serves."),
]
NoEnableOption = Annotated[bool, typer.Option("--no-enable", help="With --start: do not have it started at boot.")]
ServiceOption = Annotated[
    str | None,
    typer.Option(
        "--restart", metavar="SERVICE", help="Stop that service before, start it after, and follow it until it serves."
    ),
]
UndoOption = Annotated[
    bool, typer.Option("--undo", help="With --restart: roll back if the service does not serve with the change.")
]


@dataclasses.dataclass(frozen=True)
class Actions:
    """What the command line asks to be done on the host."""

    install: bool = False
    check: bool = False
    no_systemd: bool = False
    start: bool = False
    restart: bool = False
    stop: bool = False
    previous: bool = False
    uninstall: bool = False
    deadline_s: float = 1800.0
    enable: bool = True
    force: bool = False
    wait: float = 0.0
    reason: str | None = None

    @property
    def any(self) -> bool:
        """Whether a host is to be contacted at all."""
        return bool(self._files or self._runs)

    @property
    def writes(self) -> bool:
        """Whether files on the host may change."""
        return bool(self._files)

    @property
    def _files(self) -> list[str]:
        return [name for name in ("install", "previous", "uninstall") if getattr(self, name)]

    @property
    def _runs(self) -> list[str]:
        return [name for name in ("start", "restart", "stop") if getattr(self, name)]

    def validate(self) -> None:
        """Raises DeployError DD001 for what does not go together."""
        problem = ""
        if len(self._files) > 1 or len(self._runs) > 1:
            both = self._files if len(self._files) > 1 else self._runs
            problem = f"--{both[0]} and --{both[1]} do not go together"
        elif self.uninstall and (self.start or self.restart):
            problem = "what is uninstalled cannot be started"
        elif self.stop and (self.install or self.previous):
            problem = f"--stop and --{self._files[0]} do not go together: --restart takes an install up"
        elif self.check and (not self.install or self._runs):
            problem = "--check is for --install alone"
        elif self.no_systemd and not self.install:
            problem = "--no-systemd is for --install: later commands know"
        if problem:
            raise DeployError("DD001", problem, "see `ddtree-deploy launch --help`")


def say_checked(console: Console, command: Command, strict: bool) -> Rendering:
    """Render a command for one host and say what was and was not checked. Raises DeployError DD612 if ``strict``."""
    from ddtree_deploy.launch.render import render_command

    rendering = render_command(command)
    if command.source is not None:
        console.note(f"note: flags checked against {command.source} (sglang {command.engine})")
    # What remains to be done by hand is looked up on the host.
    for note in command.notes:
        console.note(f"note: {note}")
    for item in command.unchecked:
        console.note(f"not checked: {item}")
    if strict and command.unchecked:
        count = len(command.unchecked)
        raise DeployError(
            "DD612", f"{command.service.name}: {count} things were left unchecked", None, command.unchecked
        )
    return rendering


def act(
    console: Console,
    actions: Actions,
    service: Service,
    choice: opt.HostChoice,
    render: Callable[[HostSession], Rendering],
) -> None:
    """Do on the host what is asked, in the order files, then run; report it. Raises DeployError.

    ``render`` makes the files of an install, from what the host shows of its engine and models.
    """
    from ddtree_deploy.serve import install as installing
    from ddtree_deploy.serve.files import unit_of
    from ddtree_deploy.serve.run import serve

    unit = unit_of(service)
    document: dict[str, Any] = {"service": service.name, "unit": unit}
    served: Served | None = None
    with opt.open_session(choice, console) as session:
        document["host"] = session.target.name
        if actions.install:
            installed = installing.install(
                session,
                render(session),
                console,
                systemd=not actions.no_systemd,
                check=actions.check,
                force=actions.force,
                wait=actions.wait,
                reason=actions.reason,
            )
            document["install"] = _install_document(installed)
            if not console.json_mode:
                _print_install(console, session, installed, actions)
        if actions.uninstall and actions.stop:
            served = _run(session, unit, "stop", console, actions, serve)
            document["run"] = _run_document(served)
        if actions.previous or actions.uninstall:
            result = installing.restore(
                session,
                unit,
                console,
                everything=actions.uninstall,
                force=actions.force,
                wait=actions.wait,
                reason=actions.reason,
            )
            document["restore"] = result
            if not console.json_mode:
                _print_restore(console, session, result, actions)
        for action in ("start", "restart", "stop"):
            if getattr(actions, action) and served is None:
                served = _run(session, unit, action, console, actions, serve)
                document["run"] = _run_document(served)
    if served is not None and not console.json_mode:
        print_served(console, document["host"], served)
    error = served.error(document["host"]) if served and served.failed else None
    console.outcome("launch-host", document, error)


def _run(
    session: HostSession, unit: str, action: str, console: Console, actions: Actions, serve: Callable[..., Served]
) -> Served:
    return serve(session, unit, action, console, deadline_s=actions.deadline_s, enable=actions.enable)


def _install_document(installed: Installed) -> dict[str, Any]:
    result = installed.result
    return {
        "manager": installed.item.facts["manager"],
        "version": installed.item.version,
        "changed": result is not None,
        "difference": list(installed.difference),
        "files": dict(result["files"]) if result else {},
        "transaction": result["transaction"] if result else None,
        "notes": list(installed.notes),
    }


def _run_document(served: Served) -> dict[str, Any]:
    result, verdict = served.result, served.verdict
    return {
        "ready": result["failure"] is None,
        "failure": result["failure"],
        "cause": dataclasses.asdict(served.cause) if served.cause else None,
        "state": result["state"],
        "endpoint": result["endpoint"],
        "elapsed_s": result["elapsed_s"],
        "accept_length": verdict.accept_length if verdict else None,
        "findings": [dataclasses.asdict(finding) for finding in verdict.findings] if verdict else [],
        "proof": result["proof"],
        "log": result["log"],
        "notes": result["notes"],
    }


_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def _print_install(console: Console, session: HostSession, installed: Installed, actions: Actions) -> None:
    host, result = session.target.name, installed.result
    for line in installed.difference:
        style = _DIFF_STYLES.get(line[:1])
        console.line((line, style) if style else line)
    for note in installed.notes:
        console.note(f"note: {note}")
    if installed.outdated and not (actions.start or actions.restart):
        console.note("note: it runs the install from before: `launch --restart` takes the new one up")
    version = f"{installed.item.unit} {installed.item.version}"
    if result is not None:
        checked = " and verified by its systemd" if installed.item.facts["manager"] == "systemd" else ""
        console.line(f"{host}: {version} installed: {len(result['files'])} file(s) read back{checked}")
    elif actions.check and installed.difference:
        console.line(f"{host}: {version} checked only, nothing was written")
    else:
        console.line(f"{host}: {version} is installed already, nothing was written")


def _print_restore(console: Console, session: HostSession, result: dict[str, Any], actions: Actions) -> None:
    for path, entry in sorted(result["files"].items()):
        console.line(f"  {'removed' if entry is None else 'restored':<8} /{path}")
    for path in result["saved"]:
        console.note(f"note: edits saved on the host in {path}")
    for note in result["notes"]:
        console.note(f"note: {note}")
    left = result["left"]
    now = f"install {left[-1]['version']} of {left[-1]['time']}" if left else "what was there before the first install"
    console.line(f"{session.target.name}: back to {now}")
    if left and not (actions.start or actions.restart):
        console.note("note: a service that runs goes on as it is: `launch --restart` takes this up")


def print_served(console: Console, host: str, served: Served) -> None:
    """Print how a start, restart or stop went; failures are left to the error."""
    result, verdict = served.result, served.verdict
    for note in result["notes"]:
        console.note(f"note: {note}")
    if verdict is None:
        if not served.failed:
            console.line(f"{host}: {result['unit']} is {result['state']['active']}, after {result['elapsed_s']} s")
        return
    for finding in verdict.findings:
        console.note(f"{finding.severity}: {finding.what}; {finding.mend}")
    if served.failed:
        return
    proof = result["proof"]
    tokens = proof["completion"]["tokens"]
    counted = f"{tokens} tokens" if tokens else "some text"
    console.line(f"{host}: {result['unit']} serves on {result['endpoint']} after {result['elapsed_s']} s")
    console.line(f"  a completion of {counted} came back")
    algorithm = proof["server"].get("speculative_algorithm")
    if algorithm:
        length = "not told" if verdict.accept_length is None else f"{verdict.accept_length:.2f} tokens a verify"
        console.line(f"  speculation: {algorithm}, accept length {length}")
    if result["state"]["enabled"]:
        console.line("  it starts at boot")


def print_services(console: Console, installed: list[dict[str, Any]], unread: list[str], last: Any) -> None:
    """Print the services of a host, a line each. ``last``: the last change of the engine's files, from the history."""
    from ddtree_deploy.serve.standing import describe

    for service in installed:
        line, notes = describe(service, last["time"] if last else None)
        console.line(f"  {line}")
        for note in notes:
            console.note(f"note: {note}")
    for note in unread:
        console.note(f"note: {note}")


# --- apply --restart


def apply_around(
    session: HostSession,
    service_name: str,
    inventory: Path | None,
    console: Console,
    apply: Callable[[bool], Applied],
    *,
    undo: bool,
    deadline_s: float,
    wait: float,
    reason: str | None,
) -> Around:
    """Apply around a restart of a service of the inventory, as :func:`ddtree_deploy.serve.around.apply_around`."""
    from ddtree_deploy.launch.run import find_service
    from ddtree_deploy.serve import around
    from ddtree_deploy.serve.files import unit_of

    unit = unit_of(find_service(opt.load(opt.HostChoice(inventory=inventory)), service_name))
    return around.apply_around(
        session, unit, console, apply, undo=undo, deadline_s=deadline_s, wait=wait, reason=reason
    )


def around_document(around: Around) -> dict[str, Any]:
    """What came of the restart, for ``apply --json``."""
    return {
        "run": _run_document(around.served) if around.served else None,
        "undone": list(around.undone),
        "again": _run_document(around.again) if around.again else None,
    }


def print_around(console: Console, host: str, around: Around) -> None:
    """Print how the restart went; failures are left to the error."""
    if around.served is None:
        console.note("note: nothing changed, so nothing was restarted; `launch --restart` does")
        return
    print_served(console, host, around.served)
    for name in around.undone:
        console.line(f"{host}: {name} rolled back")
    if around.again is not None:
        print_served(console, host, around.again)
