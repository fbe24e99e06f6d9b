"""Patch sets made in memory and on disk, for the tests of the authoring commands."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from ddtree_deploy.authoring.patchtext import FileChange, compose
from ddtree_deploy.authoring.settle import hashes_of
from ddtree_deploy.authoring.stack import stack_of
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.patchset import Family, Patch, PatchSet
from tests.patching.difftools import contents, edits

ENGINE = "0.5.11"
F, G, H, NEW = (f"sglang/srt/{name}.py" for name in ("f", "g", "h", "new"))


def text(*lines):
    return "".join(f"{line}\n" for line in lines).encode()


def numbered(count, prefix=""):
    return text(*(f"{prefix}{number}" for number in range(1, count + 1)))


def a_patch(name, before, after, head=""):
    """The patch that makes ``after`` of ``before``, two trees."""
    changes = [
        FileChange(path if path in before else None, before.get(path), path if path in after else None, after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
    data = compose(head, changes)
    return Patch(name, data, parse(data, source=name))


def a_set(trees, *, name="demo", engines=(ENGINE,), added=None, requires=(), heads=(), pristine=None):
    """The set whose patches lead from each of ``trees`` to the next; sound on all of ``pristine`` (engine -> tree)."""
    patches = [
        a_patch(f"{number:04d}-p.patch", before, after, heads[number - 1] if heads else f"patch {number}")
        for number, (before, after) in enumerate(itertools.pairwise(trees), 1)
    ]
    family = Family("f", tuple(engines), tuple(patches), added or {}, {engine: {} for engine in engines}, "")
    item = PatchSet(name, "1.0.0", "for tests", "sglang", ("sglang/srt",), tuple(requires), {"f": family}, "")
    hashes = {}
    for engine in engines:
        stack = stack_of([item], engine, (pristine or {}).get(engine, trees[0]), trust_hashes=False)
        hashes[engine] = hashes_of(stack)
    return replace(item, families={"f": replace(family, hashes=hashes)})


@st.composite
def series(draw):
    """Trees, one after the other: files are edited, come and go."""
    tree = {path: draw(contents(12)) for path in (F, G)}
    trees = [tree]
    for _ in range(draw(st.integers(1, 4))):
        tree = dict(tree)
        for path in draw(st.lists(st.sampled_from([F, G, H]), min_size=1, max_size=2, unique=True)):
            if path not in tree:
                tree[path] = draw(contents(8))
            elif draw(st.integers(0, 9)) == 0:
                del tree[path]
            else:
                tree[path] = draw(edits(tree[path]))
        if tree != trees[-1]:
            trees.append(tree)
    return trees
