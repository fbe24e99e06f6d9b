"""Someone who deploys to the machine with the real command line, from a folder and an inventory of their own."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from ddtree_deploy.cli.main import run
from ddtree_deploy.console import Console
from tests.cli.harness import Result, Stream
from tests.systemd.machine import Machine, free_port


def toml(value: Any) -> str:
    """A value as TOML; JSON's escapes are TOML's, but for surrogates and DEL."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


class Operator:
    """``service`` holds the keys of the one service in the inventory; :meth:`save` writes it."""

    def __init__(self, machine: Machine, folder: Path, name: str) -> None:
        self.machine = machine
        self.folder = folder
        self.name = name
        self.unit = f"sglang-{name}.service"
        self.port = free_port()
        self.host: dict[str, Any] = {
            "ssh": f"root@127.0.0.1:{machine.port}",
            "python": machine.python,
            "root": "/opt/site",
            "identity_file": str(machine.folder / "client"),
            "known_hosts": str(machine.folder / "known_hosts"),
            "ssh_config": "none",
        }
        self.service: dict[str, Any] = {
            "model": "org/target",
            "served_name": "target",
            "algorithm": "DDTREE",
            "drafter": "org/draft",
            "block_size": 16,
            "budget": 15,
            "attention_backend": "triton",
            "python": "/opt/engine/bin/python",
            "port": self.port,
            "environment": {"STANDIN": "serve"},
        }
        self.save()

    def save(self, **changes: Any) -> None:
        """Change the service and write the inventory."""
        self.service.update(changes)
        lines = ['default_host = "box"', "[hosts.box]"]
        lines += [f"{key} = {toml(value)}" for key, value in self.host.items()]
        lines += [f"[services.{self.name}]"] + [f"{key} = {toml(value)}" for key, value in self.service.items()]
        text = "\n".join(lines) + "\n"
        tomllib.loads(text)
        (self.folder / "hosts.toml").write_text(text)

    def mode(self, mode: str) -> None:
        """Have the stand-in do something else at its next install."""
        self.save(environment={**self.service["environment"], "STANDIN": mode})

    def run(self, *arguments: str) -> Result:
        """Run a command line with the inventory."""
        out, err = Stream(), Stream()
        status = run([*arguments, "--inventory", str(self.folder / "hosts.toml")], Console(out, err))
        return Result(status, out.text(), err.text())

    def launch(self, *arguments: str, status: int = 0) -> Result:
        """``launch`` with these options, which must end with that status."""
        result = self.run("launch", *arguments)
        assert result.status == status, f"{result.status}\n{result.out}\n{result.err}"
        return result

    def seen(self) -> dict[str, Any]:
        """What the stand-in was started with."""
        value: dict[str, Any] = json.loads(self.machine.read(f"/var/cache/sglang-{self.name}/seen.json"))
        return value
