"""Options that several commands share, and the way from them to an open session."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddtree_deploy.console import Console
    from ddtree_deploy.hosts.inventory import Inventory
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.hosts.target import Target
    from ddtree_deploy.hosts.watch import Watch
    from ddtree_deploy.patching.problems import Problem
    from ddtree_deploy.snapshots.wheels import Sources

HostArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="HOST",
        show_default=False,
        help="Inventory name, ssh alias, user@host[:port], local:PATH, docker:NAME or docker:NAME@HOST; "
        "without one, the inventory's default.",
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", metavar="HOST", help="The host, as an option.")]
InventoryOption = Annotated[
    Path | None, typer.Option("--inventory", metavar="PATH", help="Inventory file or folder to use.")
]
PythonOption = Annotated[
    str | None, typer.Option("--python", metavar="PATH", help="The engine's interpreter on the host.")
]
RootOption = Annotated[
    str | None, typer.Option("--root", metavar="PATH", help="The folder on the host that holds sglang/.")
]
StateDirOption = Annotated[
    str | None, typer.Option("--state-dir", metavar="PATH", help="Where the host keeps lock, journal and history.")
]
AcceptNewOption = Annotated[
    bool, typer.Option("--accept-new", help="Add the key of a host seen for the first time; never a changed key.")
]
SudoOption = Annotated[bool, typer.Option("--sudo", help="Run the agent under `sudo -n`.")]
PatchesOption = Annotated[
    Path | None,
    typer.Option("--patches", metavar="DIR", help="The folder of patch sets; or $DDTREE_DEPLOY_PATCHES."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
LiveOption = Annotated[bool, typer.Option("--live", help="Go on although engine processes run from the root.")]
WaitOption = Annotated[
    float,
    typer.Option("--wait", metavar="SECONDS", min=0, max=86400, help="Wait this long for another deployer's lock."),
]
ReasonOption = Annotated[str | None, typer.Option("-m", "--message", metavar="TEXT", help="Reason, for the history.")]

WheelhouseOption = Annotated[
    list[Path] | None,
    typer.Option("--wheelhouse", metavar="DIR", help="A folder of wheels to look in first; may be given again."),
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Download nothing, whatever is missing.")]
FetchOption = Annotated[bool, typer.Option("--fetch", help="Download the pinned wheels that are not here.")]


@dataclasses.dataclass(frozen=True)
class HostChoice:
    """What the command line says about the host."""

    argument: str | None = None
    option: str | None = None
    inventory: Path | None = None
    python: str | None = None
    root: str | None = None
    state_dir: str | None = None
    accept_new: bool = False
    sudo: bool = False

    @property
    def host(self) -> str | None:
        """The host as given; DD001 when the argument and ``--host`` differ."""
        if self.argument and self.option and self.argument != self.option:
            raise DeployError("DD001", f"two hosts named: {self.argument} and --host {self.option}", "name one")
        return self.argument or self.option


def load(choice: HostChoice) -> Inventory:
    """The inventory that the choice leads to."""
    from ddtree_deploy.hosts.inventory import find_inventory

    return find_inventory(str(choice.inventory) if choice.inventory else None)


def find_target(choice: HostChoice) -> Target:
    """The host that the choice leads to, with the command line's overrides."""
    from ddtree_deploy.hosts.inventory import resolve_target

    target = resolve_target(choice.host, load(choice))
    changes: dict[str, object] = {
        key: value
        for key, value in (("python", choice.python), ("root", choice.root), ("state_dir", choice.state_dir))
        if value
    }
    if choice.sudo:
        changes["sudo"] = True
    return dataclasses.replace(target, **changes) if changes else target  # type: ignore[arg-type]


def open_session(choice: HostChoice, console: Console) -> HostSession:
    """Connect to the host. Raises DeployError; the caller closes the session."""
    from ddtree_deploy.hosts.connect import connect
    from ddtree_deploy.hosts.session import HostSession

    target = find_target(choice)
    with console.progress(f"connecting to {target.name}"):
        watch = watch_of(console, target)
        return HostSession(target, lambda: connect(target, accept_new=choice.accept_new, watch=watch), watch)


def watch_of(console: Console, target: Target) -> Watch:
    """What happens on the way to the host, as lines on stderr: notices always, steps with ``-v``."""
    from ddtree_deploy.hosts.watch import Watch

    def step(what: str, seconds: float, worked: bool) -> None:
        console.note(f"{target.name}: {what}: {seconds * 1000:.0f} ms{'' if worked else ', failed'}")

    return Watch(console.note, step if console.verbose else None)


def console_of(ctx: typer.Context, json_mode: bool = False) -> Console:
    """The command's console, set to JSON where the command line says so."""
    console: Console = ctx.obj
    console.json_mode = json_mode
    return console


def wheel_sources(
    console: Console, wheelhouse: list[Path] | None = None, *, download: bool = False, offline: bool = False
) -> Sources:
    """Where the command's wheels may come from: its options over the environment; downloads are announced."""
    from ddtree_deploy.snapshots.wheels import Sources, offline_by_environment, wheelhouses_by_environment

    folders = tuple(wheelhouse or ()) or wheelhouses_by_environment()
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise DeployError(
            "DD007", f"the wheelhouse {missing} is no folder", "see --wheelhouse, $DDTREE_DEPLOY_WHEELHOUSE"
        )
    return Sources(folders, download, offline or offline_by_environment(), console.note)


def say_broken(console: Console, broken: Mapping[str, Sequence[Problem]]) -> None:
    """Name the patch sets that cannot be used, each with its first problem."""
    for name, problems in broken.items():
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        console.note(f"note: the patch set {name} is not valid: {problems[0].text}{more}")


def say_restart(console: Console, processes: list[dict[str, object]]) -> None:
    """Name the processes that still run the code from before."""
    for process in processes:
        if not process["certain"]:
            console.note(f"pid {process['pid']} may use the engine (it {process['why']}): {process['command']}")
            continue
        console.note(f"pid {process['pid']} still runs the code from before: restart it ({process['command']})")
