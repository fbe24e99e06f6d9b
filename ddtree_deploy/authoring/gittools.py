"""git as a tool for diffs, merges and scratch trees, whatever the user's configuration says."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.names import PLAIN_PATH
from ddtree_deploy.patching.problems import printable

#: The first version that GIT_CONFIG_GLOBAL shuts the user's configuration out of.
OLDEST = (2, 32)
_MAX_CONFLICTS = 127  # merge-file counts no further; above it are errors
_NOWHERE = "/nonexistent"


@dataclass(frozen=True)
class Merged:
    """A three-way merge: the bytes, with diff3 markers around each of ``conflicts`` places (at most 127 counted)."""

    data: bytes
    conflicts: int


def file_diff(path: str, before: bytes | None, after: bytes | None) -> bytes:
    """The change of one file as a unified diff: names ``a/`` and ``b/``, 3 lines of context; None is no file.

    The same input gives the same bytes: no times, no object ids, ``\\n`` alone ends a line. Empty where nothing
    changes. Raises DeployError DD105 for a name that a patch set may not have, DD009 without a usable git.
    """
    if not PLAIN_PATH.fullmatch(path):
        raise DeployError("DD105", f"{printable(path.encode())}: names in a set are of letters, digits and ._+@-")
    if before == after:
        return b""
    name = path.encode()
    if not before and not after:
        # An empty file comes or goes: only git's own headers can say so. The empty line ends them: without it a
        # diff that follows would be read as their continuation.
        what = b"new file" if before is None else b"deleted file"
        return b"diff --git a/%b b/%b\n%b mode 100644\n\n" % (name, name, what)
    with tempfile.TemporaryDirectory(prefix="ddtree-diff-") as folder:
        Path(folder, "old").write_bytes(before or b"")
        Path(folder, "new").write_bytes(after or b"")
        options = ("--no-index", "--text", "--histogram", "--unified=3", "--no-renames", "--indent-heuristic")
        quiet = ("--no-color", "--no-ext-diff", "--no-textconv")
        said = run_git(("diff", *options, *quiet, "old", "new"), folder=Path(folder), fine=(1,))
    old = b"/dev/null" if before is None else b"a/" + name
    new = b"/dev/null" if after is None else b"b/" + name
    return b"--- %b\n+++ %b\n%b" % (old, new, said[said.index(b"\n@@ ") + 1 :])


def merge3(
    base: bytes,
    ours: bytes,
    theirs: bytes,
    labels: Sequence[str] = ("ours", "base", "theirs"),
    *,
    marker_size: int = 7,
) -> Merged:
    """What ``theirs`` made of ``base``, done to ``ours``; ``labels`` name ours, base and theirs in the markers.

    Raises DeployError DD104 for contents that git takes for binary, DD009 without a usable git.
    """
    with tempfile.TemporaryDirectory(prefix="ddtree-merge-") as folder:
        for name, data in (("ours", ours), ("base", base), ("theirs", theirs)):
            Path(folder, name).write_bytes(data)
        named = [part for label in labels for part in ("-L", label)]
        size = f"--marker-size={marker_size}"
        command = ("merge-file", "-p", "--diff3", "--quiet", size, *named, "ours", "base", "theirs")
        done = _run(command, Path(folder), b"", {})
    if done.returncode > _MAX_CONFLICTS or done.returncode < 0:
        raise DeployError("DD104", f"git cannot merge {labels[2]} into {labels[0]}: binary content?")
    return Merged(done.stdout, done.returncode)


def run_git(
    arguments: Sequence[str],
    *,
    folder: Path,
    given: bytes = b"",
    fine: Sequence[int] = (0,),
    repository: bool = False,
) -> bytes:
    """Run git in ``folder`` and return its stdout; ``given`` is its stdin, ``fine`` the exit statuses that are.

    Nobody's configuration, attributes, hooks, pager, colour or external diff has a say. Unless ``repository``,
    no repository around ``folder`` has one either. Raises DeployError DD009.
    """
    done = _run(arguments, folder, given, {"GIT_CEILING_DIRECTORIES": str(folder.parent)} if repository else {})
    if done.returncode not in fine:
        said = printable(done.stderr.strip().rpartition(b"\n")[2])
        raise DeployError("DD009", f"git {arguments[0]} failed in {folder} (exit status {done.returncode}): {said}")
    return done.stdout


def _run(
    arguments: Sequence[str], folder: Path, given: bytes, extra: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes]:
    _check_version()
    return _call(arguments, folder, given, extra or {"GIT_DIR": _NOWHERE})


def _call(
    arguments: Sequence[str], folder: Path | None, given: bytes, extra: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes]:
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    environment = {
        **kept,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "HOME": _NOWHERE,
        "XDG_CONFIG_HOME": _NOWHERE,
        "LC_ALL": "C",
        **extra,
    }
    command = ["git", "--no-pager", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", *arguments]
    try:
        return subprocess.run(command, cwd=folder, input=given, capture_output=True, env=environment)
    except OSError as error:
        raise DeployError("DD009", f"git cannot be run: {error.strerror}", "install git") from None


@functools.cache
def _check_version() -> None:
    said = _call(("--version",), None, b"", {}).stdout
    found = re.search(rb"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise DeployError("DD009", f"git {wanted} or later is needed, this is {printable(said.strip())}", "update git")
