"""What a new engine did to the files of sets that it took away: told from what the host keeps, without a wheel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_deploy.agent.layers import bottom_entries, top_entries
from ddtree_deploy.deploy.facts import HostFacts, entry_fingerprint, stored_images
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.patching.functions import changed_functions
from ddtree_deploy.patching.images import FileImage, Image
from ddtree_deploy.patching.patchset import PatchSet

_NAMED = 8


def with_impact(session: HostSession, facts: HostFacts, sets: Sequence[PatchSet], refusal: DeployError) -> DeployError:
    """The refusal to apply ``sets`` to this engine, with what changed in their files since they were applied to
    another one; the refusal itself where the engine took none of them away.
    """
    names = [item.name for item in sets if item.name in facts.status["reinstalled"]]
    layers = [layer for layer in facts.layers if layer["set"] in names]
    then = str(layers[0]["install"]["version"]) if layers and layers[0].get("install") else facts.engine
    if then == facts.engine:
        return refusal
    title = f"of the files of {', '.join(names)}, applied to sglang {then}, these are others in {facts.engine}:"
    return DeployError(
        refusal.code,
        refusal.message,
        f"bring the set to this engine: ddtree-deploy patchset port {names[-1]} --from {then} --to {facts.engine}",
        [*refusal.details, title, *impact(session, facts, layers)],
    )


def impact(session: HostSession, facts: HostFacts, layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each file of these lost layers that the engine brings in another form: of a module, which
    functions changed, and which of them the sets change too.

    ``facts`` holds the images of these files. What they were before and after the sets comes from the host's own
    state; where that is gone, the hash alone speaks.
    """
    before, after = (ends(dict(layer) for layer in layers) for ends in (bottom_entries, top_entries))
    now = facts.fingerprints
    changed = [
        path
        for path in sorted(before)
        if now[path] != entry_fingerprint(before[path]) and path not in facts.status["survivors"]
    ]
    stored, _missing = stored_images(session, [(path, end[path]) for path in changed for end in (before, after)])
    lines = []
    for path in changed:
        was, left = (stored.get((path, entry_fingerprint(end[path]))) for end in (before, after))
        lines.append(_line(path, was, left, facts.images[path]))
    same = len(before) - len(changed)
    return [*lines, f"{same} more are as they were"] if same else lines


def _line(path: str, before: Image, after: Image, now: Image) -> str:
    if now is None:
        return f"{path}: gone"
    if before is None and isinstance(after, FileImage):
        return f"{path}: comes with the engine now, and the set adds it"
    images = (before, after, now)
    sources = [image.data if isinstance(image, FileImage) else None for image in images]
    if not path.endswith(".py") or sources[0] is None or sources[2] is None:
        return f"{path}: changed"
    upstream = changed_functions(sources[0], sources[2])
    if upstream.problem:
        return f"{path}: changed; cannot be compared: {upstream.problem}"
    mine = set(changed_functions(sources[0], sources[1]).names)
    both = [name for name in upstream.names if name in mine]
    other = [name for name in upstream.names if name not in mine]
    said = [f"{_some(both)}, which the set changes too"] if both else []
    said += [f"{'and ' if both else ''}{_some(other)}"] if other else []
    return f"{path}: changed in {'; '.join(said)}" if said else f"{path}: changed in comments alone"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
