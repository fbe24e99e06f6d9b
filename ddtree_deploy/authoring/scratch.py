"""Scratch trees: an unpacked engine with a set applied, under git, to edit with anything.

::

    <scratch>/sglang/...                     the engine's files with the required sets and the set applied
             /.git/                          the user's to use; refresh reads files, never their commits
                  /ddtree-deploy/state.json  which set, for which engine, from which folder
                                /manifest.json  every file as it was put there
                                /draft/<set>/   a set that is in no folder of patch sets yet (of `port`)
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_deploy.agent.root import PACKAGE
from ddtree_deploy.authoring.gittools import run_git
from ddtree_deploy.authoring.history import TIP, history_of, write_history
from ddtree_deploy.authoring.stack import Pristine, Stack
from ddtree_deploy.authoring.write import save_set
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.images import FileImage, Image, sha256
from ddtree_deploy.patching.patchset import PatchSet, load_set
from ddtree_deploy.snapshots.places import data_folder, usable

_SCHEMA = 1
_OURS = Path(".git", "ddtree-deploy")
_STATE, _MANIFEST, _DRAFT = "state.json", "manifest.json", "draft"
# The files are kept byte for byte whatever a .gitattributes among them, or the user's configuration, says.
_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding\n"
_CONFIG = (("core.autocrlf", "false"), ("core.fileMode", "true"), ("core.safecrlf", "false"))


@dataclass(frozen=True)
class State:
    """What a scratch tree is about. ``patches``: the folder of patch sets; ``digest`` that of the set's folder as
    it was read. ``family``: the one that serves ``engine``. ``draft``: the set is the scratch's own.
    """

    set: str
    engine: str
    family: str
    patches: str
    digest: str | None
    draft: bool
    #: False while files are being written: then nobody knows what is there.
    complete: bool = True


@dataclass(frozen=True)
class Scratch:
    """A scratch tree. ``manifest``: path -> (sha256, whether it is executable), as the tool put it there."""

    folder: Path
    state: State
    manifest: Mapping[str, tuple[str, bool]]

    def is_from(self, patches: Path) -> bool:
        """Whether it is of a set in that folder."""
        return Path(self.state.patches).resolve() == patches.resolve()

    @property
    def name(self) -> str:
        """The set and engine version, as messages name them."""
        return f"{self.state.set} {self.state.engine}"

    def draft(self) -> PatchSet:
        """The set that is in no folder of patch sets yet. Raises DeployError DD108."""
        return load_set(self.folder / _OURS / _DRAFT / self.state.set)


def default_folder(name: str, engine: str) -> Path:
    """Where ``edit`` puts a scratch tree that nobody names a place for."""
    return scratches_folder() / f"{name}-{engine}"


def scratches_folder() -> Path:
    """The folder of scratch trees."""
    return data_folder() / "scratch"


def open_scratch(folder: Path) -> Scratch:
    """Read a scratch tree. Raises DeployError DD118 where there is none, or one of a tool of another version."""
    ours = folder / _OURS
    try:
        state = json.loads((ours / _STATE).read_text())
        if state.pop("schema") != _SCHEMA:
            raise DeployError("DD118", f"{folder} was made by another version of ddtree-deploy", "make another one")
        manifest = {path: (sha, on) for path, (sha, on) in json.loads((ours / _MANIFEST).read_text()).items()}
        return Scratch(folder, State(**state), manifest)
    except FileNotFoundError:
        raise DeployError("DD118", f"{folder} is no scratch tree", "`ddtree-deploy patchset edit` makes one") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DeployError("DD118", f"{folder}: its {_OURS} cannot be read: {error}", "make another one") from None


def find_scratches() -> list[Scratch]:
    """The scratch trees below :func:`scratches_folder`."""
    found = []
    for folder in sorted(scratches_folder().glob("*")):
        if (folder / _OURS / _STATE).is_file():
            found.append(open_scratch(folder))
    return found


def existing(folder: Path) -> Scratch | None:
    """The scratch tree in ``folder``; None where nothing is. Raises DeployError DD118 for anything else."""
    if not folder.is_symlink() and (not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))):
        return None
    if not (folder / _OURS / _STATE).is_file():
        raise DeployError("DD118", f"{folder} is there and is no scratch tree", "name another folder: --into DIR")
    return open_scratch(folder)


def the_scratch(name: str | None, engine: str | None, patches: Path | None) -> Scratch:
    """The one scratch tree at the usual place for what is named. Raises DeployError DD118 for none, DD001 several."""
    found = [
        scratch
        for scratch in find_scratches()
        if name in (None, scratch.state.set)
        and engine in (None, scratch.state.engine)
        and (patches is None or scratch.is_from(patches))
    ]
    if len(found) > 1:
        names = ", ".join(scratch.name for scratch in found)
        hint = "name one: NAME --engine VERSION, or --from DIR"
        raise DeployError("DD001", f"there are several scratch trees: {names}", hint)
    if not found:
        what = " of " + " ".join(part for part in (name, engine) if part) if name or engine else ""
        hint = "`ddtree-deploy patchset edit NAME --engine VERSION` makes one"
        raise DeployError("DD118", f"there is no scratch tree{what}", hint)
    return found[0]


def scratch_around(folder: Path) -> Scratch | None:
    """The scratch tree that ``folder`` lies in, if any."""
    for place in (folder, *folder.parents):
        if (place / _OURS / _STATE).is_file():
            return open_scratch(place)
    return None


# -- making ------------------------------------------------------------------------------------------


def make_scratch(folder: Path, state: State, stack: Stack, pristine: Pristine) -> Scratch:
    """Make a scratch tree of the stack in ``folder``, which is not there or empty: all of it or nothing.

    With ``state.draft`` the stack's last set is kept in it. Raises DeployError DD118 where something is, DD007.
    """
    if existing(folder) is not None:
        raise DeployError("DD118", f"{folder} holds a scratch tree", "name another folder: --into DIR")
    with usable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            run_git(("init", "--quiet", "--template=", "--initial-branch=main"), folder=place, repository=True)
            for key, value in _CONFIG:
                run_git(("config", key, value), folder=place, repository=True)
            (place / ".git" / "info").mkdir(exist_ok=True)
            (place / ".git" / "info" / "attributes").write_text(_ATTRIBUTES)
            tip = write_history(place, history_of(stack, pristine))
            run_git(("update-ref", "HEAD", tip), folder=place, repository=True)
            run_git(("reset", "--quiet", "--hard"), folder=place, repository=True)
            (place / _OURS).mkdir()
            _remember(place, state, _manifest(stack, pristine), stack.sets[-1])
            place.chmod(0o755)
            place.rename(folder)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    return open_scratch(folder)


def renew_scratch(scratch: Scratch, state: State, stack: Stack, pristine: Pristine) -> tuple[Scratch, str | None]:
    """Bring a scratch tree without edits (or one whose edits ``stack`` has taken up) to the stack.

    Files that are right, or edited since, stay untouched; commits of the user's that were checked out are kept as
    a branch, whose name is returned. Raises DeployError DD007, DD009.
    """
    folder = scratch.folder
    wanted = _manifest(stack, pristine)
    with usable(folder):
        _write_state(folder, dataclasses.replace(scratch.state, complete=False))
        kept = _keep_commits(folder)
        tip = write_history(folder, history_of(stack, pristine))
        for path in scratch.manifest.keys() | wanted.keys():
            if scratch.manifest.get(path) != wanted.get(path):
                _put(folder / path, scratch.manifest.get(path), stack.levels[-1].get(path))
        run_git(("update-ref", "-m", "ddtree-deploy", "HEAD", tip), folder=folder, repository=True)
        run_git(("reset", "--quiet", "--mixed"), folder=folder, repository=True)
        _remember(folder, state, wanted, stack.sets[-1])
    return open_scratch(folder), kept


def _keep_commits(folder: Path) -> str | None:
    """Give the checked-out commit a branch of its own if it is not the tool's."""
    tip, head = (
        run_git(("rev-parse", "--quiet", "--verify", name), folder=folder, repository=True, fine=(0, 1)).strip()
        for name in (TIP, "HEAD")
    )
    if not head or head == tip:
        return None
    name = "kept/" + head[:12].decode()
    run_git(("update-ref", f"refs/heads/{name}", head.decode()), folder=folder, repository=True)
    return name


