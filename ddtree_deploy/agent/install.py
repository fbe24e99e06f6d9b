"""The operations on an installed service's files: look, install, go back, recover.

Each install is a layer of the service's record, the newest on top: ``files`` as in any layer, and ``service``,
what start and stop need to know of it. Installing pushes one, going back pops one, removing pops them all. The
unit is verified and loaded by the host's own systemd while the transaction can still be undone.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Tuple

from . import managers
from .call import Call
from .commit import uninterrupted
from .installation import RUNNING, Installation, check_service, summary, transaction_of
from .layers import bottom_entries, top_entries
from .protocol import AgentError
from .site import quiet_entry, text
from .state import DEFAULT_BASE, check_id
from .tree import Entry, Tree, file_entry, same
from .unitfiles import IDENTITY, masked, secrets_problems, user_base

#: Installs that can be gone back through; the oldest two become one beyond that.
KEEP_GENERATIONS = 5


# --- look


def run_unit_look(call: Call) -> Dict[str, Any]:
    """How a service stands here: ``unit``, ``paths`` of interest (from /, without the slash), ``secrets_path`` and
    ``secrets`` (names). Texts are of files that are there now, with what is named like a secret masked.
    """
    installation = Installation(call)
    layers = installation.layers()
    asked = [installation.files.check_path(path) for path in call.request.get("paths") or []]
    top = top_entries(layers)
    paths = sorted({*asked, *top})
    entries: Dict[str, Entry] = {}
    texts: Dict[str, str] = {}
    with Tree("/") as tree:
        for path in paths:
            try:
                entries[path], _info, data = tree.entry(path)
            except (AgentError, OSError) as error:
                entries[path], data = {"kind": "other", "why": str(error)}, b""
            if entries[path] is not None:
                texts[path] = masked(data.decode("utf-8", "replace"))
    holder = installation.state.holder()
    journal = None if holder else installation.state.interrupted()
    service = layers[-1].get("service") if layers else None
    return {
        "booted": managers.booted(),
        "uid": os.geteuid(),
        "entries": entries,
        "texts": texts,
        "edited": [path for path in sorted(top) if not same(entries[path], top[path])],
        "generations": [summary(layer) for layer in layers],
        "interrupted": journal["history"] if journal else None,
        "holder": holder,
        "state": installation.standing(check_service(service)) if service else None,
        "secrets": secrets_problems(call.request.get("secrets_path"), call.request.get("secrets") or []),
    }


# --- install


def _planned(installation: Installation, tree: Tree) -> List[Dict[str, Any]]:
    """The request's files with what stands there now, which must be what the client planned on."""
    call, files = installation.call, []
    for given in call.request.get("files") or []:
        path = installation.files.check_path(given.get("path"))
        data, mode = call.blobs.get(given.get("sha256") or ""), given.get("mode")
        if data is None or not isinstance(mode, int) or not 0 <= mode <= 0o777:
            raise AgentError("DD307", "%s: its content or mode is missing" % path)
        before = tree.entry(path)[0]
        if not same(before, given.get("before")):
            raise AgentError("DD502", "/%s changed since it was looked at" % path, "run the command again")
        files.append({"path": path, "before": before, "after": file_entry(data, mode)})
    if not files:
        raise AgentError("DD307", "nothing to install")
    return files


def _foreign(files: List[Dict[str, Any]], top: Dict[str, Entry]) -> List[str]:
    """Files there that are neither as we left them nor as they will be."""
    return [
        "/%s: %s" % (item["path"], "edited since it was installed" if item["path"] in top else "not of this tool")
        for item in files
        if not same(item["before"], item["after"]) and not same(item["before"], top.get(item["path"]))
    ]


