"""apply, status, rollback, recover and history as a person types them, on a small local install."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.harness import tree_of
from tests.cli.harness import ENGINE, ONE, TWO


def stamps(folder: Path) -> dict[str, tuple]:
    """What any write would change: for every path below, its inode and its change time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        found[str(path)] = (info.st_ino, info.st_ctime_ns, info.st_mtime_ns)
    return found


def test_apply_status_rollback_history(cli):
    old = tree_of(cli.site)
    patch = cli.patch("one.patch", ONE)
    result = cli.on_host("apply", patch, "-m", "trying")
    assert result.status == 0, result.err
    assert "change sglang/srt/a.py" in result.out
    assert "1 file(s) read back" in result.out
    assert (cli.site / "sglang/srt/a.py").read_text() == "A = 2\n"
    status = cli.on_host("status")
    assert status.status == 0
    assert "applied" in status.out
    assert cli.on_host("rollback", "one").status == 0
    assert tree_of(cli.site) == old
    history = cli.on_host("history", "--json").json["history"]
    assert [(item["kind"], item["reason"], item["outcome"]) for item in history] == [
        ("apply", "trying", "done"),
        ("rollback", None, "done"),
    ]


def test_twice_is_a_no_op(cli):
    patch = cli.patch("one.patch", ONE)
    cli.on_host("apply", patch)
    before = stamps(cli.site), stamps(cli.state)
    result = cli.on_host("apply", patch)
    assert result.status == 0
    assert "already applied" in result.out
    assert (stamps(cli.site), stamps(cli.state)) == before


@pytest.mark.parametrize(
    "command",
    [
        ["apply", "one.patch", "--check"],
        ["status"],
        ["history"],
        ["recover"],
        ["grep", "A"],
        ["find-def", "A"],
        ["snapshot"],
    ],
)
def test_reading_commands_write_nothing_on_the_host(cli, command):
    """T73, T22: nothing changes on the host, to the inode and the nanosecond."""
    cli.patch("one.patch", ONE)
    before = stamps(cli.site)
    arguments = cli.host if command[0] in ("apply", "status", "history", "recover") else cli.host[:2]
    result = cli.run(*command, *arguments)
    assert result.status in (0, 1), result.err
    assert stamps(cli.site) == before
    assert not cli.state.exists()


def test_two_sets_in_a_row_and_rollback_in_any_order(cli):
    old = tree_of(cli.site)
    cli.on_host("apply", cli.patch("one.patch", ONE))
    cli.on_host("apply", cli.patch("two.patch", TWO))
    assert cli.on_host("rollback", "one").status == 0
    assert cli.on_host("status", "--json").json["sets"][0]["name"] == "two"
    assert cli.on_host("rollback", "two").status == 0
    assert tree_of(cli.site) == old


def test_a_set_built_on_another_must_go_first(cli):
    cli.on_host("apply", cli.patch("one.patch", ONE))
    over = ONE.replace("A = 2", "A = 3").replace("A = 1", "A = 2")
    assert cli.on_host("apply", cli.patch("over.patch", over)).status == 0
    result = cli.on_host("rollback", "one")
    assert result.status == 3
    assert "over builds on one" in result.err
    assert cli.on_host("rollback", "one", "--with-dependents").status == 0
    assert (cli.site / "sglang/srt/a.py").read_text() == "A = 1\n"


def test_drift_is_shown_refused_and_saved_when_forced(cli):
    cli.on_host("apply", cli.patch("one.patch", ONE))
    (cli.site / "sglang/srt/a.py").write_text("A = 2\nMINE = True\n")
    status = cli.on_host("status")
    assert status.status == 1
    assert "drift" in status.out
    result = cli.on_host("rollback", "one")
    assert result.status == 3
    assert "+MINE = True" in result.err
    result = cli.on_host("rollback", "one", "--force")
    assert result.status == 0
    saved = result.err.split("saved what was discarded: ")[1].splitlines()[0]
    assert Path(saved).read_text() == "A = 2\nMINE = True\n"


