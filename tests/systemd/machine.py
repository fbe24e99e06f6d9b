"""A machine with a real systemd and a real sshd, booted in namespaces of its own in about a second."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UNITS = Path("/usr/lib/systemd/system")
# What the booted system gets to run; all else that its targets want would touch devices or wait for them.
WANTED = {"systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket"}
PROGRAMS = (
    "systemctl",
    "journalctl",
    "systemd-analyze",
    "sshd",
    "ssh-keygen",
    "setpriv",
    "unshare",
    "nsenter",
    "python3",
)
NAMESPACES = ("--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child")

NOT_ROOT = "booting systemd in a machine of its own takes root"


def why_not() -> str | None:
    """Why no machine can be booted here; None when one can."""
    if os.geteuid() != 0:
        return NOT_ROOT
    absent = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if absent or not Path("/lib/systemd/systemd").exists():
        return f"booting systemd takes {', '.join(absent or ['systemd'])} in /usr"
    tried = subprocess.run(["unshare", *NAMESPACES, "--cgroup", "true"], capture_output=True, text=True)
    return "booting systemd takes namespaces, which this machine refuses" if tried.returncode else None


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Machine:
    """The booted machine. ``folder`` holds its keys, its seed and what its console said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: The interpreter that the machine shares with this one.
        self.python = shutil.which("python3", path=SYSTEM_PATH)
        self.port = free_port()
        self.group = f"ddtree-test-{os.getpid()}-{self.port}"
        self.root = folder / "root"
        self.seed = folder / "seed"
        self.root.mkdir(parents=True)
        self._seed()
        # It goes when this process does, however that ends.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *NAMESPACES,
            "bash",
            str(HERE / "boot.sh"),
            str(self.root),
            str(self.seed),
            self.group,
        ]
        with (folder / "console").open("wb") as console:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            self._await_boot()
        except BaseException:
            self.stop()
            raise

    def _write(self, path: str, text: str, mode: int = 0o644) -> None:
        target = self.seed / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def _seed(self) -> None:
        self._write(
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n"
            "ops:x:1000:1000::/home/ops:/bin/sh\nengine:x:1001:1001::/nonexistent:/bin/false\n"
            "nobody:x:65534:65534::/nonexistent:/bin/false\n",
        )
        self._write(
            "etc/group", "root:x:0:\nadm:x:4:\nops:x:1000:\nengine:x:1001:\nsystemd-journal:x:101:\nnogroup:x:65534:\n"
        )
        self._write("etc/shadow", "root:*:1::::::\nops:*:1::::::\n", 0o600)
        self._write("etc/machine-id", "0123456789abcdef0123456789abcdef\n")
        self._write("etc/systemd/journald.conf", "[Journal]\nStorage=volatile\n")
        for keys in UNITS.glob("*.target.wants/*"):
            if keys.name not in WANTED:
                self._mask(keys.name)
        for name in ("systemd-tmpfiles-setup.service", "systemd-logind.service", "getty.target", "dbus.service"):
            self._mask(name)
        self._write("etc/systemd/system/default.target", "[Unit]\nRequires=multi-user.target ssh-test.service\n")
        self._write(
            "etc/systemd/system/ssh-test.service",
            "[Unit]\nAfter=basic.target\n[Service]\nType=exec\nRuntimeDirectory=sshd\n"
            "ExecStart=/usr/sbin/sshd -D -e -f /etc/ssh/sshd_config\nKillMode=process\n",
        )
        for name in ("host", "client"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        self._write("etc/ssh/host", (self.folder / "host").read_text(), 0o600)
        authorized = (self.folder / "client.pub").read_text()
        for home in ("root", "home/ops"):
            self._write(f"{home}/.ssh/authorized_keys", authorized, 0o600)
        for path in (self.seed / "home/ops", *(self.seed / "home/ops").rglob("*")):
            os.chown(path, 1000, 1000)
        self._write(
            "etc/ssh/sshd_config",
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey /etc/ssh/host\nUsePAM no\nPasswordAuthentication no\n"
            "PidFile none\nStrictModes no\nPermitRootLogin yes\nMaxStartups 50\n",
        )
        self._write("opt/engine/standin.py", (HERE / "standin.py").read_text())
        self._write("opt/engine/bin/python", f'#!/bin/sh\nexec {self.python} /opt/engine/standin.py "$@"\n', 0o755)
        self._write("opt/site/sglang/__init__.py", "")
        self._write("opt/site/sglang/srt/__init__.py", "")
        self._write("opt/site/sglang/srt/server_args.py", (HERE / "server_args.py").read_text())
        self._write("opt/site/sglang/srt/mode.py", 'MODE = "serve"\n')
        self._write("opt/site/sglang-0.5.11.dist-info/METADATA", "Name: sglang\nVersion: 0.5.11\n")
        self._write("opt/site/sglang-0.5.11.dist-info/RECORD", "sglang/__init__.py,,\nsglang/srt/__init__.py,,\n")
        # ops may run the agent as root, and is asked for no password.
        self._write("etc/sudoers", f"ops ALL=(root) NOPASSWD: {self.python}\n", 0o440)
        self._write(
            "etc/pam.d/sudo", "".join(f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "session"))
        )
        # Restarts come after 30 s by the unit; the tests have no time for that.
        self._write("etc/systemd/system/sglang-.service.d/quick.conf", "[Service]\nRestartSec=0.3\n")
        known = " ".join((self.folder / "host.pub").read_text().split()[:2])
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {known}\n")

    def _mask(self, name: str) -> None:
        link = self.seed / "etc/systemd/system" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to("/dev/null")

    def _await_boot(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the machine did not boot:\n{self.console()}")
            time.sleep(0.05)

    def console(self) -> str:
        """What the machine's console said."""
        return (self.folder / "console").read_text(errors="replace")

    def run(self, *argv: str, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine, as root."""
        pid = self._process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        enter = ["nsenter", "-t", child, "-m", "-p", "-u", "-i", "-C", "--root", "--wd=/"]
        environment = ["env", "-i", f"PATH={SYSTEM_PATH}", "HOME=/root", "LC_ALL=C", "SYSTEMD_PAGER="]
        done = subprocess.run([*enter, *environment, *argv], capture_output=True, text=True, input=stdin, timeout=60)
        if check and done.returncode:
            raise AssertionError(f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def read(self, path: str) -> str:
        """A file of the machine."""
        return self.run("cat", path).stdout

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Put a file into the machine."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"', "-", path, mode, stdin=text)

    def exists(self, path: str) -> bool:
        """Whether the machine has that file (a link, too)."""
        return self.run("sh", "-c", '[ -e "$1" ] || [ -L "$1" ]', "-", path, check=False).returncode == 0

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).stdout.strip()

    def stop(self) -> None:
        """Power it off: PID 1 of its namespace goes, and all with it."""
        self._process.kill()
        self._process.wait()
        remove = 'mount -t cgroup2 cgroup2 "$1" && find "$1/$2" -depth -type d -exec rmdir {} +'
        for _attempt in range(50):
            command = ["unshare", "--mount", "sh", "-c", remove, "-", str(self.root), self.group]
            if subprocess.run(command, capture_output=True).returncode == 0:
                break
            time.sleep(0.05)  # its processes are still on their way out
