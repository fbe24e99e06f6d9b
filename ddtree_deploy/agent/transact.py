"""The operations that change a tree: apply, and recover after a crash; rollback is in a module of its own.

The agent knows nothing of diffs. It replaces files whose entry is as expected, all or none, and keeps the
applied sets as layers; see the layers module.
"""

from __future__ import annotations

from typing import Any, Dict, List

from .call import Call
from .commit import Transaction, check_compiles, say, uninterrupted
from .layers import Layer, built_on, changes_off, changes_on, compose, folders_of, generations, identity, inherit
from .protocol import AgentError
from .site import Site, text
from .state import State
from .tree import Entry, Tree, check_path, file_entry, same


def carry_out(site: Site, tree: Tree, journal: Dict[str, Any], contents: Dict[str, bytes]) -> Dict[str, Any]:
    """Drive one transaction to its end; returns what was read back. Raises AgentError after undoing."""
    transaction = Transaction(site.root, tree, site.state, journal)
    return transaction.carry_out(contents, lambda: site.call.progress(0, 1, "importing the patched modules"))


def _check_entry(value: Any, contents: Dict[str, bytes], state: State, path: str) -> Entry:
    if value is None:
        return None
    if isinstance(value, dict) and value.get("kind") == "link" and isinstance(value.get("target"), str):
        return {"kind": "link", "target": value["target"]}
    ok = (
        isinstance(value, dict)
        and value.get("kind") == "file"
        and isinstance(value.get("mode"), int)
        and 0 <= value["mode"] <= 0o7777
    )
    if not ok:
        raise AgentError("DD307", "%s: not an entry: %r" % (path, value))
    data = contents.get(value.get("sha256"))
    if data is None:
        data = contents[value["sha256"]] = state.object(value["sha256"])
    return file_entry(data, value["mode"])


def _planned_layers(site: Site, tree: Tree, contents: Dict[str, bytes]) -> List[Layer]:
    """The request's layers, validated afresh: the client's word is not taken for paths or hashes."""
    layers = []
    for given in site.call.request.get("layers") or []:
        files, seen = [], set()
        for item in given.get("files") or []:
            path = check_path(item.get("path"), site.root.package)
            if path in seen:
                raise AgentError("DD307", "%s: twice in one layer" % path)
            seen.add(path)
            before, after = item.get("before"), item.get("after")
            if isinstance(before, dict) and before.get("kind") == "file" and before.get("sha256") not in contents:
                current, _info, data = tree.entry(path)
                if current and current.get("sha256") == before.get("sha256"):
                    contents[current["sha256"]] = data
            files.append(
                {
                    "path": path,
                    "before": _check_entry(before, contents, site.state, path),
                    "after": _check_entry(after, contents, site.state, path),
                }
            )
        layers.append(
            {
                "set": text(given.get("set"), 100),
                "version": text(given.get("version"), 100),
                "digest": text(given.get("digest"), 100),
                "family": text(given.get("family"), 100) or None,
                "requires": [text(name, 100) for name in given.get("requires") or []],
                "files": files,
            }
        )
    return layers


