"""``status``: how a host's tree stands."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.cli import serving

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.deploy.status import StatusReport

FOREIGN_SHOWN = 20
_STYLES = {"applied": "green", "pristine": "green", "pending": "cyan", "unserved": "dim"}


def status(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    files: Annotated[
        bool, typer.Option("--files", help="Show the files of sets that are as they should be, too.")
    ] = False,
    patches: opt.PatchesOption = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """Per set and file: pristine, pending, applied, superseded, drift, reinstalled, interrupted.

    Exit status 0 while everything is pristine, applied or pending, else 1.
    """
    from ddtree_deploy.deploy.status import read_status
    from ddtree_deploy.patching.patchset import survey_sets
    from ddtree_deploy.resources import patches_dir
    from ddtree_deploy.serve.standing import services

    console = opt.console_of(ctx, json_mode)
    sets, broken = survey_sets(patches_dir(patches))
    choice = opt.HostChoice(host, host_option, inventory, python, root, state_dir, accept_new, sudo)
    with opt.open_session(choice, console) as session, console.progress(f"reading {session.target.name}"):
        report = read_status(session, sets)
        installed, unread = services(session)
    opt.say_broken(console, broken)
    console.status = int(report.exit_status)
    if json_mode:
        answer = {**dataclasses.asdict(report), "services": installed, "exit_status": int(report.exit_status)}
        console.document("status", answer)
    else:
        _print(console, report, files)
        serving.print_services(console, installed, unread, report.last)
    return int(report.exit_status)


def _print(console: Console, report: StatusReport, all_files: bool) -> None:
    root = report.root
    console.line(
        f"{report.host}: sglang {root['version'] or '(unknown version)'} at {root['site']}: ", _styled(report.state)
    )
    if report.record.get("baseline"):
        files, baseline = report.record["files"], report.record["baseline"]
        off = len(report.foreign)
        console.line(f"  {files} files held against {baseline}: {off or 'none'} changed by anyone else")
    elif report.record:
        console.line(f"  RECORD is {report.record['state']}: foreign edits cannot be told")
    for line in report.sets:
        back = f"; can go back to {', '.join(line.back)}" if line.back else ""
        said = (line.detail + back).removeprefix("; ")
        console.line(f"  {line.name} {line.version}  ", _styled(line.state), f"  {said}".rstrip())
        for file in line.files:
            if all_files or file.state not in ("applied", "pending") or line.state in ("partly", "drift"):
                console.line(f"    {file.path}  ", _styled(file.state), f"  {file.detail}".rstrip())
    shown = report.foreign if all_files else report.foreign[:FOREIGN_SHOWN]
    for file in shown:
        console.line(f"  {file.path}  ", _styled(file.state), f"  {file.detail}")
    if len(shown) < len(report.foreign):
        console.line(f"  ... and {len(report.foreign) - len(shown)} more such files; --files shows all")
    if report.unlisted:
        baseline = report.record.get("baseline") or "RECORD"
        console.note(f"note: {report.unlisted} file(s) that neither {baseline} nor a set knows")
    for note in report.notes:
        console.note(f"note: {note}")
    if report.interrupted:
        console.note(
            f"a transaction ({report.interrupted.get('kind')} of {report.interrupted.get('time')}) was interrupted: "
            "run `ddtree-deploy recover`"
        )
    if report.holder:
        console.note(f"at work right now: {report.holder.get('who')} ({report.holder.get('command')})")
    for process in report.processes:
        old = " and started before the last change: it runs older code" if _older(process, report.last) else ""
        runs = "runs from here" if process["certain"] else "may use the engine (it " + process["why"] + ")"
        console.note(f"pid {process['pid']} {runs}{old}: {process['command']}")


def _styled(state: str) -> tuple[str, str]:
    return state, _STYLES.get(state, "bold yellow")


def _older(process: Any, last: Any) -> bool:
    if not last or not process.get("started"):
        return False
    changed = datetime.strptime(last["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return bool(process["started"] < changed.timestamp())
