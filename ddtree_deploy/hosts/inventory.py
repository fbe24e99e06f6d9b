"""The inventory: hosts and services in TOML, and which host a command is about.

Every fault of a file is reported at once, with file, line and key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_deploy import resources
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.schema import HOST_KEYS, SSH_ONLY
from ddtree_deploy.hosts.target import (
    CONTAINER_ENGINES,
    LOCAL_PREFIX,
    NAME,
    OPENSSH_PREFIX,
    Target,
    expand_home,
    find_site,
    parse_container,
    parse_destination,
    venv_python,
)
from ddtree_deploy.tomllines import KeyLines, KeyPath
from ddtree_deploy.wording import did_you_mean, wrong_type

if TYPE_CHECKING:
    from ddtree_deploy.launch.service import Service

ENVIRONMENT = "DDTREE_DEPLOY_INVENTORY"
_APP = "ddtree-deploy"


@dataclass(frozen=True)
class Inventory:
    """The hosts and services of one file or folder; ``shipped`` marks the example, which contacts no host."""

    path: Path
    shipped: bool
    hosts: Mapping[str, Target]
    services: Mapping[str, Service]
    default_host: str | None


def find_inventory(flag: str | None = None) -> Inventory:
    """Load the inventory that counts.

    The order is ``flag``, $DDTREE_DEPLOY_INVENTORY, ./inventories, the user's configuration folder, the
    shipped example. A place that holds nothing but the example is passed over. Raises DeployError DD003, DD004.
    """
    named = flag or os.environ.get(ENVIRONMENT)
    if named:
        return load_inventory(expand_home(named))
    example = None
    for files in (_toml_files(Path("inventories")), _user_files()):
        if files:
            inventory = _load(files[0] if len(files) == 1 else files[0].parent, files)
            if not inventory.shipped:
                return inventory
            example = example or inventory
    return example or load_inventory(resources.example_inventory())


def load_inventory(path: str | Path) -> Inventory:
    """Load one file, or every ``*.toml`` of a folder as one inventory.

    Raises DeployError DD003 when there is none, DD004 with every fault that was found.
    """
    path = Path(path)
    if path.is_dir():
        files = _toml_files(path)
        if not files:
            raise DeployError("DD003", f"no inventory in {path}", hint="the folder holds no *.toml file")
        return _load(path, files)
    if not path.is_file():
        raise DeployError("DD003", f"no inventory at {path}")
    return _load(path, [path])


def resolve_target(host: str | None, inventory: Inventory) -> Target:
    """The host that ``host`` names; None means the inventory's default.

    A name is one of the inventory's, ``local:PATH``, ``docker:NAME`` or ``podman:NAME`` (a container of this
    machine, or with ``@HOST`` behind it of any host), ``user@host[:port]`` or an ssh alias, or
    ``openssh:`` and one of these two, to go by the system's ssh. Raises DeployError (DD001 not a host, DD002 none
    named, DD005 only the shipped example knows it, DD007 no local install).
    """
    name = inventory.default_host if host is None else host
    if name is None:
        raise DeployError(
            "DD002",
            "no host is named and the inventory has no default_host",
            hint=f"name one, or set default_host in {inventory.path}",
        )
    if name in inventory.hosts:
        if inventory.shipped:
            raise DeployError(
                "DD005",
                f"host {name} is only in the shipped example inventory, which contacts no host",
                hint=f"copy {inventory.path} to {_user_folder() / 'inventories' / 'hosts.toml'}, "
                "put your host in and take out the line `example = true`",
            )
        return _located(inventory.hosts[name])
    if name.startswith(LOCAL_PREFIX):
        path = name.removeprefix(LOCAL_PREFIX)
        if not path or not path.isprintable():
            raise DeployError("DD001", f"{name!r} names no folder", hint="write local:PATH")
        site = find_site(path)
        return Target(LOCAL_PREFIX + str(site), "local", root=str(site), python=venv_python(site))
    if name.partition(":")[0] in CONTAINER_ENGINES:
        return _container(name, inventory)
    plain = name.removeprefix(OPENSSH_PREFIX)
    try:
        parse_destination(plain)
    except ValueError as error:
        raise DeployError(
            "DD001",
            f"{name!r} is not a host: {error}",
            hint="a host is an inventory name, an ssh alias, user@host[:port], local:PATH, docker:NAME or "
            "docker:NAME@HOST",
        ) from None
    known = [] if inventory.shipped else sorted(inventory.hosts)
    hint = f"it was taken as an ssh name; the hosts of {inventory.path}: {', '.join(known) or 'none of yours'}"
    return Target(
        name=name,
        kind="ssh",
        ssh=plain,
        transport="paramiko" if plain == name else "openssh",
        unresolved_hint=hint if NAME.match(name) else None,
    )


def _container(name: str, inventory: Inventory) -> Target:
    """The container of ``docker:NAME`` or ``docker:NAME@HOST``: what is known of HOST's own install does not count."""
    text, at, place = name.partition("@")
    try:
        parse_container(text)
    except ValueError as error:
        raise DeployError("DD001", str(error), hint="write docker:NAME, or docker:NAME@HOST") from None
    if not at:
        return Target(name, "local", container=text)
    host = resolve_target(place, inventory)
    if host.kind == "local" or host.container:
        raise DeployError("DD001", f"{name}: {place} is no host to reach over ssh", f"for this machine write {text}")
    return replace(host, name=name, container=text, python=None, root=None, state_dir=None, any_python=False)


