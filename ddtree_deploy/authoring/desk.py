"""The authoring commands: from a folder of patch sets to a scratch tree and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ddtree_deploy.authoring.order import dropped, reordered
from ddtree_deploy.authoring.refresh import Wishes, refresh
from ddtree_deploy.authoring.scratch import (
    Found,
    Scratch,
    State,
    default_folder,
    existing,
    find_scratches,
    is_of,
    look,
    make_scratch,
    renew_scratch,
)
from ddtree_deploy.authoring.settle import PristineOf, settle, versioned
from ddtree_deploy.authoring.stack import Stack, family_of, stack_of
from ddtree_deploy.authoring.swap import STAGE, locked
from ddtree_deploy.authoring.write import SetFolder, new_folder, read_folder, write_sets
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.declaration import read_declaration
from ddtree_deploy.patching.patchset import (
    TOML,
    Family,
    PatchSet,
    check_chain,
    in_order,
    load_closure,
    survey_sets,
)
from ddtree_deploy.patching.problems import Problem, as_error

PACKAGE, ROOTS = "sglang", ("sglang/srt",)


@dataclass(frozen=True)
class Versioning:
    """What becomes of the set's version: one of its numbers goes up (``part``), or it is given (``exact``)."""

    part: str | None = None
    exact: str | None = None


@dataclass(frozen=True)
class Spread:
    """How far a change may reach: ``split`` names a family for the engine versions that take it when others do
    not, ``with_dependents`` makes the hashes of sets anew that require the changed one.
    """

    split: str | None = None
    with_dependents: bool = False


@dataclass(frozen=True)
class Report:
    """What a command did. ``written``: the sets as they are on disk now, none where nothing had to change.
    ``patches``: those of the family that serves the engine.
    """

    name: str
    engine: str
    written: tuple[PatchSet, ...]
    lines: tuple[str, ...]
    notices: tuple[str, ...]
    patches: tuple[str, ...]


