"""Put a service's files on a host, or take them back: looked at first, one transaction, read back after."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ddtree_deploy.agent.managers import SCRIPT
from ddtree_deploy.console import Console
from ddtree_deploy.deploy.transaction import client_name, transact
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.launch.render import RenderedFile, Rendering
from ddtree_deploy.serve.files import Installable, installable

T = TypeVar("T")


@dataclass(frozen=True)
class Installed:
    """The outcome. ``result`` is what the host read back; None when nothing was to do or it was only checked.

    ``difference``: unified diffs from what was there to what was rendered, a line each.
    """

    item: Installable
    look: Mapping[str, Any]
    difference: tuple[str, ...]
    result: Mapping[str, Any] | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the operator should know beside the files."""
        notes = [f"before a start: {problem}" for problem in self.look["secrets"]]
        if self.item.facts["manager"] == SCRIPT:
            why = "it was asked for" if self.look["booted"] else "this host is not run by systemd"
            notes.append(f"a script and its supervisor instead of a unit ({why}): nothing starts it at boot")
        return (*notes, *(self.result["notes"] if self.result else ()))

    @property
    def outdated(self) -> bool:
        """Whether the service runs, and not as it is installed now."""
        state = self.look["state"]
        return bool(self.result and state and state["active"] in ("active", "activating"))


def install(
    session: HostSession,
    rendering: Rendering,
    console: Console,
    *,
    check: bool = False,
    systemd: bool = True,
    force: bool = False,
    wait: float = 0.0,
    reason: str | None = None,
) -> Installed:
    """Install a rendered service in one transaction; with ``check`` only say what would change.

    ``systemd``: as a unit, where the host has systemd; else as a script with a supervisor.

    Raises DeployError: ``DD603`` files that are not ours, ``DD604`` the host's systemd finds fault (undone),
    ``DD606`` not root, ``DD5xx`` as every transaction.
    """
    with console.progress(f"reading {session.target.name}") as progress:
        item, look = _look(session, rendering, systemd)
        if look["interrupted"] and not check:
            _say_recovered(session, console, item.unit, wait)
            item, look = _look(session, rendering, systemd)
        difference = tuple(_difference(item, look))
        if check:
            return Installed(item, look, difference, None)
        progress(0, 0, f"installing on {session.target.name}")
        files = [_wire(file, look) for file in item.files]
        args = {
            "unit": item.unit,
            "service": item.facts,
            "version": item.version,
            "files": files,
            "force": force,
            "wait": wait,
            "reason": reason,
        }
        blobs = list(dict.fromkeys(file.text.encode() for file in item.files))
        result = transact(session, "unit_install", args, blobs, progress, outcome="unit_outcome")
    if not result["changed"]:
        return Installed(item, look, difference, None)
    _check_read_back(session, item, result)
    return Installed(item, look, difference, result)


def restore(
    session: HostSession,
    unit: str,
    console: Console,
    *,
    everything: bool = False,
    force: bool = False,
    wait: float = 0.0,
    reason: str | None = None,
) -> dict[str, Any]:
    """Take back the newest install of a unit, or all of them; the host's record alone says what was before.

    Returns what the host read back: ``files``, ``removed``, ``left`` (installs, oldest first), ``saved``, ``notes``.
    """
    args = {"unit": unit, "all": everything, "force": force, "wait": wait, "reason": reason}

    def run() -> dict[str, Any]:
        return transact(session, "unit_restore", args, progress=progress, outcome="unit_outcome")

    with console.progress(f"restoring {unit}") as progress:
        return _after_recovery(session, console, unit, wait, run)


def recover_units(
    session: HostSession, *, unit: str | None = None, force: bool = False, wait: float = 0.0
) -> list[dict[str, Any]]:
    """Finish or undo interrupted installs, of one unit or of all: what was done, one item each."""
    args = {"force": force, "wait": wait, "who": client_name(), **({"unit": unit} if unit else {})}
    recovered: list[dict[str, Any]] = session.call("units_recover", args)["recovered"]
    return recovered