def run_unit_install(call: Call) -> Dict[str, Any]:
    """Install: ``service``, ``files`` (``path``, ``before`` as seen, ``mode``, ``sha256`` of a blob), ``force``."""
    installation = Installation(call)
    service = check_service(call.request.get("service"))
    installation.check_root(service)
    with installation.exclusive("launch --install") as tree:
        installation.check_not_interrupted()
        installation.check_same_manager(service)
        layers = installation.layers()
        top = top_entries(layers)
        files = _planned(installation, tree)
        new = {item["path"] for item in files}
        # What the install before had and this one has not, such as the files of another service manager.
        for path in sorted(set(top) - new):
            before = tree.entry(path)[0]
            if before is not None:
                files.append({"path": path, "before": before, "after": None})
        foreign = _foreign(files, top)
        if foreign and not call.request.get("force"):
            raise AgentError(
                "DD603",
                "%d file(s) hold what this tool did not write" % len(foreign),
                "compare (`launch --install --check` shows the difference), then give --force: "
                "`launch --previous` brings them back",
                foreign,
            )
        if all(same(item["before"], item["after"]) for item in files) and layers:
            return {"changed": False, "files": {}, "notes": [], "state_dir": installation.state.folder}
        version = text(call.request.get("version"), 60)
        history = installation.history_line("install", [{"name": service["name"], "version": version}])
        layer = {
            "set": service["name"],
            "version": version,
            "digest": version,
            "requires": [],
            "files": files,
            "service": service,
            **{key: history[key] for key in ("time", "who", "reason")},
            "transaction": history["id"],
        }
        journal = installation.journal(history, _copies(files), _kept([*layers, layer]))
        journal["smoke"] = True
        transaction = transaction_of(installation, tree, journal)
        result = transaction.carry_out(dict(call.blobs), lambda: call.progress(0, 1, "systemd reads the unit"))
        return {"changed": True, **result}


