"""The arithmetic of layers: which build on which, what taking some off and putting others on changes.

A *layer* is one applied set as the record keeps it: ``set``, ``version``, ``digest``, ``requires``, and under
``files`` the entries before and after of every path. Layers lie on one another, oldest first; what stands on
disk is the after of the topmost that holds the path. ``replaced`` are the earlier layers of the same set,
newest first, which upgrades put aside: each with ``replaced_by``, the transaction that did. Plain data in and
out; no file is touched.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Optional, Tuple

from .protocol import AgentError
from .tree import Entry, same

Layer = Dict[str, Any]
Change = Dict[str, Any]
Look = Callable[[str], Entry]

#: How many earlier layers of a set are kept, with their contents, to go back to.
KEEP_GENERATIONS = 3


def paths_of(layers: Iterable[Layer]) -> List[str]:
    """Every path of the layers, sorted."""
    return sorted({item["path"] for layer in layers for item in layer["files"]})


def top_entries(layers: Iterable[Layer]) -> Dict[str, Entry]:
    """What each recorded path should be on disk: the after of the topmost layer that holds it."""
    return {item["path"]: item["after"] for layer in layers for item in layer["files"]}


def bottom_entries(layers: Iterable[Layer]) -> Dict[str, Entry]:
    """What each path of the layers holds without them: the before of the lowest layer that holds it."""
    below: Dict[str, Entry] = {}
    for layer in layers:
        for item in layer["files"]:
            below.setdefault(item["path"], item["before"])
    return below


def built_on(layers: Iterable[Layer], names: Collection[str]) -> List[Layer]:
    """The layers of these sets and all that builds on them, lowest first: above them, one that requires one of
    them or holds one of their files.
    """
    taken: List[Layer] = []
    for layer in layers:
        sets = {item["set"] for item in taken}
        if layer["set"] in names or sets & set(layer["requires"]) or set(paths_of(taken)) & set(paths_of([layer])):
            taken.append(layer)
    return taken


def identity(layer: Layer) -> List[Any]:
    """What tells this layer of a record from any other, also from the same set applied once more."""
    return [layer["set"], layer["version"], layer["digest"], layer.get("transaction")]


def changes_off(layers: List[Layer]) -> Iterator[Change]:
    """What taking these layers off changes, in order; ``owner`` is whose a file was that a layer deleted."""
    for layer in reversed(layers):
        for item in layer["files"]:
            yield {
                "path": item["path"],
                "before": item["after"],
                "after": item["before"],
                "owner": item.get("owner"),
            }


def changes_on(layers: Iterable[Layer]) -> Iterator[Change]:
    """What putting these layers on changes, in order."""
    for layer in layers:
        for item in layer["files"]:
            yield {"path": item["path"], "before": item["before"], "after": item["after"]}


def compose(changes: Iterable[Change]) -> List[Change]:
    """One operation a path out of changes in order; some may come out as no change at all.

    Raises AgentError DD307 where a change does not begin with what the one before it leaves.
    """
    operations: Dict[str, Change] = {}
    for change in changes:
        path = change["path"]
        operation = operations.setdefault(path, {"path": path, "before": change["before"], "after": change["before"]})
        if not same(operation["after"], change["before"]):
            raise AgentError("DD307", "%s: the layers do not follow on from one another" % path)
        operation["after"] = change["after"]
        if change.get("owner"):
            operation["owner"] = change["owner"]
    return list(operations.values())


def inherit(layers: Iterable[Layer], taken: List[Layer]) -> None:
    """Hand on to new layers what the layers that they replace know, and a later rollback needs: the owners of
    files that stay deleted, and the folders that were made for files that both have.
    """
    owners = {item["path"]: item["owner"] for layer in taken for item in layer["files"] if item.get("owner")}
    for layer in layers:
        for item in layer["files"]:
            if item["after"] is None and item["path"] in owners:
                item.setdefault("owner", owners[item["path"]])
        layer["folders"] = [folder for folder in folders_of(taken) if _is_below(layer, folder)]


def folders_of(layers: Iterable[Layer]) -> List[str]:
    """Every folder that was made for the layers' files, sorted."""
    return sorted({folder for layer in layers for folder in layer.get("folders", [])})


def _is_below(layer: Layer, folder: str) -> bool:
    return any(item["path"].startswith(folder + "/") for item in layer["files"])


# --- going back to what a layer replaced


