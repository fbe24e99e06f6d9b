"""Another order of a series, or one patch fewer: only where every hunk still finds its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddtree_deploy.authoring.series import Series
from ddtree_deploy.authoring.stack import Stack, stack_on
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.patchset import Family, Patch


def reordered(stack: Stack, names: Sequence[str]) -> Family:
    """The family with its patches in the order of ``names``, which are all of them; hashes as they are.

    Raises DeployError DD001 for other names, DD117 where a hunk needs a patch that would come after it, or where
    the files would end up otherwise.
    """
    patches = {patch.name: patch for patch in stack.family.patches}
    if sorted(names) != sorted(patches):
        odd = sorted(set(names) ^ set(patches)) or sorted({name for name in names if list(names).count(name) > 1})
        raise DeployError("DD001", f"the new order must name every patch once: {', '.join(odd)}", _known(stack))
    again = _applied(stack, [patches[name] for name in names])
    wrong = [path for path in stack.family.paths if again.final(path) != stack.final(path)]
    if wrong:
        raise DeployError("DD117", f"in that order {', '.join(wrong)} would end up otherwise", _known(stack))
    return _renumbered(again)


def moved(names: Sequence[str], patch: str, before: str | None) -> list[str]:
    """``names`` with one patch moved before another, or to the end. Raises DeployError DD001 for unknown ones."""
    for name in (patch, *([before] if before else [])):
        if name not in names:
            raise DeployError("DD001", f"{name} is no patch of the series", f"patches: {', '.join(names)}")
    rest = [name for name in names if name != patch]
    at = rest.index(before) if before and before != patch else len(rest)
    return [*rest[:at], patch, *rest[at:]] if before != patch else list(names)


def dropped(stack: Stack, name: str, why: str | None = None) -> Family:
    """The family without one patch; hashes as they are, to be made anew. ``why``: to be said in ``left_out``.

    Raises DeployError DD001 for an unknown patch, or a reason for one that no other family has; DD117 where a hunk
    of a later one needs it.
    """
    names = [patch.name for patch in stack.family.patches]
    if name not in names:
        raise DeployError("DD001", f"{name} is no patch of the series", _known(stack))
    again = _applied(stack, [patch for patch in stack.family.patches if patch.name != name])
    level = names.index(name) + 1
    for weave in Series(stack).weaves:
        path = weave.names[-1]
        there = path is not None and weave.names[level - 1] == weave.names[level] == path
        # A hunk that found like lines elsewhere would pass unseen.
        if there and again.final(str(path)) != weave.without(level):
            raise DeployError("DD117", f"later patches depend on what {name} does to {path}")
    family = _renumbered(again)
    if why is None:
        return family
    others = [other for other in stack.sets[-1].families.values() if other.name != family.name]
    if not any(patch.name == name for other in others for patch in other.patches):
        raise DeployError("DD001", f"--because is for patches that another family has, and none has {name}")
    return replace(family, left_out={**family.left_out, name: why})


def _known(stack: Stack) -> str:
    return f"patches: {', '.join(patch.name for patch in stack.family.patches) or 'none'}"


def _applied(stack: Stack, patches: Sequence[Patch]) -> Stack:
    """The stack with other patches. Raises DeployError DD117 for the first that does not apply."""
    old = [patch.name for patch in stack.family.patches]
    for count in range(len(patches) + 1):
        family = replace(stack.family, patches=tuple(patches[:count]))
        top = replace(stack.sets[-1], families={**stack.sets[-1].families, family.name: family})
        try:
            again = stack_on(stack.levels[0], (*stack.sets[:-1], top), stack.engine, trust_hashes=False)
        except DeployError as error:
            last = patches[count - 1].name
            missing = set(old[: old.index(last)]) - {patch.name for patch in patches[:count]}
            raise _depends(stack, last, missing, error) from None
    return again


def _depends(stack: Stack, name: str, missing: set[str], error: DeployError) -> DeployError:
    names = [patch.name for patch in stack.family.patches]
    level = names.index(name) + 1
    details = [
        f"{what} builds on {', '.join(names[below - 1] for below in sorted(below))}"
        for at, what, spans in Series(stack).leanings
        if at == level and (below := {below for below in spans if names[below - 1] in missing})
    ]
    return DeployError(
        "DD117",
        f"{name} needs {', '.join(sorted(missing))}, which would not be before it",
        "nothing was written",
        details or error.details or [error.message],
    )


def _renumbered(stack: Stack) -> Family:
    """The family whose hunks state the lines at which they stand."""
    return replace(stack.family, patches=tuple(Series(stack).patches(renumber=True)))
