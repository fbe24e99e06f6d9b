"""``launch``: the command, environment file and systemd unit of a service, checked, printed or written."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli import serving
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_deploy.console import Console
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.launch.argv import Command
    from ddtree_deploy.launch.known import Known
    from ddtree_deploy.launch.render import RenderedFile, Rendering
    from ddtree_deploy.launch.service import Service
    from ddtree_deploy.snapshots.wheels import Sources


class Part(StrEnum):
    """What ``--format`` prints."""

    ALL = "all"
    COMMAND = "command"
    ENV = "env"
    UNIT = "unit"
    SCRIPT = "script"
    SLURM = "slurm"
    K8S = "k8s"


def launch(
    ctx: typer.Context,
    service: Annotated[
        str | None, typer.Option("--service", metavar="NAME", help="A service; without it, the inventory's first.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="GPUs to split the model over: 1, 2, 4, 8.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="Hosts to split it over, with --format slurm or k8s.")
    ] = None,
    host: opt.HostOption = None,
    snapshot: Annotated[
        str | None, typer.Option("--snapshot", metavar="S", help="Hold the flags against the engine in this snapshot.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="VERSION", help="Hold the flags against this published sglang version."),
    ] = None,
    fetch: opt.FetchOption = False,
    wheelhouse: opt.WheelhouseOption = None,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", metavar="FILE", help="The model's config.json, if it is here.")
    ] = None,
    draft_config: Annotated[
        Path | None, typer.Option("--draft-config", metavar="FILE", help="The drafter's config.json, if it is here.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse where anything is left unchecked.")] = False,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    part: Annotated[Part, typer.Option("--format", help="What to print.")] = Part.ALL,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write environment file, unit and script there instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --out or --install: replace files that differ.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for every flag and variable why it is there, and what changes it.")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Show how one GPU's memory will be used.")] = False,
    install: serving.InstallOption = False,
    check: serving.CheckOption = False,
    no_systemd: serving.NoSystemdOption = False,
    start: serving.StartOption = False,
    restart: serving.RestartOption = False,
    stop: serving.StopOption = False,
    previous: serving.PreviousOption = False,
    uninstall: serving.UninstallOption = False,
    deadline: serving.DeadlineOption = 1800.0,
    no_enable: serving.NoEnableOption = False,
    wait: opt.WaitOption = 0.0,
    reason: opt.ReasonOption = None,
    state_dir: opt.StateDirOption = None,
    json_mode: opt.JsonOption = False,
) -> None:
    """Render a service's launch command, environment file and systemd unit; install, start and stop it on its host.

    With --host engine and models are read there (nothing is changed) and everything is checked against them. Without
    it no host is contacted: the newest snapshot of the service's host, --snapshot or --engine stand for the engine,
    and each thing that could not be checked is listed on stderr.
    """
    from ddtree_deploy.launch.argv import build_command
    from ddtree_deploy.launch.run import resolve
    from ddtree_deploy.launch.write import write_files

    console = opt.console_of(ctx, json_mode)
    actions = serving.Actions(
        install=install,
        check=check,
        no_systemd=no_systemd,
        start=start,
        restart=restart,
        stop=stop,
        previous=previous,
        uninstall=uninstall,
        deadline_s=deadline,
        enable=not no_enable,
        force=force,
        wait=wait,
        reason=reason,
    )
    actions.validate()
    if force and out is None and not actions.writes:
        raise DeployError("DD001", "--force is for --out and --install", "name a folder: --out DIR")
    _one_engine(host, snapshot, engine)
    if host is not None and (model_config or draft_config):
        raise DeployError("DD001", "--host reads the models there: name no config.json here", "leave one of them out")
    loaded = opt.load(opt.HostChoice(inventory=inventory))
    chosen = resolve(loaded, service, python=python)
    choice = opt.HostChoice(None, host, inventory, python, root, None, accept_new, sudo)
    if actions.any:
        if out is not None or snapshot is not None or engine is not None or model_config or draft_config:
            raise DeployError("DD001", "on a host, its own engine and models count", "leave out what stands for them")

        def rendered(session: HostSession) -> Rendering:
            known = _read_host(session, console, chosen.service)
            command = build_command(chosen.service, tp=tp, nodes=nodes, python=chosen.interpreter, known=known)
            return serving.say_checked(console, command, strict)

        choice = opt.HostChoice(None, host or chosen.service.host, inventory, python, root, state_dir, accept_new, sudo)
        serving.act(console, actions, chosen.service, choice, rendered)
        return
    if host is not None:
        known = _of_host(choice, console, chosen.service)
    else:
        sources = opt.wheel_sources(console, wheelhouse, download=fetch)
        known = _from_here(console, chosen.host, snapshot, engine, sources, model_config, draft_config)
    command = build_command(chosen.service, tp=tp, nodes=nodes, engine=engine, python=chosen.interpreter, known=known)
    files, text, notes = _rendered(command, part)
    if loaded.shipped:
        console.note(f"note: rendered from the shipped example inventory {loaded.path}")
    if service is None and len(loaded.services) > 1:
        console.note(f"note: service {command.service.name}, the first of {len(loaded.services)}")
    if command.source is not None:
        console.note(f"note: flags checked against {command.source} (sglang {command.engine})")
    for note in notes:
        console.note(f"note: {note}")
    for item in command.unchecked:
        console.note(f"not checked: {item}")
    if strict and command.unchecked:
        raise DeployError(
            "DD612",
            f"{command.service.name}: {len(command.unchecked)} things were left unchecked",
            "name the host (--host): there all of them can be",
            command.unchecked,
        )
    outcomes = [] if out is None else write_files(files, out, force=force)
    if json_mode:
        written = {str(one.path): one.outcome for one in outcomes}
        console.document("launch", {**_document(command, files, notes), "written": written})
        return
    for one in outcomes:
        console.line(f"{one.outcome} {one.path}")
    if explain:
        _explain(console, command)
    if memory:
        _memory(console, command)
    if not explain and not memory and out is None:
        console.data(text)


def _one_engine(*named: str | None) -> None:
    if sum(each is not None for each in named) > 1:
        raise DeployError("DD001", "--host, --snapshot and --engine each name an engine", "give one of them")


def _of_host(choice: opt.HostChoice, console: Console, service: Service) -> Known:
    """What the host itself shows of engine and models."""
    with opt.open_session(choice, console) as session:
        return _read_host(session, console, service)


def _read_host(session: HostSession, console: Console, service: Service) -> Known:
    """Its engine by a snapshot (cheap where nothing changed), its models' folders."""
    import dataclasses

    from ddtree_deploy.launch.known import engine_of_snapshot, models_of_host
    from ddtree_deploy.snapshots.pull import pull
    from ddtree_deploy.snapshots.store import Store

    with console.progress(f"reading {session.target.name}") as progress:
        taken = pull(session, Store.default(), progress=progress).snapshot
        models = models_of_host(session, service)
    return dataclasses.replace(models, engine=engine_of_snapshot(taken, live=True))


