"""The host that a command is about, and the texts that people name one with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ddtree_deploy.errors import DeployError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
LOCAL_PREFIX = "local:"
OPENSSH_PREFIX = "openssh:"
CONTAINER_ENGINES = ("docker", "podman")
TRANSPORTS = ("paramiko", "openssh")

# What OpenSSH refuses in a host name (and, less a few, in a user name): ProxyCommand hands both to a shell.
_UNSAFE_HOST = re.compile(r"[\s\x00-\x1f\x7f-\x9f'\"`$\\;&<>|(){},@/?#!*\[\]]")
_UNSAFE_USER = re.compile(r"[\s\x00-\x1f\x7f-\x9f'\"`$;&<>|(){}]")
# What docker and podman take for a name, or an id.
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
_ADDRESS6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?\Z")


@dataclass(frozen=True)
class Target:
    """One host: how to reach it and what is known about its install.

    ``root`` is the folder that holds the package folder ``sglang/``; ``python`` is the absolute path of the
    interpreter to use on the host, None to look for ``python3``. ``connect_timeout`` is in seconds and bounds
    each of TCP, key exchange and authentication. ``identity_file``, ``known_hosts`` and ``ssh_config`` are
    files on this machine (``ssh_config`` may be "none": read no configuration). With ``container``
    (``docker:NAME``) the commands run inside that container of the host, and paths are the container's.
    """

    name: str
    kind: Literal["local", "ssh"]
    ssh: str | None = None
    transport: Literal["paramiko", "openssh"] = "paramiko"
    container: str | None = None
    python: str | None = None
    root: str | None = None
    #: Take ``python`` for the engine's own although the tree's evidence says otherwise.
    any_python: bool = False
    sudo: bool = False
    state_dir: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    connect_timeout: float | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    ssh_config: str | None = None
    #: Said when the name cannot be resolved: how the text that named this host was understood.
    unresolved_hint: str | None = field(default=None, compare=False)

    def options(self) -> dict[str, object]:
        """What the agent is told about the host: ``root``, ``state_dir`` and ``any_python``."""
        return {"root": self.root, "state_dir": self.state_dir, "any_python": self.any_python}

    @property
    def place(self) -> str:
        """Where the host is, for people: the ssh destination or ``local:PATH``, and the container there."""
        where = "this machine" if self.container else LOCAL_PREFIX + str(self.root)
        if self.ssh:
            where = (OPENSSH_PREFIX if self.transport == "openssh" else "") + self.ssh
        return f"{self.container} on {where}" if self.container else where


@dataclass(frozen=True)
class Destination:
    """The parts of ``[user@]host[:port]``; the host may be an alias of the ssh configuration."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")


def parse_destination(text: str) -> Destination:
    """Read ``[user@]host[:port]`` or ``ssh://...``; an IPv6 address stands in brackets.

    Raises ValueError, with a text that says what is wrong, for anything that OpenSSH would take for an option
    or hand to a shell.
    """
    rest = text.removeprefix("ssh://").removesuffix("/") if text.startswith("ssh://") else text
    user, at, place = rest.rpartition("@")
    if at and (not user or user[0] == "-" or user[-1] == "\\" or _UNSAFE_USER.search(user)):
        raise ValueError(f"{user!r} is not a user name")
    if not rest.isprintable():
        raise ValueError(f"{rest!r} holds characters that cannot be printed")
    port = None
    if place.startswith("["):
        host, bracket, after = place[1:].partition("]")
        if not bracket or not _ADDRESS6.match(host) or (after and not after.startswith(":")):
            raise ValueError(f"{place!r} is not an IPv6 address in brackets")
        port_text = after[1:] if after else None
    else:
        host, colon, after = place.partition(":")
        if ":" in after:
            raise ValueError(f"{place!r} has more than one colon (an IPv6 address stands in brackets)")
        port_text = after if colon else None
        if not host or host.startswith("-") or _UNSAFE_HOST.search(host):
            raise ValueError(f"{host!r} is not a host name")
    if port_text is not None:
        if not re.fullmatch("[0-9]{1,5}", port_text) or not 0 < int(port_text) < 65536:
            raise ValueError(f"{port_text!r} is not a port number")
        port = int(port_text)
    return Destination(host, user or None, port)


def parse_container(text: str) -> tuple[str, str]:
    """Engine and container of ``docker:NAME`` or ``podman:NAME``. Raises ValueError."""
    engine, _, name = text.partition(":")
    if engine not in CONTAINER_ENGINES:
        raise ValueError(f"{text!r} is not docker:NAME or podman:NAME")
    if not _CONTAINER.match(name):
        raise ValueError(f"{name!r} is not the name or id of a container")
    return engine, name


def expand_home(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced; left as it is where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def find_site(path: str | Path) -> Path:
    """The site folder that a path on this machine names: itself, or the one whose sglang or sglang/srt it is.

    Symbolic links are kept as they are. Raises DeployError DD007 when there is no ``sglang/srt`` there.
    """
    given = expand_home(path).absolute()
    for site in _readings(given):
        if (site / "sglang" / "srt").is_dir():
            return site
    if not given.is_dir():
        raise DeployError("DD007", f"{given} is not a folder on this machine")
    near = next((str(folder) for folder in _sites_below(given)), None)
    hint = f"did you mean local:{near}?" if near else "name the folder that holds the package sglang/"
    raise DeployError("DD007", f"{given} holds no sglang/srt", hint=hint)


def venv_python(site: Path) -> str | None:
    """The interpreter that owns ``site`` where the layout is PREFIX/lib/pythonX.Y/site-packages."""
    library = site.parent
    python = library.parent.parent / "bin" / library.name
    owned = site.name == "site-packages" and re.match(r"python3\.\d+\Z", library.name) and python.is_file()
    return str(python) if owned else None


def _readings(given: Path) -> Iterator[Path]:
    """The site folders that ``given`` may stand for: itself, or the one whose sglang or sglang/srt it is."""
    yield given
    if given.name == "sglang":
        yield given.parent
    if given.parts[-2:] == ("sglang", "srt"):
        yield given.parent.parent


def _sites_below(folder: Path) -> Iterator[Path]:
    """Where a virtual environment or a source checkout keeps its packages, if sglang is there."""
    for pattern in ("python", "lib/python3*/site-packages", "lib/python3*/dist-packages"):
        for place in sorted(folder.glob(pattern)):
            if (place / "sglang" / "srt").is_dir():
                yield place
