"""Checks of the interpreter, its environment and the packages in it."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from ddtree_deploy.doctor.common import plural, services, some, version
from ddtree_deploy.doctor.facts import Facts, NotKnown
from ddtree_deploy.doctor.findings import Saying, check, error, warning

_ENGINE = "sglang"
_MARKERS = (
    "implementation_name",
    "implementation_version",
    "os_name",
    "platform_machine",
    "platform_python_implementation",
    "platform_release",
    "platform_system",
    "platform_version",
    "python_full_version",
    "python_version",
    "sys_platform",
)
_SHOWN = 12  # missing packages with their users
# Packages whose version decides whether the engine runs; another one of anything else is a risk alone.
_BINARY = ("torch", "sglang-kernel", "sgl-kernel", "flashinfer-python", "flashinfer-cubin", "transformers", "triton")


@check("DD240")
def engine_there(facts: Facts) -> Iterator[Saying]:
    engine = facts.at("engine")
    if engine.has("error"):
        yield error(
            "sglang is not installed for this interpreter",
            engine.text("error"),
            mend="name the engine's interpreter: --python, or python in the inventory",
        )
    elif engine.maybe_text("version") is None:
        yield warning(
            "the engine does not say its version",
            engine.text("site"),
            mend="install sglang from a wheel, so that it has a dist-info",
        )


@check("DD241")
def interpreter(facts: Facts) -> Iterator[Saying]:
    python = facts.at("python")
    wanted = facts.at("packages").maybe_text("requires_python")
    found = version(python.text("version"), "python.version")
    if wanted is None:
        return
    try:
        allowed = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise NotKnown("packages.requires_python", f"{wanted!r} is no version specifier") from None
    if not allowed.contains(found, prereleases=True):
        yield error(
            f"python {found} is not one that the engine supports",
            f"it requires {wanted}; {python.text('executable')}",
            mend="make the engine's environment anew with a supported python",
        )


@check("DD242")
def environment(facts: Facts) -> Iterator[Saying]:
    python = facts.at("python")
    foreign = python.maybe_text("foreign")
    if foreign is not None:
        yield error(
            "this interpreter is not the one that runs the engine",
            foreign,
            mend="name the engine's own: --python, or python in the inventory",
        )
    if python.flag("venv") and python.maybe_flag("venv_home_there") is False:
        yield error(
            "the virtual environment's base python is gone",
            f"pyvenv.cfg names {python.maybe_text('venv_home')}",
            mend="make the environment anew",
        )
    for service in services(facts):
        rendered = service.settings.python
        prefix = python.text("prefix")
        if rendered is not None and posixpath.dirname(posixpath.dirname(rendered)) != prefix and foreign is None:
            yield warning(
                f"{service.name}: runs {rendered}",
                f"what is judged here is the environment {prefix}",
                mend="set `python` of the host and of the service to the same interpreter",
            )


@check("DD243")
def missing(facts: Facts) -> Iterator[Saying]:
    installed = facts.at("packages").words("installed")
    absent: dict[str, dict[str, None]] = {}
    for user, requirement in _required(facts):
        name = canonicalize_name(requirement.name)
        if name not in installed:
            who = user + (f" ({requirement.specifier})" if requirement.specifier else "")
            absent.setdefault(name, {})[who] = None
    if absent:
        lines = [f"{name}, required by {some(list(users), 3)}" for name, users in sorted(absent.items())]
        yield error(
            f"{plural(len(absent), 'required package')} not installed",
            *lines[:_SHOWN],
            *([f"and {len(lines) - _SHOWN} more: {some(sorted(absent)[_SHOWN:], 99)}"] if len(lines) > _SHOWN else []),
            mend="install the engine's requirements into its environment: the installation was cut off or trimmed",
        )


@check("DD244")
def versions(facts: Facts) -> Iterator[Saying]:
    installed = facts.at("packages").words("installed")
    for user, requirement in _required(facts):
        name = canonicalize_name(requirement.name)
        found = installed.get(name)
        if found is None or not requirement.specifier:
            continue
        if not requirement.specifier.contains(version(found, f"packages.installed.{name}"), prereleases=True):
            severe = error if name in _BINARY and user == _ENGINE else warning
            yield severe(
                f"{name} {found} is not what {user} requires",
                f"{user} requires {requirement.name}{requirement.specifier}",
                mend=f"install '{requirement.name}{requirement.specifier}'",
            )


@check("DD245")
def twice(facts: Facts) -> Iterator[Saying]:
    for item in facts.at("packages").items("twice"):
        yield warning(
            f"{item.text('name')} is installed twice in one folder",
            some(item.texts("versions")),
            mend="an upgrade was cut off: uninstall it and install it again",
        )


@functools.lru_cache(4096)
def _parsed(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _required(facts: Facts) -> Iterator[tuple[str, Requirement]]:
    """(who, requirement) for everything that the engine leads to and that this interpreter's markers ask for."""
    packages = facts.at("packages")
    lines = packages.at("requires")
    given = facts.at("python").at("markers")
    # What is missing would be taken from this machine's own python.
    markers = {name: given.text(name) for name in _MARKERS}
    waiting: list[tuple[str, frozenset[str]]] = [(_ENGINE, frozenset())]
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        user, extras = waiting.pop()
        if (user, extras) in done or not lines.has(user):
            if user == _ENGINE and not lines.has(user):
                raise NotKnown("packages.requires.sglang", "was not gathered")
            continue
        done.add((user, extras))
        for line in lines.texts(user):
            requirement = _parsed(line)
            if requirement is None:
                raise NotKnown(f"packages.requires.{user}", f"{line!r} is no requirement")
            if requirement.marker is not None and not any(
                requirement.marker.evaluate({**markers, "extra": extra}) for extra in ("", *extras)
            ):
                continue
            yield user, requirement
            wanted = frozenset(canonicalize_name(extra) for extra in requirement.extras)
            waiting.append((canonicalize_name(requirement.name), wanted))
