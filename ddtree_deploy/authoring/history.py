"""The history of a scratch tree: a commit for the pristine engine, one for each required set, one for each patch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.agent.root import PACKAGE
from ddtree_deploy.authoring.gittools import run_git
from ddtree_deploy.authoring.stack import Pristine, Stack, applied
from ddtree_deploy.patching.declaration import NEW
from ddtree_deploy.patching.images import FileImage, Image

#: The newest commit that the tool made, and that of the pristine engine: branches of the user's do not move them.
TIP, PRISTINE = "refs/ddtree-deploy/tip", "refs/ddtree-deploy/pristine"
_WHO = b"ddtree-deploy <ddtree-deploy@localhost>"
_QUOTED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


@dataclass(frozen=True)
class Commit:
    """A commit: its message, and what it makes of which paths."""

    message: str
    changes: Iterable[tuple[str, Image]]


def history_of(stack: Stack, pristine: Pristine) -> Iterator[Commit]:
    """The commits, oldest first; the last one's tree is the engine with everything applied."""
    engine = stack.engine
    files = ((path, pristine[path]) for path in pristine if path.startswith(PACKAGE + "/"))
    yield Commit(f"sglang {engine}, pristine", files)
    below: Mapping[str, Image] = pristine
    for number, item in enumerate(stack.sets[:-1], 1):
        family = item.family_for(engine)
        if family is not None:
            below, before = applied(stack.sets[:number], engine, pristine), below
            yield Commit(f"{item.name} {item.version}", _changed(before, below, family.paths))
    top = stack.sets[-1]
    if stack.family.added:
        added = [(path, FileImage(data)) for path, data in sorted(stack.family.added.items())]
        yield Commit(f"{top.name}: {NEW}/", added)
    for level, patch in enumerate(stack.family.patches, 1):
        paths = tuple(path for diff in patch.diffs for path in diff.paths)
        yield Commit(patch.name, _changed(stack.levels[level - 1], stack.levels[level], paths))


def _changed(
    before: Mapping[str, Image], after: Mapping[str, Image], paths: tuple[str, ...]
) -> list[tuple[str, Image]]:
    return [(path, after.get(path)) for path in sorted(set(paths)) if before.get(path) != after.get(path)]


def write_history(repository: Path, commits: Iterator[Commit]) -> str:
    """Write the commits as a history of their own and let ``TIP`` name the last one; returns its id.

    The first one, the pristine engine, is written once for a repository.
    """
    if not _id_of(repository, PRISTINE):
        _import(repository, PRISTINE, "", [next(commits)])
    else:
        next(commits)
    _import(repository, TIP, PRISTINE, commits)
    return _id_of(repository, TIP)


def _id_of(repository: Path, reference: str) -> str:
    """The id of the commit that a reference names; empty where there is none."""
    command = ("rev-parse", "--quiet", "--verify", reference)
    return run_git(command, folder=repository, repository=True, fine=(0, 1)).decode().strip()


def _import(repository: Path, reference: str, start: str, commits: Iterable[Commit]) -> None:
    stream: list[bytes] = [b"reset %b\n" % reference.encode()]
    if start:
        stream.append(b"from %b\n\n" % start.encode())
    now = int(time.time())
    for commit in commits:
        message = commit.message.encode()
        stream.append(b"commit %b\ncommitter %b %d +0000\n" % (reference.encode(), _WHO, now))
        stream.append(b"data %d\n%b\n" % (len(message), message))
        for path, image in commit.changes:
            name = f'"{path.translate(_QUOTED)}"'.encode("utf-8", "surrogateescape")
            if isinstance(image, FileImage):
                mode = 0o100755 if image.executable else 0o100644
                stream += (b"M %o inline %b\ndata %d\n" % (mode, name, len(image.data)), image.data, b"\n")
            else:
                stream.append(b"D %b\n" % name)
    options = ("-c", "core.compression=1", "fast-import", "--quiet", "--force")
    run_git(options, folder=repository, given=b"".join(stream), repository=True)
