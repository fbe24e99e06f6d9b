"""Where the host's sglang is, which version, who installed it, and whether this interpreter is the engine's own."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import platform
import re
import site as site_module
import sys
from typing import Any, Dict, List, Optional, Set

from .call import Call
from .protocol import AgentError
from .tree import check_path

PACKAGE = "sglang"
# Folders of the package that hold engine code: 0.5.11 has srt and jit_kernel, later versions add kernels.
PARTS = ("srt", "kernels", "jit_kernel")
_LIB = re.compile(r"python(\d+)\.(\d+)t?\Z")


class Place:
    """What a transaction works on: a folder, which paths below it are its business, and whose state that is."""

    #: The folder that every path counts from.
    site: str
    #: What the state folder is named by and says that it belongs to.
    identity: str
    #: Where state goes if the usual base cannot be written.
    beside: str
    #: The group that may read the state.
    gid: int

    def check_path(self, path: Any) -> str:
        """``path`` if a transaction here may touch it; raises AgentError DD105."""
        raise NotImplementedError


class Root(Place):
    """An installed sglang: ``site`` is the real path of the folder that holds ``sglang/``.

    ``named``: the folder that was named instead, where a link in it leads to the package.
    """

    package = PACKAGE

    def __init__(self, site: str, declared: bool, any_python: bool = False, named: Optional[str] = None) -> None:
        self.site = self.identity = site
        self.beside = _beside(site)
        self.gid = os.stat(os.path.join(site, PACKAGE)).st_gid
        self.declared = declared
        self.any_python = any_python
        self._named = named
        self.dist_info = self._find_dist_info()
        self.version = self._metadata_field("Version") or self._version_module()
        self.installer = (self._dist_text("INSTALLER") or "").strip() or None
        self.editable = self._is_editable()

    def check_path(self, path: Any) -> str:
        return check_path(path, PACKAGE)

    def _find_dist_info(self) -> Optional[str]:
        found = _dist_infos(self.site) or (_dist_infos(self._named) if self._named else [])
        if not found:
            # An editable install keeps its dist-info in the interpreter's site-packages.
            for folder in sys.path:
                there = _dist_infos(folder)
                if self.declared:
                    there = [item for item in there if _leads_to(item, self.site)]
                found = found or there
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

    def installed_paths(self) -> Set[str]:
        """Every path that the installer's RECORD lists; empty where there is no readable one."""
        try:
            rows = csv.reader(io.StringIO(self._dist_text("RECORD") or "", newline=""))
            return {row[0].replace("\\", "/") for row in rows if row}
        except csv.Error:
            return set()

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
            "container": container(),
            "volatile": self.is_volatile(),
            "foreign_python": self.foreign_python(),
        }

    def is_volatile(self) -> bool:
        """Whether the tree lies in a container's own file system, on no mount: it goes when the container does."""
        return container() is not None and os.stat(self.site).st_dev == os.stat("/").st_dev

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


def container() -> Optional[str]:
    """The kind of container that this is ("docker", "podman", ...), None where nothing says so."""
    for path, kind in (("/run/.containerenv", "podman"), ("/.dockerenv", "docker")):
        if os.path.exists(path):
            return kind
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    try:
        with open("/run/systemd/container", encoding="utf-8", errors="replace") as handle:
            return handle.read(100).strip() or None
    except OSError:
        return None


def run_facts(_call: Call) -> Dict[str, Any]:
    """The operation ``facts``: :func:`python_facts`, also where there is no sglang."""
    return python_facts()


def _beside(site: str) -> str:
    """A state base beside the environment that the site belongs to."""
    beside = os.path.dirname(site)
    if os.path.basename(site) in ("site-packages", "dist-packages"):
        beside = os.path.dirname(os.path.dirname(beside))
    return os.path.join(beside, ".ddtree-deploy")


def source_of(dist_info: str) -> Optional[str]:
    """The local folder that a dist-info was installed from, as its direct_url.json says."""
    from urllib.parse import unquote, urlsplit  # seldom needed, and slow to load

    try:
        with open(os.path.join(dist_info, "direct_url.json"), encoding="utf-8") as handle:
            url = urlsplit(str(json.load(handle)["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return unquote(url.path) if url.scheme == "file" else None


def _leads_to(dist_info: str, site: str) -> bool:
    source = source_of(dist_info)
    return source is not None and os.path.join(site, "").startswith(os.path.join(os.path.realpath(source), ""))


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


def package_site(folder: str) -> Optional[str]:
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
        site = package_site(folder)
        if site:
            return site
    return None


def locate(request: Dict[str, Any]) -> Root:
    """The root that the request's ``root`` names, or the one that this interpreter would import sglang from.

    With ``search`` (nobody named an interpreter either) the host must have no other. Never imports the package.
    Raises AgentError DD311 when there is none, DD012 when there are several.
    """
    declared, any_python = request.get("root"), bool(request.get("any_python"))
    if declared:
        site = package_site(os.path.join(declared, PACKAGE))
        if site is None:
            raise AgentError(
                "DD311",
                "%s holds no sglang/srt" % declared,
                "root (or local:PATH) is the folder that holds sglang/: a site-packages",
            )
        return Root(site, declared=True, any_python=any_python, named=declared)
    site = _found_by_import()
    if request.get("search"):
        from . import discovery

        return Root(discovery.choose(site, discovery.here()), declared=False, any_python=any_python)
    if site is None:
        raise AgentError(
            "DD311",
            "%s (python %s) has no sglang" % (sys.executable, platform.python_version()),
            "name the engine's interpreter: --python /path/to/venv/bin/python, or python and root in the inventory",
        )
    return Root(site, declared=False, any_python=any_python)
