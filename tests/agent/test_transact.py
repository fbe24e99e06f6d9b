"""The agent's transactions on a small tree: what is written, what is refused, what is remembered."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_deploy.agent.protocol import AgentError
from tests.agent.harness import THREE, Host, change, entry, layer, tree_of

A = change("sglang/srt/a.py", b"A = 1\n", b"A = 2\n")
A2 = change("sglang/srt/a.py", b"A = 2\n", b"A = 3\n")
B = change("sglang/srt/b.py", b"B = 1\n", b"B = 2\n")


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def refused(code: str, action, *args, **keywords) -> AgentError:
    with pytest.raises(AgentError) as caught:
        action(*args, **keywords)
    assert caught.value.code == code, caught.value
    return caught.value


def test_apply_reads_back_what_it_wrote_and_rollback_restores_all(host):
    old = tree_of(host.site)
    result = host.apply(layer("one", *THREE))
    assert result["files"] == {item["path"]: item["after"] for item in THREE}
    assert (host.site / "sglang/srt/a.py").read_bytes() == b"A = 2\n"
    assert host.status()["layers"][0]["reason"] == "because"
    result = host.rollback("one")
    assert tree_of(host.site) == old
    assert result["removed"] == [{"name": "one", "version": "1.0"}]
    kinds = [(item["kind"], item["outcome"]) for item in host.run("history")["history"]]
    assert kinds == [("apply", "done"), ("rollback", "done")]


def test_a_changed_file_refuses_all(host):
    (host.site / "sglang/srt/b.py").write_bytes(b"B = 99\n")
    old = tree_of(host.site)
    error = refused("DD502", host.apply, layer("one", A, B))
    assert "b.py" in error.details[0]
    assert tree_of(host.site) == old
    assert host.status()["layers"] == []


def test_a_plan_made_before_another_deployer_came_is_refused(host):
    request, blobs = host.apply_request(layer("one", A))
    host.apply(layer("other", B))
    refused("DD502", host.run, "apply", blobs, **request)


def test_another_engine_version_than_planned_is_refused(host):
    refused("DD502", host.apply, layer("one", A), engine="0.5.12")


def test_no_file_that_would_not_compile_is_written(host):
    old = tree_of(host.site)
    error = refused("DD112", host.apply, layer("one", change("sglang/srt/a.py", b"A = 1\n", b"def (:\n")))
    assert "line 1" in error.details[0]
    assert tree_of(host.site) == old


@pytest.mark.parametrize(
    "path",
    [
        "../evil.py",
        "/tmp/evil.py",
        "sglang/srt/../../evil.py",
        "sglang",
        "other/x.py",
        "sglang//x.py",
        "sglang/./x.py",
        "sglang/a\nb.py",
        "sglang/a\\b.py",
        "sglang/srt/.ddtree-x.py",
        "sglang/srt/__pycache__/a.py",
        "",
        None,
        3,
    ],
)
def test_the_agent_itself_refuses_unsafe_paths(host, path):
    unsafe = dict(change("sglang/srt/n.py", None, b"N = 1\n"), path=path)
    refused("DD105", host.apply, layer("one", unsafe))
    assert not (host.folder / "evil.py").exists()


def test_layers_stack_and_the_lower_waits_for_the_upper(host):
    old = tree_of(host.site)
    host.apply(layer("base", A, B), layer("top", A2, requires=["base"]))
    assert (host.site / "sglang/srt/a.py").read_bytes() == b"A = 3\n"
    error = refused("DD110", host.rollback, "base")
    assert error.message.startswith("top builds on base")
    host.rollback("top")
    assert (host.site / "sglang/srt/a.py").read_bytes() == b"A = 2\n"
    assert [item["set"] for item in host.status()["layers"]] == ["base"]
    host.rollback("base")
    assert tree_of(host.site) == old


def test_with_dependents_undoes_all_in_one_transaction(host):
    old = tree_of(host.site)
    host.apply(layer("base", A, B), layer("top", A2, requires=["base"]))
    result = host.rollback("base", with_dependents=True)
    assert [item["name"] for item in result["removed"]] == ["top", "base"]
    assert tree_of(host.site) == old


def test_a_set_that_shares_a_file_builds_on_the_lower_one(host):
    host.apply(layer("base", A))
    host.apply(layer("top", A2))
    refused("DD110", host.rollback, "base")


def test_an_unrelated_set_above_is_left_alone(host):
    host.apply(layer("one", A))
    host.apply(layer("two", B))
    host.rollback("one")
    assert [item["set"] for item in host.status()["layers"]] == ["two"]
    assert (host.site / "sglang/srt/b.py").read_bytes() == b"B = 2\n"


def test_layers_that_do_not_follow_on_are_refused(host):
    refused("DD307", host.apply, layer("one", A), layer("two", change("sglang/srt/a.py", b"A = 1\n", b"A = 9\n")))


def test_a_recorded_set_is_not_applied_twice(host):
    host.apply(layer("one", A))
    refused("DD114", host.apply, layer("one", B))


def test_rollback_of_an_edited_file_refuses_and_shows_the_edit(host):
    host.apply(layer("one", A, B))
    (host.site / "sglang/srt/a.py").write_bytes(b"A = 2\nMINE = 1\n")
    old = tree_of(host.site)
    error = refused("DD101", host.rollback, "one")
    assert "+MINE = 1" in error.details
    assert tree_of(host.site) == old
    result = host.rollback("one", force=True)
    (saved,) = result["saved"]
    assert Path(saved).read_bytes() == b"A = 2\nMINE = 1\n"
    assert (host.site / "sglang/srt/a.py").read_bytes() == b"A = 1\n"


def test_rollback_after_a_deletion_by_hand(host):
    host.apply(layer("one", A))
    (host.site / "sglang/srt/a.py").unlink()
    refused("DD101", host.rollback, "one")
    host.rollback("one", force=True)
    assert (host.site / "sglang/srt/a.py").read_bytes() == b"A = 1\n"


def test_rollback_of_what_is_not_applied_names_what_is(host):
    host.apply(layer("one", A))
    error = refused("DD111", host.rollback, "two")
    assert "one" in error.hint


def reinstall(host: Host, version: str = "0.5.11") -> None:
    """What pip does: the old files go, the new ones come, RECORD is another file."""
    import shutil

    from tests.agent.harness import make_site

    shutil.rmtree(host.site)
    make_site(host.folder, version)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.12"])
def test_a_reinstall_is_told_from_drift(host, version):
    host.apply(layer("one", A, B))
    reinstall(host, version)
    assert host.status()["reinstalled"] == ["one"]
    old = tree_of(host.site)
    refused("DD113", host.rollback, "one")
    result = host.rollback("one", force=True)
    assert result["files"] == {}
    assert tree_of(host.site) == old
    assert host.status()["layers"] == []


def test_an_edit_without_a_reinstall_is_drift(host):
    host.apply(layer("one", A))
    (host.site / "sglang/srt/a.py").write_bytes(b"A = 1\n")
    assert host.status()["reinstalled"] == []


def test_owner_mode_and_attributes_survive(host):
    path = host.site / "sglang/srt/a.py"
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    try:
        os.setxattr(path, "user.note", b"keep")
        noted = True
    except OSError:
        noted = False
    before = path.stat()
    host.apply(layer("one", change("sglang/srt/a.py", b"A = 1\n", b"A = 2\n", 0o640)))
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert not noted or os.getxattr(path, "user.note") == b"keep"
    host.rollback("one")
    assert (path.stat().st_mode, path.stat().st_uid) == (before.st_mode, before.st_uid)


def test_a_hard_link_into_a_cache_is_never_written_through(host):
    cache = host.folder / "cache.py"
    os.link(host.site / "sglang/srt/a.py", cache)
    result = host.apply(layer("one", A))
    assert cache.read_bytes() == b"A = 1\n"
    assert (host.site / "sglang/srt/a.py").stat().st_nlink == 1
    assert any("hard-linked" in note for note in result["notes"])


def link_entry(target: str):
    return {"kind": "link", "target": target}


def test_a_symlinked_file_is_refused_and_can_be_broken_on_request(host):
    cache = host.folder / "cache.py"
    path = host.site / "sglang/srt/a.py"
    cache.write_bytes(b"A = 1\n")
    path.unlink()
    path.symlink_to(cache)
    over = dict(A, before=link_entry(str(cache)))
    error = refused("DD509", host.apply, layer("one", over))
    assert str(cache) in error.details[0]
    host.apply(layer("one", over), break_links=True)
    assert cache.read_bytes() == b"A = 1\n"
    assert not path.is_symlink()
    host.rollback("one")
    assert os.readlink(path) == str(cache)


def test_a_symlinked_folder_is_refused(host):
    outside = host.folder / "outside"
    outside.mkdir()
    (host.site / "sglang/srt/l").symlink_to(outside)
    refused("DD509", host.apply, layer("one", change("sglang/srt/l/evil.py", None, b"x = 1\n")))
    assert not list(outside.iterdir())


def test_stale_bytecode_never_runs(host):
    """T37: same size, same second; and a pyc that the interpreter would never check."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import sglang.srt.a as a; print(a.A)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def value():
        return subprocess.run(
            [sys.executable, "-c", script, str(host.site)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def settle():
        # The same whole second for both versions of the source, whatever the clock says.
        os.utime(host.site / "sglang/srt/a.py", (1_700_000_000, 1_700_000_000))

    settle()
    assert value() == "1"
    pyc = host.site / "sglang/srt/__pycache__" / f"a.{sys.implementation.cache_tag}.pyc"
    assert pyc.exists()
    host.apply(layer("one", A))
    assert value() == "2"
    assert pyc.exists()
    import py_compile

    py_compile.compile(
        str(host.site / "sglang/srt/a.py"),
        str(pyc),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    host.rollback("one")
    assert value() == "1"


def test_smoke_undoes_what_does_not_import(host):
    old = tree_of(host.site)
    broken = change("sglang/srt/a.py", b"A = 1\n", b"import no_such_module_at_all\n")
    error = refused("DD505", host.apply, layer("one", broken), smoke=True)
    assert "no_such_module_at_all" in str(error)
    assert tree_of(host.site) == old
    assert host.status()["layers"] == []
    assert host.run("history")["history"][-1]["outcome"].startswith("undone")
    host.apply(layer("one", A), smoke=True)


def test_a_full_disk_changes_nothing(host, tmp_path):
    """T40: RLIMIT_FSIZE stands in for a full disk: writing the large new file fails with an error."""
    large = b"X = '" + b"x" * 400_000 + b"'\n"
    old = tree_of(host.site)
    request, blobs = host.apply_request(layer("one", A, change("sglang/srt/big.py", None, large)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        refused("DD504", host.run, "apply", blobs, **request)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert tree_of(host.site) == old
    assert host.status()["interrupted"] is None
    host.apply(layer("one", A, change("sglang/srt/big.py", None, large)))


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_rename_that_fails_undoes_the_ones_before(host, monkeypatch, failing):
    old = tree_of(host.site)
    real, done = os.replace, 0

    def replace(source, target, **keywords):
        nonlocal done
        if "src_dir_fd" in keywords:
            done += 1
            if done == failing:
                raise OSError(16, "Device or resource busy", target)
        return real(source, target, **keywords)

    monkeypatch.setattr(os, "replace", replace)
    changes = [A, B, change("sglang/srt/sub/c.py", b"C = 1\n", b"C = 2\n")]
    error = refused("DD505", host.apply, layer("one", *changes))
    assert "busy" in str(error)
    assert tree_of(host.site) == old
    monkeypatch.undo()
    assert host.status()["interrupted"] is None


def test_an_undo_that_fails_says_so_and_can_be_taken_up(host, monkeypatch):
    old = tree_of(host.site)
    real, done = os.replace, 0

    def replace(source, target, **keywords):
        nonlocal done
        done += "src_dir_fd" in keywords
        if "src_dir_fd" in keywords and done >= 2:
            raise OSError(5, "Input/output error", target)
        return real(source, target, **keywords)

    monkeypatch.setattr(os, "replace", replace)
    error = refused("DD506", host.apply, layer("one", A, B))
    assert any("a.py" in line for line in error.details)
    monkeypatch.undo()
    assert host.status()["interrupted"]["kind"] == "apply"
    refused("DD503", host.apply, layer("one", A, B))
    refused("DD503", host.rollback, "one")
    assert host.recover()["action"] == "undone"
    assert tree_of(host.site) == old


def test_recovery_stops_at_an_edit_made_since(host, monkeypatch):
    real, done = os.replace, 0

    def replace(source, target, **keywords):
        nonlocal done
        done += "src_dir_fd" in keywords
        if "src_dir_fd" in keywords and done >= 2:
            raise OSError(5, "Input/output error", target)
        return real(source, target, **keywords)

    monkeypatch.setattr(os, "replace", replace)
    refused("DD506", host.apply, layer("one", A, B))
    monkeypatch.undo()
    (host.site / "sglang/srt/b.py").write_bytes(b"MINE = 1\n")
    error = refused("DD510", host.recover)
    assert "b.py" in error.details[0]
    result = host.recover(force=True)
    assert any(Path(note.split(" ", 1)[1]).read_bytes() == b"MINE = 1\n" for note in result["notes"])
    assert (host.site / "sglang/srt/b.py").read_bytes() == b"B = 1\n"


def test_two_deployers_one_lock(host):
    """T45: the second is told who holds the lock; a killed holder leaves no lock behind."""
    host.apply(layer("one", A))
    program = (
        "import fcntl, sys, time, json\n"
        "handle = open(sys.argv[1], 'r+')\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "handle.write(json.dumps({'who': 'ann@desk', 'pid': 1, 'since': 'noon', 'command': 'apply'})); handle.flush()\n"
        "print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(host.state / "lock")], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        error = refused("DD501", host.apply, layer("two", B))
        assert "ann@desk" in error.message
        assert host.status()["holder"]["who"] == "ann@desk"
        refused("DD501", host.rollback, "one", wait=0.2)
        other.kill()
    host.apply(layer("two", B))
    assert host.status()["holder"] is None


def test_running_engines_are_named_and_refuse(host):
    program = "import sglang.srt.a, time; print('up', flush=True); time.sleep(60)"
    environment = dict(os.environ, PYTHONPATH=str(host.site))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as engine:
        assert engine.stdout.readline() == b"up\n"
        error = refused("DD507", host.apply, layer("one", A))
        assert any(f"pid {engine.pid}" in line for line in error.details)
        result = host.apply(layer("one", A), live=True)
        assert [item["pid"] for item in result["processes"]] == [engine.pid]
        refused("DD507", host.rollback, "one")
        (found,) = host.status()["processes"]
        assert abs(found["started"] - time.time()) < 60
        engine.kill()
    host.rollback("one")


def test_state_is_readable_by_the_group_and_lies_outside_the_tree(host):
    host.apply(layer("one", A))
    assert host.site not in host.state.parents
    for path in host.state.rglob("*"):
        mode = path.stat().st_mode
        assert mode & 0o040, path
        assert not mode & 0o007, path
    assert (host.state / "schema").read_text() == "1\n"


def test_a_newer_schema_is_refused_not_guessed(host):
    host.apply(layer("one", A))
    (host.state / "schema").write_text("2\n")
    for action in (host.status, lambda: host.rollback("one"), host.recover):
        error = refused("DD508", action)
        assert "newer" in error.message


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"layers": 3}', "\x00"])
def test_a_damaged_record_is_named(host, damage):
    host.apply(layer("one", A))
    (host.state / "record.json").write_text(damage)
    error = refused("DD508", host.status)
    assert "record.json" in error.message


def test_a_damaged_preimage_is_found_before_anything_changes(host):
    host.apply(layer("one", A, B))
    (host.state / "objects" / entry(b"A = 1\n")["sha256"]).write_bytes(b"other")
    old = tree_of(host.site)
    with pytest.raises(AgentError):
        host.rollback("one")
    assert tree_of(host.site) == old


def test_old_transactions_and_contents_are_pruned_but_not_those_in_use(host):
    from ddtree_deploy.agent import state as state_module

    host.apply(layer("kept", B))
    for number in range(state_module.KEEP_TRANSACTIONS):
        host.apply(layer("one", change("sglang/srt/a.py", b"A = 1\n", b"A = %d\n" % (number + 10))))
        host.rollback("one")
    assert len(list((host.state / "transactions").iterdir())) == state_module.KEEP_TRANSACTIONS
    assert (host.state / "objects" / entry(b"B = 1\n")["sha256"]).exists()
    assert not (host.state / "objects" / entry(b"A = 10\n")["sha256"]).exists()
    host.rollback("kept")


def test_a_torn_history_line_does_not_hide_the_others(host):
    host.apply(layer("one", A))
    with (host.state / "history.jsonl").open("a") as handle:
        handle.write('{"id": "torn')
    host.rollback("one")
    assert [item["kind"] for item in host.run("history")["history"]] == ["apply", "rollback"]


def test_state_beside_the_environment_when_the_system_folder_is_closed(tmp_path, monkeypatch):
    from ddtree_deploy.agent import state as state_module

    monkeypatch.setattr(state_module, "DEFAULT_BASE", "/proc/no-such-place")
    venv = tmp_path / "venv/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    venv.mkdir(parents=True)
    host = Host(venv)
    request, blobs = host.apply_request(layer("one", A))
    host.run("apply", blobs, **{**request, "state_dir": None})
    (base,) = (tmp_path / "venv/.ddtree-deploy").iterdir()
    assert (base / "schema").exists()
    assert [item["set"] for item in host.status(state_dir=None)["layers"]] == ["one"]


def test_outcome_of_a_transaction_can_be_asked_for(host):
    assert host.run("outcome", transaction="never-begun")["outcome"] == "unknown"
    request, blobs = host.apply_request(layer("one", A))
    host.run("apply", blobs, **{**request, "transaction": "t-1"})
    answer = host.run("outcome", transaction="t-1")
    assert answer["outcome"] == "committed"
    assert answer["files"] == {A["path"]: A["after"]}


def test_a_foreign_interpreter_is_refused(host):
    (host.site / "sglang-0.5.11.dist-info/WHEEL").write_text(
        "Wheel-Version: 1.0\nTag: cp38-cp38-manylinux_2_34_x86_64\n"
    )
    error = refused("DD312", host.apply, layer("one", A))
    assert "cp38" in error.message


def test_a_half_finished_upgrade_is_named(host):
    (host.site / "sglang-0.5.12.dist-info").mkdir()
    error = refused("DD311", host.status)
    assert "0.5.11" in error.message and "0.5.12" in error.message


def test_journal_is_plain_json_that_names_everything(host):
    host.apply(layer("one", *THREE))
    (journal,) = host.state.glob("transactions/*/journal.json")
    value = json.loads(journal.read_text())
    assert value["state"] == "committed"
    assert [item["path"] for item in value["operations"]] == [item["path"] for item in THREE]


# --- a state folder that others had their hands in


@pytest.mark.parametrize("name", ["lock", "record.json", "history.jsonl"])
def test_a_link_in_place_of_a_state_file_is_not_followed(host, name):
    host.apply(layer("one", A))
    victim = host.folder / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    path = host.state / name
    path.unlink()
    path.symlink_to(victim)
    if name == "history.jsonl":
        assert any("bookkeeping" in note for note in host.rollback("one")["notes"])
    else:
        with pytest.raises(AgentError):
            host.rollback("one")
    assert (victim.read_bytes(), victim.stat().st_mode & 0o777) == (b"precious", 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_state_folder_of_another_user_is_not_believed(host):
    host.apply(layer("one", A))
    os.chown(host.state, 12345, -1)
    error = refused("DD508", host.rollback, "one")
    assert "12345" in error.message


def test_a_state_folder_that_others_may_write_is_not_believed(host):
    host.apply(layer("one", A))
    host.state.chmod(0o770)
    refused("DD508", host.rollback, "one")


FORGED = [
    {"path": "sglang/../../victim"},
    {"path": "/etc/shadow"},
    {"path": "sglang/srt/../../../victim"},
    {"before": {"kind": "file", "sha256": "../../x", "mode": 420, "size": 1}},
    {"before": {"kind": "file", "sha256": "0" * 64, "mode": 0o100644, "size": 1}},
    {"after": {"kind": "device"}},
    {"owner": ["root", "root"]},
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_record_writes_nowhere(host, forged):
    host.apply(layer("one", A))
    path = host.state / "record.json"
    record = json.loads(path.read_text())
    record["layers"][0]["files"][0].update(forged)
    path.write_text(json.dumps(record))
    old = tree_of(host.site)
    for action in (host.status, lambda: host.rollback("one"), lambda: host.rollback("one", force=True)):
        error = refused("DD508", action)
        assert "record.json" in error.message
    assert tree_of(host.site) == old
    assert not (host.folder / "victim").exists()


@pytest.mark.parametrize(
    "forged",
    [
        {"state": "prepared", "operations": [{"path": "sglang/../../victim", "before": None, "after": None}]},
        {"state": "staged", "folders": ["sglang/../.."]},
        {"state": "prepared", "operations": [3]},
        {"state": "no such state"},
        {"id": "another"},
        {"history": {"sets": 3}},
    ],
)
def test_a_forged_journal_is_not_recovered(host, forged):
    host.apply(layer("one", A))
    (path,) = host.state.glob("transactions/*/journal.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **forged}))
    error = refused("DD508", host.recover)
    assert "journal.json" in error.message


@pytest.mark.parametrize("damage", ['{"layers":[1]}', '{"layers":[{}]}', "[" * 100_000, '{"layers":{}}'])
def test_a_record_of_another_shape_is_named(host, damage):
    host.apply(layer("one", A))
    (host.state / "record.json").write_text(damage)
    refused("DD508", host.status)


@pytest.mark.parametrize("schema", ["", "0", "²", "-1", "x", "1 2"])
def test_a_damaged_schema_is_named(host, schema):
    host.apply(layer("one", A))
    (host.state / "schema").write_text(schema)
    refused("DD508", host.status)


def test_history_lines_of_another_shape_are_passed_over(host):
    host.apply(layer("one", A))
    with (host.state / "history.jsonl").open("a") as handle:
        handle.write('{"sets":3}\n[]\n' + "[" * 50_000 + "\n")
    assert [item["kind"] for item in host.run("history")["history"]] == ["apply"]


# --- bytecode and disks in the way


def test_bytecode_folders_in_odd_shapes_wedge_nothing(host):
    outside = host.folder / "pc"
    outside.mkdir()
    (host.site / "sglang/srt/__pycache__").symlink_to(outside)
    result = host.apply(layer("one", A))
    assert any("bytecode" in note for note in result["notes"])
    host.rollback("one")
    (host.site / "sglang/srt/__pycache__").unlink()
    (host.site / "sglang/srt/__pycache__" / f"a.{sys.implementation.cache_tag}.pyc").mkdir(parents=True)
    host.apply(layer("one", A))
    host.rollback("one")
    assert host.status()["interrupted"] is None


def test_bytecode_that_would_run_and_cannot_go_refuses(host, monkeypatch):
    import py_compile

    source = host.site / "sglang/srt/a.py"
    pyc = host.site / "sglang/srt/__pycache__" / f"a.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(source), str(pyc), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    real = os.unlink

    def unlink(path, **keywords):
        if str(path).endswith(".pyc"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, **keywords)

    monkeypatch.setattr(os, "unlink", unlink)
    old = tree_of(host.site)
    error = refused("DD505", host.apply, layer("one", A))
    assert "bytecode" in error.message
    assert tree_of(host.site) == old
    monkeypatch.undo()
    assert host.status()["interrupted"] is None


def test_bookkeeping_that_fails_after_the_commit_is_a_note(host):
    host.apply(layer("one", A))
    request, blobs = host.apply_request(layer("two", B))
    (host.state / "objects" / "folder").mkdir()
    history = host.state / "history.jsonl"
    history.unlink()
    history.mkdir()
    result = host.run("apply", blobs, **request)
    assert any("bookkeeping" in note for note in result["notes"])
    assert (host.site / "sglang/srt/b.py").read_bytes() == b"B = 2\n"


def test_a_disk_that_is_full_for_the_journal_too_leaves_nothing_open(host, monkeypatch):
    real, full = os.write, False

    def write(fd, data):
        if full:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    from ddtree_deploy.agent.commit import Transaction

    stage = Transaction.stage

    def fill(self):
        nonlocal full
        full = True
        stage(self)

    monkeypatch.setattr(Transaction, "stage", fill)
    old = tree_of(host.site)
    refused("DD504", host.apply, layer("one", A))
    full = False
    assert tree_of(host.site) == old
    assert host.status()["interrupted"] is None


def test_a_client_that_went_away_while_waiting_changes_nothing(host):
    host.apply(layer("one", A))
    request, blobs = host.apply_request(layer("two", B))
    from ddtree_deploy.agent.call import Call

    class Gone(Call):
        def client_gone(self):
            return True

    import hashlib

    from ddtree_deploy.agent import transact
    from ddtree_deploy.agent.protocol import MessageReader, MessageWriter

    call = Gone(host.request(**request, wait=30), MessageReader(lambda _n: b""), MessageWriter(lambda _data: None))
    call.blobs = {hashlib.sha256(blob).hexdigest(): blob for blob in blobs}
    refused("DD308", transact.run_apply, call)
    assert [item["set"] for item in host.status()["layers"]] == ["one"]
