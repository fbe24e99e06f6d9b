"""The sha256 of published wheels: those that ship with the program, and those that a user vouched for.

::

    [wheels."0.5.11"]
    cp312-cp312-manylinux_2_34_x86_64 = { sha256 = "9186...", size = 7307932 }
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ddtree_deploy.agent.root import PACKAGE
from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.places import config_folder, usable

PINS = "pins.toml"
MAX_SIZE = 1 << 32  # bytes of a wheel
_HEAD = (
    "# The published wheels that count as pristine: sha256 and size in bytes of each file, as the index serves it.\n"
)
_TAGS = re.compile(r"[a-z0-9_.]+-[a-z0-9_.]+-[a-z0-9_.]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_]{0,63}")


@dataclass(frozen=True, slots=True)
class Pin:
    """One published wheel: engine version, tags (``cp312-cp312-manylinux_2_34_x86_64``), sha256 in hex, bytes."""

    version: str
    tags: str
    sha256: str
    size: int

    @property
    def python(self) -> str:
        """The python tag: ``cp312``, or ``py3`` for every python."""
        return self.tags.split("-")[0]

    @property
    def platform(self) -> str:
        """The platform tag: ``manylinux_2_34_x86_64``, or ``any``."""
        return self.tags.split("-")[2]

    @property
    def filename(self) -> str:
        """The wheel's name on the index."""
        return f"{PACKAGE}-{self.version}-{self.tags}.whl"


def version_key(version: str) -> tuple[int, Version | str]:
    """Orders engine versions as pip does; what is no version comes first."""
    try:
        return 1, Version(version)
    except InvalidVersion:
        return 0, version


def pins() -> tuple[Pin, ...]:
    """Every pinned wheel, by version and name: the shipped pins, then the user's. Raises DeployError DD007."""
    return (*shipped_pins(), *user_pins())


@functools.cache
def shipped_pins() -> tuple[Pin, ...]:
    """The pins that ship with the program."""
    return read_pins(resources.files("ddtree_deploy.snapshots").joinpath(PINS).read_bytes(), PINS)


def user_pins() -> tuple[Pin, ...]:
    """The pins in the user's own file, but those that are shipped as well. Raises DeployError DD007."""
    file = user_file()
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DeployError("DD007", f"{file}: {error.strerror}") from None
    shipped = {(pin.version, pin.tags) for pin in shipped_pins()}
    return tuple(pin for pin in read_pins(data, str(file)) if (pin.version, pin.tags) not in shipped)


def user_file() -> Path:
    """Where the user's own pins are kept."""
    return config_folder() / PINS


def checkout_file() -> Path | None:
    """The shipped pins where they may be edited: in a checkout of this program; None in an installed one."""
    folder = Path(__file__).resolve().parent
    return folder / PINS if (folder.parents[1] / "pyproject.toml").is_file() else None


def read_pins(data: bytes, where: str) -> tuple[Pin, ...]:
    """The pins in a file, by version and name. Raises DeployError DD007 for one that is not as it must be."""

    def bad(what: str) -> DeployError:
        return DeployError("DD007", f"{where}: {what}", f"mend the file, or remove it: {where}")

    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad(str(error)) from None
    versions = document.pop("wheels", {})
    if document or not isinstance(versions, dict):
        raise bad('it has more than tables [wheels."VERSION"]')
    found = []
    for version, wheels in versions.items():
        if not _VERSION.fullmatch(version) or not isinstance(wheels, dict):
            raise bad(f"{version!r} is no table of a version")
        for tags, value in wheels.items():
            if not _TAGS.fullmatch(tags) or not isinstance(value, dict) or value.keys() != {"sha256", "size"}:
                raise bad(f"{version}: {tags!r} is not a wheel's tags with sha256 and size")
            sha256, size = value["sha256"], value["size"]
            if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
                raise bad(f"{version}: {tags}: sha256 must be 64 hex digits in lower case")
            if type(size) is not int or not 0 < size < MAX_SIZE:
                raise bad(f"{version}: {tags}: size must be a number of bytes")
            found.append(Pin(version, tags, sha256, size))
    return _sorted(found)


def render_pins(found: Iterable[Pin]) -> str:
    """The text of a file of pins, in the order of versions and names."""
    lines, version = [_HEAD], None
    for pin in _sorted(found):
        if pin.version != version:
            lines.append(f'\n[wheels."{pin.version}"]\n')
            version = pin.version
        key = pin.tags if "." not in pin.tags else f'"{pin.tags}"'
        lines.append(f'{key} = {{ sha256 = "{pin.sha256}", size = {pin.size} }}\n')
    return "".join(lines)


def add_pins(file: Path, new: Iterable[Pin]) -> tuple[Pin, ...]:
    """Record pins in a file, all or none; returns those that were not there yet.

    Raises DeployError DD405 for a wheel that is pinned to other bytes already, DD007.
    """
    known = {(pin.version, pin.tags): pin for pin in (*pins(), *_in(file))}
    added = []
    for pin in new:
        there = known.get((pin.version, pin.tags))
        if there is not None and there.sha256 != pin.sha256:
            raise DeployError(
                "DD405",
                f"{pin.filename}: sha256 {pin.sha256} is offered, pinned is {there.sha256}",
                "a published wheel never changes: find out who serves another one under its name",
            )
        if there is None:
            added.append(pin)
    if added:
        _write(file, render_pins((*_in(file), *added)))
        shipped_pins.cache_clear()
    return tuple(added)


def _in(file: Path) -> tuple[Pin, ...]:
    return read_pins(file.read_bytes(), str(file)) if file.is_file() else ()


def _write(file: Path, text: str) -> None:
    with usable(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        try:
            with open(handle, "wb") as draft:  # noqa: PTH123
                draft.write(text.encode("utf-8"))
                os.fchmod(draft.fileno(), 0o644)
                draft.flush()
                os.fsync(draft.fileno())
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _sorted(found: Iterable[Pin]) -> tuple[Pin, ...]:
    return tuple(sorted(found, key=lambda pin: (version_key(pin.version), pin.filename)))