def _from_here(
    console: Console,
    host: str | None,
    snapshot: str | None,
    engine: str | None,
    sources: Sources,
    model_config: Path | None,
    draft_config: Path | None,
) -> Known:
    """What can be known without a host: from a snapshot or a wheel, and from configuration files here."""
    import dataclasses

    from ddtree_deploy.launch.known import engine_of_snapshot, engine_of_wheel, models_of_files
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.store import Store
    from ddtree_deploy.snapshots.wheels import find_wheel

    known = models_of_files(model_config, draft_config)
    if engine is not None:
        try:
            with console.progress("finding the published wheel"):
                wheel = find_wheel(engine, sources=sources, any_tags=True)
        except DeployError as error:
            if error.code != "DD404":
                raise
            why = error.message + (f": {error.hint}" if error.hint else "")
            return dataclasses.replace(known, missing={"engine": why})
        with PristineTree(wheel) as tree:
            return dataclasses.replace(known, engine=engine_of_wheel(tree))
    store = Store.default()
    found = store.find(snapshot) if snapshot is not None else store.newest(host) if host is not None else None
    return known if found is None else dataclasses.replace(known, engine=engine_of_snapshot(found))


def _rendered(command: Command, part: Part) -> tuple[Sequence[RenderedFile], str, Sequence[str]]:
    """The files that this format makes, what is printed of them, and the notes."""
    from ddtree_deploy.launch.render import render_command
    from ddtree_deploy.launch.schedulers import render_k8s, render_slurm

    if part in (Part.SLURM, Part.K8S):
        file = render_slurm(command) if part is Part.SLURM else render_k8s(command)
        return [file], file.text, command.notes
    rendering = render_command(command)
    env, unit = rendering.environment_file, rendering.unit
    texts = {
        Part.ALL: f"# launch command\n{rendering.shell_command}\n"
        f"# {env.install_path} (mode {env.mode:04o})\n{env.text}\n"
        f"# {unit.install_path} (mode {unit.mode:04o})\n{unit.text}",
        Part.COMMAND: rendering.shell_command,
        Part.ENV: env.text,
        Part.UNIT: unit.text,
        Part.SCRIPT: rendering.script.text,
    }
    return rendering.files, texts[part], rendering.notes


def _explain(console: Console, command: Command) -> None:
    told = [(" ".join(each.words), each.reason, each.change) for each in command.arguments]
    told += [(f"{each.name}={each.value}", each.reason, each.change) for each in command.environment]
    for what, reason, change in told:
        console.line(what)
        console.line(f"    {reason} (changed by {change})")


def _memory(console: Console, command: Command) -> None:
    plan = command.plan
    if plan is None:
        console.note("note: the model's configuration is not known: --host, or --model-config FILE")
        return
    gib = 1 << 30
    console.rows([(row.what, f"{row.bytes / gib:7.2f} GiB", row.how) for row in plan.rows])
    console.line(
        f"{plan.total / gib:.2f} GiB on each of {command.service.tp} GPUs: {plan.effective} requests at once, "
        f"{plan.tokens} tokens of KV cache, --mem-fraction-static {plan.fraction}"
    )


def _document(command: Command, files: Sequence[RenderedFile], notes: Sequence[str]) -> dict[str, object]:
    plan = command.plan
    return {
        "service": command.service.name,
        "tp": command.service.tp,
        "nodes": command.service.nodes,
        "engine": str(command.engine),
        "checked_against": command.source,
        "argv": list(command.argv),
        "environment": {each.name: each.value for each in command.environment},
        "reasons": {
            **{" ".join(each.words): {"why": each.reason, "change": each.change} for each in command.arguments},
            **{each.name: {"why": each.reason, "change": each.change} for each in command.environment},
        },
        "memory": None
        if plan is None
        else {
            "running_requests": plan.running,
            "effective_requests": plan.effective,
            "mem_fraction_static": plan.fraction,
            "kv_tokens": plan.tokens,
            "total_bytes": plan.total,
            "rows": [{"what": row.what, "bytes": row.bytes, "how": row.how} for row in plan.rows],
        },
        "files": [
            {"name": file.name, "mode": f"{file.mode:04o}", "install_path": file.install_path, "text": file.text}
            for file in files
        ],
        "notes": list(notes),
        "unchecked": list(command.unchecked),
    }
