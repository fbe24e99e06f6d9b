"""Where the host's sglang is, which version, who installed it, and whether this interpreter is the engine's own."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import site as site_module
import sys
from typing import Any, Dict, List, Optional

from .call import Call
from .protocol import AgentError

PACKAGE = "sglang"
# Folders of the package that hold engine code: 0.5.11 has srt and jit_kernel, later versions add kernels.
PARTS = ("srt", "kernels", "jit_kernel")
_LIB = re.compile(r"^python(\d+)\.(\d+)t?$")


class Root:
    """An installed sglang: ``site`` is the real path of the folder that holds ``sglang/``."""

    package = PACKAGE

    def __init__(self, site: str, declared: bool, any_python: bool = False) -> None:
        self.site = site
        self.declared = declared
        self.any_python = any_python
        self.dist_info = self._find_dist_info()
        self.version = self._metadata_field("Version") or self._version_module()
        self.installer = (self._dist_text("INSTALLER") or "").strip() or None
        self.editable = self._is_editable()

    def _find_dist_info(self) -> Optional[str]:
        found = _dist_infos(self.site)
        if not found and not self.declared:
            # An editable install keeps its dist-info in the interpreter's site-packages.
            for folder in sys.path:
                found = found or _dist_infos(folder)
        if len(found) > 1:
            raise AgentError(
                "DD311",
                "%s holds more than one sglang dist-info: %s"
                % (os.path.dirname(found[0]), ", ".join(os.path.basename(item) for item in found)),
                "an upgrade was cut off: reinstall sglang on the host, then try again",
            )
        return found[0] if found else None

    def _dist_text(self, name: str) -> Optional[str]:
        if self.dist_info is None:
            return None
        try:
            with open(os.path.join(self.dist_info, name), encoding="utf-8", errors="replace") as handle:
                return handle.read()
        except OSError:
            return None

    def _metadata_field(self, field: str) -> Optional[str]:
        for line in (self._dist_text("METADATA") or "").splitlines():
            if not line:
                break
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
        return None

    def _version_module(self) -> Optional[str]:
        for name in ("_version.py", "version.py"):
            try:
                path = os.path.join(self.site, PACKAGE, name)
                with open(path, encoding="utf-8", errors="replace") as handle:
                    text = handle.read(65536)
            except OSError:
                continue
            match = re.search(r"""^(?:__version__|version)\b[^'"\n]*['"]([^'"\n]+)['"]""", text, re.MULTILINE)
            if match:
                return match.group(1)
        return None

    def _is_editable(self) -> bool:
        try:
            url = json.loads(self._dist_text("direct_url.json") or "{}")
            return bool(url.get("dir_info", {}).get("editable"))
        except (ValueError, AttributeError):
            return False

    def parts(self) -> List[str]:
        """The engine's folders that exist here, as paths relative to the site (``sglang/srt`` first)."""
        names = [PACKAGE + "/" + part for part in PARTS]
        return [name for name in names if os.path.isdir(os.path.join(self.site, name))]

    def fingerprint(self) -> Dict[str, Any]:
        """What changes when the package is installed anew, even at the same version."""
        value: Dict[str, Any] = {"version": self.version}
        if self.dist_info is not None:
            try:
                info = os.stat(os.path.join(self.dist_info, "RECORD"))
                value.update(inode=info.st_ino, mtime_ns=info.st_mtime_ns, size=info.st_size)
            except OSError:
                value.update(inode=None)
        return value

    def describe(self) -> Dict[str, Any]:
        """The root as plain data for the client."""
        return {
            "site": self.site,
            "parts": self.parts(),
            "version": self.version,
            "installer": self.installer,
            "editable": self.editable,
            "dist_info": os.path.basename(self.dist_info) if self.dist_info else None,
            "python": python_facts(),
            "foreign_python": self.foreign_python(),
        }

    def is_imported(self) -> bool:
        """Whether this interpreter, left to itself, would import the engine from here."""
        return _found_by_import() == self.site

    def foreign_python(self) -> Optional[str]:
        """Why this interpreter is not the one that runs the engine from here; None when it is.

        The tree's own evidence counts (its ``lib/pythonX.Y`` path, its virtual environment, the wheel's
        tag); without any, the interpreter must find the package by itself or the root was declared with it.
        An operator's ``any_python`` overrules it all.
        """
        if self.any_python:
            return None
        running = "%d.%d" % sys.version_info[:2]
        head, tail = os.path.split(self.site)
        lib = _LIB.match(os.path.basename(head)) if tail in ("site-packages", "dist-packages") else None
        if lib:
            if "%s.%s" % lib.groups() != running:
                return "the tree belongs to python %s.%s, the agent ran on %s" % (*lib.groups(), running)
            prefix = os.path.dirname(os.path.dirname(head))
            if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
                if os.path.realpath(sys.prefix) != prefix:
                    return "the tree belongs to the environment %s, the agent ran on %s" % (
                        prefix,
                        sys.executable,
                    )
                return None
        for line in (self._dist_text("WHEEL") or "").splitlines():
            if line.startswith("Tag:"):
                tags = line[4:].strip().split("-")[0].split(".")
                if all(re.match(r"cp3\d", tag) for tag in tags) and "cp" + running.replace(".", "") not in tags:
                    return "the wheel was built for %s, the agent ran on python %s" % (
                        "/".join(tags),
                        running,
                    )
        if self.declared or self.is_imported():
            return None
        return "%s does not import sglang from %s" % (sys.executable, self.site)


def python_facts() -> Dict[str, Any]:
    """The interpreter that the agent runs on, and the machine, as a wheel's tags name them."""
    return {
        "executable": sys.executable,
        "version": platform.python_version(),
        "tag": "cp%d%d" % sys.version_info[:2],
        "prefix": sys.prefix,
        "machine": platform.machine(),
        "system": platform.system(),
        "libc": "-".join(platform.libc_ver()),
    }


def run_facts(_call: Call) -> Dict[str, Any]:
    """The operation ``facts``: :func:`python_facts`, also where there is no sglang."""
    return python_facts()


def _dist_infos(folder: str) -> List[str]:
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return []
    return sorted(
        os.path.join(folder, name)
        for name in names
        if name.lower().startswith(PACKAGE + "-") and name.endswith(".dist-info")
    )


def _package_site(folder: str) -> Optional[str]:
    """The real site of a package folder ``.../sglang`` that holds ``srt``; links are resolved once, here."""
    package = os.path.realpath(folder)
    if os.path.basename(package) == PACKAGE and os.path.isdir(os.path.join(package, "srt")):
        return os.path.dirname(package)
    return None


def _found_by_import() -> Optional[str]:
    # Isolated mode leaves the user's site-packages out, but a server started without -I would see it.
    user = site_module.getusersitepackages()
    added = os.path.isdir(user) and user not in sys.path
    if added:
        sys.path.append(user)
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    finally:
        if added:
            sys.path.remove(user)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        site = _package_site(folder)
        if site:
            return site
    return None


def locate(request: Dict[str, Any]) -> Root:
    """The root that the request's ``root`` names, or the one that this interpreter would import sglang from.

    Never imports the package. Raises AgentError DD311 when there is none.
    """
    declared, any_python = request.get("root"), bool(request.get("any_python"))
    if declared:
        site = _package_site(os.path.join(declared, PACKAGE))
        if site is None:
            raise AgentError(
                "DD311",
                "%s holds no sglang/srt" % declared,
                "root (or local:PATH) is the folder that holds sglang/: a site-packages",
            )
        return Root(site, declared=True, any_python=any_python)
    site = _found_by_import()
    if site is None:
        raise AgentError(
            "DD311",
            "%s (python %s) has no sglang" % (sys.executable, platform.python_version()),
            "name the engine's interpreter: --python /path/to/venv/bin/python, or python and root in the inventory",
        )
    return Root(site, declared=False, any_python=any_python)
