"""One installed service: its files, what its record says of it, and the transaction that changes them."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from . import managers
from .call import Call
from .commit import Transaction
from .managers import SCRIPT, SYSTEMD, Manager, Systemd
from .protocol import AgentError
from .site import Deployment
from .supervised import Supervised
from .tree import Tree
from .unitfiles import UNIT_FOLDER, UnitFiles

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


def transaction_of(installation: Installation, tree: Tree, journal: Dict[str, Any]) -> UnitTransaction:
    """The transaction of a journal; systemd takes part where it runs this host and the unit changes."""
    transaction = UnitTransaction(installation.files, tree, installation.state, journal)
    transaction.installation = installation
    transaction.systemd = managers.booted() and any(
        item["path"] == installation.unit_path for item in journal["operations"]
    )
    return transaction


def summary(layer: Dict[str, Any]) -> Dict[str, Any]:
    """An install without its files, for the client."""
    keys = ("version", "time", "who", "reason", "transaction", "service")
    return {key: layer.get(key) for key in keys}