def _located(target: Target) -> Target:
    """An inventory's host ready for use: a local one gets its site folder and that folder's interpreter."""
    if target.kind == "ssh" or target.container or target.root is None:
        return target
    site = find_site(target.root)
    return replace(target, root=str(site), python=target.python or venv_python(site))


def _user_folder() -> Path:
    import platformdirs

    return platformdirs.user_config_path(_APP)


def _user_files() -> list[Path]:
    folder = _user_folder()
    single = folder / "inventory.toml"
    return ([single] if single.is_file() else []) + _toml_files(folder / "inventories")


def _toml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.toml") if not path.name.startswith("."))


@dataclass
class _File:
    """One inventory file as read, with the faults found so far: (line, ``key: what``)."""

    path: Path
    table: dict[str, Any]
    lines: KeyLines
    faults: list[tuple[int, str]] = field(default_factory=list)

    def where(self, key: KeyPath) -> str:
        return f"{self.path}:{self.lines.of(key)}"

    def fault(self, key: KeyPath, what: str) -> None:
        self.faults.append((self.lines.of(key), f"{'.'.join(map(str, key))}: {what}"))

    @property
    def example(self) -> bool:
        return self.table.get("example") is True


def _read(path: Path) -> _File:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DeployError("DD003", f"{path} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DeployError("DD004", f"{path}:{line}: the file is not UTF-8 text") from None
    if text.startswith("\ufeff"):
        raise DeployError("DD004", f"{path}:1: the file begins with a byte-order mark", hint="save it without")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise DeployError("DD004", f"{path}: not TOML that can be read: nested too deeply") from None
    except ValueError as error:
        what, place = _syntax_error(str(error), text)
        raise DeployError("DD004", f"{path}{place}: not TOML: {what[:1].lower()}{what[1:]}") from None
    return _File(path, table, KeyLines(text))


def _syntax_error(message: str, text: str) -> tuple[str, str]:
    """What tomllib complains of, and ``:LINE`` where it says so."""
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)\Z", message)
    if place is None:
        return message, ""
    return message[: place.start()], f":{place[1] or text.rstrip().count(chr(10)) + 1}"


def _load(path: Path, paths: Iterable[Path]) -> Inventory:
    files = [_read(each) for each in paths]
    shipped = all(file.example for file in files)
    if not shipped:  # an example beside real inventories is only something to read
        files = [file for file in files if not file.example]
    hosts: dict[str, Target] = {}
    services: dict[str, Service] = {}
    owners: dict[KeyPath, _File] = {}
    for file in files:
        _check_top(file)
        for key in _claims(file):
            first = owners.setdefault(key, file)
            if first is not file:
                file.fault(key, f"is already at {first.where(key)}")
        hosts |= _hosts(file)
        services |= _services(file)
    default = _default_host(owners)
    _check_service_hosts(files, [str(owned[1]) for owned in owners if owned[0] == "hosts"])
    faults = [f"{file.path}:{line}: {what}" for file in files for line, what in sorted(file.faults)]
    if len(faults) == 1:
        raise DeployError("DD004", faults[0])
    if faults:
        raise DeployError("DD004", f"the inventory {path} has {len(faults)} faults", details=faults)
    return Inventory(path, shipped, hosts, services, default)


