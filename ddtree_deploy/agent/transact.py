"""The operations that change a tree, and those that say how it stands: apply, rollback, recover, status.

The agent knows nothing of diffs. It replaces files whose entry is as expected, all or none, and keeps the
applied sets as *layers*, oldest first: each with the entries before and after of every file of the set.
What stands on disk is the after of the topmost layer that holds the path.
"""

from __future__ import annotations

import contextlib
import difflib
import getpass
import os
import signal
from typing import Any, Dict, Iterator, List

from . import processes
from .call import Call
from .commit import Transaction, check_compiles
from .protocol import AgentError
from .root import Root, locate
from .state import State, check_id, utc_now
from .tree import Entry, Tree, check_path, file_entry, local_name, same

DIFF_LINES = 200
RECOVER_HINT = "run `ddtree-deploy recover`: it finishes or undoes it, and says which"


def _text(value: Any, limit: int = 400) -> str:
    return value[:limit] if isinstance(value, str) else ""


def _who(call: Call) -> str:
    claimed = _text(call.request.get("who")) or "someone"
    account = os.environ.get("SUDO_USER") or os.environ.get("LOGNAME")
    if not account:
        try:
            account = getpass.getuser()
        except (KeyError, OSError):
            account = "uid %d" % os.getuid()
    return "%s as %s" % (claimed, account)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let no hang-up or Ctrl-C stop a commit half-way: it takes milliseconds, and undoing it takes more."""
    kinds = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(kind, signal.SIG_IGN) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, old):
            signal.signal(kind, handler)


class _Site:
    """Root, state and open tree of one call."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.root: Root = locate(call.request)
        self.state = State(self.root, call.request.get("state_dir"))

    @contextlib.contextmanager
    def exclusive(self, command: str) -> Iterator[Tree]:
        """The tree, with the lock held. Until something is written, a signal or a client that goes away ends it."""
        who = {"who": _who(self.call), "command": command}
        wait = float(self.call.request.get("wait") or 0)
        with self.state.lock(who, wait, self.call.client_gone), Tree(self.root.site) as tree:
            yield tree

    def check_interpreter(self) -> None:
        why = self.root.foreign_python()
        if why:
            raise AgentError("DD312", why, "name the engine's own interpreter: --python, or python in the inventory")

    def check_idle(self) -> List[Dict[str, Any]]:
        """The engine processes of the root. Raises AgentError DD507 if there are any and ``live`` is not set."""
        found = processes.running(self.root)
        certain = [item for item in found if item["certain"]]
        if certain and not self.call.request.get("live"):
            raise AgentError(
                "DD507",
                "%d process(es) run from %s" % (len(certain), self.root.site),
                "stop the service first, or give --live: modules imported later would be of the other version",
                ["pid %d (%s): %s" % (item["pid"], item["why"], item["command"]) for item in certain],
            )
        return found

    def check_not_interrupted(self) -> None:
        journal = self.state.interrupted()
        if journal:
            raise AgentError(
                "DD503",
                "transaction %s (%s) was interrupted" % (journal["id"], journal["history"].get("kind")),
                RECOVER_HINT,
            )


def _history(call: Call, kind: str, root: Root, sets: List[Dict[str, Any]]) -> Dict[str, Any]:
    return {
        "id": check_id(call.request.get("transaction")),
        "kind": kind,
        "time": utc_now(),
        "who": _who(call),
        "reason": _text(call.request.get("reason")) or None,
        "client": _text(call.request.get("client"), 60),
        "engine": root.version,
        "sets": sets,
    }


def _set_name(layer: Dict[str, Any]) -> Dict[str, Any]:
    return {"name": layer["set"], "version": layer["version"]}


