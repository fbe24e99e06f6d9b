"""The operations that say how a tree stands and write nothing: status, stored contents, history, outcome."""

from __future__ import annotations

import os
from typing import Any, Dict

from . import processes
from .call import Call
from .layers import top_entries, ways_back
from .protocol import AgentError
from .root import Root
from .site import Site, quiet_entry
from .state import check_id
from .tree import Entry, Tree, check_path, file_entry, local_name, same


def run_status(call: Call) -> Dict[str, Any]:
    """How the root stands: record, entries of the recorded and the asked ``paths``, processes, interruption.

    ``sets``: names of sets whose recorded files count as asked for.
    With ``contents``, a message ``{"contents": [path, ...]}`` and then the bytes of those files, in this order;
    for a link, with ``break_links``, those of the file that it leads to, whose mode is in ``linked``.
    With ``survey``, ``record``: what of the engine's folders is not as it should be; see the baseline module.
    ``survivors``: the files that lost sets added and that still stand. ``back``: set -> the versions that
    ``rollback --to`` takes, newest first.
    """
    site = Site(call)
    layers = site.state.record()["layers"]
    top = top_entries(layers)
    asked = [check_path(path, site.root.package) for path in call.request.get("paths") or []]
    names = set(call.request.get("sets") or [])
    asked += sorted({item["path"] for layer in layers if layer["set"] in names for item in layer["files"]} - set(asked))
    linked: Dict[str, Dict[str, Any]] = {}
    with Tree(site.root.site) as tree:
        entries = {path: quiet_entry(tree, path) for path in sorted(set(top) | set(asked))}
        if call.request.get("contents"):
            linked = _send_contents(call, tree, {path: entries[path] for path in asked})
        lost = [layer["set"] for layer in layers if site.is_lost(tree, layers, layer)]
        survivors = [item["path"] for item in site.survivors(tree, layers, lost, layers)]
        back = {
            layer["set"]: ways_back(layers, layer["set"], site.root.version, lambda path: quiet_entry(tree, path))
            for layer in layers
            if layer["set"] not in lost
        }
    holder = site.state.holder()
    journal = None if holder else site.state.interrupted()
    history = site.state.history()
    return {
        "root": site.root.describe(),
        "state_dir": site.state.folder if site.state.exists else None,
        "layers": layers,
        "reinstalled": lost,
        "survivors": survivors,
        "back": back,
        "entries": entries,
        "linked": linked,
        "record": _survey(site.root) if call.request.get("survey") else None,
        "processes": processes.running(site.root),
        "holder": holder,
        "interrupted": journal["history"] if journal else None,
        "last": history[-1] if history else None,
    }


def _survey(root: Root) -> Dict[str, Any]:
    from .baseline import survey  # travels only where it is asked for

    return survey(root)


def _send_contents(call: Call, tree: Tree, listed: Dict[str, Entry]) -> Dict[str, Dict[str, Any]]:
    """Send the bytes of the listed files; returns the entries of the files that links lead to, if asked for."""
    linked: Dict[str, Dict[str, Any]] = {}
    pieces = []
    for path, entry in listed.items():
        if entry is None or entry["kind"] == "other":
            continue
        if entry["kind"] == "link":
            if not call.request.get("break_links"):
                continue
            linked[path], data = _behind_link(tree, path, os.path.basename(path))
        else:
            now, _info, data = tree.entry(path)
            if not same(now, entry):
                raise AgentError("DD403", "%s changed while it was read" % path, "run the command again")
        pieces.append((path, data))
    call.message({"contents": [path for path, _data in pieces]})
    for _path, data in pieces:
        call.data(data)
    return linked


def _behind_link(tree: Tree, path: str, target: str) -> Any:
    """Entry and bytes of the file that a link at ``path`` to ``target`` leads to."""
    where = os.path.join(tree.site, local_name(os.path.dirname(path)), local_name(target))
    try:
        with open(where, "rb") as handle:
            data = handle.read()
            return file_entry(data, os.fstat(handle.fileno()).st_mode & 0o7777), data
    except OSError as error:
        raise AgentError("DD509", "%s leads nowhere: %s" % (path, error.strerror)) from None


def run_stored(call: Call) -> Dict[str, Any]:
    """Contents that the record names: ``wanted``, a list of ``{"path", "entry"}``, as some layer has it.

    Sends a message ``{"contents": [index in wanted, ...]}`` and then the bytes, in this order; for a link those
    that it leads to, whose entry is in ``linked``, by index. ``missing``: index -> why it cannot be had any more.
    """
    site = Site(call)
    recorded = [item for layer in site.state.record()["layers"] for item in layer["files"]]
    linked: Dict[str, Dict[str, Any]] = {}
    missing: Dict[str, str] = {}
    pieces = []
    with Tree(site.root.site) as tree:
        for index, one in enumerate(call.request.get("wanted") or []):
            path, entry = one["path"], one["entry"]
            known = [end for item in recorded if item["path"] == path for end in (item["before"], item["after"])]
            if entry is None or entry not in known:
                raise AgentError("DD502", "%s: the record changed since it was read" % path, "run the command again")
            try:
                if entry["kind"] == "link":
                    linked[str(index)], data = _behind_link(tree, path, entry["target"])
                else:
                    data = site.state.object(entry["sha256"])
            except AgentError as error:
                missing[str(index)] = error.message
                continue
            pieces.append((index, data))
    call.message({"contents": [index for index, _data in pieces]})
    for _index, data in pieces:
        call.data(data)
    return {"linked": linked, "missing": missing}


def run_history(call: Call) -> Dict[str, Any]:
    """Every operation that this root has seen, oldest first."""
    site = Site(call)
    return {"root": site.root.describe(), "state_dir": site.state.folder, "history": site.state.history()}


def run_outcome(call: Call) -> Dict[str, Any]:
    """What became of ``transaction``: "unknown" (it never began), "committed", "undone", "running", "interrupted"."""
    site = Site(call)
    wanted = check_id(call.request.get("transaction"))
    holder = site.state.holder()
    journal = site.state.journal(wanted)
    if journal is None:
        outcome = "running" if holder else "unknown"
    elif journal["state"] in ("committed", "undone"):
        outcome = journal["state"]
    else:
        outcome = "running" if holder else "interrupted"
    result: Dict[str, Any] = {"outcome": outcome, "files": {}, "state_dir": site.state.folder}
    if outcome == "committed" and journal is not None:
        with Tree(site.root.site) as tree:
            result["files"] = {item["path"]: tree.entry(item["path"])[0] for item in journal["operations"]}
    return result
