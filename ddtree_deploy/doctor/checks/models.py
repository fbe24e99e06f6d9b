"""Checks of the model folders, and of target and drafter against each other and against this engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ddtree_deploy.doctor.common import (
    GIB,
    Planned,
    chosen,
    engine_version,
    fitted,
    folders,
    model,
    plural,
    read_draft,
    read_target,
    services,
    some,
)
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning
from ddtree_deploy.launch import budget, legality
from ddtree_deploy.launch.models import Drafter

_AGAIN = "copy the folder again, and compare it with where it came from"


def _folders(facts: Facts) -> Iterator[tuple[Planned, str, str]]:
    for service in services(facts):
        for role, path in folders(service):
            yield service, role, path


@check("DD270")
def folders_there(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        named = [("model", service.settings.model)]
        if service.settings.speculative and service.settings.drafter:
            named.append(("drafter", service.settings.drafter))
        for role, path in named:
            if not path.startswith("/"):
                yield note(
                    f"{service.name}: the {role} {path} is fetched from a hub at the start",
                    mend="download it before, and name the folder",
                )
                continue
            found = model(facts, path)
            why = found.maybe_text("config_error") if found.flag("there") else None
            if not found.flag("there"):
                yield error(f"{service.name}: the {role}'s folder is not there", path, mend="copy the model there")
            elif not found.flag("readable"):
                yield error(
                    f"{service.name}: the {role}'s folder cannot be read",
                    f"{path}, as {facts.at('agent').text('user')}",
                    mend="give the service's user the right to read it",
                )
            elif why is not None:
                yield error(f"{service.name}: the {role}'s config.json {why}", path, mend=_AGAIN)
            elif role == "model" and not found.flag("tokenizer"):
                yield warning(f"{service.name}: the model's folder has no tokenizer", path, mend=_AGAIN)


@check("DD271")
def files_there(facts: Facts) -> Iterator[Saying]:
    for service, role, path in _folders(facts):
        found = model(facts, path)
        if not found.flag("there"):
            continue
        dangling = found.texts("dangling")
        if dangling:
            yield error(f"{service.name}: links of the {role} lead nowhere", f"{path}: {some(dangling)}", mend=_AGAIN)
        held = found.table("weights")
        index = found.maybe("index")
        lacking = [name for name in index.texts("shards") if name not in held] if index is not None else []
        if lacking:
            yield error(
                f"{service.name}: {plural(len(lacking), 'weight file')} of the {role} missing",
                f"{path}: {some(lacking)}",
                mend=_AGAIN,
            )
        elif not held:
            yield error(f"{service.name}: the {role}'s folder holds no safetensors file", path, mend=_AGAIN)


@check("DD272")
def files_whole(facts: Facts) -> Iterator[Saying]:
    for service, role, path in _folders(facts):
        for name, file in model(facts, path).table("weights").items():
            why, size = file.maybe_text("error"), file.integer("size")
            expected = file.maybe_integer("expected")
            if why is not None:
                mend = "fetch the files themselves: `git lfs pull`" if "git-lfs" in why else _AGAIN
                yield error(f"{service.name}: a weight file of the {role} {why}", f"{path}/{name}", mend=mend)
            elif expected is not None and size != expected:
                yield error(
                    f"{service.name}: a weight file of the {role} is {'cut off' if size < expected else 'too long'}",
                    f"{path}/{name}: {size} bytes, and its header promises {expected}",
                    mend=_AGAIN,
                )


@check("DD273")
def index_agrees(facts: Facts) -> Iterator[Saying]:
    for service, role, path in _folders(facts):
        found = model(facts, path)
        why = found.maybe_text("index_error")
        if why is not None:
            yield error(f"{service.name}: the {role}'s index {why}", path, mend=_AGAIN)
        index = found.maybe("index")
        if index is not None and index.at("lost").integer("count"):
            lost = index.at("lost")
            yield error(
                f"{service.name}: {plural(lost.integer('count'), 'tensor')} of the {role} not where the index says",
                some(lost.texts("first")),
                path,
                mend="the files are of two revisions of the model: " + _AGAIN,
            )


@check("DD274")
def drafter_fits(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        draft = read_draft(service, facts)
        if draft is not None:
            alone = {finding.text for finding in _legality(service, facts, None)}
            for finding in _legality(service, facts, draft):
                if finding.text not in alone:
                    yield _say(service, finding, "choose the drafter that was trained for this target")


@check("DD275")
def target_can_be_served(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        for finding in _legality(service, facts, None):
            yield _say(service, finding, "change the service as it says, or upgrade the engine")


@check("DD276")
def fits_memory(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        target, draft, gpus = read_target(service, facts), read_draft(service, facts), chosen(service, facts)
        settings = fitted(service, facts)
        if (
            target is None
            or not gpus
            or len(gpus) < settings.tp
            or any(f.refused for f in _legality(service, facts, None))
        ):
            continue
        if settings.block_size is None and draft is not None:
            settings = replace(settings, block_size=draft.block_size)
        least = int(min(device.number("memory_mib") for device in gpus))
        compact = _tree(facts).compact_states
        plan = budget.plan(settings, engine_version(facts), target, draft, gpu_mib=least, compact_states=compact)
        rows = sorted(plan.rows, key=lambda row: -row.bytes)[:3]
        for fault in plan.faults:
            yield error(
                f"{service.name}: {fault}",
                f"{least} MiB a GPU; largest: " + ", ".join(f"{row.what} {row.bytes / GIB:.1f} GiB" for row in rows),
                mend=f"`ddtree-deploy launch --service {service.name}` shows the table and sizes that fit",
            )


def _legality(service: Planned, facts: Facts, draft: Drafter | None) -> list[legality.Finding]:
    target = read_target(service, facts)
    if target is None:
        return []
    return legality.check(fitted(service, facts), engine_version(facts), target, draft, _tree(facts))


def _tree(facts: Facts) -> legality.Tree:
    """What the sources on the host show of what was fixed and added in them."""
    release = legality.Tree.of_release(engine_version(facts))
    traits = facts.at("engine").at("traits")
    return legality.Tree(
        draft_rope_read=release.draft_rope_read or traits.flag("draft_rope"),
        draft_windows_honoured=release.draft_windows_honoured or traits.flag("draft_windows"),
        compact_states=traits.flag("compact_states"),
    )


def _say(service: Planned, finding: legality.Finding, mend: str) -> Saying:
    # What can be mended otherwise is said in the finding itself, behind a colon.
    way = None if ": " in finding.text else mend
    return (error if finding.refused else warning)(f"{service.name}: {finding.text}", mend=way)
