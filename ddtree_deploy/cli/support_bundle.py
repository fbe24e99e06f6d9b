"""``support-bundle``: one file for a bug report, without secrets and names."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.hosts.inventory import Inventory
    from ddtree_deploy.hosts.target import Target
    from ddtree_deploy.support.parts import Parts
    from ddtree_deploy.support.scrub import Scrubber

NAME = "ddtree-deploy-support"


def support_bundle(
    ctx: typer.Context,
    host: opt.HostArgument = None,
    host_option: opt.HostOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help=f"The .tar.gz or .zip to write; default: {NAME}.tar.gz."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show what would be in it, write nothing.")] = False,
    no_host: Annotated[bool, typer.Option("--no-host", help="Contact no host, not even the default one.")] = False,
    patches: opt.PatchesOption = None,
    inventory: opt.InventoryOption = None,
    python: opt.PythonOption = None,
    root: opt.RootOption = None,
    state_dir: opt.StateDirOption = None,
    sudo: opt.SudoOption = False,
    accept_new: opt.AcceptNewOption = False,
    json_mode: opt.JsonOption = False,
) -> None:
    """Gather versions, inventory, a host's status, history and doctor's facts in one file, and list what is in it.

    Secrets are taken out; names of machines and people are replaced. What cannot be had is named inside.
    """
    from ddtree_deploy.resources import patches_dir
    from ddtree_deploy.support import archive, bundle, parts

    console = opt.console_of(ctx, json_mode)
    choice = opt.HostChoice(host, host_option, inventory, python, root, state_dir, accept_new, sudo)
    path = out or Path(f"{NAME}.tar.gz")
    if no_host and choice.host:
        raise DeployError("DD001", f"--no-host contacts no host, and {choice.host} is named", "leave one of them out")
    if not show:
        archive.check(path)
    found = parts.Parts()
    found.take("versions.json", "this program, python, libraries, platform", parts.versions)
    found.take("patch-sets.json", "the sets known here", lambda: parts.patch_sets(patches_dir(patches)))
    loaded = _inventory(found, choice)
    target = None
    if not no_host and loaded is not None and (choice.host or (loaded.default_host and not loaded.shipped)):
        target = opt.find_target(choice)
        _gather(console, found, choice, loaded, target, patches)
    elif choice.host:
        found.failed("host", DeployError(found.errors[-1]["code"], "not contacted: the inventory cannot be used"))
    targets = [*(loaded.hosts.values() if loaded is not None else ()), *([target] if target else [])]
    members = bundle.members(found, _scrubber(), targets, target.name if target else None)
    data = None if show else archive.write(path, NAME, {name: text for name, (_about, text) in members.items()})
    if json_mode:
        document = {
            "file": None if data is None else str(path),
            "bytes": None if data is None else len(data),
            "sha256": None if data is None else hashlib.sha256(data).hexdigest(),
            "members": [
                {"name": name, "about": about, "bytes": len(text.encode())} for name, (about, text) in members.items()
            ],
            "errors": found.errors,
        }
        console.document("support-bundle", document)
        return
    console.rows([(name, f"{len(text.encode()):>8}", about) for name, (about, text) in members.items()])
    for error in found.errors:
        console.note(f"note: {error['part']} is not in it: [{error['code']}] {error['message']}")
    if data is None:
        console.note("nothing was written")
    else:
        console.line(f"{path}: {len(members)} files, {len(data)} bytes; read it before you give it away")


def _inventory(found: Parts, choice: opt.HostChoice) -> Inventory | None:
    """The inventory, put into the bundle; None where it cannot be used."""
    from ddtree_deploy.support import parts

    try:
        loaded = opt.load(choice)
    except DeployError as error:
        found.failed("inventory.json", error)
        return None
    found.take("inventory.json", "hosts and services", lambda: parts.inventory(loaded))
    return loaded


def _gather(
    console: Console, found: Parts, choice: opt.HostChoice, loaded: Inventory, target: Target, patches: Path | None
) -> None:
    """What the host says of itself; where it cannot be reached, that."""
    from ddtree_deploy.doctor.gather import services_of
    from ddtree_deploy.patching.patchset import survey_sets
    from ddtree_deploy.resources import patches_dir
    from ddtree_deploy.support import parts

    found.names += parts.names_on_the_way(target)
    try:
        sets, _broken = survey_sets(patches_dir(patches))
        wanted = services_of(loaded, target.name, None)
        with opt.open_session(choice, console) as session, console.progress(f"reading {target.name}"):
            parts.of_host(found, session, dict(sets), wanted)
    except DeployError as error:
        if error.exit_status == ExitStatus.USAGE:
            raise
        found.failed("host", error)


def _scrubber() -> Scrubber:
    """One that knows this machine and its user."""
    from ddtree_deploy.support.scrub import Scrubber

    scrubber = Scrubber(home=str(Path.home()))
    scrubber.name("host", platform.node())
    with contextlib.suppress(KeyError, OSError):  # an account without a name
        scrubber.name("user", getpass.getuser())
    return scrubber
