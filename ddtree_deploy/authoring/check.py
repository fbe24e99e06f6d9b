"""Whether patch sets hold on the pristine engines that they name: applied, compiled, hashed, undone, looked through."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddtree_deploy.authoring.modules import Sources
from ddtree_deploy.authoring.stack import Stack, stack_of
from ddtree_deploy.authoring.symbols import check_symbols
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.filediff import reverse
from ddtree_deploy.patching.images import FileImage, fingerprint
from ddtree_deploy.patching.patchset import PatchSet, short

#: What is checked, in order. What comes after a failed ``applies`` cannot be said.
CHECKS = ("applies", "compiles", "hashes", "undoes", "symbols")


@dataclass(frozen=True)
class Checked:
    """One set on one engine version. ``problems``: check -> lines, none where it passed; a check that was not
    reached is not in it. ``unneeded``: why the set says that this version needs nothing of it.
    """

    patch_set: PatchSet
    engine: str
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unneeded: str | None = None

    @property
    def good(self) -> bool:
        """Whether every check was made and found nothing."""
        return self.unneeded is not None or (
            set(self.problems) == set(CHECKS) and not any(lines for lines in self.problems.values())
        )


def check_set(sets: Sequence[PatchSet], engine: str, pristine: Mapping[str, bytes]) -> Checked:
    """Check the last of ``sets`` (requirements first) on the pristine files of an engine version, in memory.

    Raises DeployError DD109 for a version that the set does not name.
    """
    item = sets[-1]
    if engine in item.unneeded:
        return Checked(item, engine, unneeded=item.unneeded[engine])
    try:
        stack = stack_of(sets, engine, pristine, trust_hashes=False)
    except DeployError as error:
        if error.code == "DD109":
            raise
        return Checked(item, engine, {"applies": error.details or (error.message,)})
    checks = (_compiles, _hashes, _undoes, _symbols)
    found = {name: tuple(check(stack)) for name, check in zip(CHECKS[1:], checks, strict=True)}
    return Checked(item, engine, {"applies": (), **found})


def problems_of(stack: Stack) -> list[str]:
    """Why what a stack makes would not run: files that do not compile, symbols that its engine lacks; a line each."""
    return [*_compiles(stack), *_symbols(stack)]


def added_lines(before: bytes | None, after: bytes) -> set[int]:
    """The numbers (from 1) of the lines of ``after`` that ``before`` does not have there."""
    new = after.split(b"\n")
    if before is None:
        return set(range(1, len(new) + 1))
    old = before.split(b"\n")
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    matcher = difflib.SequenceMatcher(None, old[first : len(old) - last], new[first : len(new) - last], autojunk=False)
    return {
        first + 1 + number
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for number in range(start, end)
    }


def _compiles(stack: Stack) -> list[str]:
    problems = []
    for path in stack.family.paths:
        data = stack.final(path)
        if data is None or not path.endswith(".py"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            problems.append(f"{path}{line}: {getattr(error, 'msg', error)}")
    return problems


def _hashes(stack: Stack) -> list[str]:
    said = stack.family.hashes.get(stack.engine, {})
    problems = []
    for path in stack.family.paths:
        both = said.get(path)
        for end, level in (("before", stack.levels[0]), ("after", stack.levels[-1])):
            wanted, found = getattr(both, end, None), fingerprint(level.get(path))
            if wanted != found:
                problems.append(f"{path}: {end} is said to be {short(wanted)}, and is {short(found)}")
    return problems


def _undoes(stack: Stack) -> list[str]:
    family = stack.family
    after = {path: stack.levels[-1].get(path) for path in family.paths}
    try:
        undone = {**after, **apply_diffs(after, reverse(family.diffs), exact=family.paths).images}
    except DeployError as error:
        return list(error.details or (error.message,))
    # Added files are no diffs: taking them away undoes them.
    undone.update(dict.fromkeys(family.added))
    return [
        f"{path}: the reversed patches do not give back what was there"
        for path in family.paths
        if undone[path] != stack.levels[0].get(path)
    ]


def _symbols(stack: Stack) -> list[str]:
    tree = stack.levels[-1]

    def read(path: str) -> bytes | None:
        image = tree.get(path)
        return image.data if isinstance(image, FileImage) else None

    lines = {}
    for path in stack.family.paths:
        after = stack.final(path)
        if after is not None and path.endswith(".py"):
            lines[path] = added_lines(stack.before(path), after)
    package = stack.sets[-1].package
    paths = [path for path in tree if path.startswith(package + "/")]
    return [str(finding) for finding in check_symbols(Sources(paths, read, package), lines)]
