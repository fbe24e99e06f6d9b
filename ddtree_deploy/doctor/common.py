"""What several checks read from the facts: services, the GPUs that each uses, versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from ddtree_deploy.doctor.facts import Facts, NotKnown
from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import flags
from ddtree_deploy.launch.argv import build_command
from ddtree_deploy.launch.models import Drafter, Model, read_drafter, read_model
from ddtree_deploy.launch.service import Service

BLACKWELL = (10, 11, 12)  # majors of compute capability
GIB = 1024**3

T = TypeVar("T")

_BACKENDS = ("attention_backend", "draft_attention_backend", "moe_runner_backend", "mamba_scheduler_strategy")


def version(text: str, path: str) -> Version:
    """A version; NotKnown for what is none."""
    try:
        return Version(text)
    except InvalidVersion:
        raise NotKnown(path, f"{text!r} is no version") from None


def dotted(text: str, path: str) -> tuple[int, ...]:
    """The leading numbers of a dotted version such as a driver's: ``580.65.06`` is (580, 65, 6)."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", text)
    if match is None:
        raise NotKnown(path, f"{text!r} is no version")
    return tuple(int(part) for part in match.group().split("."))


def engine_version(facts: Facts) -> Version:
    """The installed engine's version."""
    return version(facts.at("engine").text("version"), "engine.version")


def torch_cuda(facts: Facts) -> tuple[int, ...] | None:
    """The CUDA version that torch is built for; None for a build without."""
    text = facts.at("cuda").at("torch").maybe_text("cuda")
    return None if text is None else dotted(text, "cuda.torch.cuda")


def devices(facts: Facts) -> list[Facts]:
    """The GPUs that the driver shows."""
    return facts.at("gpu").items("devices")


def capability(device: Facts) -> tuple[int, int]:
    """A GPU's compute capability, such as (12, 0)."""
    numbers = dotted(device.text("capability"), f"{device.path}.capability")
    return numbers[0], numbers[1] if len(numbers) > 1 else 0


def shown(numbers: tuple[int, ...]) -> str:
    """Numbers with dots between them."""
    return ".".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class Planned:
    """A service that the inventory has for this host, and what was recorded of it."""

    settings: Service
    facts: Facts

    @property
    def name(self) -> str:
        """The service's name."""
        return self.settings.name

    @property
    def unit(self) -> str:
        """The name of its systemd unit."""
        return self.facts.at("unit").text("name")


def services(facts: Facts) -> list[Planned]:
    """The services that are looked at; NotKnown for one that is not valid."""
    found = []
    for item in facts.items("services"):
        try:
            found.append(Planned(Service.from_table(item.text("name"), item.at("table").value), item))  # type: ignore[arg-type]
        except DeployError as error:
            raise NotKnown(f"{item.path}.table", error.message) from None
    return found


def chosen(planned: Planned, facts: Facts) -> list[Facts]:
    """The GPUs of a service that the host has: those that it lists, else the first ones."""
    listed, size, there = planned.settings.gpus, planned.settings.tp, devices(facts)
    if not listed:
        return there[:size]
    return [device for device in there if device.integer("index") in listed[:size]]


def fitted(planned: Planned, facts: Facts) -> Service:
    """The service as it would start: on the GPUs that it really has, with the backends of the unit that is loaded."""
    changes: dict[str, Any] = {}
    gpus = chosen(planned, facts)
    if gpus:
        changes["compute_capability"] = shown(capability(gpus[0]))
    given = installed_options(planned, facts) or {}
    for key in _BACKENDS:
        value = given.get(flags.flag(key, engine_version(facts)))
        if value:
            changes[key] = value
    return replace(planned.settings, **changes)


def installed_options(planned: Planned, facts: Facts) -> dict[str, str] | None:
    """The flags of the unit that systemd has loaded for a service, and their values; None where it has none."""
    units = facts.at("units").at("units")
    if not units.has(planned.unit):
        return None
    loaded = units.at(planned.unit).maybe("loaded")
    words = [] if loaded is None else loaded.texts("command")
    return _options(words) if words else None


def options(planned: Planned, facts: Facts) -> dict[str, str]:
    """The flags of a service's command line and their values, "" for one without: as loaded, else as rendered.

    Where there is neither, what ``extra_args`` say.
    """
    given = installed_options(planned, facts)
    if given is not None:
        return given
    engine, python = str(engine_version(facts)), facts.at("python").text("executable")
    try:
        return _options(build_command(planned.settings, engine=engine, python=python).argv)
    except DeployError:
        return _options(planned.settings.extra_args)


def _options(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            found[name] = value if equals else "" if following.startswith("--") else following
    return found


def model(facts: Facts, path: str) -> Facts:
    """What was found in a model folder."""
    return facts.at("models").at(path)


def folders(planned: Planned) -> list[tuple[str, str]]:
    """("model" or "drafter", path) of a service's model folders; a name of a hub has none."""
    settings = planned.settings
    roles = (("model", settings.model), ("drafter", settings.drafter if settings.speculative else None))
    return [(role, path) for role, path in roles if path is not None and path.startswith("/")]


def read_target(planned: Planned, facts: Facts) -> Model | None:
    """The geometry of a service's target; None where it is no folder, NotKnown where its config cannot be read."""
    path = planned.settings.model
    if not path.startswith("/"):
        return None
    found = model(facts, path)
    return _geometry(read_model, found, path, int(found.number("bytes")))


def read_draft(planned: Planned, facts: Facts) -> Drafter | None:
    """The geometry of a service's drafter, as :func:`read_target`."""
    path = planned.settings.drafter
    if path is None or not path.startswith("/") or not planned.settings.speculative:
        return None
    found = model(facts, path)
    return _geometry(read_drafter, found, path, int(found.number("bytes")))


def _geometry(read: Callable[..., T], found: Facts, path: str, size: int) -> T:
    config = found.at("config").value
    try:
        return read(config, f"{path}/config.json", weight_bytes=size or None)
    except DeployError as error:
        raise NotKnown(f"{found.path}.config", error.message) from None


def plural(count: int, what: str) -> str:
    """A number of things, such as "2 files"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def some(items: list[str], limit: int = 5) -> str:
    """The first few of a list, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
