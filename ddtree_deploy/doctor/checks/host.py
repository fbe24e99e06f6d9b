"""Checks of the host around the engine."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.doctor.common import GIB, devices, folders, model, services
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning

_SHM = 1 * GIB
_MEMLOCK = 1 * GIB
_NOFILE = 65535  # what the engine itself asks for
_SPACE = 2 * GIB
_SKEW_S = 5.0


@check("DD260")
def shared_memory(facts: Facts) -> Iterator[Saying]:
    several = len(devices(facts)) > 1
    shm = facts.at("host").maybe("shm")
    if shm is None:
        yield error("there is no /dev/shm", mend="mount a tmpfs there: the engine's processes share memory through it")
        return
    total, free = shm.number("total"), shm.number("free")
    if several and total < _SHM:
        yield warning(
            f"shared memory (/dev/shm) has {total / 2**20:.0f} MiB",
            "NCCL ends with: unhandled system error",
            mend="give the container --shm-size=16g, or remount: `mount -o remount,size=16G /dev/shm`",
        )
    elif several and free < _SHM:
        yield warning(
            f"shared memory (/dev/shm) is nearly full: {free / 2**20:.0f} MiB free",
            mend="remove what ended processes left there: `ls -la /dev/shm`",
        )


@check("DD261")
def locked_memory(facts: Facts) -> Iterator[Saying]:
    yield from _limit(facts, "memlock", _MEMLOCK, "LimitMEMLOCK=infinity", "memory that may be locked")


@check("DD262")
def open_files(facts: Facts) -> Iterator[Saying]:
    yield from _limit(facts, "nofile", _NOFILE, "LimitNOFILE=1048576", "files that may be open")


def _limit(facts: Facts, name: str, least: int, setting: str, what: str) -> Iterator[Saying]:
    """A unit's own limit counts; the login's only where something is started by hand."""
    units = facts.at("units").at("units")
    judged = False
    for service in services(facts):
        loaded = units.at(service.unit).maybe("loaded") if units.has(service.unit) else None
        limit = loaded.maybe_integer(name) if loaded is not None and loaded.maybe_text("load") == "loaded" else None
        if limit is None:
            continue
        judged = True
        if 0 <= limit < least:
            yield warning(
                f"{service.unit}: {what}: {limit}",
                f"systemd does not read /etc/security/limits.conf; at least {least} is needed",
                mend=f"{setting} in the unit: `ddtree-deploy launch` writes it",
            )
    limit = facts.at("host").at("limits").integer(name)
    if not judged and 0 <= limit < least:
        yield note(f"{what}: {limit} in a login", "a service's unit sets its own", mend=f"`{setting}` in the unit")


@check("DD263")
def disk_space(facts: Facts) -> Iterator[Saying]:
    for path, folder in facts.at("host").table("folders").items():
        free = folder.maybe_number("free")
        if free is not None and free < _SPACE:
            yield warning(
                f"{free / 2**20:.0f} MiB free for {path}",
                "compiled kernels, caches and patched files need space",
                mend="free some there",
            )


@check("DD264")
def runnable_folders(facts: Facts) -> Iterator[Saying]:
    engine = facts.at("engine")
    site = None if engine.has("error") else engine.text("site")
    for path, folder in facts.at("host").table("folders").items():
        if not folder.flag("exec"):
            yield error(
                f"no program can run from {path}: it is mounted noexec",
                "kernels compiled at run time are loaded from there",
                mend="mount it without noexec, or set TMPDIR and the cache variables to another folder",
            )
        if not folder.flag("writable") and path != site:
            yield note(
                f"{path} cannot be written by {facts.at('agent').text('user')}",
                "the service's own user counts",
            )


@check("DD265")
def main_memory(facts: Facts) -> Iterator[Saying]:
    total = facts.at("host").at("memory").number("total")
    for service in services(facts):
        for role, path in folders(service):
            size = model(facts, path).number("bytes")
            if size > total:
                yield warning(
                    f"{service.name}: the {role}'s {size / GIB:.0f} GiB of weights exceed main memory",
                    f"{total / GIB:.0f} GiB: every start reads them from disk in full",
                    mend="expect slow starts, and raise the deadline for readiness",
                )


@check("DD266")
def clock(facts: Facts) -> Iterator[Saying]:
    clock = facts.at("host").at("clock")
    client = facts.at("client")
    sent, received = client.number("sent"), client.number("received")
    skew = clock.number("epoch") - (sent + received) / 2
    if abs(skew) > _SKEW_S + abs(received - sent) / 2:
        yield warning(
            f"the host's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
            mend="synchronise both: `timedatectl set-ntp true`",
        )
    if clock.maybe_flag("synchronised") is False:
        yield note(
            "nothing synchronises the host's clock",
            "certificates, logs and the history's times depend on it",
            mend="`timedatectl set-ntp true`",
        )


@check("DD267")
def ports(facts: Facts) -> Iterator[Saying]:
    used: dict[int, str] = {}
    table = facts.at("host").at("ports")
    for service in services(facts):
        port = service.settings.port
        if port in used and used[port] != service.name:
            yield error(
                f"{service.name} and {used[port]} both listen on port {port}", mend="give one of them another `port`"
            )
        used[port] = service.name
        listener = table.maybe(str(port))
        if listener is None:
            continue
        who = listener.maybe_text("command") or "a process that only root sees"
        if listener.maybe_text("unit") == service.unit:
            yield note(f"{service.name}: listens on port {port}", who)
        else:
            yield error(
                f"{service.name}: port {port} is taken",
                f"{who} (pid {listener.maybe_integer('pid') or '?'}) on {listener.text('address')}",
                mend="stop it, or set another `port`",
            )