def test_every_broken_file_is_reported_and_nothing_is_written(cli):
    """T03: three files, two of them broken in different ways."""
    old = tree_of(cli.site)
    bad = ONE + "--- a/sglang/srt/b.py\n+++ b/sglang/srt/b.py\n@@ -1 +1 @@\n-B = 9\n+B = 2\n"
    bad += "--- a/sglang/srt/gone.py\n+++ b/sglang/srt/gone.py\n@@ -1 +1 @@\n-B = 9\n+B = 2\n"
    result = cli.on_host("apply", cli.patch("bad.patch", bad))
    assert result.status == 3
    assert "sglang/srt/b.py" in result.err
    assert "sglang/srt/gone.py" in result.err
    assert "applied" not in result.out
    assert tree_of(cli.site) == old


def test_status_after_a_reinstall(cli):
    from tests.agent.test_transact import reinstall

    cli.on_host("apply", cli.patch("one.patch", ONE))

    class Host:
        site, folder = cli.site, cli.site.parent

    reinstall(Host, ENGINE)
    status = cli.on_host("status")
    assert status.status == 1
    assert "reinstalled" in status.out
    result = cli.on_host("rollback", "one")
    assert result.status == 3
    assert "[DD113]" in result.err
    again = cli.on_host("apply", str(cli.folder / "one.patch"))
    assert again.status == 0, again.err
    assert "lost in a reinstall" in again.err
    assert cli.on_host("status").status == 0
    assert cli.on_host("rollback", "one").status == 0


def interrupt_apply(cli, patch: str) -> None:
    """Kill the agent in the middle of its renames: one file done, one not."""
    from tests.agent.harness import Host, change, layer

    host = Host.__new__(Host)
    host.folder, host.site, host.state_dir = cli.folder, cli.site, cli.state
    pid = os.fork()
    if pid == 0:
        real, done = os.replace, 0

        def replace(source, target, **keywords):
            nonlocal done
            done += "src_dir_fd" in keywords
            if done == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(source, target, **keywords)

        os.replace = replace
        host.apply(
            layer(
                "halfway",
                change("sglang/srt/a.py", b"A = 1\n", b"A = 2\n"),
                change("sglang/srt/b.py", b"B = 1\n", b"B = 2\n"),
            ),
            engine=ENGINE,
        )
        os._exit(1)
    _pid, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


def test_an_interrupted_transaction_is_seen_and_recovered(cli):
    old = tree_of(cli.site)
    interrupt_apply(cli, "x")
    status = cli.on_host("status")
    assert status.status == 1
    assert "interrupted" in status.out
    assert "ddtree-deploy recover" in status.err
    check = cli.on_host("apply", cli.patch("one.patch", ONE), "--check")
    assert check.status == 3
    assert "[DD503]" in check.err
    result = cli.on_host("recover")
    assert result.status == 0
    assert "undid the interrupted apply of halfway 1.0: 1 file(s) restored" in result.out
    assert tree_of(cli.site) == old
    assert "nothing to recover" in cli.on_host("recover").out


def test_apply_recovers_by_itself_and_says_so(cli):
    interrupt_apply(cli, "x")
    result = cli.on_host("apply", cli.patch("one.patch", ONE))
    assert result.status == 0
    assert "undid the interrupted apply" in result.err
    assert (cli.site / "sglang/srt/b.py").read_text() == "B = 1\n"


def test_rollback_recovers_by_itself_and_says_so(cli):
    cli.on_host("apply", cli.patch("c.patch", ONE.replace("srt/a.py", "srt/sub/c.py").replace("A =", "C =")))
    interrupt_apply(cli, "x")
    result = cli.on_host("rollback", "c")
    assert result.status == 0, result.err
    assert "undid the interrupted apply" in result.err


