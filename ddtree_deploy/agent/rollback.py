"""The operation ``rollback``: a set goes, or goes back to the version that it replaced, by the host's state alone."""

from __future__ import annotations

import difflib
from typing import Any, Dict, List

from .call import Call
from .layers import Layer, built_on, changes_off, changes_on, compose, folders_of, put_back
from .protocol import AgentError
from .site import Site, quiet_entry, text
from .transact import carry_out
from .tree import Tree, same

DIFF_LINES = 200


def run_rollback(call: Call) -> Dict[str, Any]:
    """Undo a set: ``set``, ``to`` (an earlier version, to put in its place), ``with_dependents``, ``force``,
    ``live``, ``smoke``.
    """
    site = Site(call)
    site.check_interpreter()
    name, to = text(call.request.get("set"), 100), text(call.request.get("to"), 100)
    force = bool(call.request.get("force"))
    with site.exclusive("rollback") as tree:
        site.check_not_interrupted()
        recorded = site.state.record()["layers"]
        taken = _taken(recorded, name)
        kept = [layer for layer in recorded if layer not in taken]
        lost = [layer for layer in taken if site.is_lost(tree, recorded, layer)]
        if lost and (to or not force):
            raise AgentError(
                "DD113",
                "sglang was reinstalled (now %s) since %s was applied: nothing of it is left to undo"
                % (site.root.version, ", ".join(layer["set"] for layer in lost)),
                "`rollback --force` forgets the set and removes what it added; `apply` puts it back",
            )
        on: List[Layer] = []
        away = taken
        if to:
            on, away = put_back(recorded, taken, to, site.root.version, lambda path: quiet_entry(tree, path))
        _check_dependents(taken, to, bool(call.request.get("with_dependents")))
        off = list(changes_off(taken))
        if len(lost) == len(taken):
            every = [layer["set"] for layer in recorded if site.is_lost(tree, recorded, layer)]
            off = site.survivors(tree, recorded, every, taken)
        operations = compose([*off, *changes_on(on)])
        _check_contents(site, operations)
        history = site.history_line("rollback", _said(on, away, taken))
        saved = _settle_drift(site, tree, operations, history["id"], force)
        journal = site.journal(history, operations, kept + on)
        found = site.check_idle() if journal["operations"] else []
        for layer in on:
            layer["install"] = site.root.fingerprint()
        journal["emptied"] = folders_of(taken)
        result = carry_out(site, tree, journal, {})
        result.update(
            processes=found,
            saved=saved,
            back=[item for item in history["sets"] if "undone" not in item],
            removed=[_named(layer) for layer in reversed(away)],
            left=[_named(layer) for layer in kept + on],
        )
        return result


def _named(layer: Layer) -> Dict[str, Any]:
    return {"name": layer["set"], "version": layer["version"]}


def _said(on: List[Layer], away: List[Layer], taken: List[Layer]) -> List[Dict[str, Any]]:
    """The sets as the history tells them: see :meth:`Site.history_line`."""
    old = {layer["set"]: layer["version"] for layer in taken}
    said = [dict(_named(layer), **{"from": old[layer["set"]]}) for layer in on]
    return said + [dict(_named(layer), undone=True) for layer in reversed(away)]


def _taken(recorded: List[Layer], name: str) -> List[Layer]:
    taken = built_on(recorded, [name])
    if not taken:
        applied = ", ".join(layer["set"] for layer in recorded) or "none"
        raise AgentError("DD111", "%s is not applied here" % name, "applied sets: %s" % applied)
    return taken


def _check_dependents(taken: List[Layer], to: str, allowed: bool) -> None:
    if len(taken) > 1 and not allowed:
        take = "take them back to how they were on it" if to else "undo all in order"
        raise AgentError(
            "DD110",
            "%s builds on %s" % (", ".join(layer["set"] for layer in taken[1:]), taken[0]["set"]),
            "roll that back first, or give --with-dependents to %s" % take,
        )


def _check_contents(site: Site, operations: List[Dict[str, Any]]) -> None:
    """Raises AgentError DD508 where the bytes to put back are gone or damaged, before anything is touched."""
    missing = []
    for item in operations:
        if item["after"] and item["after"]["kind"] == "file" and not same(item["before"], item["after"]):
            try:
                site.state.object(item["after"]["sha256"])
            except AgentError as error:
                missing.append("%s: %s" % (item["path"], error.message))
    if missing:
        raise AgentError(
            "DD508",
            "%d file(s) cannot be put back: their content is gone from the host's state" % len(missing),
            "restore it from a backup; or reinstall sglang %s, and `rollback --force` forgets the set"
            % site.root.version,
            missing,
        )


def _settle_drift(site: Site, tree: Tree, operations: List[Dict[str, Any]], transaction: str, force: bool) -> List[str]:
    """Refuse where a file is not as we left it; with ``force`` save its bytes and take it as it is."""
    drifted, details, saved = 0, [], []
    for operation in operations:
        entry, _info, data = tree.entry(operation["path"])
        if same(entry, operation["before"]):
            continue
        drifted += 1
        if force:
            if entry is not None and entry["kind"] == "other":
                raise AgentError("DD106", "%s is no regular file any more" % operation["path"])
            if entry is not None and entry["kind"] == "file":
                saved.append(site.state.save(transaction, operation["path"], data))
            operation["before"] = entry
            continue
        expected = operation["before"]
        text = site.state.object(expected["sha256"]) if expected and expected["kind"] == "file" else b""
        difference = _difference(operation["path"], text, data)
        details.extend(difference or ["%s: its kind or mode changed" % operation["path"]])
    if details:
        raise AgentError(
            "DD101",
            "%d file(s) were edited after the set was applied" % drifted,
            "undo those edits, or give --force: the bytes that it discards are saved on the host first",
            details,
        )
    return saved


def _difference(path: str, expected: bytes, found: bytes) -> List[str]:
    lines = difflib.unified_diff(
        expected.decode("utf-8", "replace").splitlines(),
        found.decode("utf-8", "replace").splitlines(),
        path + " (as this tool left it)",
        path + " (now)",
        lineterm="",
    )
    shown: List[str] = []
    for line in lines:
        if len(shown) == DIFF_LINES:
            shown.append("... (cut after %d lines)" % DIFF_LINES)
            break
        shown.append(line)
    return shown
