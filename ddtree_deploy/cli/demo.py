"""``demo``: the main job from end to end, on a throw-away host inside this process.

The published engine wheel is unpacked as a site-packages, an SSH server on loopback serves it, and then the
ordinary commands run against it, as they would against any host.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError, ExitStatus

if TYPE_CHECKING:
    from ddtree_deploy.hosts.target import Target

ENGINE = "0.5.11"
SET, BASE = "ddtree", "dflash-fixes"  # the set, and the one that it requires
PATTERNS = "update_mamba_state_after_mtp_verify|mamba_track_indices|TARGET_VERIFY|disable_state_update"
SYMBOL = "update_mamba_state_after_mtp_verify"


def demo(
    ctx: typer.Context,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", metavar="FILE", help=f"A published sglang {ENGINE} wheel, for no download."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's folder and say where it is.")] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Also write what was shown as an SVG.")
    ] = None,
) -> int:
    """Show the main job: snapshot, grep, find-def, apply, status, launch, rollback, on a host of its own."""
    console = opt.console_of(ctx)
    if svg is not None:
        console = Console(console.stdout, console.stderr, record=True, width=118)
    signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="ddtree-demo-"))
    try:
        status = _Demo(console, folder).run(wheel)
    finally:
        if keep:
            console.note(f"kept: {folder}")
        else:
            shutil.rmtree(folder)
    if svg is not None:
        picture = console.recorded.export_svg(title="make demo")
        # Without rich's web font: a picture that asks nobody for anything.
        svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")
        console.note(f"wrote {svg}")
    return status


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class _Demo:
    """One run in one folder; everything that it writes, but the cached wheel, is below that folder."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console = console
        self.folder = folder
        self.site = folder / "site-packages"

    def run(self, wheel: Path | None) -> int:
        from ddtree_deploy.hosts.loopback import LoopbackServer

        started = time.monotonic()
        with LoopbackServer() as server:
            any_python = self._install(server.target(name="demo", python=sys.executable), wheel)
            started = max(started, self.downloaded)
            target = server.target(name="demo", python=sys.executable, root=str(self.site))
            self._write_inventory(target, any_python)
            with self._environment():
                before = tree_digest(self.site)
                self._commands()
                after = tree_digest(self.site)
        self._say(f"the tree before: {before}")
        self._say(f"the tree now:    {after}")
        if before != after:
            raise DeployError("DD505", "the demo's tree is not as it was before", "this is a bug: please report it")
        self._say(f"identical, after {time.monotonic() - started:.1f} s")
        return int(ExitStatus.OK)

    def _say(self, text: str) -> None:
        self.console.line((f"# {text}", "dim"))

    def _install(self, target: Target, wheel: Path | None) -> bool:
        """Unpack the wheel that the host's python and machine call for; True if none is published for that python."""
        from ddtree_deploy.hosts.connect import connect
        from ddtree_deploy.hosts.session import HostSession
        from ddtree_deploy.snapshots.pins import pins
        from ddtree_deploy.snapshots.pristine import unpack
        from ddtree_deploy.snapshots.wheels import brought, find_wheel, tags_of

        with HostSession(target, lambda: connect(target)) as session:
            facts = session.call("facts", {})
        python_tag, platform = tags_of({"python": facts})
        published = any((pin.version, pin.python) == (ENGINE, python_tag) for pin in pins())
        with self.console.progress(f"fetching the sglang {ENGINE} wheel"):
            sources = opt.wheel_sources(self.console, download=True)
            file = brought(wheel, ENGINE) if wheel else find_wheel(ENGINE, python_tag, platform, sources=sources)
        self.downloaded = time.monotonic()
        if not published:
            self._say(f"no sglang {ENGINE} wheel is published for {python_tag}: the sources of {file.name} will do")
        with self.console.progress("unpacking"):
            unpack(file, self.site, installer="ddtree-deploy demo")
        self._say(f"a host to try on: ssh on 127.0.0.1, python {facts['version']}, {file.name}")
        return not published or python_tag not in file.name

    def _write_inventory(self, target: Target, any_python: bool) -> None:
        """The shipped example, its services among it, and a host that is this very process."""
        from ddtree_deploy.resources import example_inventory

        values = {
            "ssh": target.ssh,
            "python": target.python,
            "root": target.root,
            "state_dir": str(self.folder / "state"),
            "identity_file": target.identity_file,
            "known_hosts": target.known_hosts,
            "ssh_config": target.ssh_config,
        }
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        if any_python:
            lines.append("any_python = true")
        example = re.sub(
            r"^(example|default_host) = .*\n", "", example_inventory().read_text("utf-8"), flags=re.MULTILINE
        )
        text = "\n".join(['default_host = "demo"', example, "[hosts.demo]", *lines, ""])
        (self.folder / "inventory.toml").write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """The commands' own folders, for the time of the demo."""
        own = {
            "DDTREE_DEPLOY_INVENTORY": str(self.folder / "inventory.toml"),
            "DDTREE_DEPLOY_DATA": str(self.folder / "data"),
        }
        old = {key: os.environ.get(key) for key in own}
        os.environ.update(own)
        try:
            yield
        finally:
            for key, value in old.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def _commands(self) -> None:
        self._command("snapshot", "demo")
        lines = self._command("grep", PATTERNS, "--under", "srt/speculative")
        self._say(f"{lines} lines")
        self._command("find-def", SYMBOL, "--before", "2", "--after", "9")
        self._command("apply", SET, "-m", "trying it out")
        self._command("status")
        self._command("launch", "--tp", "8")
        self._command("rollback", BASE, "--with-dependents")
        self._command("snapshot", "demo")

    def _command(self, *arguments: str) -> int:
        """Run one command line as a person would type it; returns how many lines it put on stdout."""
        from ddtree_deploy.cli.main import run

        self.console.line("")
        self.console.line(("$ ", "bold green"), (shlex.join(["ddtree-deploy", *arguments]), "bold"))
        before = self.console.lines_out
        status = run(arguments, self.console)
        if status == ExitStatus.INTERRUPTED:
            raise KeyboardInterrupt
        if status != ExitStatus.OK:
            raise DeployError("DD901", f"the demo's `{arguments[0]}` ended with {status}", "its message is above")
        return self.console.lines_out - before


def _toml(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def tree_digest(folder: Path) -> str:
    """One sha256 over every file below ``folder`` but bytecode: path, mode and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode:o}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()
