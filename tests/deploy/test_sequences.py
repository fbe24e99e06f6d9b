"""Any sequence of applying, upgrading, going back, rolling back and reinstalling, against a model of a few lines."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent.layers import KEEP_GENERATIONS
from ddtree_deploy.errors import DeployError
from tests.deploy.sets import Desk
from tests.deploy.test_lost import install

PRISTINE = {"a.py": b"A = 1\n", "b.py": b"B = 1\n", "sub/c.py": b"C = 1\n"}
#: What each version of ``base`` leaves: paths that are not named stay pristine.
BASE = {
    1: {"a.py": b"A = 11\n", "b.py": b"B = 11\n", "n.py": b"N = 1\n"},
    2: {"a.py": b"A = 12\n", "sub/c.py": None, "n.py": b"N = 2\n", "m/o.py": b"O = 2\n"},
    3: {"a.py": b"A = 13\n", "b.py": b"B = 11\n"},
}
#: What each version of ``top`` appends to a.py, and the file that it adds.
TOP = {1: (b"TOP = 1\n", "t.py"), 2: (b"TOP = 2\n", "u/t.py")}


def with_top(base: int, top: int) -> dict[str, bytes | None]:
    text, added = TOP[top]
    return {"a.py": BASE[base]["a.py"] + text, added: b"T = %d\n" % top}


@dataclass
class Past:
    """An earlier layer: its version, that of ``base`` below it, and the step that replaced it."""

    version: int
    below: int | None
    step: int


@dataclass
class Model:
    """What is applied (``top`` needs ``base``), whether a reinstall took it away, and what each replaced."""

    base: int | None = None
    top: int | None = None
    lost: bool = False
    past: dict[str, list[Past]] = field(default_factory=lambda: {"base": [], "top": []})

    def tree(self) -> dict[str, bytes | None]:
        files: dict[str, bytes | None] = dict(PRISTINE)
        for layer in ([BASE[self.base]] if self.base else []) + ([with_top(self.base, self.top)] if self.top else []):
            for path, data in layer.items():
                if not self.lost or path not in PRISTINE:
                    files[path] = data
        return files

    def replace(self, name: str, version: int | None, step: int) -> None:
        old = getattr(self, name)
        if version is None:
            self.past[name] = []
        elif old is not None:
            entry = Past(old, self.base if name == "top" else None, step)
            self.past[name] = [entry, *self.past[name]][:KEEP_GENERATIONS]
        setattr(self, name, version)

    def apply(self, name: str, base: int, top: int, downgrade: bool, step: int) -> str | None:
        """Returns the code of the expected refusal."""
        was_lost = self.lost
        replaces_base = self.base is not None and (was_lost or self.base != base)
        wants_top = name == "top" or (self.top is not None and replaces_base and not was_lost)
        if not was_lost and not downgrade:
            if self.base is not None and base < self.base:
                return "DD114"
            if wants_top and self.top is not None and top < self.top:
                return "DD114"
        if was_lost and not wants_top:
            self.replace("top", None, step)
        changes_top = wants_top and (was_lost or replaces_base or self.top != top)
        if changes_top:
            self.replace("top", top, step)
        if self.base is None or replaces_base:
            self.replace("base", base, step)
        self.lost = False
        return None

    def rollback(self, name: str, force: bool) -> str | None:
        if getattr(self, name) is None:
            return "DD111"
        if self.lost and not force:
            return "DD113"
        self.replace("top", None, 0)
        if name == "base":
            self.replace("base", None, 0)
        if self.base is None:
            self.lost = False
        return None

    def ways(self, name: str) -> list[int]:
        now = getattr(self, name)
        fits = [past for past in self.past[name] if name == "base" or past.below == self.base]
        return list(dict.fromkeys(past.version for past in fits if past.version != now))

    def back(self, name: str, version: int) -> str | None:
        if getattr(self, name) is None:
            return "DD111"
        if self.lost:
            return "DD113"
        if version not in self.ways(name):
            return "DD115"
        fits = [at for at, past in enumerate(self.past[name]) if name == "base" or past.below == self.base]
        at = next(at for at in fits if self.past[name][at].version == version)
        step = self.past[name][at].step
        setattr(self, name, version)
        self.past[name] = self.past[name][at + 1 :]
        if name == "base" and self.top is not None:
            along = [at for at, past in enumerate(self.past["top"]) if past.step == step]
            self.top = self.past["top"][along[0]].version if along else None
            self.past["top"] = self.past["top"][along[0] + 1 :] if along else []
        return None


NAMES, VERSIONS = st.sampled_from(["base", "top"]), st.integers(1, 3)
STEPS = st.one_of(
    st.tuples(st.just("apply"), NAMES, VERSIONS, st.integers(1, 2), st.booleans()),
    st.tuples(st.just("apply"), NAMES, VERSIONS, st.integers(1, 2), st.just(True)),
    st.tuples(st.just("back"), NAMES, VERSIONS),
    st.tuples(st.just("rollback"), NAMES, st.booleans()),
    st.tuples(st.just("reinstall")),
)


def write(desk: Desk, base: int, top: int) -> None:
    files = {path: (PRISTINE.get(path), data) for path, data in BASE[base].items()}
    desk.write("base", f"{base}.0", files)
    changes = with_top(base, top)
    desk.write("top", f"{top}.0", {path: (BASE[base].get(path), data) for path, data in changes.items()}, ["base"])


def take(desk: Desk, model: Model, step: tuple, number: int) -> str | None:
    """Take one step on both sides; returns the refusal that the model expects. Raises DeployError."""
    kind, *rest = step
    if kind == "apply":
        name, base, top, downgrade = rest
        write(desk, base, top)
        expected = model.apply(name, base, top, downgrade, number)
        act = lambda: desk.apply(name, downgrade=downgrade)  # noqa: E731
    elif kind == "back":
        name, version = rest
        expected = model.back(name, version)
        act = lambda: desk.rollback(name, f"{version}.0", with_dependents=True)  # noqa: E731
    elif kind == "rollback":
        name, force = rest
        expected = model.rollback(name, force)
        act = lambda: desk.rollback(name, with_dependents=True, force=force)  # noqa: E731
    else:
        install(desk, "0.5.11")
        model.lost = model.base is not None
        return None
    if expected is None:
        act()
        return None
    with pytest.raises(DeployError) as caught:
        act()
    assert caught.value.code == expected, caught.value
    return expected


def check(desk: Desk, model: Model) -> None:
    tree = model.tree()
    every = {*PRISTINE, *(path for files in BASE.values() for path in files), *(added for _text, added in TOP.values())}
    assert {path: desk.read(path) for path in every} == {path: tree.get(path) for path in every}
    wanted = {name: getattr(model, name) for name in ("base", "top")}
    assert desk.applied() == {name: f"{version}.0" for name, version in wanted.items() if version is not None}
    status = desk.host.status()
    assert bool(status["reinstalled"]) == model.lost
    if not model.lost:
        ways = {name: [f"{version}.0" for version in model.ways(name)] for name in status["back"]}
        assert status["back"] == ways
        top = {item["path"]: item["after"] for layer in status["layers"] for item in layer["files"]}
        assert all(status["entries"][path] == entry for path, entry in top.items())
    assert not [path for path in desk.host.site.rglob("*") if path.is_dir() and path.name in ("m", "u")] or any(
        path.startswith(("m/", "u/")) for path, data in tree.items() if data is not None
    )


@settings(max_examples=12, deadline=None)
@given(st.lists(STEPS, min_size=4, max_size=10))
def test_tree_and_record_are_always_as_the_model_says(steps):
    with tempfile.TemporaryDirectory() as folder:
        desk, model = Desk(Path(folder)), Model()
        for number, step in enumerate(steps):
            take(desk, model, step, number)
            check(desk, model)


@pytest.mark.parametrize(
    "steps",
    [
        [("apply", "top", 1, 1, False), ("apply", "base", 2, 2, False), ("back", "base", 1)],
        [
            ("apply", "top", 1, 1, False),
            ("apply", "top", 2, 1, False),
            ("apply", "top", 3, 2, False),
            ("back", "base", 1),
        ],
        [
            ("apply", "base", 1, 1, False),
            ("apply", "base", 2, 1, False),
            ("apply", "top", 2, 1, False),
            ("back", "base", 1),
        ],
        [("apply", "top", 2, 2, False), ("reinstall",), ("apply", "base", 2, 2, False), ("rollback", "base", False)],
        [("apply", "top", 2, 2, False), ("reinstall",), ("apply", "top", 1, 1, False), ("back", "base", 2)],
        [("apply", "top", 1, 1, False), ("apply", "top", 1, 2, False), ("back", "top", 1), ("rollback", "top", False)],
        [("apply", "top", 1, 2, False), ("reinstall",), ("rollback", "top", True), ("rollback", "base", True)],
    ],
    ids=str,
)
def test_sequences_worth_naming(tmp_path, steps):
    desk, model = Desk(tmp_path), Model()
    for number, step in enumerate(steps):
        assert take(desk, model, step, number) is None
        check(desk, model)
