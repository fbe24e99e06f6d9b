"""What a host's files are held against to tell foreign edits: RECORD, or the published wheel and git HEAD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Target

RECORD = "the installer's RECORD"


def published_hashes(root: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Path -> sha256 of the published engine of that root's version; None where its wheel is not here.

    Only what is here already counts (a wheelhouse, the cache): nothing is downloaded.
    """
    from ddtree_deploy.snapshots.pristine import PristineTree
    from ddtree_deploy.snapshots.wheels import Sources, find_wheel, tags_of, wheelhouses_by_environment

    if not root["version"]:
        return None
    try:
        sources = Sources(wheelhouses_by_environment())
        wheel = find_wheel(str(root["version"]), *tags_of(root), sources=sources, any_tags=True)
        with PristineTree(wheel) as tree:
            return {path: tree.sha256(path) for path in tree.entries}
    except DeployError:
        return None


def judge(record: Mapping[str, Any], version: str | None, published: Mapping[str, str] | None) -> dict[str, Any]:
    """The agent's survey with its ``baseline`` named and, where that is not RECORD, its verdicts filled in.

    Without a RECORD a file is accounted for if it is as published or as git HEAD has it. ``baseline`` is None where
    there is nothing to hold the files against; ``notes`` say what else is worth knowing.
    """
    judged = {key: value for key, value in record.items() if key != "hashes"}
    notes: list[str] = []
    judged["notes"] = notes
    if record["state"] == "present":
        return {**judged, "baseline": RECORD}
    hashes: Mapping[str, str] = record.get("hashes") or {}
    git = record.get("git")
    if git and "problem" in git:
        notes.append(f"the tree's git repository could not be asked: {git['problem']}")
        git = None
    if git is None and published is None:
        notes.append(_no_baseline(version))
        return {**judged, "baseline": None}
    names = [f"the published sglang {version}"] if published is not None else []
    names += [f"git HEAD {git['commit'][:12]}"] if git else []
    pristine = published or {}
    changed, untracked = set((git or {}).get("differs", ())), set((git or {}).get("untracked", ()))

    def as_head(path: str) -> bool:
        return git is not None and path not in changed and path not in untracked

    as_published = {path for path, digest in hashes.items() if pristine.get(path) == digest}
    off = {path for path in hashes if path not in as_published and not as_head(path)}
    listed = {path for path in hashes if path in pristine or (git and path not in untracked)}
    judged["differs"] = sorted((off & listed) | (changed - hashes.keys()))
    judged["unlisted"] = sorted((off - listed) | (untracked - hashes.keys()))
    # A checkout may lack what the wheel's build added; only HEAD knows what it should hold.
    judged["missing"] = sorted(git["missing"]) if git else sorted(pristine.keys() - hashes.keys())
    own = sum(1 for path in hashes if as_head(path) and path in pristine and path not in as_published)
    if own:
        notes.append(f"{own} file(s) are as in git HEAD, which is not as published there")
    return {**judged, "baseline": " or ".join(names)}


def _no_baseline(version: str | None) -> str:
    if not version:
        return "no RECORD, no git repository and no version: foreign edits cannot be told"
    return (
        "no RECORD and no git repository: foreign edits cannot be told; "
        f"`ddtree-deploy wheel fetch {version}` brings the published files to compare with"
    )


def container_notes(target: Target, root: Mapping[str, Any]) -> list[str]:
    """What a set in a container is worth: as long as the container lives."""
    kind = root.get("container")
    if not (root.get("volatile") or (target.container and not kind)):
        return []
    name = target.container or f"this {kind} container"
    return [
        f"the tree lies in {name}'s own file system: recreating the container loses every set, with its history; "
        "apply again afterwards, or build the set into the image"
    ]