def _claims(file: _File) -> Iterator[KeyPath]:
    """The keys that only one file of a folder may set."""
    for name in ("hosts", "services"):
        for entry in _section(file, name):
            yield (name, entry)
    if "default_host" in file.table:
        yield ("default_host",)


def _default_host(owners: Mapping[KeyPath, _File]) -> str | None:
    key: KeyPath = ("default_host",)
    file = owners.get(key)
    if file is None:
        return None
    default = file.table["default_host"]
    known = [str(owned[1]) for owned in owners if owned[0] == "hosts"]
    if not isinstance(default, str):
        file.fault(key, wrong_type("a string", default))
        return None
    if default not in known:
        file.fault(key, f"there is no [hosts.{default}]" + did_you_mean(default, known))
    return default


def _check_top(file: _File) -> None:
    _check_keys(file, (), file.table, ("default_host", "example", "hosts", "services"))
    if not isinstance(file.table.get("example", False), bool):
        file.fault(("example",), wrong_type("a boolean", file.table["example"]))
    for name in ("hosts", "services"):
        if not isinstance(file.table.get(name, {}), dict):
            file.fault((name,), wrong_type("a table", file.table[name]))


def _section(file: _File, name: str) -> dict[str, Any]:
    section = file.table.get(name, {})
    return section if isinstance(section, dict) else {}


def _services(file: _File) -> dict[str, Service]:
    section = _section(file, "services")
    services: dict[str, Service] = {}
    if not section:
        return services
    from ddtree_deploy.launch.service import Service

    for name, table in section.items():
        if not _check_name(file, ("services", name), table):
            continue
        try:
            services[name] = Service.from_table(name, table)
        except DeployError as error:
            for what in error.details or (error.message,):
                # Each says `services.NAME.KEY: why`.
                word, _, why = what.removeprefix(f"services.{name}.").partition(": ")
                file.fault(("services", name, word), why)
    return services


def _check_service_hosts(files: Iterable[_File], known: list[str]) -> None:
    """A service's host may be in another file of the folder."""
    for file in files:
        for name, table in _section(file, "services").items():
            host = table.get("host") if isinstance(table, dict) else None
            if isinstance(host, str) and host not in known:
                file.fault(("services", name, "host"), f"there is no [hosts.{host}]" + did_you_mean(host, known))


def _hosts(file: _File) -> dict[str, Target]:
    hosts = {}
    for name, table in _section(file, "hosts").items():
        key: KeyPath = ("hosts", name)
        before = len(file.faults)
        if not _check_name(file, key, table):
            continue
        _check_keys(file, key, table, HOST_KEYS)
        values: dict[str, Any] = {}
        for word, convert in HOST_KEYS.items():
            if word in table:
                try:
                    values[word] = convert(table[word], file.path.parent)
                except ValueError as error:
                    file.fault((*key, word), str(error))
        if "ssh" in table and "local" in table:
            file.fault(key, "needs exactly one of ssh and local")
        elif "ssh" not in table and "local" not in table and "container" not in table:
            file.fault(key, "needs one of ssh, local and container")
        elif "local" in table:
            for word in sorted((SSH_ONLY | {"root", "container"}) & table.keys()):
                file.fault((*key, word), "has no meaning beside local")
        elif "ssh" not in table:
            for word in sorted(SSH_ONLY & table.keys()):
                file.fault((*key, word), "has no meaning for a container of this machine")
        if len(file.faults) == before:
            # A local folder is looked at when the host is used: it may not be there yet.
            path = values.pop("local", None)
            if path is not None:
                values["root"] = path
            hosts[name] = Target(name, "ssh" if "ssh" in values else "local", **values)
    return hosts


def _check_name(file: _File, key: KeyPath, table: object) -> bool:
    if not NAME.match(str(key[-1])):
        file.fault(key, "a name is letters, digits, `.`, `_` and `-`, and does not begin with `.` or `-`")
        return False
    if not isinstance(table, dict):
        file.fault(key, wrong_type("a table", table))
        return False
    return True


def _check_keys(file: _File, key: KeyPath, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for word in table:
        if word not in known:
            file.fault((*key, word), "unknown key" + did_you_mean(word, known))
