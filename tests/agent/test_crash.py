"""SIGKILL at every system call that changes something: afterwards the tree is exactly old or exactly new."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from tests.agent.harness import THREE, Host, change, layer, tree_of

# Everything through which the agent can change the disk.
CALLS = (
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
    "symlink",
    "fsync",
    "write",
    "chmod",
    "fchmod",
    "chown",
    "fchown",
    "ftruncate",
    "pwrite",
)


def run_until(count: int | None, action) -> tuple[bool, int]:
    """Run ``action`` in a forked process that is killed just before its ``count``-th change.

    Returns (was it killed, how many changes it made when it was not).
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            done = 0

            def wrap(real):
                def changed(*args, **keywords):
                    nonlocal done
                    done += 1
                    if done == count:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **keywords)

                return changed

            real_write = os.write
            for name in CALLS:
                setattr(os, name, wrap(getattr(os, name)))
            action()
            real_write(send, b"%d" % done)
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    with os.fdopen(receive, "rb") as handle:
        said = handle.read()
    _pid, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True, 0
    assert os.WEXITSTATUS(status) == 0, "the action failed without being killed"
    return False, int(said)


def check_consistent(host: Host, old: dict, new: dict, new_layers: list[str], old_layers: list[str]) -> str:
    """The tree is old or new as a whole and the host's own word agrees; returns which."""
    now = tree_of(host.site)
    status = host.status()
    layers = [item["set"] for item in status["layers"]]
    assert status["interrupted"] is None
    assert now in (old, new)
    which = "new" if now == new else "old"
    assert layers == (new_layers if which == "new" else old_layers)
    assert all(status["entries"][item["path"]] == item["after"] for one in status["layers"] for item in one["files"])
    return which


def survey(folder, prepare, action):
    """(old tree, new tree, number of changes) of ``action`` on a host that ``prepare`` made."""
    host = Host(folder)
    prepare(host)
    old = tree_of(host.site)
    _killed, total = run_until(None, lambda: action(host))
    return old, tree_of(host.site), total


SCENARIOS = {
    "apply": (lambda host: None, lambda host: host.apply(layer("one", *THREE)), [], ["one"]),
    "rollback": (
        lambda host: host.apply(layer("one", *THREE)),
        lambda host: host.rollback("one"),
        ["one"],
        [],
    ),
}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_killed_anywhere(tmp_path, name):
    prepare, action, before, after = SCENARIOS[name]
    old, new, total = survey(tmp_path / "survey", prepare, action)
    assert old != new
    assert total > 30
    outcomes = set()
    for count in range(1, total + 1):
        host = Host(tmp_path / f"{count}")
        prepare(host)
        killed, _ = run_until(count, lambda host=host: action(host))
        assert killed
        kinds = {path: value for path, value in tree_of(host.site).items() if ".ddtree-" not in path}
        # Even before recovery each file is as a whole either old or new.
        assert all(value in (old.get(path), new.get(path)) for path, value in kinds.items())
        recovered = host.recover()
        outcomes.add((recovered["action"], check_consistent(host, old, new, after, before)))
        assert host.recover()["action"] == "nothing"
        if count % 4:
            continue
        # The host is fit for work afterwards.
        if [item["set"] for item in host.status()["layers"]] == ["one"]:
            host.rollback("one")
        host.apply(layer("one", *THREE))
        host.rollback("one")
        assert host.run("history")["history"][-1]["kind"] == "rollback"
        assert not list(host.state.rglob("*.new"))
    assert {("undone", "old"), ("finished", "new")} <= outcomes
    assert all(which == {"undone": "old", "finished": "new"}.get(did, which) for did, which in outcomes)


def test_recovery_killed_anywhere(tmp_path):
    """A crash of the recovery itself, at each of its steps, after crashes spread over the commit."""
    prepare, action, before, after = SCENARIOS["apply"]
    old, new, total = survey(tmp_path / "survey", prepare, action)
    seen = 0
    for count in range(1, total + 1, 5):
        for again in range(1, 200):
            host = Host(tmp_path / f"{count}-{again}")
            prepare(host)
            run_until(count, lambda host=host: action(host))
            killed, _ = run_until(again, lambda host=host: host.recover())
            seen += killed
            host.recover()
            check_consistent(host, old, new, after, before)
            if not killed:
                break
    assert seen > 50


def test_no_temporaries_and_no_lock_are_left(tmp_path):
    host = Host(tmp_path)
    _old, _new, total = survey(tmp_path / "survey", *SCENARIOS["apply"][:2])
    killed, _ = run_until(total - 8, lambda: host.apply(layer("one", *THREE)))
    assert killed
    assert host.status()["holder"] is None
    assert host.status()["interrupted"]["kind"] == "apply"
    host.recover()
    assert not [path for path in host.site.rglob("*") if path.name.startswith(".ddtree-")]


# --- an upgrade, and the way back from it, with a set that builds on the upgraded one