def _run(site: _Site, tree: Tree, journal: Dict[str, Any], contents: Dict[str, bytes]) -> Dict[str, Any]:
    """Drive one transaction to its end; returns what was read back. Raises AgentError after undoing."""
    transaction = Transaction(site.root, tree, site.state, journal)
    with _uninterrupted():
        transaction.prepare(contents)
        try:
            transaction.stage()
        except BaseException:
            transaction.abort()
            raise
        try:
            transaction.replace()
            transaction.verify()
            transaction.refresh_bytecode()
            if journal["smoke"]:
                site.call.progress(0, 1, "importing the patched modules")
                transaction.smoke()
            transaction.commit()
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the tree goes back
            transaction.undo("undone: %s" % error)
            raise AgentError(
                "DD505",
                "the transaction was undone: %s" % error,
                "every file was read back and is as before",
                getattr(error, "details", []),
            ) from None
        transaction.close()
    return {
        "transaction": journal["id"],
        "files": {item["path"]: tree.entry(item["path"])[0] for item in transaction.operations},
        "notes": transaction.notes,
        "state_dir": site.state.folder,
    }


def _journal(
    site: _Site, history: Dict[str, Any], operations: List[Dict[str, Any]], layers: List[Any]
) -> Dict[str, Any]:
    return {
        "id": history["id"],
        "state": "new",
        "history": history,
        "operations": operations,
        "record": {"layers": layers},
        "folders": [],
        "emptied": [],
        "smoke": bool(site.call.request.get("smoke")),
    }


# --- apply


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
        data = state.object(value["sha256"])
    return file_entry(data, value["mode"])


def _planned_layers(site: _Site, tree: Tree, contents: Dict[str, bytes]) -> List[Dict[str, Any]]:
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
                "set": _text(given.get("set"), 100),
                "version": _text(given.get("version"), 100),
                "digest": _text(given.get("digest"), 100),
                "family": _text(given.get("family"), 100) or None,
                "requires": [_text(name, 100) for name in given.get("requires") or []],
                "files": files,
            }
        )
    if not layers:
        raise AgentError("DD307", "nothing to apply")
    return layers


