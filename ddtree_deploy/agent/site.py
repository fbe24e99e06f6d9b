"""What every operation on a tree's state begins with: the root, its state, the lock, and who stands in the way."""

from __future__ import annotations

import contextlib
import getpass
import os
from typing import Any, Collection, Dict, Iterable, Iterator, List, Optional

from . import processes
from .call import Call
from .layers import Layer, bottom_entries, top_entries
from .protocol import AgentError
from .root import Place, Root, locate
from .state import State, check_id, utc_now
from .tree import Entry, Tree, same

RECOVER_HINT = "run `ddtree-deploy recover`: it finishes or undoes it, and says which"


def text(value: Any, limit: int = 400) -> str:
    """The request's text, cut; "" for what is none."""
    return value[:limit] if isinstance(value, str) else ""


def _who(call: Call) -> str:
    claimed = text(call.request.get("who")) or "someone"
    account = os.environ.get("SUDO_USER") or os.environ.get("LOGNAME")
    if not account:
        try:
            account = getpass.getuser()
        except (KeyError, OSError):
            account = "uid %d" % os.getuid()
    return "%s as %s" % (claimed, account)


class Deployment:
    """A place, its state and the call that is about it."""

    def __init__(self, call: Call, place: Place, engine: Optional[str] = None) -> None:
        self.call = call
        self.place = place
        self.engine = engine
        self.state = State(place, call.request.get("state_dir"))

    @contextlib.contextmanager
    def exclusive(self, command: str) -> Iterator[Tree]:
        """The tree, with the lock held. Until something is written, a signal or a client that goes away ends it."""
        who = {"who": _who(self.call), "command": command}
        wait = float(self.call.request.get("wait") or 0)
        with self.state.lock(who, wait, self.call.client_gone), Tree(self.place.site) as tree:
            yield tree

    def check_not_interrupted(self) -> None:
        """Raises AgentError DD503 while a transaction waits for recovery."""
        journal = self.state.interrupted()
        if journal:
            raise AgentError(
                "DD503",
                "transaction %s (%s) was interrupted" % (journal["id"], journal["history"].get("kind")),
                RECOVER_HINT,
            )

    def history_line(self, kind: str, sets: List[Dict[str, Any]]) -> Dict[str, Any]:
        """The history's line of this call. ``sets``: ``{"name", "version"}`` each, with ``from``, the version that
        it took the place of, or ``undone`` where the set went.
        """
        request = self.call.request
        return {
            "id": check_id(request.get("transaction")),
            "kind": kind,
            "time": utc_now(),
            "who": _who(self.call),
            "reason": text(request.get("reason")) or None,
            "client": text(request.get("client"), 60),
            "engine": self.engine,
            "sets": sets,
        }

    def outcome(self, transaction: Any) -> str:
        """What became of a transaction: "unknown" (it never began), "committed", "undone", "running", "interrupted"."""
        journal = self.state.journal(check_id(transaction))
        if journal is not None and journal["state"] in ("committed", "undone"):
            return str(journal["state"])
        if self.state.holder():
            return "running"
        return "unknown" if journal is None else "interrupted"

    def journal(self, history: Dict[str, Any], operations: List[Dict[str, Any]], layers: List[Layer]) -> Dict[str, Any]:
        """A journal that leaves ``layers`` as the record; operations that change nothing are left out."""
        return {
            "id": history["id"],
            "state": "new",
            "history": history,
            "operations": [item for item in operations if not same(item["before"], item["after"])],
            "record": {"layers": layers},
            "folders": [],
            "emptied": [],
            "smoke": bool(self.call.request.get("smoke")),
        }


class Site(Deployment):
    """The engine's root as such a place."""

    def __init__(self, call: Call) -> None:
        self.root: Root = locate(call.request)
        super().__init__(call, self.root, self.root.version)

    def check_interpreter(self) -> None:
        """Raises AgentError DD312 on an interpreter that is not the engine's."""
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

    # --- what a new install did to the layers

    def is_lost(self, tree: Tree, layers: List[Layer], layer: Layer) -> bool:
        """Whether a new install took a layer away: another install, and none of its files as we left it."""
        if layer.get("install") == self.root.fingerprint():
            return False
        top = top_entries(layers)
        # Added files survive a reinstall, so those that the package itself brings decide.
        brought = [item["path"] for item in layer["files"] if item["before"] is not None]
        paths = brought or [item["path"] for item in layer["files"]]
        return not any(same(quiet_entry(tree, path), top[path]) for path in paths)

    def survivors(
        self, tree: Tree, layers: List[Layer], lost: Collection[str], of: Iterable[Layer]
    ) -> List[Dict[str, Any]]:
        """The removal of files that lost sets added and that still stand as these left them, of the layers ``of``:
        no installer put them there.
        """
        gone = [layer for layer in layers if layer["set"] in lost]
        top, below = top_entries(gone), bottom_entries(gone)
        asked = {item["path"] for layer in of for item in layer["files"]}
        added = [path for path in sorted(below) if path in asked and below[path] is None and top[path] is not None]
        standing = {path: top[path] for path in added if same(quiet_entry(tree, path), top[path])}
        listed = self.root.installed_paths() if standing else set()
        return [
            {"path": path, "before": entry, "after": None} for path, entry in standing.items() if path not in listed
        ]


def quiet_entry(tree: Tree, path: str) -> Entry:
    """What stands at a path; "other" with the reason where that cannot be told."""
    try:
        return tree.entry(path)[0]
    except AgentError as error:
        return {"kind": "other", "why": str(error)}