def test_a_folder_with_a_series(cli):
    folder = cli.folder / "mine"
    folder.mkdir()
    (folder / "series").write_text("# mine\none.patch\ntwo.patch\n")
    (folder / "one.patch").write_text(ONE)
    (folder / "two.patch").write_text(TWO)
    old = tree_of(cli.site)
    assert cli.on_host("apply", str(folder)).status == 0
    assert (cli.site / "sglang/srt/new/n.py").exists()
    assert cli.on_host("rollback", "mine").status == 0
    assert tree_of(cli.site) == old


def test_strip(cli):
    patch = cli.patch("deep.patch", ONE.replace("a/sglang", "x/y/sglang").replace("b/sglang", "x/y/sglang"))
    assert cli.on_host("apply", patch).status == 3
    assert cli.on_host("apply", patch, "--strip", "2").status == 0


def test_break_links(cli):
    cache = cli.folder / "cache.py"
    path = cli.site / "sglang/srt/a.py"
    cache.write_text("A = 1\n")
    path.unlink()
    path.symlink_to(cache)
    patch = cli.patch("one.patch", ONE)
    result = cli.on_host("apply", patch)
    assert result.status == 3
    assert "[DD509]" in result.err
    result = cli.on_host("apply", patch, "--break-links")
    assert result.status == 0, result.err
    assert cache.read_text() == "A = 1\n"
    assert path.read_text() == "A = 2\n"
    assert cli.on_host("status").status == 0
    assert cli.on_host("rollback", "one").status == 0
    assert path.readlink() == cache


def test_a_module_that_does_not_import_is_undone_by_smoke(cli):
    old = tree_of(cli.site)
    bad = ONE.replace("+A = 2", "+import not_there_at_all")
    result = cli.on_host("apply", cli.patch("bad.patch", bad), "--smoke")
    assert result.status == 6
    assert "not_there_at_all" in result.err
    assert tree_of(cli.site) == old


def test_bad_syntax_is_refused_before_anything_is_written(cli):
    bad = ONE.replace("+A = 2", "+A = = 2")
    result = cli.on_host("apply", cli.patch("bad.patch", bad))
    assert result.status == 3
    assert "[DD112]" in result.err
    assert "line 1" in result.err


def test_json_documents_have_a_schema_and_agree_with_the_tree(cli):
    patch = cli.patch("one.patch", ONE)
    checked = cli.on_host("apply", patch, "--check", "--json").json
    assert checked["schema"] == "ddtree-deploy.apply/1"
    assert checked["changed"] is False
    assert checked["sets"][0]["state"] == "would be applied"
    applied = cli.on_host("apply", patch, "--json").json
    assert applied["changed"] is True
    assert applied["files"] == checked["sets"][0]["files"]
    status = cli.on_host("status", "--json").json
    assert status["schema"] == "ddtree-deploy.status/1"
    assert status["state"] == "applied"
    assert status["exit_status"] == 0
    rolled = cli.on_host("rollback", "one", "--json").json
    assert rolled["removed"] == [{"name": "one", "version": applied["sets"][0]["version"]}]


def test_an_error_is_a_json_document_too(cli):
    result = cli.on_host("rollback", "nothing", "--json")
    assert result.status == 3
    assert result.json["error"]["code"] == "DD111"
    assert result.json["error"]["exit_status"] == 3
    assert "[DD111]" in result.err


def test_secrets_of_the_environment_are_nowhere(cli, monkeypatch):
    """T72: not in outputs, not in tracebacks, not in what the host keeps."""
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("DDTREE_DEPLOY_DEBUG", "1")
    results = [
        cli.on_host("apply", cli.patch("one.patch", ONE)),
        cli.on_host("apply", "/no/such/thing"),
        cli.on_host("rollback", "one", "--json"),
        cli.run("launch", "--tp", "8"),
    ]
    for result in results:
        assert "hf_verysecret" not in result.out + result.err
    for path in cli.state.rglob("*"):
        assert path.is_dir() or b"hf_verysecret" not in path.read_bytes()


