"""The parts of a bundle, as they are found: of this machine, and of the host. Scrubbed later, all at once.

Each part stands for itself: one that cannot be had leaves its error behind and the others come along.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_deploy import __version__
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.doctor.gather import Wanted
    from ddtree_deploy.hosts.inventory import Inventory
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.hosts.target import Target
    from ddtree_deploy.patching.patchset import PatchSet

_TOOLS = {"git": ("git", "--version"), "ssh": ("ssh", "-V")}
_LIMIT_S = 10
_DOTTED = re.compile(r"[\w-]+(?:\.[\w-]+)+")
_LOG_LINES = 400
#: Of a host in the inventory: what is shown. Of the rest it is shown only whether it is set.
_SHOWN = ("kind", "transport", "python", "root", "any_python", "sudo", "state_dir", "connect_timeout")


@dataclass
class Parts:
    """``found``: the name of a part -> (what it is, its JSON data). ``errors``: what went wrong on the way.

    ``names``: (kind, name) of what the parts do not name themselves, and may hold.
    """

    found: dict[str, tuple[str, Any]] = field(default_factory=dict)
    names: list[tuple[str, object]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def take(self, name: str, about: str, read: Callable[[], Any]) -> Any:
        """Add what ``read`` gives; its error where it fails. Returns it, or None."""
        try:
            value = read()
        except DeployError as error:
            self.failed(name, error)
            return None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            # A host may answer anything.
            self.failed(name, DeployError("DD307", f"the answer cannot be read: {type(error).__name__}"))
            return None
        self.found[name] = (about, value)
        return value

    def failed(self, name: str, error: DeployError) -> None:
        """Keep an error of a part."""
        self.errors.append({"part": name, **error.fields})


def versions() -> dict[str, Any]:
    """The program, what it is built on, and the machine it runs on; which of its variables are set."""
    return {
        "ddtree-deploy": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": dict(_libraries()),
        "tools": {name: _tool(argv) for name, argv in _TOOLS.items()},
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
        },
        "variables": sorted(name for name in os.environ if name.startswith("DDTREE_DEPLOY_")),
    }


def _libraries() -> Iterator[tuple[str, str]]:
    """(name, version) of what the program requires."""
    try:
        requirements = importlib.metadata.requires("ddtree-deploy") or []
    except importlib.metadata.PackageNotFoundError:
        return  # run from its sources
    for requirement in requirements:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        if match and "extra ==" not in requirement:
            try:
                yield match[0], importlib.metadata.version(match[0])
            except importlib.metadata.PackageNotFoundError:
                yield match[0], "not installed"


def _tool(argv: tuple[str, ...]) -> str | None:
    """What a tool says of its version, in one line; None where there is no such tool."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"could not be run: {type(error).__name__}"
    return ((done.stdout or done.stderr).splitlines() or [""])[0]


def patch_sets(folder: Path) -> dict[str, Any]:
    """The sets that are known here: versions and digests, and what is wrong with the others."""
    from ddtree_deploy.patching.patchset import survey_sets

    sets, broken = survey_sets(folder)
    return {
        "sets": [
            {"name": item.name, "version": item.version, "digest": item.digest, "engines": list(item.engines)}
            for item in sets.values()
        ],
        "invalid": {name: [problem.text for problem in problems] for name, problems in broken.items()},
    }


def inventory(loaded: Inventory) -> dict[str, Any]:
    """The inventory: hosts by what kind they are, services by their tables."""
    from ddtree_deploy.doctor.gather import inventory_table

    return {
        "path": str(loaded.path),
        "shipped": loaded.shipped,
        "default_host": loaded.default_host,
        "hosts": [_host(target) for target in loaded.hosts.values()],
        "services": {name: inventory_table(service) for name, service in loaded.services.items()},
    }


def _host(target: Target) -> dict[str, Any]:
    values = dataclasses.asdict(target)
    hidden = {key: value for key, value in values.items() if key not in _SHOWN and key not in ("name", "labels")}
    return {
        "name": target.name,
        **{key: values[key] for key in _SHOWN},
        "labels": sorted(target.labels),
        "set": sorted(key for key, value in hidden.items() if value and key != "unresolved_hint"),
    }


def of_host(parts: Parts, session: HostSession, sets: dict[str, PatchSet], wanted: list[Wanted]) -> None:
    """Status, history, services' last errors and the doctor's facts and findings of the host."""
    from ddtree_deploy.deploy.status import read_status
    from ddtree_deploy.doctor.examine import examine
    from ddtree_deploy.doctor.gather import gather
    from ddtree_deploy.doctor.redact import redact
    from ddtree_deploy.serve.standing import services

    about = "sets, files, processes"
    report = parts.take("host/status.json", about, lambda: dataclasses.asdict(read_status(session, sets)))
    if report is None and parts.errors[-1]["exit_status"] == ExitStatus.CONNECTION:
        return  # it would be the same, as slowly, for each of the others
    history = parts.take("host/history.json", "what was done, with what outcome", lambda: session.call("history", {}))
    installed = parts.take("host/services.json", "installed services", lambda: services(session)[0])

    def doctor() -> dict[str, Any]:
        facts = gather(session, wanted, list(sets.values()))
        shown = [{**dataclasses.asdict(item), "severity": item.severity.word} for item in examine(facts)]
        parts.names += names_of(facts)
        return {"facts": redact(facts), "findings": shown}

    parts.take("host/doctor.json", "facts and findings", doctor)

    def errors() -> dict[str, Any]:
        entries = [item for item in (history or {}).get("history", []) if item.get("outcome") != "done"]
        return {
            "transactions": entries,
            "services": {item["unit"]: _ended(session, item["unit"]) for item in installed or () if _is_wrong(item)},
        }

    parts.take("host/errors.json", "transactions that failed, services that ended", errors)


def names_of(facts: dict[str, Any]) -> list[tuple[str, object]]:
    """(kind, name) of what the doctor's facts name: gone from them once they are redacted, not from the rest."""
    host, agent = facts.get("host"), facts.get("agent")
    found: list[tuple[str, object]] = [("host", host.get("name"))] if isinstance(host, dict) else []
    return [*found, *([("user", agent.get("user"))] if isinstance(agent, dict) else [])]


def names_on_the_way(target: Target) -> list[tuple[str, object]]:
    """(kind, name) of what the ssh configuration makes of a target: errors name it."""
    from ddtree_deploy.hosts.sshconfig import effective_config
    from ddtree_deploy.hosts.target import parse_destination

    if target.ssh is None:
        return []
    try:
        config = effective_config(parse_destination(target.ssh), target.ssh_config)
    except (DeployError, ValueError):
        return []  # connecting says why
    hosts = [config.hostname, config.host_key_alias, *_DOTTED.findall(config.proxy_command or "")]
    jumps = [text.rpartition("@") for text in config.proxy_jump]
    users = [config.user, *(user for user, _at, _place in jumps)]
    hosts += [place.partition(":")[0] for _user, _at, place in jumps]
    return [*(("host", name) for name in hosts), *(("user", name) for name in users)]


def _is_wrong(service: dict[str, Any]) -> bool:
    state = service["state"]
    return bool(state and (state["active"] == "failed" or state["restarts"]))


def _ended(session: HostSession, unit: str) -> dict[str, Any] | None:
    """Why a service ended, as far as its log shows a known cause: the log itself may hold what users asked."""
    from ddtree_deploy.serve.causes import find_cause
    from ddtree_deploy.serve.logs import log_lines

    cause = find_cause(log_lines(session, unit, lines=_LOG_LINES, follow=False))
    return None if cause is None else dataclasses.asdict(cause)
