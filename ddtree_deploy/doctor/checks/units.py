"""Checks of the services' systemd units: on disk, loaded, running."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.doctor.common import Planned, plural, services, some
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning

_HIDDEN = "***"  # what the agent puts in place of a secret


def _unit(facts: Facts, name: str) -> tuple[Facts | None, Facts | None]:
    """(file, loaded) of a unit; each None where there is none."""
    units = facts.at("units").at("units")
    if not units.has(name):
        return None, None
    unit = units.at(name)
    loaded = unit.maybe("loaded")
    there = loaded is not None and loaded.maybe_text("load") not in (None, "not-found")
    return unit.maybe("file"), loaded if there else None


@check("DD290")
def loaded_as_on_disk(facts: Facts) -> Iterator[Saying]:
    units = facts.at("units")
    why = units.maybe_text("manager")
    if why is not None:
        if services(facts) or units.at("units").value:
            yield note("not known: what systemd has loaded", why)
        return
    for name in units.table("units"):
        file, loaded = _unit(facts, name)
        if loaded is not None and loaded.flag("reload"):
            yield warning(
                f"{name} on disk is not what systemd has loaded",
                "a start or restart runs the old one",
                mend="`systemctl daemon-reload`, then restart the service",
            )
        if file is not None and loaded is None:
            yield warning(
                f"{name} is on disk, and systemd does not know it", file.text("path"), mend="`systemctl daemon-reload`"
            )


@check("DD291")
def as_rendered(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        file, loaded = _unit(facts, service.unit)
        drop_ins = loaded.texts("drop_ins") if loaded is not None else []
        if drop_ins:
            yield warning(
                f"{service.unit} is changed by files beside it",
                some(drop_ins),
                mend="bring their settings into the inventory, then remove them",
            )
        if file is None:
            yield note(
                f"{service.unit} is not installed",
                mend=f"`ddtree-deploy launch --service {service.name} --install`",
            )
            continue
        wanted = service.facts.at("unit").maybe_text("sha256")
        if wanted is not None and wanted != file.text("sha256"):
            yield warning(
                f"{service.unit} is not the unit that the inventory gives",
                f"{file.text('path')}: sha256 {file.text('sha256')[:12]}, rendered {wanted[:12]}",
                mend=f"`ddtree-deploy launch --service {service.name} --install` shows the difference and installs it",
            )


@check("DD292")
def environment_files(facts: Facts) -> Iterator[Saying]:
    files = facts.at("files")
    for service in services(facts):
        file, _loaded = _unit(facts, service.unit)
        if file is None:
            continue  # not installed: its environment is not expected either
        rendered = service.facts.at("environment_file")
        yield from _environment_file(service, files, rendered)
        secrets = service.facts.maybe_text("secrets_file")
        if secrets is not None:
            yield from _secrets_file(service, files, secrets)


def _environment_file(service: Planned, files: Facts, rendered: Facts) -> Iterator[Saying]:
    path, wanted = rendered.text("path"), rendered.maybe_text("sha256")
    install = f"`ddtree-deploy launch --service {service.name} --install`"
    found = files.maybe(path)
    if found is None:
        yield error(f"{service.name}: the environment file is not there", path, mend=install)
        return
    digest = found.maybe_text("sha256")
    if None not in (wanted, digest) and wanted != digest:
        yield warning(
            f"{service.name}: the environment file is not the one that the inventory gives", path, mend=install
        )


def _secrets_file(service: Planned, files: Facts, path: str) -> Iterator[Saying]:
    found = files.maybe(path)
    if found is None:
        yield error(
            f"{service.name}: the secrets file is not there", path, mend=f"write it, with mode 0600: {_names(service)}"
        )
        return
    if found.integer("mode") & 0o077:
        yield error(
            f"{service.name}: others can read the secrets file",
            f"{path}: mode {found.integer('mode'):04o}",
            mend=f"`chmod 600 {path}`, and change the secrets",
        )
    names = found.maybe_texts("names")
    if names is None:
        yield note(f"not known: whether {path} sets {_names(service)}", mend="run the doctor as root: --sudo")
        return
    lacking = [name for name in service.settings.secrets if name not in names]
    if lacking:
        yield error(f"{service.name}: the secrets file does not set {some(lacking)}", path, mend="set it there")


def _names(service: Planned) -> str:
    return some(list(service.settings.secrets))


@check("DD293")
def not_failed(facts: Facts) -> Iterator[Saying]:
    for name in facts.at("units").table("units"):
        _file, loaded = _unit(facts, name)
        if loaded is None:
            continue
        if loaded.maybe_text("active") == "failed":
            yield error(
                f"{name} has failed",
                f"result: {loaded.maybe_text('result')}",
                mend=f"`journalctl -u {name} -n 100` says why",
            )
        elif count := loaded.maybe_integer("restarts"):
            yield warning(
                f"{name} was restarted {plural(count, 'time')}",
                f"it is {loaded.maybe_text('active')} ({loaded.maybe_text('sub')})",
                mend=f"`journalctl -u {name}` says why it ended",
            )


@check("DD294")
def running_as_written(facts: Facts) -> Iterator[Saying]:
    for name in facts.at("units").table("units"):
        file, loaded = _unit(facts, name)
        if loaded is None or loaded.maybe_integer("pid") is None:
            continue
        age = loaded.maybe_number("age")
        if file is not None and age is not None and file.number("age") < age:
            yield warning(
                f"{name} runs since before its unit was changed",
                f"running for {age:.0f} s, changed {file.number('age'):.0f} s ago",
                mend=f"`systemctl restart {name}`",
            )
        words = loaded.maybe_texts("argv") or []
        if any(word == _HIDDEN or word.endswith("=" + _HIDDEN) for word in words):
            yield warning(
                f"{name} has a secret on its command line",
                "every user of the host can read it",
                mend="put it into the file that `engine_config` names, mode 0600, and change the secret",
            )