def _compose(layers: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """One operation a path out of consecutive layers; each layer's before must be the after below it."""
    operations: Dict[str, Dict[str, Any]] = {}
    for layer in layers:
        for item in layer["files"]:
            below = operations.setdefault(
                item["path"], {"path": item["path"], "before": item["before"], "after": item["before"]}
            )
            if not same(below["after"], item["before"]):
                raise AgentError("DD307", "%s: the layers do not follow on from one another" % item["path"])
            below["after"] = item["after"]
    return [item for item in operations.values() if not same(item["before"], item["after"])]


def run_apply(call: Call) -> Dict[str, Any]:
    """Apply layers: ``layers`` (bottom first), ``drop`` (names of recorded layers that they replace),
    ``expect`` ([set, version] of every recorded layer, as planned on), ``engine``, ``live``, ``smoke``.
    """
    site = _Site(call)
    site.check_interpreter()
    with site.exclusive("apply") as tree:
        site.check_not_interrupted()
        record = site.state.record()
        recorded = [[layer["set"], layer["version"]] for layer in record["layers"]]
        if recorded != call.request.get("expect") or site.root.version != call.request.get("engine"):
            raise AgentError("DD502", "the host changed since it was planned", "run the command again")
        found = site.check_idle()
        contents = dict(call.blobs)
        layers = _planned_layers(site, tree, contents)
        operations = _compose(layers)
        linked = [item for item in operations if item["before"] and item["before"]["kind"] != "file"]
        if linked and not call.request.get("break_links"):
            raise AgentError(
                "DD509",
                "%d file(s) are symbolic links" % len(linked),
                "--break-links replaces the links by patched copies and leaves what they point to",
                ["%s -> %s" % (item["path"], item["before"].get("target")) for item in linked],
            )
        check_compiles(operations, contents)
        drop = set(call.request.get("drop") or [])
        history = _history(call, "apply", site.root, [_set_name(layer) for layer in layers])
        for layer in layers:
            layer.update(
                transaction=history["id"],
                time=history["time"],
                who=history["who"],
                reason=history["reason"],
                install=site.root.fingerprint(),
            )
        kept = [layer for layer in record["layers"] if layer["set"] not in drop]
        twice = {layer["set"] for layer in kept} & {layer["set"] for layer in layers}
        if twice:
            raise AgentError("DD114", "already recorded here: %s" % ", ".join(sorted(twice)), "roll back first")
        journal = _journal(site, history, operations, kept + layers)
        result = _run(site, tree, journal, contents)
        result["processes"] = found
        return result


# --- rollback


def _layers_to_remove(layers: List[Dict[str, Any]], name: str, dependents: bool) -> List[Dict[str, Any]]:
    """The set's layer and, above it, all that builds on it: that requires it or holds one of its files."""
    named = [index for index, layer in enumerate(layers) if layer["set"] == name]
    if not named:
        applied = ", ".join(layer["set"] for layer in layers) or "none"
        raise AgentError("DD111", "%s is not applied here" % name, "applied sets: %s" % applied)
    removed = [layers[named[-1]]]
    for layer in layers[named[-1] + 1 :]:
        names = {item["set"] for item in removed}
        paths = {file["path"] for item in removed for file in item["files"]}
        if names & set(layer["requires"]) or paths & {file["path"] for file in layer["files"]}:
            removed.append(layer)
    if len(removed) > 1 and not dependents:
        raise AgentError(
            "DD110",
            "%s builds on %s" % (", ".join(layer["set"] for layer in removed[1:]), name),
            "roll that back first, or give --with-dependents to undo all in order",
        )
    return removed


def _rollback_operations(removed: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    operations: Dict[str, Dict[str, Any]] = {}
    for layer in removed:
        for item in layer["files"]:
            operation = operations.setdefault(item["path"], {"path": item["path"], "after": item["before"]})
            operation["before"] = item["after"]
            operation.setdefault("owner", item.get("owner"))
    return [item for item in operations.values() if not same(item["before"], item["after"])]


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


def run_rollback(call: Call) -> Dict[str, Any]:
    """Undo a set: ``set``, ``with_dependents``, ``force``, ``live``, ``smoke``; needs the host's state alone."""
    site = _Site(call)
    site.check_interpreter()
    name = _text(call.request.get("set"), 100)
    force = bool(call.request.get("force"))
    with site.exclusive("rollback") as tree:
        site.check_not_interrupted()
        record = site.state.record()
        removed = _layers_to_remove(record["layers"], name, bool(call.request.get("with_dependents")))
        operations = _rollback_operations(removed)
        history = _history(call, "rollback", site.root, [_set_name(layer) for layer in reversed(removed)])
        kept = [layer for layer in record["layers"] if layer not in removed]
        lost = [layer for layer in removed if _reinstalled(site, tree, record["layers"], layer)]
        if lost and not force:
            raise AgentError(
                "DD113",
                "sglang was reinstalled (now %s) since %s was applied: nothing of it is left to undo"
                % (site.root.version, ", ".join(layer["set"] for layer in lost)),
                "`rollback --force` forgets the set and touches no file; `apply` puts it back",
            )
        if len(lost) == len(removed):
            operations = []
        saved = _settle_drift(site, tree, operations, history["id"], force)
        operations = [item for item in operations if not same(item["before"], item["after"])]
        found = site.check_idle() if operations else []
        journal = _journal(site, history, operations, kept)
        journal["emptied"] = sorted({folder for layer in removed for folder in layer.get("folders", [])})
        result = _run(site, tree, journal, {})
        result.update(
            processes=found,
            saved=saved,
            removed=[_set_name(layer) for layer in reversed(removed)],
            left=[_set_name(layer) for layer in kept],
        )
        return result


def _settle_drift(
    site: _Site, tree: Tree, operations: List[Dict[str, Any]], transaction: str, force: bool
) -> List[str]:
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


# --- how it stands


def _top_entries(layers: List[Dict[str, Any]]) -> Dict[str, Entry]:
    """What each recorded path should be on disk: the after of the topmost layer that holds it."""
    return {item["path"]: item["after"] for layer in layers for item in layer["files"]}


def _reinstalled(site: _Site, tree: Tree, layers: List[Dict[str, Any]], layer: Dict[str, Any]) -> bool:
    """Whether a new install took a layer away: another install, and none of the layer's files as we left it."""
    if layer.get("install") == site.root.fingerprint():
        return False
    top = _top_entries(layers)
    # Added files survive a reinstall, so those that the package itself brings decide.
    brought = [item["path"] for item in layer["files"] if item["before"] is not None]
    paths = brought or [item["path"] for item in layer["files"]]
    return not any(same(_quiet_entry(tree, path), top[path]) for path in paths)


def run_status(call: Call) -> Dict[str, Any]:
    """How the root stands: record, entries of the recorded and the asked ``paths``, processes, interruption.

    ``sets``: names of sets whose recorded files count as asked for.
    With ``contents``, a message ``{"contents": [path, ...]}`` and then the bytes of those files, in this order;
    for a link, with ``break_links``, those of the file that it leads to, whose mode is in ``linked``.
    With ``survey``, ``record``: what of the engine's folders is not as the installer's RECORD says.
    """
    site = _Site(call)
    record = site.state.record()
    top = _top_entries(record["layers"])
    asked = [check_path(path, site.root.package) for path in call.request.get("paths") or []]
    names = set(call.request.get("sets") or [])
    asked += sorted(
        {item["path"] for layer in record["layers"] if layer["set"] in names for item in layer["files"]} - set(asked)
    )
    linked: Dict[str, Dict[str, Any]] = {}
    with Tree(site.root.site) as tree:
        entries = {path: _quiet_entry(tree, path) for path in sorted(set(top) | set(asked))}
        if call.request.get("contents"):
            linked = _send_contents(call, tree, {path: entries[path] for path in asked})
        lost = [layer["set"] for layer in record["layers"] if _reinstalled(site, tree, record["layers"], layer)]
    holder = site.state.holder()
    journal = None if holder else site.state.interrupted()
    history = site.state.history()
    return {
        "root": site.root.describe(),
        "state_dir": site.state.folder if site.state.exists else None,
        "layers": record["layers"],
        "reinstalled": lost,
        "entries": entries,
        "linked": linked,
        "record": _survey(site.root) if call.request.get("survey") else None,
        "processes": processes.running(site.root),
        "holder": holder,
        "interrupted": journal["history"] if journal else None,
        "last": history[-1] if history else None,
    }


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
            try:
                with open(os.path.join(tree.site, local_name(path)), "rb") as handle:
                    data = handle.read()
                    linked[path] = file_entry(data, os.fstat(handle.fileno()).st_mode & 0o7777)
            except OSError as error:
                raise AgentError("DD509", "%s leads nowhere: %s" % (path, error.strerror)) from None
        else:
            now, _info, data = tree.entry(path)
            if not same(now, entry):
                raise AgentError("DD403", "%s changed while it was read" % path, "run the command again")
        pieces.append((path, data))
    call.message({"contents": [path for path, _data in pieces]})
    for _path, data in pieces:
        call.data(data)
    return linked


def _survey(root: Root) -> Dict[str, Any]:
    """The engine's folders against RECORD: its state, and the paths that differ, are not listed, are missing."""
    from .manifest import Manifest

    manifest = Manifest(root, False)
    found: Dict[str, List[str]] = {"differs": [], "unlisted": []}
    for scan in manifest.scan():
        verdict = scan.entry.get("record")
        if verdict in found:
            found[verdict].append(scan.entry["path"])
    summary: Dict[str, Any] = manifest.facts["record"]
    return dict(summary, files=manifest.count, tree=manifest.tree, **found)


def _quiet_entry(tree: Tree, path: str) -> Entry:
    try:
        return tree.entry(path)[0]
    except AgentError as error:
        return {"kind": "other", "why": str(error)}


def run_history(call: Call) -> Dict[str, Any]:
    """Every operation that this root has seen, oldest first."""
    site = _Site(call)
    return {"root": site.root.describe(), "state_dir": site.state.folder, "history": site.state.history()}


def run_outcome(call: Call) -> Dict[str, Any]:
    """What became of ``transaction``: "unknown" (it never began), "committed", "undone", "running", "interrupted"."""
    site = _Site(call)
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


def run_recover(call: Call) -> Dict[str, Any]:
    """Finish or undo the interrupted transaction, if there is one. ``force``: over foreign edits, saving them."""
    site = _Site(call)
    if not site.state.exists:
        return {"action": "nothing", "paths": [], "notes": []}
    site.check_interpreter()
    with site.exclusive("recover") as tree:
        journal = site.state.interrupted()
        if journal is None:
            return {"action": "nothing", "paths": [], "notes": []}
        transaction = Transaction(site.root, tree, site.state, journal)
        with _uninterrupted():
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
