"""``doctor``: whether a host can serve, judged without starting anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.doctor.findings import Finding
    from ddtree_deploy.doctor.gather import Deep

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "dim"}
_FACTS_LIMIT = 64 * 1024 * 1024


def doctor(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    service: Annotated[
        str | None,
        typer.Option("--service", metavar="NAME", help="Look at this service; without it, at all of that host."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Run an all-reduce over the GPUs and import the kernels, within limits.")
    ] = False,
    deep_seconds: Annotated[
        float, typer.Option("--deep-seconds", metavar="SECONDS", min=1, max=300, help="The limit of each deep check.")
    ] = 60.0,
    deep_mib: Annotated[
        int, typer.Option("--deep-mib", metavar="MIB", min=1, max=1024, help="The size that is summed.")
    ] = 64,
    live: Annotated[bool, typer.Option("--live", help="With --deep: although other processes hold the GPUs.")] = False,
    facts_file: Annotated[
        Path | None, typer.Option("--facts", metavar="FILE", help="Judge recorded facts; contact no host.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace names of host and users, serial numbers and UUIDs.")
    ] = False,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> int:
    """Check driver, GPUs, CUDA stack, packages, links, host, models, units and patches. Writes nothing.

    Exit status 1 where there are errors, else 0. With --json the facts come along: --facts judges them again.
    """
    from ddtree_deploy.doctor.examine import examine
    from ddtree_deploy.doctor.gather import Deep
    from ddtree_deploy.doctor.redact import redact as redacted

    console = opt.console_of(ctx, json_mode)
    choice = opt.HostChoice(host, host_option, inventory, python, root, state_dir, accept_new, sudo)
    if live and not deep:
        raise DeployError("DD001", "--live is for --deep", "add --deep")
    if facts_file is not None:
        if choice.host or deep or service:
            raise DeployError("DD001", "--facts judges recorded facts alone", "name no host, --service or --deep")
        facts = _recorded(facts_file)
    else:
        limits = Deep(deep_seconds, deep_mib * 1024 * 1024, live) if deep else None
        facts = _gathered(console, choice, service, limits)
    try:
        if redact:
            facts = redacted(facts)
        findings = examine(facts)
    except RecursionError:
        raise DeployError("DD307", "the facts are nested too deeply to be judged", "record them again") from None
    status = ExitStatus.FINDINGS if any(item.severity.word == "error" for item in findings) else ExitStatus.OK
    console.status = int(status)
    target = str(facts.get("target"))
    if json_mode:
        shown = [{**dataclasses.asdict(item), "severity": item.severity.word} for item in findings]
        counts = {word: sum(item.severity.word == word for item in findings) for word in _STYLES}
        console.document(
            "doctor",
            {"host": target, "findings": shown, "counts": counts, "facts": facts, "exit_status": int(status)},
        )
    else:
        _print(console, target, findings)
    return int(status)


def _gathered(console: Console, choice: opt.HostChoice, service: str | None, deep: Deep | None) -> dict[str, Any]:
    from ddtree_deploy.doctor.gather import gather, services_of
    from ddtree_deploy.patching.patchset import load_sets
    from ddtree_deploy.resources import patches_dir

    sets = list(load_sets(patches_dir()).values())
    wanted = services_of(opt.load(choice), opt.find_target(choice).name, service)
    with (
        opt.open_session(choice, console) as session,
        console.progress(f"examining {session.target.name}") as progress,
    ):
        return gather(session, wanted, sets, deep=deep, progress=progress)


def _recorded(path: Path) -> dict[str, Any]:
    """The facts in a file: as recorded, or inside a document of ``doctor --json``."""
    from ddtree_deploy.doctor.gather import SCHEMA

    try:
        with path.open("rb") as handle:
            data = handle.read(_FACTS_LIMIT + 1)
        value = json.loads(data) if len(data) <= _FACTS_LIMIT else None
    except OSError as error:
        raise DeployError("DD007", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("facts"), dict):
        value = value["facts"]
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise DeployError("DD007", f"{path} holds no facts of the doctor", "record them: `doctor HOST --json > FILE`")
    return value


def _print(console: Console, target: str, findings: list[Finding]) -> None:
    counts = {word: sum(item.severity.word == word for item in findings) for word in _STYLES}
    known = [item for item in findings if item.known]
    for area in dict.fromkeys(item.area for item in known):
        console.line((area, "bold"))
        for item in known:
            if item.area != area:
                continue
            word = item.severity.word
            console.line("  ", (f"{word:<8}", _STYLES[word]), f"{item.code}  {item.message}")
            for line in item.evidence:
                console.line(f"{'':19}{line}")
            if item.mend:
                console.line(f"{'':19}", ("mend", "bold cyan"), f": {item.mend}")
    # What could not be judged, one line a cause.
    causes = dict.fromkeys(item.evidence for item in findings if not item.known)
    if causes:
        console.line(("not known", "bold"))
    for cause in causes:
        codes = [item.code for item in findings if not item.known and item.evidence == cause]
        console.line("  ", ("note    ", _STYLES["note"]), f"{', '.join(codes)}: {'; '.join(cause)}")
    words = ", ".join(f"{count} {word}{'s' if count != 1 else ''}" for word, count in counts.items())
    console.line(f"{target}: {words}")