def _put(target: Path, old: tuple[str, bool] | None, image: Image) -> None:
    """Make one file what it should be, unless it is so already, or the user has been at it in the meantime."""
    now = sha256(target.read_bytes()) if target.is_file() else None
    if now != (old[0] if old else None):
        return
    if not isinstance(image, FileImage):
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.new")
    draft.write_bytes(image.data)
    draft.chmod(0o755 if image.executable else 0o644)
    draft.replace(target)


def is_of(scratch: Scratch, stack: Stack) -> bool:
    """Whether the files that were put there are those of the stack, as far as sets touch them."""
    for path in _touched(stack):
        image = stack.levels[-1].get(path)
        now = (sha256(image.data), image.executable) if isinstance(image, FileImage) else None
        if scratch.manifest.get(path) != now:
            return False
    return True


def _touched(stack: Stack) -> set[str]:
    return {path for item in stack.sets if (family := item.family_for(stack.engine)) for path in family.paths}


def _manifest(stack: Stack, pristine: Pristine) -> dict[str, tuple[str, bool]]:
    """Every file of the finished tree."""
    manifest = {}
    touched = _touched(stack)
    for path in sorted(touched.union(path for path in pristine if path.startswith(PACKAGE + "/"))):
        if path not in touched:
            manifest[path] = (pristine.sha256(path), pristine.executable(path))
        elif isinstance(image := stack.levels[-1].get(path), FileImage):
            manifest[path] = (sha256(image.data), image.executable)
    return manifest


