"""Finding a pinned sglang wheel: brought by the user, in a wheelhouse, in the cache, or fetched when asked for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ddtree_deploy.agent.root import PACKAGE
from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.pins import Pin, pins, version_key
from ddtree_deploy.snapshots.places import cache_folder, usable
from ddtree_deploy.snapshots.pristine import PristineTree

DEFAULT_PYTHON = "cp312"
DEFAULT_PLATFORM = "manylinux_2_34_x86_64"
DOWNLOAD_TIMEOUT = 600  # seconds
WHEELHOUSE = "DDTREE_DEPLOY_WHEELHOUSE"
OFFLINE = "DDTREE_DEPLOY_OFFLINE"

_BRING = "bring the wheel yourself: `ddtree-deploy wheel add FILE`, or a folder with --wheelhouse"
_TRUTHS = {"": False, "0": False, "no": False, "false": False, "off": False}


@dataclass(frozen=True)
class Sources:
    """Where wheels may come from.

    ``wheelhouses`` are searched before the cache. ``download``: what is not here may be fetched, unless
    ``offline``; ``announce`` is told before it happens.
    """

    wheelhouses: tuple[Path, ...] = ()
    download: bool = False
    offline: bool = False
    announce: Callable[[str], None] = lambda _text: None


def offline_by_environment() -> bool:
    """Whether ``$DDTREE_DEPLOY_OFFLINE`` forbids every download."""
    return _TRUTHS.get(os.environ.get(OFFLINE, "").strip().lower(), True)


def wheelhouses_by_environment() -> tuple[Path, ...]:
    """The folders in ``$DDTREE_DEPLOY_WHEELHOUSE``, separated as in ``$PATH``."""
    return tuple(Path(name) for name in os.environ.get(WHEELHOUSE, "").split(os.pathsep) if name)


def wheels_folder() -> Path:
    """The cache's folder of wheels."""
    return cache_folder() / "wheels"


def tags_of(root_facts: Mapping[str, Any]) -> tuple[str, str]:
    """(python tag, platform tag) of the wheel for a host, from the ``root`` facts of its snapshot."""
    python = root_facts.get("python") or {}
    machine = {"arm64": "aarch64"}.get(str(python.get("machine")), str(python.get("machine")))
    return str(python.get("tag") or DEFAULT_PYTHON), f"manylinux_2_34_{machine}"


def published(version: str) -> tuple[Pin, ...]:
    """The pinned wheels of a version. Raises DeployError DD404 when there is none."""
    known = tuple(pin for pin in pins() if pin.version == version)
    if not known:
        versions = sorted({pin.version for pin in pins()}, key=version_key)
        some = f"{versions[0]} to {versions[-1]}" if versions else "none"
        raise DeployError(
            "DD404",
            f"sglang {version} has no pinned wheel (pinned: {some})",
            f"`ddtree-deploy wheel pin {version}` takes its hashes from the index; `wheel list` shows what is pinned",
        )
    return known


def choose(known: Sequence[Pin], python: str, platform: str) -> Pin:
    """The wheel for these tags, else one for the same platform, else the first: their sources are the same."""
    fitting = [pin for pin in known if pin.platform in (platform, "any")] or list(known)
    return next((pin for pin in fitting if pin.python == python), fitting[0])


def find_wheel(
    version: str,
    python: str = DEFAULT_PYTHON,
    platform: str = DEFAULT_PLATFORM,
    *,
    sources: Sources = Sources(),
    any_tags: bool = False,
) -> Path:
    """The pinned wheel of ``version`` for these tags, checked by hash; ``any_tags``: one that is here will do.

    Raises DeployError DD404 when there is none to be had, DD405 when what was downloaded is not the pinned file.
    """
    known = published(version)
    wanted = choose(known, python, platform)
    for pin in (wanted, *(pin for pin in known if any_tags and pin is not wanted)):
        found = find_here(pin, sources.wheelhouses)
        if found is not None:
            return found
    if sources.offline or not sources.download:
        why = ", and nothing is downloaded (offline)" if sources.offline else ""
        tags = "" if any_tags or wanted is choose(known, DEFAULT_PYTHON, DEFAULT_PLATFORM) else f" --tags {wanted.tags}"
        hint = _BRING if sources.offline else f"get it with `ddtree-deploy wheel fetch {version}{tags}`; or {_BRING}"
        raise DeployError("DD404", f"the wheel of sglang {version} is not here{why}", hint)
    sources.announce(f"downloading {wanted.filename} ({wanted.size / 1e6:.1f} MB)")
    return _fetch(wanted)


def find_wheels(versions: Iterable[str], *, sources: Sources = Sources()) -> dict[str, Path]:
    """A wheel of each version, whichever tags it has: their sources are the same.

    Raises DeployError DD404 that names every version whose wheel is not to be had, and as :func:`find_wheel`.
    """
    found: dict[str, Path] = {}
    missing: dict[str, DeployError] = {}
    for version in dict.fromkeys(versions):
        try:
            found[version] = find_wheel(version, sources=sources, any_tags=True)
        except DeployError as error:
            if error.code != "DD404" or not published(version):
                raise
            missing[version] = error
    if len(missing) > 1 and not sources.download:
        names = " ".join(missing)
        hint = _BRING if sources.offline else f"get them with `ddtree-deploy wheel fetch {names}`; or {_BRING}"
        raise DeployError("DD404", f"the wheels of sglang {names.replace(' ', ', ')} are not here", hint)
    for first in missing.values():
        raise first
    return found


