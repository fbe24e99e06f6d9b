"""The jobs, and who does them: each contender's command, what is put right before it, and what proves it done."""

from __future__ import annotations

import difflib
import hashlib
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.ground import Ground, tree_hash

SYMBOL = "update_mamba_state_after_mtp_verify"
PATTERN = "update_mamba_state_after_mtp_verify|mamba_track_indices|TARGET_VERIFY|disable_state_update"
DEFINED = "hybrid_linear_attn_backend.py"
TEN = 10

#: What is written where the engine's own facts were first asked: find the line, show what is around it.
PLAIN_SCRIPT = """\
import pathlib, sys
root, symbol = pathlib.Path(sys.argv[1]), "def " + sys.argv[2]
for path in sorted(root.rglob("*.py")):
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if symbol in line:
            print(path, number + 1)
            print("\\n".join(lines[max(0, number - 20):number + 80]))
"""


def nothing() -> None:
    """No preparation."""


@dataclass(frozen=True)
class Contender:
    """One way to do a job. ``done`` raises SystemExit unless the command's output and the trees are right."""

    name: str
    command: list[str]
    done: Callable[[bytes], None]
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


@dataclass(frozen=True)
class Job:
    """A job: the first contender is this program. ``aims``: peer -> round trip in ms -> largest ratio to it."""

    name: str
    contenders: list[Contender]
    aims: dict[str, dict[int, float]] = field(default_factory=dict)


def _must(right: bool, what: str) -> None:
    if not right:
        raise SystemExit(f"the job was not done: {what}")


def _holds(*words: str) -> Callable[[bytes], None]:
    def done(output: bytes) -> None:
        for word in words:
            _must(word.encode() in output, f"{word} is not in the output")

    return done