def _remember(folder: Path, state: State, manifest: Mapping[str, tuple[str, bool]], top: PatchSet) -> None:
    ours = folder / _OURS
    shutil.rmtree(ours / _DRAFT, ignore_errors=True)
    if state.draft:
        save_set(ours / _DRAFT, top)
    (ours / _MANIFEST).write_text(json.dumps(manifest))
    _write_state(folder, state)


def _write_state(folder: Path, state: State) -> None:
    file = folder / _OURS / _STATE
    draft = file.with_name(_STATE + ".new")
    draft.write_text(json.dumps({"schema": _SCHEMA, **dataclasses.asdict(state)}, indent=1) + "\n")
    draft.replace(file)


# -- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What differs from the manifest. ``edited``: path -> bytes, None for a deleted file; ``odd``: what a patch
    set cannot hold, one line each; ``ignored``: files that are taken for an editor's.
    """

    edited: Mapping[str, bytes | None]
    odd: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing differs."""
        return not self.edited and not self.odd


def look(scratch: Scratch) -> Found:
    """Compare every file of the scratch tree with what was put there. Raises DeployError DD118, DD007."""
    if not scratch.state.complete:
        raise DeployError(
            "DD118",
            f"{scratch.folder}: writing it was interrupted, nobody knows what is yours in it",
            "take out what you want to keep, remove it, and make another one",
        )
    edited: dict[str, bytes | None] = {}
    odd: list[str] = []
    ignored: list[str] = []
    seen = set()
    with usable(scratch.folder):
        for path, info in _walk(scratch.folder):
            seen.add(path)
            known = scratch.manifest.get(path)
            name = path.rpartition("/")[2]
            if known is None and (name.startswith(".") or name.endswith("~")):
                ignored.append(path)
                continue
            if not stat.S_ISREG(info.st_mode):
                what = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "no regular file"
                odd.append(f"{path} is {what}: a set holds regular files")
                continue
            data = (scratch.folder / path).read_bytes()
            executable = bool(info.st_mode & 0o100)
            if known is None:
                edited[path] = data
                if executable:
                    odd.append(f"{path} is executable: files that a set adds are not (chmod -x)")
                continue
            if executable != known[1]:
                odd.append(f"{path} is {'now' if executable else 'no longer'} executable: sets do not change modes")
            if sha256(data) != known[0]:
                edited[path] = data
    edited.update(dict.fromkeys(scratch.manifest.keys() - seen))
    return Found(edited, tuple(odd), tuple(ignored))


def _walk(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Every entry of the package that is no folder, but bytecode."""
    found: list[tuple[str, Any]] = []
    for at, folders, files in os.walk(folder / PACKAGE):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]  # noqa: PTH114, PTH118
        for name in sorted((*files, *links)):
            if not name.endswith(".pyc"):
                path = Path(at, name)
                found.append((path.relative_to(folder).as_posix(), path.lstat()))
    return found