def _copies(files: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [dict(item) for item in files]


def _kept(layers: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The layers, the oldest made one where there are too many: what was there before all of them stays known."""
    while len(layers) > KEEP_GENERATIONS:
        first, second = layers[:2]
        below, above = bottom_entries([first, second]), top_entries([first, second])
        files = [{"path": path, "before": below[path], "after": above[path]} for path in sorted(below)]
        folders = [*first.get("folders", []), *second.get("folders", [])]
        layers = [dict(second, files=files, folders=folders), *layers[2:]]
    return layers


# --- back


def run_unit_restore(call: Call) -> Dict[str, Any]:
    """Take the newest install back, or with ``all`` every one: the files are as before it. ``force``: over edits."""
    installation = Installation(call)
    everything = bool(call.request.get("all"))
    service = installation.service()
    installation.check_root(service)
    with installation.exclusive("launch --uninstall" if everything else "launch --previous") as tree:
        installation.check_not_interrupted()
        layers = installation.layers()
        removed = layers if everything else layers[-1:]
        below = bottom_entries(removed)
        after_unit = below.get(installation.unit_path)
        if not everything and len(layers) == 1 and after_unit is None:
            raise AgentError("DD607", "there was no unit before this one", "`launch --uninstall` removes it")
        manager = installation.manager(service)
        state = installation.standing(service)
        if everything and state["active"] in RUNNING:
            raise AgentError("DD605", "%s is running" % installation.files.name, "`launch --stop` first")
        operations = [
            {"path": path, "before": entry, "after": below[path]} for path, entry in top_entries(removed).items()
        ]
        saved = _settle(installation, tree, operations, call)
        kind = "uninstall" if everything else "previous"
        history = installation.history_line(
            kind, [{"name": layer["set"], "version": layer["version"]} for layer in reversed(removed)]
        )
        left = layers[: len(layers) - len(removed)]
        journal = installation.journal(history, operations, left)
        journal["smoke"] = True
        journal["emptied"] = sorted({folder for layer in removed for folder in layer.get("folders", [])})
        if not everything:
            installation.check_same_manager(check_service((layers[-2] if len(layers) > 1 else layers[-1])["service"]))
        if state["active"] == "failed":
            manager.settle()  # systemd would go on listing what is there no more
        # The links of a unit can be taken down only while it is there.
        was_enabled = after_unit is None and bool(state["enabled"])
        if was_enabled:
            manager.enable(False)
        transaction = transaction_of(installation, tree, journal)
        try:
            result = transaction.carry_out({}, lambda: call.progress(0, 1, "systemd reads its units"))
        except AgentError:
            if was_enabled:
                manager.enable(True)
            raise
        return {"saved": saved, "removed": history["sets"], "left": [summary(layer) for layer in left], **result}


def _settle(installation: Installation, tree: Tree, operations: List[Dict[str, Any]], call: Call) -> List[str]:
    """Refuse where a file is not as installed; with ``force`` keep its bytes aside and go on from them."""
    edited, saved = [], []
    for operation in operations:
        entry, _info, data = tree.entry(operation["path"])
        if same(entry, operation["before"]):
            continue
        edited.append("/%s" % operation["path"])
        if entry is not None and entry["kind"] == "file" and call.request.get("force"):
            saved.append(installation.state.save(text(call.request.get("transaction")), operation["path"], data))
        operation["before"] = entry
    if edited and not call.request.get("force"):
        raise AgentError(
            "DD101",
            "%d file(s) were edited since they were installed" % len(edited),
            "undo those edits, or give --force: what it discards is saved on the host first",
            edited,
        )
    return saved


# --- all of them


def _names(call: Call) -> Tuple[List[str], List[str]]:
    """The units that this host remembers, and notes on those that this account may not ask about."""
    chosen = call.request.get("state_dir")
    names, notes = set(), []
    for base in [chosen] if chosen else [DEFAULT_BASE, user_base()]:
        try:
            folders = os.listdir(base)
        except OSError:
            continue
        for folder in folders:
            try:
                with open(os.path.join(base, folder, "root"), encoding="utf-8", errors="surrogateescape") as handle:
                    identity = handle.read(400).rstrip("\n")
            except OSError as error:
                if isinstance(error, PermissionError) and folder.startswith(IDENTITY.replace(":", "-")):
                    notes.append("%s: %s" % (os.path.join(base, folder), error.strerror))
                continue
            if identity.startswith(IDENTITY):
                names.add(identity[len(IDENTITY) :])
    return sorted(names), notes


def run_units(call: Call) -> Dict[str, Any]:
    """Every service installed here and how it stands."""
    services: List[Optional[Dict[str, Any]]] = []
    names, notes = _names(call)
    for name in names:
        try:
            services.append(_standing(Installation(call, name)))
        except AgentError as error:
            notes.append("%s: %s" % (name, error))
    return {"services": [item for item in services if item], "notes": notes}


def _standing(installation: Installation) -> Optional[Dict[str, Any]]:
    layers = installation.layers()
    holder = installation.state.holder()
    journal = None if holder else installation.state.interrupted()
    if not layers and not journal:
        return None
    top = top_entries(layers)
    with Tree("/") as tree:
        edited = [path for path, entry in sorted(top.items()) if not same(quiet_entry(tree, path), entry)]
    service = check_service(layers[-1].get("service")) if layers else None
    return {
        "unit": installation.files.name,
        "install": summary(layers[-1]) if layers else None,
        "generations": len(layers),
        "edited": ["/" + path for path in edited],
        "state": installation.standing(service) if service else None,
        "interrupted": journal["history"] if journal else None,
        "holder": holder,
    }


def run_units_recover(call: Call) -> Dict[str, Any]:
    """Finish or undo every interrupted install, or that of ``unit`` alone. ``force``: over edits, saving them."""
    recovered = []
    asked = call.request.get("unit")
    for name in [asked] if asked else _names(call)[0]:
        installation = Installation(call, name)
        if not installation.state.exists or installation.state.interrupted() is None:
            continue
        with installation.exclusive("recover") as tree:
            journal = installation.state.interrupted()
            if journal is None:
                continue
            transaction = transaction_of(installation, tree, journal)
            with uninterrupted():
                if call.request.get("force"):
                    action, paths = "undone", transaction.force_undo()
                else:
                    action, paths = transaction.recover()
            recovered.append(
                {
                    "unit": name,
                    "action": action,
                    "paths": ["/" + path for path in paths],
                    "notes": transaction.notes,
                    "history": journal["history"],
                }
            )
    return {"recovered": recovered}


def run_unit_outcome(call: Call) -> Dict[str, Any]:
    """What became of ``transaction`` of ``unit``, as the operation ``outcome`` of a root; and what its answer was."""
    installation = Installation(call)
    transaction = check_id(call.request.get("transaction"))
    outcome = installation.outcome(transaction)
    result: Dict[str, Any] = {"outcome": outcome, "files": {}, "state_dir": installation.state.folder}
    journal = installation.state.journal(transaction) if outcome == "committed" else None
    if journal is not None:
        with Tree("/") as tree:
            result["files"] = {item["path"]: quiet_entry(tree, item["path"]) for item in journal["operations"]}
        result.update(changed=True, saved=[], removed=journal["history"]["sets"])
        result["left"] = [summary(layer) for layer in installation.layers()]
    return result
