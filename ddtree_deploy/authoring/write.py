"""Writing patch sets to their folders: all files of all of them, or none."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.authoring.swap import digest, exchange, locked, staging
from ddtree_deploy.authoring.tomledit import redeclare
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.declaration import NEW, Declaration, DeclaredFamily
from ddtree_deploy.patching.patchset import SERIES, TOML, PatchSet, load_set
from ddtree_deploy.patching.series import read_series


@dataclass(frozen=True)
class SetFolder:
    """A set's folder as it was read: the loaded set, None for one that is to be made, and the digest of its files."""

    path: Path
    loaded: PatchSet | None
    digest: str | None

    @property
    def name(self) -> str:
        """The set's name, which is the folder's."""
        return self.path.name


def read_folder(path: Path, *, trust_hashes: bool = True) -> SetFolder:
    """Read the set in the folder ``path``, to write it back changed; as :func:`load_set`.

    Raises DeployError DD107 for no folder, DD108, DD007 for a link.
    """
    if not path.is_dir():
        raise DeployError("DD107", f"there is no patch set {path.name} in {path.parent}")
    if path.is_symlink():
        raise DeployError(
            "DD007", f"{path} is a symbolic link", f"name the real folder: --patches {path.resolve().parent}"
        )
    before = digest(path)
    loaded = load_set(path, trust_hashes=trust_hashes)
    return SetFolder(path, loaded, before)


def new_folder(path: Path) -> SetFolder:
    """The place of a set that does not exist yet. Raises DeployError DD007 where something is."""
    if path.exists() or path.is_symlink():
        raise DeployError("DD007", f"{path} is there already", "take another name")
    return SetFolder(path, None, None)


def write_sets(writes: Sequence[tuple[SetFolder, PatchSet]]) -> tuple[PatchSet, ...]:
    """Make every folder hold its set; all folders lie in one, and all change or none does, whenever it stops.

    A set's families, series, patches, ``new/`` and declaration come from memory (its digests are not looked at);
    the author's comments and all other files of the folder stay. Sets are loaded and checked before they go into
    place. Returns them as loaded. Raises DeployError DD010 if a folder changed since it was read or is being
    written, DD108 for a set that is not sound, DD007.
    """
    parent = writes[0][0].path.parent
    with locked(parent), staging(parent) as stage:
        for folder, _ in writes:
            if digest(folder.path) != folder.digest:
                raise DeployError(
                    "DD010", f"{folder.path} changed while it was worked on", "nothing was written: run it again"
                )
        done = []
        for folder, wanted in writes:
            place = stage / folder.name
            _build(place, folder, wanted)
            done.append(load_set(place))
            _check_same(done[-1], wanted)
        exchange(parent, {folder.name: folder.digest for folder, _ in writes}, stage)
    return tuple(done)


def save_set(parent: Path, item: PatchSet) -> None:
    """Write a set that is held in memory to a new folder below ``parent``, which is made; it need not be sound."""
    parent.mkdir(parents=True, exist_ok=True)
    _build(parent / item.name, new_folder(parent / item.name), item)


def _build(place: Path, folder: SetFolder, wanted: PatchSet) -> None:
    """The new folder: what the tool does not govern as it is in the old one, and the set's files."""
    toml = b""
    if folder.loaded:
        toml = (folder.path / TOML).read_bytes()
        families = folder.loaded.families

        def ours(at: str, names: list[str]) -> set[str]:
            if Path(at) == folder.path:
                return {TOML, NEW, *(families.keys() - wanted.families)}
            in_family = Path(at).parent == folder.path and Path(at).name in families
            return {name for name in names if in_family and not name.startswith(".")}

        shutil.copytree(folder.path, place, symlinks=True, ignore=ours)
    else:
        place.mkdir()
    for path, data in _files(folder, wanted, toml).items():
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if folder.loaded and (folder.path / path).is_file():
            shutil.copy2(folder.path / path, target)  # mode and, where nothing changes, time
            if target.read_bytes() == data:
                continue
        target.write_bytes(data)
    for family in wanted.families.values():
        (place / family.name).mkdir(exist_ok=True)


def _files(folder: SetFolder, wanted: PatchSet, toml: bytes) -> dict[str, bytes]:
    """Path in the set's folder -> content."""
    files = {TOML: redeclare(toml, declared(wanted))}
    for family in wanted.families.values():
        series = folder.path / family.name / SERIES
        old = series.read_bytes() if folder.loaded and series.is_file() else b""
        files[f"{family.name}/{SERIES}"] = reseries(old, [patch.name for patch in family.patches])
        files.update({f"{family.name}/{patch.name}": patch.data for patch in family.patches})
        for path, data in family.added.items():
            if files.setdefault(f"{NEW}/{path}", data) != data:
                raise DeployError("DD108", f"{wanted.name}: two families add {path} with different contents")
    return files


def _check_same(loaded: PatchSet, wanted: PatchSet) -> None:
    """What was written must read as what was meant."""

    def said(item: PatchSet) -> object:
        return declared(item), {
            name: ([(patch.name, patch.data) for patch in family.patches], dict(family.added))
            for name, family in item.families.items()
        }

    if said(loaded) != said(wanted):
        raise DeployError("DD901", f"{wanted.name}: the written set does not read as what was meant")


def declared(item: PatchSet) -> Declaration:
    """What the patchset.toml of a set says."""
    return Declaration(
        item.name,
        item.version,
        item.summary,
        item.package,
        item.roots,
        item.requires,
        {
            name: DeclaredFamily(name, family.engines, tuple(family.added), dict(family.left_out))
            for name, family in item.families.items()
        },
        {engine: dict(files) for family in item.families.values() for engine, files in family.hashes.items() if files},
        dict(item.unneeded),
    )


def reseries(data: bytes, names: Sequence[str]) -> bytes:
    """The series ``data`` with exactly ``names`` in that order.

    Comments and blank lines stay: those directly above a name go where it goes, or with it.
    """
    entries, _ = read_series(data, SERIES, strips=False)
    if [entry.name for entry in entries] == list(names):
        return data
    lines = data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n") if data else []
    blocks: dict[str, list[bytes]] = {}
    done = 0
    for entry in entries:
        blocks[entry.name] = lines[done : entry.line]
        done = entry.line
    kept = [line for name in names for line in blocks.get(name, [name.encode()])]
    return b"".join(line + b"\n" for line in (*kept, *lines[done:]))