def find_here(pin: Pin, wheelhouses: Iterable[Path] = ()) -> Path | None:
    """The pinned file in a wheelhouse or in the cache; one with other bytes is passed over."""
    for folder in (*wheelhouses, wheels_folder()):
        file = folder / pin.filename
        if sha256_of(file) == pin.sha256:
            return file
    return None


def brought(wheel: Path, version: str) -> Path:
    """A wheel that the user names, checked: the pinned bytes; where the version has no pin, at least that version.

    Raises DeployError DD404 when it cannot be read, DD405 when it is another file.
    """
    known = {pin.sha256 for pin in pins() if pin.version == version}
    actual = sha256_of(wheel)
    if actual is None:
        raise DeployError("DD404", f"{wheel} cannot be read", "--wheel takes the path of a wheel file")
    if known and actual not in known:
        raise DeployError(
            "DD405",
            f"{wheel}: sha256 {actual} is none of the published wheels of sglang {version}",
            f"download it again: `pip download --no-deps --only-binary=:all: sglang=={version}`",
        )
    if not known:
        with PristineTree(wheel) as tree:
            if tree.version != version:
                raise DeployError("DD405", f"{wheel} is sglang {tree.version}, not {version}")
    return wheel


def examine(wheel: Path) -> tuple[Pin, bool]:
    """What a wheel file is, every file in it checked against its RECORD, and whether it is a pinned one.

    A pinned wheel is known by its bytes, whatever it is called. Raises DeployError DD404 unreadable, DD405 not
    sound, not named as a wheel of what is in it, or under a pinned wheel's name with other bytes.
    """
    actual = sha256_of(wheel)
    if actual is None:
        raise DeployError("DD404", f"{wheel} cannot be read", "name a wheel file")
    with PristineTree(wheel) as tree:
        for path in tree:
            tree.read(path)
        version = tree.version
    known = next((pin for pin in pins() if pin.sha256 == actual), None)
    if known is not None:
        return known, True
    try:
        name, named, _build, _tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise DeployError("DD405", str(error), "give the file back the name that it was published under") from None
    prefix = f"{PACKAGE}-{version}-"
    if name != PACKAGE or not wheel.name.startswith(prefix):
        raise DeployError("DD405", f"{wheel} is named as {name} {named}, but holds sglang {version}")
    own = Pin(version, wheel.name.removeprefix(prefix).removesuffix(".whl"), actual, wheel.stat().st_size)
    pinned = next((pin for pin in pins() if pin.filename == own.filename), None)
    if pinned is not None:
        raise DeployError(
            "DD405",
            f"{wheel}: sha256 is {actual}, pinned is {pinned.sha256}",
            "do not use it; download it again from the index",
        )
    return own, False


def keep(wheel: Path, pin: Pin) -> Path:
    """Copy a wheel into the cache, whole or not at all. Raises DeployError DD405 when it is not the pinned file."""
    folder = wheels_folder()
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".add-", dir=folder) as temporary:
            draft = Path(temporary) / pin.filename
            shutil.copyfile(wheel, draft)
            if sha256_of(draft) != pin.sha256:
                raise DeployError("DD405", f"{wheel} changed while it was being copied")
            return draft.replace(folder / pin.filename)


def sha256_of(path: Path) -> str | None:
    """A file's sha256 in hex; None when it cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return None


def _fetch(pin: Pin) -> Path:
    folder = wheels_folder()
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            found = _download(pin, Path(temporary))
            actual = sha256_of(found)
            if actual != pin.sha256:
                raise DeployError(
                    "DD405",
                    f"{pin.filename}: the index served sha256 {actual}, pinned is {pin.sha256}",
                    "do not use it; look at which index pip is set to, or " + _BRING,
                )
            return found.replace(folder / pin.filename)


def pip_command() -> list[str]:
    """How pip is run here. Raises DeployError DD404 when there is none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise DeployError(
        "DD404",
        "there is no pip here to download with",
        f"`python -m ensurepip` (or `uv pip install pip`) adds it; or {_BRING}",
    )


def _download(pin: Pin, folder: Path) -> Path:
    python, abi, platform = pin.tags.split("-")
    number = re.fullmatch(r"cp(\d)(\d+)", python)
    command = [
        *pip_command(),
        *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"),
        *("--implementation", python[:2], "--abi", abi, "--platform", platform),
        *("--python-version", f"{number[1]}.{number[2]}" if number else "3.12"),
        *("--dest", str(folder), f"{PACKAGE}=={pin.version}"),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeployError("DD404", f"{pin.filename} could not be downloaded: {error}", _BRING) from None
    found = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    # An index's address may carry a password.
    said = [re.sub(r"//[^/@\s]*@", "//***@", line) for line in done.stderr.strip().splitlines()]
    raise DeployError(
        "DD404",
        f"{pin.filename} could not be downloaded: pip exited with {done.returncode}",
        f"look at the network and at pip's index settings; or {_BRING}",
        said[-5:],
    )