def describe(recovered: Mapping[str, Any]) -> str:
    """A recovery in one line for a person."""
    kind, unit = recovered["history"].get("kind", "transaction"), recovered["unit"]
    if recovered["action"] == "finished":
        return f"finished the interrupted {kind} of {unit}: every file had been written"
    count = len(recovered["paths"])
    return f"undid the interrupted {kind} of {unit}: " + (
        f"{count} file(s) restored" if count else "nothing had changed"
    )


def _after_recovery(session: HostSession, console: Console, unit: str, wait: float, action: Callable[[], T]) -> T:
    try:
        return action()
    except DeployError as error:
        if error.code != "DD503":
            raise
        _say_recovered(session, console, unit, wait)
        return action()


def _say_recovered(session: HostSession, console: Console, unit: str, wait: float) -> None:
    for item in recover_units(session, unit=unit, wait=wait):
        console.note(f"{session.target.name}: {describe(item)}")


def _look(session: HostSession, rendering: Rendering, systemd: bool) -> tuple[Installable, dict[str, Any]]:
    """The files for this host, and how it stands: one exec, a second where it turns out to have no systemd."""
    item = installable(rendering, systemd=systemd)
    look = _ask(session, item)
    if systemd and not look["booted"]:
        item = installable(rendering, systemd=False)
        look = _ask(session, item)
    return item, look


def _ask(session: HostSession, item: Installable) -> dict[str, Any]:
    paths = [_path(file) for file in item.files]
    facts = item.facts
    secrets = {"secrets_path": facts["secrets_path"], "secrets": facts["secrets"]}
    return session.call("unit_look", {"unit": item.unit, "paths": paths, **secrets})


def _path(file: RenderedFile) -> str:
    """Where a file goes, counted from the host's root folder."""
    if file.install_path is None:
        raise ValueError(f"{file.name} has no place on a host")
    return file.install_path.lstrip("/")


def _wire(file: RenderedFile, look: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "path": _path(file),
        "before": look["entries"][_path(file)],
        "mode": file.mode,
        "sha256": hashlib.sha256(file.text.encode()).hexdigest(),
    }


def _difference(item: Installable, look: Mapping[str, Any]) -> list[str]:
    """What changes: texts as unified diffs, else modes and kinds; files that go away are named."""
    lines: list[str] = []
    for file in item.files:
        path = _path(file)
        entry, old = look["entries"][path], look["texts"].get(path)
        if entry is not None and entry["kind"] != "file":
            lines.append(f"/{path}: is no regular file ({entry.get('target') or entry['kind']})")
            continue
        diff = difflib.unified_diff(
            (old or "").splitlines(),
            file.text.splitlines(),
            "/dev/null" if entry is None else f"/{path}",
            f"/{path}",
            lineterm="",
        )
        shown = list(diff)
        lines += shown
        if entry is not None and entry["mode"] != file.mode:
            lines.append(f"/{path}: mode {entry['mode']:04o} becomes {file.mode:04o}")
        elif entry is not None and not shown and entry["sha256"] != hashlib.sha256(file.text.encode()).hexdigest():
            lines.append(f"/{path}: differs where it is not shown (secrets, line ends)")
    new = {_path(file) for file in item.files}
    lines += [f"/{path}: goes away" for path, entry in look["entries"].items() if path not in new and entry is not None]
    return lines


def _check_read_back(session: HostSession, item: Installable, result: Mapping[str, Any]) -> None:
    """Every file that the host says it wrote must be the rendered one."""
    wanted = {_path(file): hashlib.sha256(file.text.encode()).hexdigest() for file in item.files}
    wrong = [f"/{path}" for path, entry in result["files"].items() if (entry or {}).get("sha256") != wanted.get(path)]
    if wrong:
        raise DeployError(
            "DD505",
            f"{session.target.name}: {len(wrong)} file(s) read back differ from what was rendered",
            "look at them on the host; `launch --previous` brings back what was there",
            wrong,
        )