A, C, D, E = (f"sglang/srt/{name}.py" for name in ("a", "sub/c", "new/deep/d", "newer/e"))
ONE = (
    layer("base", *THREE),
    layer("top", change(A, b"A = 2\n", b"A = 3\n"), change("sglang/srt/new/t.py", None, b"T = 1\n"), requires=["base"]),
)
# Leaves one file as it was, changes one, brings the deleted one back otherwise, removes and adds one each.
TWO = (
    layer(
        "base",
        change(A, b"A = 1\n", b"A = 4\n"),
        change(C, b"C = 1\n", b"C = 2\n"),
        change(E, None, b"E = 1\n"),
        version="2.0",
    ),
    layer("top", change(A, b"A = 4\n", b"A = 5\n"), requires=["base"], version="2.0"),
)


class Restorable(Host):
    """A host that can be put back to how it was when it was saved, in place."""

    def save(self) -> None:
        for name in ("site-packages/sglang", "state"):
            shutil.copytree(self.folder / name, self.folder / "saved" / name, symlinks=True)

    def restore(self) -> None:
        for name in ("site-packages/sglang", "state"):
            shutil.rmtree(self.folder / name)
            shutil.copytree(self.folder / "saved" / name, self.folder / name, symlinks=True)


def upgrade(host: Host) -> None:
    host.apply(*TWO, drop=["base", "top"])


def go_back(host: Host) -> None:
    host.rollback("base", to="1.0", with_dependents=True)


LIVE = {
    "upgrade": (lambda host: host.apply(*ONE), upgrade, "1.0", "2.0"),
    "back": (lambda host: (host.apply(*ONE), upgrade(host)), go_back, "2.0", "1.0"),
}


def live(folder, name):
    """(host as it is before, its tree then, its tree afterwards, the action, the number of changes)."""
    prepare, action, *_versions = LIVE[name]
    host = Restorable(folder)
    prepare(host)
    host.save()
    old = tree_of(host.site)
    _killed, total = run_until(None, lambda: action(host))
    return host, old, tree_of(host.site), action, total


def check_live(host: Host, old: dict, new: dict, name: str) -> str:
    """The tree is old or new as a whole, and the record with it; returns which."""
    _prepare, _action, before, after = LIVE[name]
    now, status = tree_of(host.site), host.status()
    assert status["interrupted"] is None
    assert now in (old, new)
    which = "new" if now == new else "old"
    version = after if which == "new" else before
    assert [(one["set"], one["version"]) for one in status["layers"]] == [("base", version), ("top", version)]
    top = {item["path"]: item["after"] for one in status["layers"] for item in one["files"]}
    assert all(status["entries"][path] == entry for path, entry in top.items())
    # What an upgrade replaced is there to go back to, and nothing else is.
    assert status["back"]["base"] == (["1.0"] if version == "2.0" else [])
    assert {path.name for path in (host.state / "objects").iterdir()} >= set(wanted_objects(status["layers"]))
    return which


def wanted_objects(value) -> list[str]:
    """Every sha256 that layers name, and those that they replaced."""
    if isinstance(value, dict):
        own = [value["sha256"]] if "sha256" in value else []
        return own + [sha for item in value.values() for sha in wanted_objects(item)]
    return [sha for item in value for sha in wanted_objects(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", sorted(LIVE))
def test_a_live_set_killed_anywhere(tmp_path, name):
    host, old, new, action, total = live(tmp_path, name)
    assert old != new
    assert total > 40
    outcomes = set()
    for count in range(1, total + 1):
        host.restore()
        killed, _ = run_until(count, lambda: action(host))
        assert killed
        for path, value in tree_of(host.site).items():
            assert ".ddtree-" in path or value in (old.get(path), new.get(path)), path
        recovered = host.recover()
        which = check_live(host, old, new, name)
        outcomes.add((recovered["action"], which))
        assert host.recover()["action"] == "nothing"
        if which == "old" and count % 5 == 0:
            action(host)
            check_live(host, old, new, name)
    assert {("undone", "old"), ("finished", "new")} <= outcomes
    assert all(which == {"undone": "old", "finished": "new"}.get(did, which) for did, which in outcomes)


@pytest.mark.parametrize("name", sorted(LIVE))
def test_recovery_of_a_live_set_killed_anywhere(tmp_path, name):
    """A crash of the recovery itself, at each of its steps, after crashes in the renames, the record and the end."""
    host, old, new, action, total = live(tmp_path, name)
    seen = 0
    for count in range(total // 12, total, total // 6):
        for again in range(1, 200):
            host.restore()
            run_until(count, lambda: action(host))
            killed, _ = run_until(again, host.recover)
            seen += killed
            host.recover()
            check_live(host, old, new, name)
            if not killed:
                break
    assert seen > 50
    (journal,) = [path for path in host.state.glob("transactions/*/journal.json") if path.stat().st_size][-1:]
    assert json.loads(journal.read_text())["state"] in ("committed", "undone")
