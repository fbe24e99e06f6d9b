"""What it means when the agent did not come up: judged by exit status and the host's own words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Target, parse_container

_ENGINE_SAYS = re.compile(
    r"Error response from daemon|Cannot connect to the Docker daemon|failed to connect to the docker API"
    r"|permission denied while trying to connect|no container with name or ID|no such container"
    r"|can only create exec sessions on running|(?:docker|podman): (?:command )?not found|docker.*daemon running",
    re.IGNORECASE,
)
_NO_PROGRAM = re.compile(r"no such file or directory|not found|unknown command|is a directory", re.IGNORECASE)
_OLD_PYTHON = re.compile(r"SyntaxError|[Uu]nknown option|is too old|has no attribute 'buffer'|No module named '?zlib")
# sudo speaks the host's language: what it says begins with its name, whatever follows.
_SUDO_SAYS = re.compile(r"^\s*sudo: ")
_NO_SUDO = re.compile(r"(?:^|[\s:])sudo: (?:command )?not found|unknown command.*\bsudo\b", re.IGNORECASE)
_NO_SPACE = re.compile(r"No space left on device|Read-only file system|Disk quota exceeded")


@dataclass(frozen=True)
class NoAgent:
    """What there is instead of an agent.

    ``status`` is None for a lost connection; ``stderr`` and ``noise`` are what was said there and on stdout
    (its last line); ``user()`` names the account on the host.
    """

    status: int | None
    stderr: str
    noise: str
    user: Callable[[], str]

    @property
    def last(self) -> str:
        """The last line on stderr."""
        lines = self.stderr.splitlines()
        return lines[-1].strip() if lines else ""

    def line(self, pattern: re.Pattern[str]) -> str | None:
        """The first line on stderr that matches."""
        return next((line.strip() for line in self.stderr.splitlines() if pattern.search(line)), None)


def explain(target: Target, seen: NoAgent) -> DeployError:
    """The one clear error for it: DD310 sudo, DD313 container, DD309 python, else DD306."""
    for judge in (_sudo, _container, _python):
        error = judge(target, seen)
        if error is not None:
            return error
    words = seen.last or seen.noise or "nothing was said"
    hint = "try `ssh HOST python3 -V` by hand"
    if "Session open refused" in seen.stderr:
        hint = "the host allows too few sessions on one connection (MaxSessions)"
    elif _NO_SPACE.search(seen.stderr):
        hint = "the host's disk is full or read-only: look at `df -h` and `mount` there"
    return DeployError("DD306", f"{target.name}: the agent did not start: {words}", hint)


def _sudo(target: Target, seen: NoAgent) -> DeployError | None:
    said, missing = seen.line(_SUDO_SAYS), seen.line(_NO_SUDO)
    if not target.sudo or (said is None and not missing and "sudoers" not in seen.stderr):
        return None
    if missing:
        return DeployError("DD310", f"{target.name}: the host has no sudo", "log in as the tree's owner, without sudo")
    if said and (gone := re.match(r"sudo: (/\S.*): command not found", said)):
        return DeployError("DD309", f"{target.name}: no such python: {gone[1]}", "name it: python in the inventory")
    user, what = seen.user() or "USER", _sudoers_command(target)
    line = f"{user} ALL=(root) NOPASSWD: {what}"
    if said and "tty" in said:
        line = f"Defaults:{user} !requiretty"
    return DeployError(
        "DD310",
        f"{target.name}: {said or seen.last}",
        "on the host, `sudo visudo -f /etc/sudoers.d/ddtree-deploy` and add the line above"
        + ("" if target.python or target.container else ", with the engine's own python in place of /usr/bin/python3")
        + f"; it lets {user} run anything as root",
        [line],
    )


def _sudoers_command(target: Target) -> str:
    """The command as sudoers has to write it: absolute, with what is special there escaped."""
    if target.container:
        engine, name = parse_container(target.container)
        return f"/usr/bin/{engine} exec -i {name} *"
    return re.sub(r"([\\,:=\s])", r"\\\1", target.python or "/usr/bin/python3")


def _container(target: Target, seen: NoAgent) -> DeployError | None:
    if not target.container:
        return None
    said = seen.line(_ENGINE_SAYS)
    if said is None:
        return None
    engine, _name = parse_container(target.container)
    hint = f"`{engine} ps` on that machine lists the containers that run"
    if "ermission denied" in said:
        hint = f"let the account use {engine} (its group), or set sudo = true: then it runs as `sudo -n {engine}`"
    elif "not found" in said:
        hint = f"install {engine} there, or leave the container out"
    return DeployError("DD313", f"{target.name}: {said}", hint)


def _python(target: Target, seen: NoAgent) -> DeployError | None:
    if seen.status == 9 or _OLD_PYTHON.search(seen.stderr):
        return DeployError(
            "DD309",
            f"{target.name}: {seen.line(_OLD_PYTHON) or seen.last}",
            "the agent needs python 3.8 or later; --python PATH names another",
        )
    if seen.status in (126, 127) or _NO_PROGRAM.search(seen.last):
        what = seen.line(_NO_PROGRAM) or seen.last or shlex.quote(target.python or "python3")
        return DeployError(
            "DD309",
            f"{target.name}: no such python: {what}",
            "name it: --python PATH, or python in the inventory",
        )
    return None
