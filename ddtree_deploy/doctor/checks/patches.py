"""Checks of the engine's files against RECORD and the patch sets, as ``status`` reports them."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.doctor.common import plural, some
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning

_BAD = {
    "drift": "`ddtree-deploy status` shows the files; put them back by reinstalling, or with `rollback --force`",
    "reinstalled": "`ddtree-deploy apply` puts the set back",
    "partly": "`ddtree-deploy apply` finishes it",
}


@check("DD295")
def files_as_they_should_be(facts: Facts) -> Iterator[Saying]:
    patches = facts.at("patches")
    if patches.flag("interrupted"):
        yield error("a transaction was interrupted", mend="`ddtree-deploy recover`")
    for line in patches.items("sets"):
        name, state = f"{line.text('name')} {line.text('version')}", line.text("state")
        if state in _BAD:
            yield error(f"patch set {name}: {state}", *filter(None, [line.text("detail")]), mend=_BAD[state])
        elif state == "superseded":
            yield note(
                f"patch set {name}: a newer version is known here", line.text("detail"), mend="`ddtree-deploy apply`"
            )
    foreign = patches.texts("foreign")
    if foreign:
        yield warning(
            f"{plural(len(foreign), 'file')} of the engine changed, and no patch set did it",
            some(foreign),
            mend="`ddtree-deploy status` names them; `ddtree-deploy diff` shows the changes",
        )


@check("DD296")
def engines_up_to_date(facts: Facts) -> Iterator[Saying]:
    patches = facts.at("patches")
    for process in patches.items("processes"):
        if process.flag("older"):
            yield warning(
                f"pid {process.integer('pid')} still runs the code from before the last change",
                process.text("command"),
                mend="restart it",
            )
