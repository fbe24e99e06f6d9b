"""SIGKILL at every system call that changes something: afterwards the tree is exactly old or exactly new."""

from __future__ import annotations

import os
import signal

import pytest

from tests.agent.harness import THREE, Host, layer, tree_of

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
