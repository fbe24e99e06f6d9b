"""What a rendered service becomes on a host: its files, and what start and stop need to know of it. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ddtree_deploy.agent.managers import SCRIPT, SYSTEMD
from ddtree_deploy.launch.render import RenderedFile, Rendering, unit_name
from ddtree_deploy.launch.service import Service

# The supervisor's counterparts of the unit's RestartSec=, StartLimitBurst=, StartLimitIntervalSec=, TimeoutStopSec=.
RESTART_S, BURST, INTERVAL_S, STOP_S = 30, 4, 7200, 180


@dataclass(frozen=True, slots=True)
class Installable:
    """A service as it is put on a host. ``facts`` go into the host's record; every file has an install path."""

    unit: str
    facts: dict[str, Any]
    files: tuple[RenderedFile, ...]

    @property
    def version(self) -> str:
        """A short digest of paths, modes and bytes."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.install_path}\0{file.mode:o}\0{len(file.text.encode())}\0{file.text}".encode())
        return digest.hexdigest()[:12]


def unit_of(service: Service) -> str:
    """The unit of a service; also what its state on the host is named by."""
    return f"{unit_name(service)}.service"


def installable(rendering: Rendering, *, systemd: bool) -> Installable:
    """The files of a rendering for a host with systemd, or for one without: then a script and its supervisor."""
    service = rendering.command.service
    facts: dict[str, Any] = {
        "name": service.name,
        "manager": SYSTEMD if systemd else SCRIPT,
        "address": service.bind,
        "port": service.port,
        "model": service.served_name or service.model,
        "algorithm": service.algorithm,
        "verify_tokens": service.verify_tokens if service.speculative else 1,
        "shadow_linear": service.shadow_linear,
        "metrics": service.metrics,
        "engine": str(rendering.command.engine),
        "tp": service.tp,
        "engine_config": service.engine_config,
        "secrets_path": rendering.secrets_path,
        "secrets": list(service.secrets),
    }
    if systemd:
        return Installable(rendering.unit.name, facts, (rendering.environment_file, rendering.unit))
    base = f"{service.environment_directory.rstrip('/')}/{service.name}"
    config = {
        "command": ["/bin/sh", f"{base}.sh"],
        "secrets_file": rendering.secrets_path,
        "folder": f"{base}.run",
        "user": service.user,
        "group": service.group,
        "restart_s": RESTART_S,
        "burst": BURST,
        "interval_s": INTERVAL_S,
        "stop_s": STOP_S,
    }
    facts.update(config=f"{base}.supervisor.json", supervisor=f"{base}.supervisor.py")
    source = resources.files("ddtree_deploy.agent").joinpath("supervisor.py").read_text("utf-8")
    files = (
        RenderedFile(f"{service.name}.sh", 0o755, rendering.script.text, f"{base}.sh"),
        RenderedFile(f"{service.name}.supervisor.json", 0o644, json.dumps(config, indent=1) + "\n", facts["config"]),
        RenderedFile(f"{service.name}.supervisor.py", 0o755, source, facts["supervisor"]),
    )
    return Installable(rendering.unit.name, facts, files)
