"""The files of one installed service as a place for a transaction, and the secrets file that is never ours.

Paths count from ``/``. The service's state (lock, journal, generations) is kept as that of a root is, under the
identity ``unit:NAME``.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from typing import Any, Dict, List, Optional

from .protocol import AgentError
from .records import check_unit
from .root import Place
from .supervisor import assignments
from .tree import check_path

IDENTITY = "unit:"
UNIT_FOLDER = "etc/systemd/system"
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|APIKEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
_FORBIDDEN = ("proc", "sys", "dev", "run")
_LIMIT = 1 << 20


def user_base() -> str:
    """Where a user who is not root keeps the state of services."""
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = os.environ.get("HOME") or "/"
    return os.path.join(home, ".local/state/ddtree-deploy")


class UnitFiles(Place):
    """The files of the service that the unit ``name`` runs."""

    def __init__(self, name: Any) -> None:
        self.name = check_unit(name)
        self.site = "/"
        self.identity = IDENTITY + self.name
        self.beside = user_base()
        self.gid = os.getegid()

    def check_path(self, path: Any) -> str:
        clean: str = check_path(path, path.split("/")[0] if isinstance(path, str) else "")
        if clean.split("/", 1)[0] in _FORBIDDEN or clean.endswith(".secrets.env"):
            raise AgentError("DD105", "path %r is not one that an installed service may have" % clean)
        return clean


def read_assignments(path: str) -> Dict[str, str]:
    """The variables that an environment file sets. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as handle:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return {}
        return assignments(handle.read(_LIMIT).decode("utf-8", "replace"))


def secrets_problems(path: Optional[str], names: List[str]) -> List[str]:
    """What keeps the service's secrets file from serving: absent, open to others, names not set. Values stay here."""
    if path is None or not names:
        return []
    try:
        info = os.stat(path)
        values = read_assignments(path)
    except FileNotFoundError:
        return ["%s does not exist; it must set %s (mode 0600)" % (path, ", ".join(names))]
    except OSError as error:
        return ["%s cannot be read: %s" % (path, error.strerror)]
    problems = []
    if stat.S_IMODE(info.st_mode) & 0o077:
        problems.append("%s has mode %04o: others can read it; chmod 0600" % (path, stat.S_IMODE(info.st_mode)))
    unset = [name for name in names if not values.get(name)]
    if unset:
        problems.append("%s does not set %s" % (path, ", ".join(unset)))
    return problems


def masked(text: str) -> str:
    """``text`` with the values of variables that are named like secrets taken out."""
    lines = []
    for line in text.split("\n"):
        match = _ASSIGNMENT.match(line)
        lines.append("%s=***" % match.group(1) if match and _SECRET_NAME.search(match.group(1)) else line)
    return "\n".join(lines)
