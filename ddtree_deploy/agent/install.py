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
from .commit import Transaction, uninterrupted
from .layers import bottom_entries, top_entries
from .managers import SCRIPT, SYSTEMD, Manager, Systemd
from .protocol import AgentError
from .site import Deployment, quiet_entry, text
from .state import DEFAULT_BASE, check_id
from .supervised import Supervised
from .tree import Entry, Tree, file_entry, same
from .unitfiles import IDENTITY, UNIT_FOLDER, UnitFiles, masked, secrets_problems, user_base

#: Installs that can be gone back through; the oldest two become one beyond that.
KEEP_GENERATIONS = 5
RUNNING = ("active", "activating", "deactivating")
UNKNOWN = {
    "active": "unknown",
    "detail": "",
    "restarting": False,
    "pid": 0,
    "restarts": 0,
    "since": None,
    "result": "",
    "enabled": False,
    "loaded": False,
    "stop_limit_s": 0.0,
    "invocation": None,
}


class Installation(Deployment):
    """One service's files and state. ``layers``: its installs, oldest first."""

    def __init__(self, call: Call, name: Optional[str] = None) -> None:
        self.files = UnitFiles(call.request.get("unit") if name is None else name)
        super().__init__(call, self.files)

    @property
    def unit_path(self) -> str:
        """Where the unit lies, counted from the root folder."""
        return "%s/%s" % (UNIT_FOLDER, self.files.name)

    def layers(self) -> List[Dict[str, Any]]:
        """The recorded installs, oldest first."""
        layers: List[Dict[str, Any]] = self.state.record()["layers"]
        return layers

    def service(self) -> Dict[str, Any]:
        """What the install in force says of the service. Raises AgentError DD607 where nothing is installed."""
        layers = self.layers()
        if not layers:
            raise AgentError("DD607", "%s was not installed by this tool" % self.files.name, "`launch --install` first")
        return check_service(layers[-1].get("service"))

    def manager(self, service: Dict[str, Any]) -> Manager:
        """What runs the service."""
        if service["manager"] == SYSTEMD:
            return Systemd(self.files.name)
        return Supervised(service["config"], service["supervisor"])

    def standing(self, service: Dict[str, Any]) -> Dict[str, Any]:
        """The manager's word on the service; "unknown" with a note where what it needs for it is broken."""
        try:
            return self.manager(service).state()
        except AgentError as error:
            return dict(UNKNOWN, manager=service["manager"], notes=[str(error)])

    def check_same_manager(self, new: Dict[str, Any]) -> None:
        """Raises AgentError DD605 where the service runs under a manager that would not be asked any more."""
        layers = self.layers()
        old = check_service(layers[-1].get("service")) if layers else new
        if old["manager"] != new["manager"] and self.standing(old)["active"] in RUNNING:
            raise AgentError(
                "DD605",
                "%s runs under %s, and would be managed by %s" % (self.files.name, old["manager"], new["manager"]),
                "`launch --stop` first",
            )

    def check_root(self, service: Dict[str, Any]) -> None:
        """Raises AgentError DD606 where this account may not manage the service."""
        if service["manager"] == SYSTEMD and os.geteuid() != 0:
            raise AgentError(
                "DD606",
                "a system unit takes root, the agent runs as uid %d" % os.geteuid(),
                "set `sudo = true` for the host in the inventory (or --sudo); sudo must ask for no password",
            )


class UnitTransaction(Transaction):
    """A transaction whose files the service manager reads: checked by it, and loaded, before it is final."""

    installation: Installation
    systemd = False

    def smoke(self) -> None:
        unit = self.installation.unit_path
        if self.systemd:
            manager = Systemd(self.installation.files.name)
            there = self._tree.entry(unit)[0] is not None
            found = manager.verify("/" + unit) if there else []
            if found:
                raise AgentError("DD604", "the host's systemd finds fault with the unit: %s" % found[0], None, found)
            manager.reload()
            shown = manager.properties()
            if there and (shown.get("LoadState") != "loaded" or shown.get("FragmentPath") != "/" + unit):
                raise AgentError(
                    "DD604",
                    "systemd loads %s as %s from %s"
                    % (manager.name, shown.get("LoadState"), shown.get("FragmentPath") or "nowhere"),
                )
        for operation in self.operations:
            if operation["path"].endswith(".sh") and operation["after"] is not None:
                done = managers.run_program(["sh", "-n", "/" + operation["path"]])
                if done.returncode:
                    raise AgentError("DD604", "the script is not sound: %s" % done.stderr.strip())
        self.journal["smoke"] = False

    def undo(self, outcome: str) -> List[str]:
        paths = super().undo(outcome)
        self._reload()
        return paths

    def force_undo(self) -> List[str]:
        paths = super().force_undo()
        self._reload()
        return paths

    def _reload(self) -> None:
        """Have systemd forget the units that were undone; it keeps running what runs."""
        if self.systemd:
            try:
                Systemd(self.installation.files.name).reload()
            except AgentError as error:
                self.notes.append("%s; run `systemctl daemon-reload` on the host" % error)


def check_service(value: Any) -> Dict[str, Any]:
    """What a record or request says of a service, if it is sound; raises AgentError DD307."""
    kinds = {
        "name": str,
        "manager": str,
        "address": str,
        "port": int,
        "model": str,
        "algorithm": str,
        "metrics": bool,
        "secrets": list,
    }
    if isinstance(value, dict) and value.get("manager") in (SYSTEMD, SCRIPT):
        paths = [value.get(key) for key in ("config", "supervisor")] if value["manager"] == SCRIPT else []
        texts = [*paths, *(value.get("secrets") or [])]
        if all(isinstance(value.get(key), kind) for key, kind in kinds.items()) and all(
            isinstance(item, str) for item in texts
        ):
            return value
    raise AgentError("DD307", "what is said of the service is not as this tool says it")


def _transaction(installation: Installation, tree: Tree, journal: Dict[str, Any]) -> UnitTransaction:
    transaction = UnitTransaction(installation.files, tree, installation.state, journal)
    transaction.installation = installation
    transaction.systemd = managers.booted() and any(
        item["path"] == installation.unit_path for item in journal["operations"]
    )
    return transaction


def _summary(layer: Dict[str, Any]) -> Dict[str, Any]:
    keys = ("version", "time", "who", "reason", "transaction", "service")
    return {key: layer.get(key) for key in keys}


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
        "generations": [_summary(layer) for layer in layers],
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
        transaction = _transaction(installation, tree, journal)
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
        transaction = _transaction(installation, tree, journal)
        try:
            result = transaction.carry_out({}, lambda: call.progress(0, 1, "systemd reads its units"))
        except AgentError:
            if was_enabled:
                manager.enable(True)
            raise
        return {"saved": saved, "removed": history["sets"], "left": [_summary(layer) for layer in left], **result}


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
        "install": _summary(layers[-1]) if layers else None,
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
            transaction = _transaction(installation, tree, journal)
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
        result["left"] = [_summary(layer) for layer in installation.layers()]
    return result
