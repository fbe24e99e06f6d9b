"""``launch``: the command, environment file and systemd unit of a service, printed or written."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.launch.render import Rendering


class Part(StrEnum):
    """What ``--format`` prints."""

    ALL = "all"
    COMMAND = "command"
    ENV = "env"
    UNIT = "unit"
    SCRIPT = "script"


def launch(
    ctx: typer.Context,
    service: Annotated[
        str | None, typer.Option("--service", metavar="NAME", help="A service; without it, the inventory's first.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="GPUs to split the model over: 1, 2, 4, 8.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="VERSION", help="The sglang version whose flag names to use.")
    ] = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    part: Annotated[Part, typer.Option("--format", help="What to print.")] = Part.ALL,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write environment file, unit and script there instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --out: replace files that differ.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for every flag and variable why it is there.")
    ] = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Render a service's launch command, environment file and systemd unit. Contacts no host."""
    from ddtree_deploy.launch.run import run_launch
    from ddtree_deploy.launch.write import write_files

    console = opt.console_of(ctx, json_mode)
    if force and out is None:
        raise DeployError("DD001", "--force is for --out", "name a folder: --out DIR")
    loaded = opt.load(opt.HostChoice(inventory=inventory))
    rendering = run_launch(loaded, service, tp=tp, engine=engine, python=python)
    if loaded.shipped:
        console.note(f"note: rendered from the shipped example inventory {loaded.path}")
    if service is None and len(loaded.services) > 1:
        console.note(f"note: service {rendering.command.service.name}, the first of {len(loaded.services)}")
    for note in rendering.notes:
        console.note(f"note: {note}")
    outcomes = [] if out is None else write_files(rendering.files, out, force=force)
    if json_mode:
        written = {str(one.path): one.outcome for one in outcomes}
        console.document("launch", {**_document(rendering), "written": written})
        return
    for one in outcomes:
        console.line(f"{one.outcome} {one.path}")
    if explain:
        _explain(console, rendering)
    elif out is None:
        console.data(_text(rendering, part))


def _text(rendering: Rendering, part: Part) -> str:
    env, unit = rendering.environment_file, rendering.unit
    if part is Part.ALL:
        return (
            f"# launch command\n{rendering.shell_command}\n"
            f"# {env.install_path} (mode {env.mode:04o})\n{env.text}\n"
            f"# {unit.install_path} (mode {unit.mode:04o})\n{unit.text}"
        )
    if part is Part.COMMAND:
        return rendering.shell_command
    return {Part.ENV: env, Part.UNIT: unit, Part.SCRIPT: rendering.script}[part].text


def _explain(console: Console, rendering: Rendering) -> None:
    command = rendering.command
    rows = [(" ".join(argument.words), argument.reason) for argument in command.arguments]
    rows += [(f"{setting.name}={setting.value}", setting.reason) for setting in command.environment]
    console.rows(rows)


def _document(rendering: Rendering) -> dict[str, object]:
    command = rendering.command
    return {
        "service": command.service.name,
        "tp": command.service.tp,
        "engine": str(command.engine),
        "argv": list(rendering.argv),
        "environment": rendering.env,
        "reasons": {
            **{" ".join(argument.words): argument.reason for argument in command.arguments},
            **{setting.name: setting.reason for setting in command.environment},
        },
        "files": [
            {"name": file.name, "mode": f"{file.mode:04o}", "install_path": file.install_path, "text": file.text}
            for file in rendering.files
        ],
        "notes": list(rendering.notes),
    }