class Desk:
    """A folder of patch sets at work. ``pristine_of`` brings the files of an engine version."""

    def __init__(self, patches: Path, pristine_of: PristineOf) -> None:
        self.patches = patches
        self.pristine_of = pristine_of
        if any(patches.glob(STAGE + "*")):
            with locked(patches):  # ends what was interrupted
                pass

    @cached_property
    def _survey(self) -> tuple[dict[str, PatchSet], dict[str, list[Problem]]]:
        return survey_sets(self.patches)

    def closure(self, name: str) -> tuple[PatchSet, ...]:
        """The set last, before it all that it requires. Raises DeployError DD107, DD108."""
        return load_closure(name, self.patches)

    def _requires(self, name: str, below: str) -> bool:
        """Whether a set, sound or not, requires another one directly; False where even that cannot be read."""
        toml = self.patches / name / TOML
        declared, _ = read_declaration(toml.read_bytes(), TOML) if toml.is_file() else (None, [])
        return declared is not None and below in declared.requires

    # -- a new set -----------------------------------------------------------------------------

    def begin(self, name: str, engines: Sequence[str], summary: str, requires: Sequence[str]) -> PatchSet:
        """Make a set that does nothing yet: one family, named as the first of ``engines``.

        Raises DeployError DD001 bad values, DD007 where something has that name, DD108 requirements that are not
        sound or do not serve the engines.
        """
        below = in_order(requires, {item.name: item for one in requires for item in self.closure(one)})
        problems = [problem for engine in engines for problem in check_chain(below, engine)]
        if problems:
            raise as_error(problems, name)
        family = Family(engines[0], tuple(engines), (), {}, {engine: {} for engine in engines}, "")
        roots = tuple(dict.fromkeys([*ROOTS, *(root for item in below for root in item.roots)]))
        item = PatchSet(
            *(name, "0.1.0", summary, PACKAGE, roots, tuple(requires), {family.name: family}, ""),
        )
        (written,) = write_sets([(new_folder(self.patches / name), item)])
        return written

    # -- scratch trees -------------------------------------------------------------------------

    def edit(self, name: str, engine: str, into: Path | None) -> tuple[Scratch, str | None]:
        """The scratch tree of a set: made, or renewed where it holds no edits. The second value names the branch
        that keeps commits of the user's, if there were any.

        Raises DeployError DD118 for a folder that is something else or holds edits; else as the loaders.
        """
        sets = self.closure(name)
        folder = read_folder(self.patches / name)
        place = (into or default_folder(name, engine)).absolute()
        family = family_of(sets[-1], engine)
        state = State(name, engine, family.name, str(self.patches.resolve()), folder.digest, draft=False)
        old = existing(place)
        if old is not None:
            self._same(old, name, engine)
            if not look(old).clean:
                raise DeployError(
                    "DD118",
                    f"{place} holds edits",
                    f"`ddtree-deploy patchset refresh {name}` takes them up; or remove the folder to drop them",
                )
        pristine = self.pristine_of(engine)
        stack = stack_of(sets, engine, pristine)
        if old is not None:
            return renew_scratch(old, state, stack, pristine)
        return make_scratch(place, state, stack, pristine), None

    def refresh(self, scratch: Scratch, wishes: Wishes, versioning: Versioning, spread: Spread) -> Report:
        """Take up the edits of a scratch tree. Raises DeployError, nothing written: see :func:`refresh`,
        :func:`ddtree_deploy.authoring.settle.settle`, :func:`ddtree_deploy.authoring.write.write_sets`.
        """
        state = scratch.state
        self._same(scratch, state.set, state.engine)
        found = look(scratch)
        if found.odd:
            raise as_error([Problem("DD118", line) for line in found.odd], scratch.name)
        folder = read_folder(self.patches / state.set)
        if folder.digest != state.digest:
            raise _stale(scratch, state.set, found)
        assert folder.loaded is not None
        top = scratch.draft() if state.draft else folder.loaded
        sets = (*self.closure(state.set)[:-1], top)
        pristine = self.pristine_of(state.engine)
        stack = stack_of(sets, state.engine, pristine)
        if not is_of(scratch, stack):
            raise _stale(scratch, "what it is built on", found)
        refreshed = refresh(stack, found.edited, wishes)
        families = {**folder.loaded.families, **top.families, refreshed.family.name: refreshed.family}
        changed = replace(top, families=families)
        report = self._write(
            folder, changed, [refreshed.family.name], state.engine, refreshed.lines, versioning, spread
        )
        notices = list(report.notices)
        if found.ignored:
            notices.append(f"not looked at: {', '.join(found.ignored)}")
        if report.written:
            notices += self._renew(scratch)
        return replace(report, notices=tuple(notices))

    def _renew(self, scratch: Scratch) -> list[str]:
        """Bring the scratch tree, whose files are right, to what was written."""
        sets = self.closure(scratch.state.set)
        engine = scratch.state.engine
        digest = read_folder(self.patches / scratch.state.set).digest
        family = family_of(sets[-1], engine)
        state = replace(scratch.state, digest=digest, draft=False, family=family.name)
        pristine = self.pristine_of(engine)
        _, kept = renew_scratch(scratch, state, stack_of(sets, engine, pristine), pristine)
        return [f"{scratch.folder}: your commits are on the branch {kept}"] if kept else []

    def _same(self, scratch: Scratch, name: str, engine: str) -> None:
        """Refuse a scratch tree of something else."""
        if (scratch.state.set, scratch.state.engine) != (name, engine) or not scratch.is_from(self.patches):
            raise DeployError(
                "DD118",
                f"{scratch.folder} is a scratch tree of {scratch.name} from {scratch.state.patches}",
                "name another folder: --into or --from",
            )

    # -- without a scratch tree ----------------------------------------------------------------

    def reorder(self, name: str, engine: str, names: Sequence[str], versioning: Versioning) -> Report:
        """Another order of the patches of the family that serves ``engine``. Raises as :func:`reordered`."""
        folder, stack = self._stack(name, engine)
        if list(names) == [patch.name for patch in stack.family.patches]:
            return Report(name, engine, (), ("the order is as it was",), (), tuple(names))
        line = f"order: {', '.join(names)}"
        return self._prepared(folder, reordered(stack, names), engine, (line,), versioning, Spread(), same_result=True)

    def drop(
        self, name: str, engine: str, patch: str, versioning: Versioning, spread: Spread, why: str | None = None
    ) -> Report:
        """The family that serves ``engine`` without one patch. Raises as :func:`dropped`."""
        folder, stack = self._stack(name, engine)
        family = dropped(stack, patch, why)
        return self._prepared(folder, family, engine, (f"{patch}: dropped",), versioning, spread)

    def rehash(self, name: str, versioning: Versioning, spread: Spread) -> Report:
        """Make all hashes of a set anew from its patches and ``new/`` as they stand."""
        self._no_edits(name, None)
        folder = read_folder(self.patches / name, trust_hashes=False)
        loaded = folder.loaded
        assert loaded is not None
        lines = ("hashes made anew from the patches as they are",)
        return self._write(folder, loaded, list(loaded.families), loaded.engines[0], lines, versioning, spread)

    def patch_names(self, name: str, engine: str) -> tuple[str, ...]:
        """The patches of the family that serves ``engine``, in order. Raises DeployError DD107, DD108, DD109."""
        return _names(self.closure(name)[-1], engine)

    def _stack(self, name: str, engine: str) -> tuple[SetFolder, Stack]:
        folder = read_folder(self.patches / name)
        self._no_edits(name, engine)
        return folder, stack_of(self.closure(name), engine, self.pristine_of(engine))

    def _no_edits(self, name: str, engine: str | None) -> None:
        """Edits in a scratch tree would be lost to a change of the set below them."""
        for scratch in find_scratches():
            state = scratch.state
            fits = state.set == name and scratch.is_from(self.patches) and engine in (None, state.engine)
            if fits and not look(scratch).clean:
                raise DeployError(
                    "DD118",
                    f"{scratch.folder} holds edits of {scratch.name}",
                    f"take them up first (`ddtree-deploy patchset refresh {name}`), or remove the folder",
                )

    def _prepared(
        self,
        folder: SetFolder,
        family: Family,
        engine: str,
        lines: tuple[str, ...],
        versioning: Versioning,
        spread: Spread,
        *,
        same_result: bool = False,
    ) -> Report:
        assert folder.loaded is not None
        changed = replace(folder.loaded, families={**folder.loaded.families, family.name: family})
        return self._write(folder, changed, [family.name], engine, lines, versioning, spread, same_result=same_result)

    def _write(
        self,
        folder: SetFolder,
        changed: PatchSet,
        families: Sequence[str],
        engine: str,
        lines: tuple[str, ...],
        versioning: Versioning,
        spread: Spread,
        *,
        same_result: bool = False,
    ) -> Report:
        assert folder.loaded is not None
        known = {**self._survey[0], folder.name: folder.loaded}
        settled = settle(
            *(changed, families, known, self.pristine_of),
            split=spread.split,
            with_dependents=spread.with_dependents,
        )
        if same_result:
            for name in families:
                was, now = folder.loaded.families[name].hashes, settled.sets[0].families[name].hashes
                other = [version for version in was if was[version] != now[version]]
                if other:
                    raise DeployError("DD117", f"{folder.name}: on {', '.join(other)} files would end up otherwise")
        settled = versioned(settled, known, versioning.part, versioning.exact)
        unseen = [name for name in self._survey[1] if name != folder.name and self._requires(name, folder.name)]
        notices = (*settled.notices, *(f"{name} requires it and is not valid: it was left as it is" for name in unseen))
        if settled.sets == (folder.loaded,):
            return Report(changed.name, engine, (), lines, notices, _names(changed, engine))
        folders = [folder, *(read_folder(self.patches / item.name) for item in settled.sets[1:])]
        written = write_sets(list(zip(folders, settled.sets, strict=True)))
        return Report(changed.name, engine, written, lines, notices, _names(written[0], engine))


def _stale(scratch: Scratch, what: str, found: Found) -> DeployError:
    rescue = "keep your edits (`git diff HEAD > mine.diff` there), remove it, edit again, and `git apply mine.diff`"
    again = f"`ddtree-deploy patchset edit {scratch.state.set} --engine {scratch.state.engine}` renews it"
    hint = f"it holds no edits: {again}" if found.clean else rescue
    return DeployError("DD118", f"{scratch.folder}: {what} changed since it was made", hint)


def _names(item: PatchSet, engine: str) -> tuple[str, ...]:
    return tuple(patch.name for patch in family_of(item, engine).patches)
