"""``patchset refresh``: the edits of a patched tree go back into the patches that own the lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddtree_deploy.authoring.edits import Edit, carry_out, edits_of
from ddtree_deploy.authoring.series import Series
from ddtree_deploy.authoring.stack import Stack, stack_on
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.names import PLAIN_PATH, why_disallowed
from ddtree_deploy.patching.patchset import Family
from ddtree_deploy.patching.problems import Problem, as_error
from ddtree_deploy.patching.series import NAME

_MARKERS = (b"<<<<<<< ", b"||||||| ", b">>>>>>> ")
_NUMBER = re.compile(r"(\d{1,6})-")


@dataclass(frozen=True)
class Wishes:
    """What the author says about edits that belong to no patch, or to several. ``into``: an existing patch (its
    number from 1, its name or the beginning of it); ``new``: the name of a new one at the end, with ``message`` as
    its text. ``everything``: edits that belong to a patch go there too.
    """

    into: str | None = None
    new: str | None = None
    message: str = ""
    everything: bool = False


@dataclass(frozen=True)
class Refreshed:
    """``family`` has the new patches and added files, and the old hashes. ``lines``: what went where."""

    family: Family
    lines: tuple[str, ...]


def refresh(stack: Stack, edited: Mapping[str, bytes | None], wishes: Wishes) -> Refreshed:
    """Put ``edited`` (path -> bytes, None for a deleted file) back into the stack's family.

    The rebuilt series gives exactly the edited files, and patches that have no part in an edit stay byte for byte.
    Raises one DeployError, nothing changed: DD116 edits that belong to no patch or to several, DD118 what a set
    cannot hold, DD001 wishes that make no sense.
    """
    if wishes.into is not None and wishes.new is not None:
        raise DeployError("DD001", "--into and --new exclude one another", "name one")
    if wishes.message and wishes.new is None:
        raise DeployError("DD001", "--message is the text of a new patch", "name it: --new NAME")
    problems = [*_refused(stack, edited), *_unresolved(stack, edited)]
    if problems:
        raise as_error(problems, f"{stack.sets[-1].name} {stack.engine}")
    series = Series(stack)
    added, lines = _added(stack, edited)
    of_patches = {path: data for path, data in edited.items() if path not in added and path not in stack.family.added}
    lines += _into_patches(series, of_patches, wishes)
    patches = tuple(series.patches())
    kept = {patch.name for patch in patches}
    lines += [f"{name}: nothing is left of it, it is out of the series" for name in series.names if name not in kept]
    family = replace(stack.family, patches=patches, added=added)
    _check(stack, family, edited)
    return Refreshed(family, tuple(lines))


# -- what a set cannot hold --------------------------------------------------------------------------


def _refused(stack: Stack, edited: Mapping[str, bytes | None]) -> list[Problem]:
    problems = []
    for path, data in edited.items():
        before = stack.final(path)
        reason = why_disallowed(path, stack.sets[-1].roots)
        if reason is None and not PLAIN_PATH.fullmatch(path):
            reason = "names in a set are of letters, digits and ._+@-"
        if reason is None and data is not None:
            reason = _odd_content(before, data)
        if reason is None and before is None and path not in stack.family.added:
            gone = [name for name, paths in _diffs(stack) if path in paths]
            reason = f"{gone[-1]} takes it away, and a set cannot add it again" if gone else None
        if reason is not None:
            problems.append(Problem("DD118", f"{path!r}: {reason}" if not path.isprintable() else f"{path}: {reason}"))
    return problems


def _diffs(stack: Stack) -> list[tuple[str, tuple[str, ...]]]:
    return [(patch.name, diff.paths) for patch in stack.family.patches for diff in patch.diffs]


def _odd_content(before: bytes | None, after: bytes) -> str | None:
    if b"\0" in after and b"\0" not in (before or b""):
        return "it holds a NUL byte: a set holds text"
    if before is not None and b"\r\n" not in before and after.count(b"\r\n") > after.count(b"\n") / 2:
        return "its line ends became CRLF: put the LF ones back (dos2unix)"
    if before is not None and b"\r\n" in before and b"\r\n" not in after and after == before.replace(b"\r\n", b"\n"):
        return "its line ends became LF: put the CRLF ones back (unix2dos)"
    return None


def _unresolved(stack: Stack, edited: Mapping[str, bytes | None]) -> list[Problem]:
    """Conflict markers in what the set would leave."""
    problems = []
    for path in sorted({*stack.family.paths, *edited}):
        now = edited[path] if path in edited else stack.final(path)
        below = set((stack.before(path) or b"").split(b"\n"))
        for number, line in enumerate((now or b"").split(b"\n"), 1):
            if line.startswith(_MARKERS) and line not in below:
                problems.append(Problem("DD118", f"{path}:{number}: a conflict marker: decide which lines stay"))
                break
    return problems


# -- where edits go ----------------------------------------------------------------------------------


def _added(stack: Stack, edited: Mapping[str, bytes | None]) -> tuple[dict[str, bytes], list[str]]:
    """The files that the family adds from now on, and what changed about them."""
    added = dict(stack.family.added)
    lines = []
    for path, data in sorted(edited.items()):
        if path in added and data is None:
            del added[path]
            lines.append(f"new/{path}: deleted")
        elif data is not None and (path in added or stack.final(path) is None):
            lines.append(f"new/{path}: {'changed' if path in added else 'added'}")
            added[path] = data
    return added, lines


def _into_patches(series: Series, edited: Mapping[str, bytes | None], wishes: Wishes) -> list[str]:
    edits = edits_of(series, edited)
    unclear = [edit for edit in edits if edit.owner is None]
    named = wishes.into is not None or wishes.new is not None
    if unclear and not named:
        raise _whose(series, unclear, len(edits))
    if not named:
        return _carried_out(series, edits, {edit: edit.owner for edit in edits if edit.owner is not None})
    wanted = edits if wishes.everything else unclear
    if not wanted:
        raise DeployError(
            "DD001",
            "every edit belongs to a patch already" if edits else "no patch is concerned by the edits",
            "leave out --into and --new, or take the edits from their patches with --all" if edits else None,
        )
    if wishes.new is not None:
        level = series.append(_new_name(wishes.new, series.names), wishes.message)
    else:
        level = _named(str(wishes.into), series.names)
    rest = {edit: edit.owner for edit in edits if edit.owner is not None}
    return _carried_out(series, edits, {**rest, **dict.fromkeys(wanted, level)})


def _carried_out(series: Series, edits: Sequence[Edit], levels: Mapping[Edit, int]) -> list[str]:
    problems = carry_out(edits, levels, series.names)
    if problems:
        raise as_error(problems, "edits", "put them into a later patch: --into or --new")
    lines = []
    for level, name in enumerate(series.names, 1):
        lines += [f"{name}: {edit}" for edit in edits if levels[edit] == level]
    return lines


def _whose(series: Series, unclear: Sequence[Edit], count: int) -> DeployError:
    details = []
    for edit in unclear:
        near = [series.names[level - 1] for level in edit.near]
        if not near:
            whose = "no patch touches these lines"
        elif len(near) == 1:
            whose = f"not lines of one patch alone; {near[0]} is beside them"
        else:
            whose = "could be of " + " or ".join([", ".join(near[:-1]), near[-1]])
        details.append(f"{edit}: {whose}")
    return DeployError(
        "DD116",
        f"{len(unclear)} of {count} edit(s) belong to no patch, or to several: nothing was written",
        "say where they go: --into PATCH, or --new NAME for a patch of their own",
        details,
    )


def _named(wanted: str, names: Sequence[str]) -> int:
    """The level of an existing patch: by its number from 1, its name, or the beginning of it."""
    if wanted.isdecimal() and len(wanted) < 4:
        found = [int(wanted)] if 1 <= int(wanted) <= len(names) else []
    else:
        found = [level for level, name in enumerate(names, 1) if name in (wanted, f"{wanted}.patch")]
        found = found or [level for level, name in enumerate(names, 1) if name.startswith(wanted)]
    if len(found) != 1:
        known = ", ".join(names) or "none yet: --new NAME"
        what = "names several patches" if found else "is no patch of the series"
        raise DeployError("DD001", f"--into {wanted} {what}", f"patches: {known}")
    return found[0]


def _new_name(wanted: str, names: Sequence[str]) -> str:
    """The file name of a new patch: numbered after the others, with a suffix, unless it is so already."""
    name = wanted
    if not name.endswith((".patch", ".diff")):
        name += ".patch"
    numbers = [int(found[1]) for found in map(_NUMBER.match, names) if found]
    if not _NUMBER.match(name):
        name = f"{max(numbers, default=0) + 1:04d}-{name}"
    if not NAME.fullmatch(name) or name in names:
        why = "is there already" if name in names else "is not of letters, digits, '.', '_' and '-'"
        raise DeployError("DD001", f"--new {wanted}: {name} {why}", "take another name")
    return name


def _check(stack: Stack, family: Family, edited: Mapping[str, bytes | None]) -> None:
    """Apply the new series: every file must be as edited, or as it was."""
    top = replace(stack.sets[-1], families={**stack.sets[-1].families, family.name: family})
    again = stack_on(stack.levels[0], (*stack.sets[:-1], top), stack.engine, trust_hashes=False)
    for path in sorted({*stack.family.paths, *family.paths, *edited}):
        wanted = edited[path] if path in edited else stack.final(path)
        if again.final(path) != wanted:
            raise DeployError("DD901", f"{path}: the rebuilt series does not give the edited file")
