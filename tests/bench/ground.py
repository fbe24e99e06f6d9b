"""What the benchmark stands on: hosts that are one sshd on loopback, each with an engine tree of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.snapshots import pristine
from tests.bench.delay import delayed
from tests.ssh.conftest import Keys, Sshd, free_port

HOSTS = 16


@dataclass(frozen=True)
class Ground:
    """Folders, the names of the hosts, and the files through which every program reaches them.

    ``ssh_config`` knows ``box`` and ``box00`` ... by alias, at the round trip time in force; ``sites`` are their
    trees on this machine. ``environment`` is for every command.
    """

    work: Path
    sites: dict[str, Path]
    ssh_config: Path
    inventory: Path
    environment: dict[str, str]

    @property
    def fleet(self) -> list[str]:
        """The names of the sixteen hosts."""
        return [name for name in self.sites if name != "box"]

    def run(self, command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run a command as the benchmark does: nothing on stdin, output kept, failure told."""
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, cwd=self.work
        )
        if check and done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
            raise SystemExit(f"exit {done.returncode}: {' '.join(command)}\n{said}")
        return done


@contextlib.contextmanager
def ground(work: Path, wheel: Path) -> Iterator[tuple[Ground, Sshd]]:
    """Unpack the trees and start the server; everything is below ``work``, and gone or stopped afterwards."""
    keys = Keys(work / "keys")
    keys.folder.mkdir(parents=True)
    for name in ("host_ed25519", "client", "client_rsa", "locked"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(keys[name])]
        subprocess.run(command, check=True)
    first = pristine.unpack(wheel, work / "sites" / "box")
    sites = {"box": first}
    for number in range(HOSTS):
        name = f"box{number:02d}"
        sites[name] = work / "sites" / name
        # Bytes are shared until somebody changes a file; every program here replaces files, never writes into them.
        shutil.copytree(first, sites[name], copy_function=os.link)
    server_folder = work / "sshd"
    server_folder.mkdir()
    # A fleet's hosts each have limits of their own; here one server stands for all.
    options = {
        "MaxStartups": "100:30:200",
        "MaxSessions": "100",
        "Subsystem": "sftp internal-sftp",
        "LogLevel": "ERROR",
    }
    server = Sshd(server_folder, free_port(), keys, options)
    home = work / "home"
    home.mkdir()
    binaries = Path(sys.executable).parent
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "ANSIBLE_", "GIT_"))},
        "HOME": str(home),
        "XDG_CACHE_HOME": str(work / "cache"),
        "XDG_DATA_HOME": str(work / "data"),
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(work / "ansible.cfg"),
    }
    server.start()
    try:
        yield Ground(work, sites, work / "ssh_config", work / "hosts.toml", environment), server
    finally:
        server.stop()


@contextlib.contextmanager
def at_distance(ground_: Ground, server: Sshd, round_trip_ms: int) -> Iterator[None]:
    """Point every program's configuration at the server, as far away as ``round_trip_ms``."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(delayed(server.port, round_trip_ms / 1000)) if round_trip_ms else server.port
        known = ground_.work / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} {server.keys.public('host_ed25519')}\n")
        user = os.environ.get("USER") or os.environ.get("LOGNAME") or "root"
        lines = [
            f"Host {' '.join(ground_.sites)}",
            "  HostName 127.0.0.1",
            f"  Port {port}",
            f"  User {user}",
            f"  IdentityFile {server.keys['client']}",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {known}",
            "  GlobalKnownHostsFile none",
            "  StrictHostKeyChecking yes",
            "  BatchMode yes",
        ]
        ground_.ssh_config.write_text("\n".join(lines) + "\n")
        tables = ['default_host = "box"']
        for name, site in ground_.sites.items():
            tables += [
                f"[hosts.{name}]",
                f'ssh = "{name}"',
                f'ssh_config = "{ground_.ssh_config}"',
                f'python = "{os.path.realpath(sys.executable)}"',
                "any_python = true",
                f'root = "{site}"',
                f'state_dir = "{ground_.work / "state" / name}"',
                'labels = { fleet = "yes" }' if name != "box" else "",
            ]
        ground_.inventory.write_text("\n".join(tables) + "\n")
        (ground_.work / "ansible.cfg").write_text(
            "[defaults]\nhost_key_checking = True\nretry_files_enabled = False\nlocalhost_warning = False\n"
            f"interpreter_python = {os.path.realpath(sys.executable)}\n"
            f"[ssh_connection]\npipelining = True\nssh_args = -F {ground_.ssh_config} -o ControlMaster=auto "
            f"-o ControlPersist=60s\ncontrol_path_dir = {ground_.work / 'cp'}\n"
        )
        yield


def tree_hash(site: Path) -> str:
    """One hash of the names and bytes of every source below the engine's folder."""
    digest = hashlib.sha256()
    for path in sorted((site / "sglang" / "srt").rglob("*.py")):
        digest.update(str(path.relative_to(site)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
