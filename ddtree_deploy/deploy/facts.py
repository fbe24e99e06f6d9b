"""A host's tree as the planner needs it: images of files, and the sets that the host's record names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.agent.protocol import BlobReader, ProtocolError
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession, pieces
from ddtree_deploy.patching.classify import Recorded, touched_paths
from ddtree_deploy.patching.images import FileImage, Image, LinkImage, fingerprint
from ddtree_deploy.patching.patchset import PatchSet

#: An entry as the agent speaks of it; see the agent's tree module.
Entry = Mapping[str, Any] | None


@dataclass(frozen=True)
class HostFacts:
    """What one look at a host brought: the agent's status, and the images of the files that were asked for."""

    host: str
    status: Mapping[str, Any]
    images: Mapping[str, Image]

    @property
    def engine(self) -> str:
        """The installed engine version; DD311 where the tree does not say."""
        version = self.status["root"]["version"]
        if not version:
            site = self.status["root"]["site"]
            raise DeployError("DD311", f"{self.host}: {site} does not say which sglang version it is")
        return str(version)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The host's record: the applied sets, oldest first."""
        return list(self.status["layers"])

    @property
    def fingerprints(self) -> dict[str, str | None]:
        """The images' fingerprints, by path."""
        return {path: fingerprint(image) for path, image in self.images.items()}

    def recorded(self) -> tuple[Recorded, ...]:
        """The recorded sets that are still there: those that a reinstall took away are left out."""
        lost = set(self.status["reinstalled"])
        return tuple(recorded(layer) for layer in self.layers if layer["set"] not in lost)


def recorded(layer: Mapping[str, Any]) -> Recorded:
    """A layer of the host's record as the planner knows it."""
    files = {item["path"]: entry_fingerprint(item["after"]) for item in layer["files"]}
    return Recorded(layer["set"], layer["version"], layer["digest"], files)


def entry_fingerprint(entry: Entry) -> str | None:
    """The fingerprint of what the agent found, as :func:`ddtree_deploy.patching.images.fingerprint` gives it."""
    if entry is None:
        return None
    if entry["kind"] == "file":
        return str(entry["sha256"])
    if entry["kind"] == "link":
        return "link:" + str(entry["target"])
    return "other:" + str(entry.get("why", "no regular file"))


def entry_of(image: Image) -> dict[str, Any] | None:
    """An image as the agent speaks of it."""
    if image is None:
        return None
    if isinstance(image, LinkImage):
        return {"kind": "link", "target": image.target}
    return {"kind": "file", "sha256": fingerprint(image), "size": len(image.data), "mode": image.mode}


def look(session: HostSession, sets: Sequence[PatchSet], *, break_links: bool = False) -> HostFacts:
    """One exec: how the host stands, and the bytes of every file that ``sets`` touch.

    With ``break_links`` a link's image is that of the file which it leads to. Raises DeployError.
    """
    asked = touched_paths(sets)
    names = [item.name for item in sets]
    args = {"paths": list(asked), "sets": names, "contents": True, "break_links": break_links}
    status, frames = session.collect("plan", args)
    present = {path: entry for path, entry in status["entries"].items() if entry is not None}
    contents = _contents(session.target.name, {**present, **status["linked"]}, frames)
    images: dict[str, Image] = {}
    for path, entry in status["entries"].items():
        source = status["linked"].get(path, entry)
        if source is None:
            images[path] = None
        elif source["kind"] == "link":
            images[path] = LinkImage(source["target"])
        elif source["kind"] == "file" and path in contents:
            images[path] = FileImage(contents[path], source["mode"])
        elif source["kind"] == "other":
            raise DeployError(
                "DD509" if "link" in str(source.get("why")) else "DD106",
                f"{session.target.name}: {path}: {source.get('why', 'is no regular file')}",
                "set root to the real folder, or put the host's file back",
            )
    return HostFacts(session.target.name, status, images)


def stored_images(
    session: HostSession, wanted: Iterable[tuple[str, Entry]], *, break_links: bool = False
) -> tuple[dict[tuple[str, str | None], Image], dict[str, str]]:
    """The images that entries of the host's record stand for, by path and fingerprint, from what the host keeps;
    and, for those that it cannot give any more, path -> why.

    With ``break_links`` a link's image is that of the file which it leads to. Raises DeployError.
    """
    images: dict[tuple[str, str | None], Image] = {}
    asked: list[dict[str, Any]] = []
    for path, entry in wanted:
        if entry is None or (entry["kind"] == "link" and not break_links):
            images[path, entry_fingerprint(entry)] = LinkImage(str(entry["target"])) if entry else None
        else:
            asked.append({"path": path, "entry": dict(entry)})
    if not asked:
        return images, {}
    answer, frames = session.collect("stored", {"wanted": asked})
    sent = {str(at): answer["linked"].get(str(at), one["entry"]) for at, one in enumerate(asked)}
    contents = _contents(session.target.name, {key: sent[key] for key in sent if key not in answer["missing"]}, frames)
    for at, one in enumerate(asked):
        if str(at) in contents:
            image = FileImage(contents[str(at)], sent[str(at)]["mode"])
            images[one["path"], entry_fingerprint(one["entry"])] = image
    return images, {asked[int(at)]["path"]: str(why) for at, why in answer["missing"].items()}


def _contents(host: str, entries: Mapping[str, Any], frames: Sequence[tuple[str, Any]]) -> dict[str, bytes]:
    """The data of an answer by the keys that its message lists; ``entries`` says what each must be."""
    listed = [str(key) for kind, value in frames if kind == "J" for key in value["contents"]]
    reader = BlobReader(pieces(frames))
    contents = {}
    try:
        for key in listed:
            contents[key] = reader.take(entries[key]["size"])
            if fingerprint(FileImage(contents[key])) != entries[key]["sha256"]:
                raise ProtocolError(f"{key} is not what the host said it is")
        reader.finish()
    except (ProtocolError, KeyError, TypeError) as error:
        raise DeployError("DD307", f"{host}: the reply is damaged: {error}", "run it again") from None
    return contents
