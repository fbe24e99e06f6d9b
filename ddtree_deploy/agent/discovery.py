"""Which sglang installs a host has, where nobody named one: from running engines, unit files and environments.

Everything is bounded: folders are listed one level at a time, up to a count of entries and a time. Nothing that
is found is run; an interpreter is proposed only if it belongs to root or to the agent's own account.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from .protocol import LOADER, AgentError
from .root import PACKAGE, Root, package_site, source_of

MAX_ENTRIES = 400  # of one folder
MAX_FILE = 64 * 1024  # bytes of one unit file
SECONDS = 1.0  # for the look at environments

_UNIT_FOLDERS = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
    "etc/systemd/user",
    "~/.config/systemd/user",
)
# Folders that may be an environment themselves; a last * stands for every folder there.
_ENVIRONMENTS = (
    "~/venv",
    "~/.venv",
    "~/*/venv",
    "~/*/.venv",
    "~/.virtualenvs/*",
    "~/miniconda3",
    "~/miniconda3/envs/*",
    "~/miniforge3",
    "~/miniforge3/envs/*",
    "~/*",
    "venv",
    "opt/*",
    "opt/*/venv",
    "opt/*/.venv",
    "opt/conda/envs/*",
    "srv/*",
    "srv/*/venv",
    "srv/*/.venv",
    "home/*/venv",
    "home/*/.venv",
    "home/*/*/venv",
    "home/*/*/.venv",
    "workspace/*",
    "usr/local",
    "usr",
)
_CHECKOUTS = ("sgl-workspace/sglang/python", "workspace/sglang/python", "opt/sglang/python", "~/sglang/python")
_PYTHON_FOLDER = re.compile(r"python3(\.\d+t?)?\Z")


class Install(NamedTuple):
    """One site with sglang in it, an interpreter that would import it if one is known, and how it was found."""

    site: str
    python: Optional[str]
    where: str


class Host(NamedTuple):
    """Where to look: ``top`` is the file system's root, ``home`` the account's home."""

    top: str = "/"
    proc: str = "/proc"
    home: str = ""

    def path(self, pattern: str) -> str:
        """A pattern of the tables above as a path."""
        if pattern.startswith("~/"):
            return os.path.join(self.home or os.path.expanduser("~"), pattern[2:])
        return os.path.join(self.top, pattern)


def here() -> Host:
    """This machine."""
    return Host()


def choose(own: Optional[str], host: Host) -> str:
    """The site to work on; ``own`` is the one that the running interpreter imports by itself.

    Raises AgentError DD012 when the host has several; DD311 when it has none, or its only one belongs to another
    interpreter, which the error's frame then names.
    """
    found = merged(([Install(own, sys.executable, "imported by %s" % sys.executable)] if own else []) + find(host))
    sites = sorted(found)
    if own and sites == [own]:
        return own
    if len(sites) > 1:
        raise AgentError(
            "DD012",
            "%d sglang installs on this host" % len(sites),
            "say which: --python PATH (its interpreter) or --root PATH, or python or root in the inventory",
            [_line(site, found[site]) for site in sites],
        )
    what = "%s (python %d.%d) has no sglang" % (sys.executable, *sys.version_info[:2])
    if not sites:
        inside = containers(host)
        hint = "name the engine's interpreter: --python /path/to/venv/bin/python, or python and root in the inventory"
        if inside:
            hint = "an engine runs in a container: --host docker:%s@HOST, or container in the inventory" % inside[0]
        raise AgentError("DD311", what, hint)
    (site,) = sites
    python = next((item.python for item in found[site] if item.python), None)
    doubt = python and _doubt(python)
    hint = "it is at %s: --python PATH names its interpreter" % site
    if python and doubt:
        hint = "--python %s would be taken, but %s: name it if you trust it" % (python, doubt)
    elif python:
        prefix = os.path.dirname(os.path.dirname(python))
        within = site.startswith(os.path.join(os.path.realpath(prefix), ""))
        more: Dict[str, Any] = {"python": python, "root": None if within else site}
        raise AgentError("DD311", what, "--python %s names the host's only one" % python, more=more)
    raise AgentError("DD311", what, hint, [_line(site, found[site])])


def merged(installs: List[Install]) -> Dict[str, List[Install]]:
    """By site, in the order found."""
    sites: Dict[str, List[Install]] = {}
    for item in installs:
        sites.setdefault(item.site, []).append(item)
    return sites


def _line(site: str, found: List[Install]) -> str:
    try:
        version = Root(site, declared=True).version
    except (AgentError, OSError):
        version = None
    python = next((item.python for item in found if item.python), None)
    ways = list(dict.fromkeys(item.where for item in found))
    more = ", and %d more" % (len(ways) - 3) if len(ways) > 3 else ""
    return "%s: sglang %s, %s (%s%s)" % (
        site,
        version or "of unknown version",
        "python %s" % python if python else "no interpreter known",
        "; ".join(ways[:3]),
        more,
    )


def _doubt(python: str) -> Optional[str]:
    """Why an interpreter that was merely found is not run: whoever owns it would act with our rights."""
    for path in (*_upwards(os.path.dirname(python)), *_upwards(os.path.realpath(python))):
        try:
            info = os.stat(path)
        except OSError as error:
            return "%s: %s" % (path, error.strerror)
        if info.st_uid not in (0, os.geteuid()):
            return "%s belongs to uid %d" % (path, info.st_uid)
        # In a folder like /tmp the sticky bit keeps others from what is ours.
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            return "anyone may write %s" % path
    return None


def _upwards(path: str) -> Iterator[str]:
    """The path and every folder above it."""
    while True:
        yield path
        above = os.path.dirname(path)
        if above == path:
            return
        path = above


def find(host: Host) -> List[Install]:
    """Every install that running engines, units, environments and checkouts lead to."""
    found = list(_running(host))
    found += _units(host)
    deadline = time.monotonic() + SECONDS
    for pattern in _ENVIRONMENTS:
        for prefix in _expand(host.path(pattern), deadline):
            for name in ("python3", "python"):
                python = os.path.join(prefix, "bin", name)
                if os.path.exists(python):
                    found += [Install(site, own, "environment %s" % prefix) for site, own in _sites_of(python)]
                    break
    for pattern in _CHECKOUTS:
        site = package_site(os.path.join(host.path(pattern), PACKAGE))
        if site:
            found.append(Install(site, None, "source tree"))
    return found


def _expand(pattern: str, deadline: float) -> Iterator[str]:
    """The folders that a pattern with whole-name stars stands for."""
    head, star, tail = pattern.partition("/*")
    if not star:
        if os.path.isdir(pattern):
            yield pattern
        return
    for name in _names(head):
        if time.monotonic() > deadline:
            return
        for folder in _expand(os.path.join(head, name) + tail, deadline):
            yield folder


def _names(folder: str) -> List[str]:
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) == MAX_ENTRIES:
                    break
    except OSError:
        return []
    return sorted(names)


def _sites_of(python: str) -> Iterator[Tuple[str, str]]:
    """(site, interpreter) of each sglang that belongs to the prefix of ``python``, which stands in its bin."""
    prefix = os.path.dirname(os.path.dirname(python))
    for library in ("lib", "lib64", "local/lib"):
        for name in _names(os.path.join(prefix, library)):
            if not _PYTHON_FOLDER.match(name):
                continue
            own = os.path.join(os.path.dirname(python), name)
            for packages in ("site-packages", "dist-packages"):
                for site in _sites_in(os.path.join(prefix, library, name, packages)):
                    yield site, own if os.path.exists(own) else python


def _sites_in(folder: str) -> Iterator[str]:
    """The site ``folder`` itself, and those that an editable install there leads to."""
    site = package_site(os.path.join(folder, PACKAGE))
    if site:
        yield site
    try:
        infos = [name for name in os.listdir(folder) if name.startswith(PACKAGE + "-") and name.endswith(".dist-info")]
    except OSError:
        return
    for name in infos:
        source = source_of(os.path.join(folder, name))
        for below in ("", "python", "src") if source else ():
            site = package_site(os.path.join(str(source), below, PACKAGE))
            if site:
                yield site


# --- running engines


def _read(host: Host, pid: str, name: str) -> bytes:
    try:
        with open(os.path.join(host.proc, pid, name), "rb") as handle:
            return handle.read(1 << 20)
    except OSError:
        return b""


def _link(host: Host, pid: str, name: str) -> str:
    try:
        return os.readlink(os.path.join(host.proc, pid, name))
    except OSError:
        return ""


def _engines(host: Host) -> Iterator[Tuple[str, List[str]]]:
    """(pid, argv) of every python process that speaks of sglang and is not an agent."""
    try:
        pids = sorted((name for name in os.listdir(host.proc) if name.isdigit()), key=int)
    except OSError:
        return
    for pid in pids:
        line = _read(host, pid, "cmdline")
        if PACKAGE.encode() not in line or LOADER.encode() in line:
            continue
        if os.path.basename(_link(host, pid, "exe")).startswith("python"):
            yield pid, [os.fsdecode(word) for word in line.split(b"\0") if word]


def _elsewhere(host: Host, pid: str) -> bool:
    """Whether the process sees other files than we do: it runs in a container."""
    theirs = _link(host, pid, "ns/mnt")
    return bool(theirs) and theirs != _link(host, "self", "ns/mnt")


def _running(host: Host) -> Iterator[Install]:
    for pid, argv in _engines(host):
        if _elsewhere(host, pid):
            continue
        pairs = (word.partition(b"=") for word in _read(host, pid, "environ").split(b"\0"))
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        where = "running: pid %s" % pid
        python = _interpreter(host, pid, argv, environment)
        places = [item for item in environment.get("PYTHONPATH", "").split(os.pathsep) if item]
        for folder in [*places, _link(host, pid, "cwd")]:
            site = package_site(os.path.join(folder, PACKAGE)) if folder else None
            if site:
                yield Install(site, python, where)
        for site, own in _sites_of(python) if python else ():
            yield Install(site, own, where)


def _interpreter(host: Host, pid: str, argv: List[str], environment: Dict[str, str]) -> Optional[str]:
    """The path by which the process was started: that of its environment, not where the link leads."""
    folders = [os.path.join(environment["VIRTUAL_ENV"], "bin")] if environment.get("VIRTUAL_ENV") else []
    folders += environment.get("PATH", "").split(os.pathsep)
    name = os.path.basename(argv[0])
    candidates = [argv[0]] if argv[0].startswith("/") else [os.path.join(item, name) for item in folders if item]
    for path in [*candidates, _link(host, pid, "exe")]:
        if os.path.basename(path).startswith("python") and os.path.isfile(path):
            return path
    return None


def containers(host: Host) -> List[str]:
    """Ids of the containers in which engines run, as ``docker exec`` takes them."""
    found = []
    for pid, _argv in _engines(host):
        if _elsewhere(host, pid):
            match = re.search(
                r"(?:docker|libpod|cri-containerd)[-/]([0-9a-f]{64})", _read(host, pid, "cgroup").decode()
            )
            if match and match.group(1)[:12] not in found:
                found.append(match.group(1)[:12])
    return found


# --- units


def _units(host: Host) -> Iterator[Install]:
    seen = set()
    for pattern in _UNIT_FOLDERS:
        folder = os.path.realpath(host.path(pattern))
        if folder in seen:
            continue
        seen.add(folder)
        for name in _names(folder):
            path = os.path.join(folder, name)
            if name.endswith(".service"):
                files = [path]
            elif name.endswith(".service.d"):
                files = [os.path.join(path, each) for each in _names(path) if each.endswith(".conf")]
            else:
                continue
            for file in files:
                for python in _programs(file):
                    for site, own in _sites_of(python):
                        yield Install(site, own, "unit %s" % file)


def _programs(path: str) -> Iterator[str]:
    """The interpreters that a unit file's start lines name, if it speaks of sglang."""
    try:
        with open(path, "rb") as handle:
            text = handle.read(MAX_FILE).decode("utf-8", "replace")
    except OSError:
        return
    if PACKAGE not in text:
        return
    for line in text.replace("\\\n", " ").splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or not key.strip().startswith("Exec"):
            continue
        for word in re.findall(r"/[^\s'\";]+", value):
            name = os.path.basename(word)
            if name.startswith("python"):
                yield word
            elif os.path.basename(os.path.dirname(word)) == "bin" and name.startswith(PACKAGE):
                yield os.path.join(os.path.dirname(word), "python3")
