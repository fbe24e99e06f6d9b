"""The engine's interpreter and the distributions that it sees: metadata alone, nothing is imported."""

from __future__ import annotations

import ast
import os
import platform
import re
import sys
from typing import Any, Dict, List, Optional, Set, Tuple

from .doctor_probe import Fact, listing, read, version_in
from .protocol import AgentError
from .root import PACKAGE, Root, locate, python_facts

_MAX_DISTRIBUTIONS = 1500
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
# The module of a tree's verify that keeps inputs instead of states.
_COMPACT_STATES = ("srt", "speculative", "ddtree_states.py")
_ENGINE_MODULE = "srt/entrypoints/engine.py"
_MAX_SOURCE = 4 * 1024 * 1024


def normal(name: str) -> str:
    """A distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Packages:
    """The installed distributions on the engine's path; the first folder that has one wins, as for an import."""

    def __init__(self, folders: List[str]) -> None:
        self.folders = folders
        self.found: Dict[str, Tuple[str, str]] = {}  # normal name -> (version, dist-info folder)
        self.twice: List[Fact] = []
        for folder in folders:
            seen: Dict[str, str] = {}
            for entry in listing(folder)[: 4 * _MAX_DISTRIBUTIONS]:
                match = re.match(r"^(.+?)-([^-]+?)(?:-py\d[\d.]*)?\.(?:dist-info|egg-info)\Z", entry)
                if not match:
                    continue
                name, version = normal(match.group(1)), match.group(2)
                if name in seen:
                    self.twice.append({"name": name, "versions": sorted((seen[name], version))})
                seen[name] = version
                self.found.setdefault(name, (version, os.path.join(folder, entry)))

    def metadata(self, name: str) -> Optional[str]:
        """The header of a distribution's METADATA."""
        if name not in self.found:
            return None
        folder = self.found[name][1]
        text = read(os.path.join(folder, "METADATA")) or read(os.path.join(folder, "PKG-INFO"))
        return None if text is None else text.partition("\n\n")[0]

    def record(self, name: str) -> List[str]:
        """Paths that a distribution's RECORD lists, relative to its folder."""
        if name not in self.found:
            return []
        text = read(os.path.join(self.found[name][1], "RECORD"), 8 * 1024 * 1024) or ""
        return [line.rpartition(",")[0].rpartition(",")[0].strip('"') for line in text.splitlines()]

    def place(self, name: str) -> str:
        """The folder that a distribution's files lie below."""
        return os.path.dirname(self.found[name][1])


def folders_of(root: Optional[Root]) -> List[str]:
    """The folders that the engine imports from: the site, then the interpreter's path."""
    found: List[str] = []
    for folder in ([root.site] if root else []) + sys.path:
        if folder and os.path.isdir(folder) and os.path.realpath(folder) not in found:
            found.append(os.path.realpath(folder))
    return found


def find_root(request: Dict[str, Any]) -> Tuple[Optional[Root], Optional[str]]:
    """The engine's root, or why there is none."""
    try:
        return locate(request), None
    except AgentError as error:
        return None, str(error)


def gather_python(root: Optional[Root]) -> Fact:
    """The interpreter, its environment, and the values that requirement markers are evaluated with."""
    config = read(os.path.join(sys.prefix, "pyvenv.cfg"))
    home = version_in(config or "", r"(?m)^home\s*=\s*(.+?)\s*$")
    return {
        **python_facts(),
        "base_prefix": sys.base_prefix,
        "venv": config is not None,
        "venv_home": home,
        "venv_home_there": None if home is None else os.path.isdir(home),
        "foreign": root.foreign_python() if root else None,
        "markers": {
            "implementation_name": sys.implementation.name,
            "implementation_version": platform.python_version(),
            "os_name": os.name,
            "platform_machine": platform.machine(),
            "platform_python_implementation": platform.python_implementation(),
            "platform_release": platform.release(),
            "platform_system": platform.system(),
            "platform_version": platform.version(),
            "python_full_version": platform.python_version(),
            "python_version": "%d.%d" % sys.version_info[:2],
            "sys_platform": sys.platform,
        },
    }


def gather_packages(packages: Packages) -> Fact:
    """Installed versions, and the requirements of everything that the engine leads to."""
    requires: Dict[str, List[str]] = {}
    waiting: List[Tuple[str, Set[str]]] = [(PACKAGE, set())]
    asked: Dict[str, Set[str]] = {}
    while waiting and len(requires) < _MAX_DISTRIBUTIONS:
        name, extras = waiting.pop()
        if name in asked and extras <= asked[name]:
            continue
        extras = asked.setdefault(name, set()) | extras
        asked[name] = extras
        header = packages.metadata(name)
        if header is None:
            continue
        lines = [line[14:].strip() for line in header.splitlines() if line.startswith("Requires-Dist:")]
        kept = []
        for line in lines:
            named = _EXTRA.findall(line)
            match = _NAME.match(line)
            if match and (not named or extras & {normal(extra) for extra in named}):
                kept.append(line)
                wanted = {normal(extra) for extra in (match.group(2) or "").split(",") if extra.strip()}
                waiting.append((normal(match.group(1)), wanted))
        requires[name] = kept
    header = packages.metadata(PACKAGE) or ""
    return {
        "installed": {name: version for name, (version, _folder) in sorted(packages.found.items())},
        "twice": packages.twice,
        "requires": requires,
        "requires_python": version_in(header, r"(?m)^Requires-Python:\s*(\S.*?)\s*$"),
    }


def gather_engine(root: Root) -> Fact:
    """The engine's root, the versions that it insists on itself when it starts, and what its sources show it can."""
    package = os.path.join(root.site, PACKAGE)
    return {**root.describe(), "floors": floors(os.path.join(package, _ENGINE_MODULE)), "traits": traits(package)}


def traits(package: str) -> Fact:
    """What a search of a few sources tells: whether the engine has DDTREE, and what it reads of a drafter's config."""
    drafter = read(os.path.join(package, "srt", "models", "dflash.py"), _MAX_SOURCE) or ""
    folder = os.path.join(package, "srt", "speculative")
    algorithms = (
        read(os.path.join(folder, name), _MAX_SOURCE) or "" for name in listing(folder) if name.endswith(".py")
    )
    return {
        "ddtree": any("DDTREE" in text for text in algorithms),
        "draft_rope": "get_rope_config" in drafter or "_get_dflash_rope_config" in drafter,
        "draft_windows": "sliding_window" in drafter,
        "compact_states": os.path.isfile(os.path.join(package, *_COMPACT_STATES)),
    }


def floors(path: str) -> Optional[List[Fact]]:
    """Packages and least versions of every ``assert_pkg_version(...)`` in a module; None if it cannot be read."""
    text = read(path, _MAX_SOURCE)
    if text is None:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "assert_pkg_version"):
            continue
        words = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if len(words) == 2:
            found.append({"package": normal(words[0]), "minimum": words[1], "line": node.lineno})
    return found