def run_apply(call: Call) -> Dict[str, Any]:
    """Apply layers: ``layers`` (bottom first), ``drop`` (names of recorded sets that they replace, with all that
    builds on these), ``expect`` (its ``identity`` for every recorded layer, as planned on), ``engine``, ``live``,
    ``smoke``, ``break_links``.

    Every file goes from what it is to what it shall be in one step: what a replaced layer did is undone in the
    books alone.
    """
    site = Site(call)
    site.check_interpreter()
    with site.exclusive("apply") as tree:
        site.check_not_interrupted()
        recorded = site.state.record()["layers"]
        if [identity(layer) for layer in recorded] != call.request.get("expect") or (
            site.root.version != call.request.get("engine")
        ):
            raise AgentError("DD502", "the host changed since it was planned", "run the command again")
        contents = dict(call.blobs)
        layers = _planned_layers(site, tree, contents)
        taken = _taken(recorded, set(call.request.get("drop") or []))
        kept = [layer for layer in recorded if layer not in taken]
        if not layers and not taken:
            raise AgentError("DD307", "nothing to apply")
        twice = {layer["set"] for layer in kept} & {layer["set"] for layer in layers}
        if twice:
            raise AgentError(
                "DD114",
                "already recorded here: %s" % ", ".join(sorted(twice)),
                "roll back first; where its files were undone by hand, with --force",
            )
        lost = [layer["set"] for layer in recorded if site.is_lost(tree, recorded, layer)]
        left = site.survivors(tree, recorded, lost, taken)
        off = [*left, *changes_off([layer for layer in taken if layer["set"] not in lost])]
        operations = compose([*off, *changes_on(layers)])
        contents.update(_read(tree, operations))
        found = site.check_idle() if any(not same(item["before"], item["after"]) for item in operations) else []
        _check_links(call, operations)
        history = site.history_line("apply", _said(layers, taken, lost))
        journal = site.journal(history, operations, kept + layers)
        for item in journal["operations"]:
            if item["after"] and item["after"]["kind"] == "file" and item["after"]["sha256"] not in contents:
                contents[item["after"]["sha256"]] = site.state.object(item["after"]["sha256"])
        check_compiles(journal["operations"], contents)
        old = {layer["set"]: layer for layer in taken}
        for layer in layers:
            layer.update(
                transaction=history["id"],
                time=history["time"],
                who=history["who"],
                reason=history["reason"],
                install=site.root.fingerprint(),
            )
            if layer["set"] in old:
                layer["replaced"] = generations(old[layer["set"]], history["id"], history["time"])
        inherit(layers, taken)
        journal["emptied"] = folders_of(taken)
        result = carry_out(site, tree, journal, contents)
        result["processes"] = found
        return result


def _taken(recorded: List[Layer], names: Any) -> List[Layer]:
    """The recorded layers of these sets. Raises AgentError DD307 where others would be left standing on them."""
    taken = [layer for layer in recorded if layer["set"] in names]
    left = [layer["set"] for layer in built_on(recorded, names) if layer not in taken]
    if left:
        raise AgentError("DD307", "%s would be left without what it builds on" % ", ".join(left))
    return taken


def _read(tree: Tree, operations: List[Dict[str, Any]]) -> Dict[str, bytes]:
    """The bytes of every file concerned, by sha256. Raises AgentError DD502 for one that is not as planned on."""
    contents: Dict[str, bytes] = {}
    wrong = []
    for item in operations:
        entry, _info, data = tree.entry(item["path"])
        if not same(entry, item["before"]):
            wrong.append("%s: planned on %s, found %s" % (item["path"], say(item["before"]), say(entry)))
        elif entry is not None and entry["kind"] == "file":
            contents[entry["sha256"]] = data
    if wrong:
        raise AgentError("DD502", "the tree changed since it was planned", "run the command again", wrong)
    return contents


def _check_links(call: Call, operations: List[Dict[str, Any]]) -> None:
    linked = [item for item in operations if item["before"] and item["before"]["kind"] != "file"]
    if linked and not call.request.get("break_links"):
        raise AgentError(
            "DD509",
            "%d file(s) are symbolic links" % len(linked),
            "--break-links replaces the links by patched copies and leaves what they point to",
            ["%s -> %s" % (item["path"], item["before"].get("target")) for item in linked],
        )


def _said(layers: List[Layer], taken: List[Layer], lost: List[str]) -> List[Dict[str, Any]]:
    """The sets as the history tells them: see :meth:`Site.history_line`."""
    old = {layer["set"]: layer["version"] for layer in taken if layer["set"] not in lost}
    said: List[Dict[str, Any]] = []
    for layer in layers:
        before = old.pop(layer["set"], layer["version"])
        said.append({"name": layer["set"], "version": layer["version"]})
        if before != layer["version"]:
            said[-1]["from"] = before
    return said + [{"name": name, "version": version, "undone": True} for name, version in old.items()]


def run_recover(call: Call) -> Dict[str, Any]:
    """Finish or undo the interrupted transaction, if there is one. ``force``: over foreign edits, saving them."""
    site = Site(call)
    if not site.state.exists:
        return {"action": "nothing", "paths": [], "notes": []}
    site.check_interpreter()
    with site.exclusive("recover") as tree:
        journal = site.state.interrupted()
        if journal is None:
            return {"action": "nothing", "paths": [], "notes": []}
        transaction = Transaction(site.root, tree, site.state, journal)
        with uninterrupted():
            if call.request.get("force"):
                action, paths = "undone", transaction.force_undo()
            else:
                action, paths = transaction.recover()
        return {
            "action": action,
            "paths": paths,
            "notes": transaction.notes,
            "transaction": journal["id"],
            "history": journal["history"],
        }