def generations(old: Layer, transaction: str, time: str) -> List[Layer]:
    """What a layer that replaces ``old`` keeps as ``replaced``: it, and what it had replaced itself."""
    past = {key: value for key, value in old.items() if key != "replaced"}
    past["replaced_by"] = {"transaction": transaction, "time": time}
    return [past, *old.get("replaced", [])][:KEEP_GENERATIONS]


def ways_back(layers: List[Layer], name: str, engine: Optional[str], look: Look) -> List[str]:
    """The versions that the set can go back to now, newest first. ``look``: what stands at a path on disk."""
    taken = built_on(layers, [name])
    mine = next((layer for layer in taken if layer["set"] == name), None)
    if mine is None or taken[0] is not mine:
        return []
    versions = dict.fromkeys(past["version"] for past in mine.get("replaced", []))
    return [version for version in versions if _find_past(layers, taken, version, engine, look)[0] is not None]


def put_back(
    layers: List[Layer], taken: List[Layer], version: str, engine: Optional[str], look: Look
) -> Tuple[List[Layer], List[Layer]]:
    """The layers to put on in place of ``taken`` (a set's layer, and those that build on it) so that the set goes
    back to ``version``; and those of ``taken`` that nothing takes the place of.

    Whatever builds on the set goes back to how it was on that version, or away if it was not there then.
    Raises AgentError DD115 when the host keeps no such version, or what it was applied to is no longer there.
    """
    mine = taken[0]
    target, why = _find_past(layers, taken, version, engine, look)
    if target is None:
        known = ways_back(layers, mine["set"], engine, look)
        raise AgentError(
            "DD115",
            "%s cannot go back to %s: %s" % (mine["set"], version, why),
            "versions to go back to: " + ", ".join(known) if known else "`apply` brings any version that you have",
        )
    state = _without(layers, taken)
    on: List[Layer] = [_again(target, mine)]
    away: List[Layer] = []
    _add(state, target)
    for layer in taken[1:]:
        past = next((item for item in layer.get("replaced", []) if _when(item) == _when(target)), None)
        gone = {item["set"] for item in away}
        if past is None or gone & set(past["requires"]) or _misfits(past, state, look):
            away.append(layer)
        else:
            on.append(_again(past, layer))
            _add(state, past)
    return on, away


def _find_past(
    layers: List[Layer], taken: List[Layer], version: str, engine: Optional[str], look: Look
) -> Tuple[Optional[Layer], str]:
    """The newest replaced layer of that version that can be put back, or None and why not."""
    mine = taken[0]
    why = "that is the version in force" if version == mine["version"] else "this host keeps no such version"
    names = {layer["set"] for layer in layers if layer not in taken}
    for past in mine.get("replaced", []):
        # A version may have been replaced by another content of the same version.
        if past["version"] != version or (past["version"], past["digest"]) == (mine["version"], mine["digest"]):
            continue
        made_for = (past.get("install") or {}).get("version")
        lacking = [name for name in past["requires"] if name not in names]
        wrong = _misfits(past, _without(layers, taken), look)
        if made_for != engine:
            why = "it was applied to sglang %s, and this is %s" % (made_for, engine)
        elif lacking:
            why = "it requires %s, which is not applied" % ", ".join(lacking)
        elif wrong:
            why = "%s is not as it was before that version" % ", ".join(wrong)
        else:
            return past, ""
    return None, why


def _when(past: Layer) -> str:
    return str(past["replaced_by"]["transaction"])


def _again(past: Layer, now: Layer) -> Layer:
    """A replaced layer as it is put back: it can still go back to what it had replaced itself."""
    chain = now.get("replaced", [])
    layer = {key: value for key, value in past.items() if key != "replaced_by"}
    layer["replaced"] = chain[chain.index(past) + 1 :]
    return layer


def _without(layers: List[Layer], taken: List[Layer]) -> Dict[str, Entry]:
    """What the recorded paths hold once ``taken`` are off."""
    return {**top_entries(layer for layer in layers if layer not in taken), **bottom_entries(taken)}


def _misfits(layer: Layer, state: Dict[str, Entry], look: Look) -> List[str]:
    """The layer's paths that do not hold what it was applied to."""
    return [
        item["path"]
        for item in layer["files"]
        if not same(item["before"], state[item["path"]] if item["path"] in state else look(item["path"]))
    ]


def _add(state: Dict[str, Entry], layer: Layer) -> None:
    for item in layer["files"]:
        state[item["path"]] = item["after"]