class TenFiles:
    """A change of ten files of the engine, as a diff, as ten whole files, and what is there before and after."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        site = ground.sites["box"]
        sources = (path for path in (site / "sglang" / "srt").rglob("*.py") if path.is_file())
        largest = sorted(sources, key=lambda path: (-path.stat().st_size, str(path)))[:TEN]
        self.paths = sorted(str(path.relative_to(site)) for path in largest)
        self.old: dict[str, bytes] = {}
        self.new: dict[str, bytes] = {}
        pieces = []
        for path in self.paths:
            old = (site / path).read_bytes()
            lines = old.decode().splitlines(keepends=True)
            middle = next(at for at in range(len(lines) // 2, len(lines)) if lines[at] == "\n")
            new = [*lines[:middle], "\n# changed by the benchmark\n", *lines[middle:]]
            self.old[path], self.new[path] = old, "".join(new).encode()
            changed = "".join(new).splitlines(keepends=True)
            pieces += difflib.unified_diff(lines, changed, f"a/{path}", f"b/{path}")
        self.diff = ground.work / "ten.patch"
        self.diff.write_text("".join(pieces))
        self.folder = ground.work / "ten"
        for path, data in self.new.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(data)

    def done(self, *hosts: str) -> Callable[[bytes], None]:
        """Each host has all ten files as planned."""

        def check(_output: bytes) -> None:
            for host in hosts:
                for path, data in self.new.items():
                    _must((self.ground.sites[host] / path).read_bytes() == data, f"{host}: {path} is as before")

        return check

    def reset(self) -> None:
        """Put the ten files of ``box`` back, as new files."""
        for path, data in self.old.items():
            target = self.ground.sites["box"] / path
            draft = target.with_name(".bench-draft")
            draft.write_bytes(data)
            draft.replace(target)


def jobs(ground: Ground, *, ansible: bool) -> Iterator[Job]:
    """Every job, in the order of the table."""
    ours = ["--inventory", str(ground.inventory)]
    site = str(ground.sites["box"])
    ssh = ["ssh", "-F", str(ground.ssh_config), "box"]
    ten = TenFiles(ground)
    yield from _snapshots(ground, ours, site)
    yield from _searches(ground, ours, ssh, site)
    yield _apply(ground, ours, ssh, site, ten, ansible)
    yield _fleet(ground, ours, ten)
    yield Job("--help", [Contender("ddtree-deploy", ["ddtree-deploy", "--help"], _holds("snapshot"))])


def _snapshots(ground: Ground, ours: list[str], site: str) -> Iterator[Job]:
    parts = [name for name in ("srt", "kernels", "jit_kernel") if (Path(site) / "sglang" / name).is_dir()]
    mirror, laid = ground.work / "mirror", ground.work / "laid"
    expected = tree_hash(ground.sites["box"])
    remote = ["box:" + shlex.quote(f"{site}/sglang/{part}") for part in parts]
    rsync = ["rsync", "-az", "-e", f"ssh -F {ground.ssh_config}", *remote, f"{mirror}/sglang/"]
    snapshot = ["ddtree-deploy", "snapshot", "box", *ours]

    def forget() -> None:
        shutil.rmtree(ground.work / "data", ignore_errors=True)
        shutil.rmtree(ground.work / "cache", ignore_errors=True)
        shutil.rmtree(laid, ignore_errors=True)

    def empty() -> None:
        shutil.rmtree(mirror, ignore_errors=True)
        (mirror / "sglang").mkdir(parents=True)

    def mirrored(_output: bytes) -> None:
        _must(tree_hash(mirror) == expected, "the mirror differs")

    def laid_out(_output: bytes) -> None:
        _must(tree_hash(laid) == expected, "the tree laid out differs")

    def stored(output: bytes) -> None:
        _must(b"box" in output, "no snapshot was reported")

    yield Job(
        "snapshot, cold",
        [
            Contender("ddtree-deploy", snapshot, stored, forget),
            Contender("ddtree-deploy --into", [*snapshot, "--into", str(laid)], laid_out, forget),
            Contender("rsync -az", rsync, mirrored, empty),
        ],
        {"rsync -az": {0: 1.0, 50: 0.6}},
    )
    yield Job(
        "snapshot, unchanged",
        [Contender("ddtree-deploy", snapshot, stored), Contender("rsync -az", rsync, mirrored)],
        {"rsync -az": {50: 0.85}},
    )


def _searches(ground: Ground, ours: list[str], ssh: list[str], site: str) -> Iterator[Job]:
    srt = f"{site}/sglang/srt"
    script = ground.work / "plain.py"
    script.write_text(PLAIN_SCRIPT)
    remote = shlex.join(["python3", "-", srt, SYMBOL])
    plain = ["sh", "-c", f"{shlex.join(ssh)} {shlex.quote(remote)} < {script}"]
    yield Job(
        "grep, whole tree",
        [
            Contender(
                "ddtree-deploy", ["ddtree-deploy", "grep", PATTERN, "--host", "box", *ours], _holds("eagle_info.py:156")
            ),
            Contender("ssh grep -rnE", [*ssh, shlex.join(["grep", "-rnE", PATTERN, srt])], _holds("eagle_info.py:156")),
        ],
    )
    yield Job(
        "find-def",
        [
            Contender(
                "ddtree-deploy", ["ddtree-deploy", "find-def", SYMBOL, "--host", "box", *ours], _holds(DEFINED, "937")
            ),
            Contender(
                "ssh grep -rn", [*ssh, shlex.join(["grep", "-rn", f"def {SYMBOL}", srt])], _holds(DEFINED, "937")
            ),
            Contender("ssh python3 - < script", plain, _holds(DEFINED, "937")),
        ],
        {"ssh grep -rn": {50: 1.1}},
    )


def _apply(ground: Ground, ours: list[str], ssh: list[str], site: str, ten: TenFiles, ansible: bool) -> Job:
    apply = ["ddtree-deploy", "apply", str(ten.diff), "--host", "box", *ours]

    def undo() -> None:
        ground.run(["ddtree-deploy", "rollback", "ten", "--host", "box", *ours])

    git = shlex.join(["git", "-C", site, "apply", "-p1"])
    over_ssh = ["sh", "-c", f"{shlex.join(ssh)} {shlex.quote(git)} < {ten.diff}"]
    contenders = [
        Contender("ddtree-deploy", apply, ten.done("box"), after=undo),
        Contender("git apply over ssh", over_ssh, ten.done("box"), after=ten.reset),
    ]
    aims: dict[str, dict[int, float]] = {}
    if ansible:
        hosts = ground.work / "ansible.ini"
        hosts.write_text("box\n")
        play = ground.work / "copy.yml"
        items = "".join(f"      - {path}\n" for path in ten.paths)
        play.write_text(
            "- hosts: box\n  gather_facts: false\n  tasks:\n  - ansible.builtin.copy:\n"
            f"      src: {ten.folder}/{{{{ item }}}}\n      dest: {site}/{{{{ item }}}}\n    loop:\n{items}"
        )
        patch = ["ansible", "box", "-i", str(hosts), "-m", "ansible.posix.patch"]
        patch += ["-a", f"src={ten.diff} basedir={site} strip=1"]
        copy = ["ansible-playbook", "-i", str(hosts), str(play)]

        def cold() -> None:
            """End the connection that an earlier round left open: every contender connects anew."""
            for path in (ground.work / "cp").glob("*"):
                ground.run(["ssh", "-o", f"ControlPath={path}", "-O", "exit", "box"], check=False)

        contenders += [
            Contender("ansible patch, 1 task", patch, ten.done("box"), cold, ten.reset),
            Contender("ansible copy, 10 files", copy, ten.done("box"), cold, ten.reset),
        ]
        aims = {"ansible patch, 1 task": {50: 1 / 3}, "ansible copy, 10 files": {50: 1 / 20}}
    return Job("apply, ten files", contenders, aims)


def _fleet(ground: Ground, ours: list[str], ten: TenFiles) -> Job:
    def undo(*chosen: str) -> Callable[[], None]:
        return lambda: ground.run(["ddtree-deploy", "rollback", "ten", *chosen, *ours]) and None

    def contender(name: str, chosen: list[str], hosts: list[str]) -> Contender:
        command = ["ddtree-deploy", "apply", str(ten.diff), *chosen, *ours]
        return Contender(name, command, ten.done(*hosts), after=undo(*chosen))

    return Job(
        "apply, sixteen hosts",
        [
            contender("ddtree-deploy", ["--label", "fleet=yes"], ground.fleet),
            contender("one host", ["--host", "box00"], ground.fleet[:1]),
        ],
        {"one host": {0: 5.0, 50: 5.0}},
    )


def digest(path: Path) -> str:
    """The sha256 of a file, to say which input a table is of."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