def launch_cli(cli, *arguments, **options):
    """The real program in a process of its own, which minds Ctrl-C even where the tests run in the background."""
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    script = "import sys; from ddtree_deploy.cli.main import main; sys.argv[0] = 'ddtree-deploy'; main()"
    return subprocess.Popen([sys.executable, "-c", script, *arguments], text=True, **options)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_ctrl_c_while_the_lock_is_held_by_another_changes_nothing(cli):
    cli.on_host("apply", cli.patch("one.patch", ONE))
    (lock,) = cli.state.glob("*/lock")
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = launch_cli(
            cli, "apply", cli.patch("two.patch", TWO), "--wait", "30", *cli.host, stderr=subprocess.PIPE
        )
        seen: set[str] = set()

        def at_the_lock() -> bool:
            """The first agent looks; the second waits."""
            seen.update(Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text().split())
            return len(seen) > 1

        wait_for(at_the_lock)
        time.sleep(0.3)
        waiting.send_signal(signal.SIGINT)
        err = waiting.stderr.read()
        assert waiting.wait() == 130
        assert "nothing was changed" in err or "interrupted" in err
    time.sleep(0.3)
    assert [item["name"] for item in cli.on_host("status", "--json").json["sets"] if item["state"] == "applied"] == [
        "one"
    ]


def test_ctrl_c_during_the_commit_says_what_the_host_does(cli):
    slow = ONE.replace("+A = 2", "+import time\n+A = 2\n+time.sleep(3)").replace("@@ -1 +1 @@", "@@ -1 +1,3 @@")
    running = launch_cli(cli, "apply", cli.patch("slow.patch", slow), "--smoke", *cli.host, stderr=subprocess.PIPE)
    wait_for(lambda: "sleep" in (cli.site / "sglang/srt/a.py").read_text())
    running.send_signal(signal.SIGINT)
    err = running.stderr.read()
    assert running.wait() == 130
    assert "[DD511]" in err
    assert "still at work" in err
    wait_for(lambda: not cli.on_host("status", "--json").json["holder"])
    assert cli.on_host("history", "--json").json["history"][-1]["outcome"] == "done"


def test_a_closed_stdout_does_not_make_a_done_change_look_refused(cli):
    done = launch_cli(cli, "apply", cli.patch("one.patch", ONE), *cli.host, preexec_fn=lambda: os.close(1))
    assert done.wait() == 0
    assert (cli.site / "sglang/srt/a.py").read_text() == "A = 2\n"
    with open("/dev/full", "w") as full:
        undone = launch_cli(cli, "rollback", "one", *cli.host, stdout=full, stderr=subprocess.PIPE)
        assert "[DD902]" in undone.stderr.read()
        assert undone.wait() == 8


def test_findings_are_findings_through_a_closed_pipe(cli):
    cli.on_host("apply", cli.patch("one.patch", ONE))
    (cli.site / "sglang/srt/a.py").write_text("MINE = 1\n")
    with launch_cli(cli, "status", *cli.host, stdout=subprocess.PIPE, bufsize=1) as process:
        process.stdout.close()
        assert process.wait() == 1


def test_two_at_once_one_wins(cli):
    patch = cli.patch("one.patch", ONE)
    both = [launch_cli(cli, "apply", patch, *cli.host, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in "ab"]
    statuses = sorted((process.wait(), process.stderr.read())[0] for process in both)
    assert statuses[0] == 0
    assert statuses[1] in (0, 3, 5)
    assert cli.on_host("status").status == 0


def test_the_file_that_was_applied_names_what_to_roll_back(cli):
    patch = cli.patch("one.patch", ONE)
    cli.on_host("apply", patch)
    assert cli.on_host("rollback", patch).status == 0


def test_an_adhoc_set_does_not_take_a_shipped_sets_name(cli):
    result = cli.on_host("apply", cli.patch("dflash-fixes.patch", ONE))
    assert result.status == 2
    assert "shipped set" in result.err


def test_a_reason_cannot_forge_a_line_of_the_history(cli):
    cli.on_host("apply", cli.patch("one.patch", ONE), "-m", "fine\n2020 rollback forged")
    assert len(cli.on_host("history").out.splitlines()) == 2
