"""Over SSH, on a machine whose PID 1 is systemd: install, start, crash, restart, stop, go back."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddtree_deploy.cli import options as opt
from ddtree_deploy.console import Console
from ddtree_deploy.serve.logs import log_lines
from tests.cli.harness import Stream
from tests.launch import strategies
from tests.systemd.deployer import Operator
from tests.systemd.machine import SYSTEM_PATH, Machine

_numbers = itertools.count()
SECRET = "hf_it-is-a-secret-1234"


@pytest.fixture
def operator(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDTREE_DEPLOY_DATA", str(tmp_path / "data"))
    one = Operator(machine, tmp_path, f"s{next(_numbers)}")
    yield one
    machine.run("systemctl", "kill", "--signal=KILL", one.unit, check=False)
    machine.run("systemctl", "stop", one.unit, check=False)


def kill(operator: Operator) -> None:
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/kill", b"{}", timeout=10)


def await_property(operator: Operator, name: str, wanted: str) -> None:
    operator.machine.run(
        "timeout",
        "20",
        "sh",
        "-c",
        f'until [ "$(systemctl show --value --property {name} {operator.unit})" = "{wanted}" ]; do sleep 0.1; done',
    )


def test_the_whole_way(operator: Operator) -> None:
    machine = operator.machine
    shown = operator.launch("--install", "--check")
    assert f"+++ /etc/systemd/system/{operator.unit}" in shown.out
    assert not machine.exists(f"/etc/systemd/system/{operator.unit}")
    installed = operator.launch("--install")
    assert "verified by its systemd" in installed.out
    assert machine.show(operator.unit, "NeedDaemonReload") == "no"
    assert machine.run("stat", "-c", "%a %U", f"/etc/sglang/{operator.name}.env").stdout == "600 root\n"
    assert "nothing was written" in operator.launch("--install").out

    started = operator.launch("--start")
    assert "speculation: DDTREE, accept length 4.20" in started.out
    assert "it starts at boot" in started.out
    assert "warming up" in started.err or "loading" in started.err
    assert machine.show(operator.unit, "ActiveState") == "active"
    assert machine.show(operator.unit, "UnitFileState") == "enabled"
    first = machine.show(operator.unit, "MainPID")

    kill(operator)
    await_property(operator, "NRestarts", "1")
    again = operator.launch("--start")
    assert "it was running already" in again.err
    assert machine.show(operator.unit, "MainPID") not in ("0", first)
    status = operator.run("status")
    assert f"{operator.unit}  active since" in status.out
    assert ", restarted 1 time(s)" in status.out
    (described,) = [one for one in operator.run("status", "--json").json["services"] if one["unit"] == operator.unit]
    assert described["install"]["service"]["port"] == operator.port

    restarted = operator.launch("--restart")
    assert "serves on" in restarted.out
    assert machine.show(operator.unit, "NRestarts") == "0"

    stopped = operator.launch("--stop")
    assert "is inactive" in stopped.out
    # The engine ends itself by SIGKILL; a stop that was asked for does not count as its failure.
    assert machine.show(operator.unit, "ActiveState") == "inactive"
    operator.launch("--uninstall")
    assert not machine.exists(f"/etc/systemd/system/{operator.unit}")
    assert not machine.exists(f"/etc/sglang/{operator.name}.env")
    assert not machine.exists(f"/etc/systemd/system/multi-user.target.wants/{operator.unit}")
    assert machine.show(operator.unit, "LoadState") == "not-found"


def test_a_unit_with_a_warning_is_undone(operator: Operator) -> None:
    machine = operator.machine
    operator.launch("--install")
    old = machine.read(f"/etc/systemd/system/{operator.unit}"), machine.read(f"/etc/sglang/{operator.name}.env")
    # Nothing of this makes `systemd-analyze verify` fail by its exit status alone.
    machine.write(f"/etc/systemd/system/{operator.unit}.d/own.conf", "[Service]\nLimitMEMLOK=infinity\n")
    operator.save(max_running_requests=8)
    failed = operator.launch("--install", status=6)
    assert "LimitMEMLOK" in failed.err
    assert "hint:" in failed.err
    now = machine.read(f"/etc/systemd/system/{operator.unit}"), machine.read(f"/etc/sglang/{operator.name}.env")
    assert now == old
    assert machine.show(operator.unit, "NeedDaemonReload") == "no"
    machine.run("rm", f"/etc/systemd/system/{operator.unit}.d/own.conf")
    shown = operator.launch("--install")
    assert "-    --max-running-requests 16 \\" in shown.out
    assert "+    --max-running-requests 8 \\" in shown.out


def test_a_program_that_is_not_there(operator: Operator) -> None:
    operator.save(python="/opt/none/bin/python")
    failed = operator.launch("--install", status=6)
    assert "/opt/none/bin/python is not executable" in failed.err
    assert not operator.machine.exists(f"/etc/systemd/system/{operator.unit}")
    assert operator.machine.show(operator.unit, "LoadState") == "not-found"


def test_a_foreign_unit_comes_back(operator: Operator) -> None:
    machine, path = operator.machine, f"/etc/systemd/system/{operator.unit}"
    mine = "[Service]\nExecStart=/bin/sleep 1000\n"
    machine.write(path, mine)
    refused = operator.launch("--install", status=3)
    assert f"{path}: not of this tool" in refused.err
    assert machine.read(path) == mine
    shown = operator.launch("--install", "--force")
    assert "-ExecStart=/bin/sleep 1000" in shown.out
    operator.launch("--uninstall")
    assert machine.read(path) == mine
    assert machine.show(operator.unit, "ExecStart").startswith("{ path=/bin/sleep ")


def test_a_start_that_fails_names_the_cause_and_goes_back(operator: Operator) -> None:
    machine = operator.machine
    operator.launch("--install", "--start")
    operator.save(max_running_requests=8)
    operator.mode("crash")
    noted = operator.launch("--install")
    assert "it runs the install from before" in noted.err
    assert machine.show(operator.unit, "NeedDaemonReload") == "no"
    assert "it was running already, with the install from before" in operator.launch("--start").err
    failed = operator.launch("--restart", status=1)
    assert "DD608" in failed.err
    assert "cause: a GPU ran out of memory" in failed.err
    assert "torch.OutOfMemoryError: CUDA out of memory." in failed.err
    assert "launch --previous --restart" in failed.err
    assert machine.show(operator.unit, "ActiveState") == "inactive", "no restart loop is left behind"
    back = operator.launch("--previous", "--restart")
    assert "back to install" in back.out
    assert "serves on" in back.out
    document = operator.launch("--stop", "--json").json
    assert document["run"]["state"]["active"] == "inactive"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("deaf", "accept length 1.00: nothing that is drafted gets accepted"),
        ("chain", "it runs with speculation EAGLE, not DDTREE"),
        ("mute", "it gave no completion"),
    ],
)
def test_up_but_not_as_it_should(operator: Operator, mode: str, said: str) -> None:
    operator.mode(mode)
    failed = operator.launch("--install", "--start", status=1)
    assert "DD609" in failed.err
    assert said in failed.err
    assert operator.machine.show(operator.unit, "ActiveState") == "active", "whoever is asked may still look at it"


def test_the_deadline(operator: Operator) -> None:
    operator.mode("hang")
    failed = operator.launch("--install", "--start", "--deadline", "2", status=1)
    assert "it was not ready after 2 s, and was left running" in failed.err
    assert "nothing listens on" in failed.err
    assert operator.machine.show(operator.unit, "ActiveState") == "active"
    assert operator.machine.show(operator.unit, "UnitFileState") == "disabled", "only what served starts at boot"


def test_secrets_stay_on_the_host(operator: Operator) -> None:
    machine, path = operator.machine, f"/etc/sglang/{operator.name}.secrets.env"
    operator.save(user="engine", group="engine")
    operator.save(secrets=["HF_TOKEN", "STANDIN_API_KEY"], engine_config=f"/etc/sglang/{operator.name}.yaml")
    installed = operator.launch("--install")
    assert f"{path} does not exist; it must set HF_TOKEN" in installed.err
    refused = operator.launch("--start", status=3)
    assert f"{path} does not exist" in refused.err
    text = f"HF_TOKEN={SECRET}\nSTANDIN_API_KEY='key-of-the-engine'\n"
    machine.write(path, text, "0644")
    assert "others can read it" in operator.launch("--start", status=3).err
    machine.run("chmod", "0600", path)
    unanswered = operator.launch("--start", status=1)
    assert "it wants an API key" in unanswered.err
    machine.write(f"/etc/sglang/{operator.name}.yaml", "tp-size: 1\napi-key: 'key-of-the-engine'\n", "0600")
    started = operator.launch("--start")
    assert "serves on" in started.out
    logged = operator.run("logs")
    assert "server_args=ServerArgs(token='***')" in logged.out
    assert operator.seen()["environ"]["HF_TOKEN"] == SECRET
    assert operator.seen()["uid"] == 1001
    document = operator.launch("--restart", "--json")
    unit = machine.read(f"/etc/systemd/system/{operator.unit}")
    environment = machine.read(f"/etc/sglang/{operator.name}.env")
    journal = machine.run("journalctl", "--unit", "ssh-test.service", "-o", "cat").stdout
    results = (installed, refused, unanswered, started, logged, document)
    shown = [unit, environment, journal, *(result.out + result.err for result in results)]
    for hidden in (SECRET, "key-of-the-engine", "must-not-travel"):
        assert not any(hidden in one for one in shown)
    assert SECRET not in " ".join(operator.seen()["argv"])
    operator.launch("--stop", "--uninstall")
    assert machine.read(path) == text
    assert machine.run("stat", "-c", "%a", path).stdout == "600\n"


def test_one_manager_at_a_time(operator: Operator) -> None:
    operator.launch("--install", "--start")
    refused = operator.launch("--install", "--no-systemd", status=3)
    assert "runs under systemd, and would be managed by script" in refused.err
    operator.launch("--stop")
    operator.launch("--install", "--no-systemd", "--start")
    assert not operator.machine.exists(f"/etc/systemd/system/{operator.unit}")
    assert "runs under script" in operator.launch("--previous", status=3).err
    operator.launch("--stop")
    operator.launch("--previous", "--start")
    assert operator.machine.show(operator.unit, "ActiveState") == "active"


def test_a_taken_port(operator: Operator) -> None:
    operator.launch("--install")
    with socket.create_server(("127.0.0.1", operator.port)):
        refused = operator.launch("--start", status=3)
    assert "something else listens on 127.0.0.1:" in refused.err
    assert operator.machine.show(operator.unit, "ActiveState") == "inactive"


def test_many_restarts_in_a_row(operator: Operator) -> None:
    """The unit's start limit is for crashes: an operator who restarts is not locked out by it."""
    limit = "[Unit]\nStartLimitBurst=1\n"
    operator.machine.write(f"/etc/systemd/system/{operator.unit}.d/limit.conf", limit)
    operator.launch("--install", "--start")
    operator.launch("--restart")
    operator.launch("--restart")


def test_the_log_is_followed(operator: Operator) -> None:
    operator.launch("--install", "--start")
    choice = opt.HostChoice(inventory=operator.folder / "hosts.toml")
    with opt.open_session(choice, Console(Stream(), Stream())) as session:
        guard = threading.Timer(60, session.__exit__)
        guard.start()
        lines = log_lines(session, operator.unit, lines=1000, follow=True)
        assert any("ready to roll" in line for line in lines)
        operator.machine.run("systemctl", "kill", "--signal=TERM", operator.unit)
        assert any("Scheduled restart job" in line for line in lines), "it goes on with what comes"
        lines.close()
        guard.cancel()
    assert "ready to roll" in operator.run("logs", "-n", "50").out
    assert len(operator.run("logs", "-n", "2", "--json").json["lines"]) == 2


def test_not_root(operator: Operator) -> None:
    operator.host["ssh"] = f"ops@127.0.0.1:{operator.machine.port}"
    operator.save()
    refused = operator.launch("--install", status=3)
    assert "DD606" in refused.err
    assert "sudo = true" in refused.err
    assert "Traceback" not in refused.err


def test_sudo(operator: Operator) -> None:
    if shutil.which("sudo", path=SYSTEM_PATH) is None:
        pytest.skip("sudo is not installed")
    operator.host.update(ssh=f"ops@127.0.0.1:{operator.machine.port}", sudo=True)
    operator.save()
    operator.launch("--install", "--start")
    assert operator.machine.run("stat", "-c", "%U", f"/etc/sglang/{operator.name}.env").stdout == "root\n"
    operator.host["python"] = "/bin/sh"
    operator.save()
    refused = operator.launch("--stop", status=4)
    assert "DD310" in refused.err


def patch(operator: Operator, name: str, before: str, after: str) -> str:
    path = operator.folder / f"{name}.patch"
    header = "--- a/sglang/srt/mode.py\n+++ b/sglang/srt/mode.py\n@@ -1 +1 @@\n"
    path.write_text(f"{header}-{before}\n+{after}\n")
    return str(path)


def test_apply_around_a_restart(operator: Operator) -> None:
    machine, engine, old = operator.machine, "/opt/site/sglang/srt/mode.py", 'MODE = "serve"'
    operator.launch("--install", "--start")
    first = machine.show(operator.unit, "MainPID")
    drift = operator.run("apply", patch(operator, "drift", "MODE = 1", "MODE = 2"), "--restart", operator.name)
    assert drift.status == 3
    assert machine.show(operator.unit, "MainPID") == first, "what is refused leaves the service alone"

    good = patch(operator, "good", old, 'MODE = "serve better"')
    applied = operator.run("apply", good, "--restart", operator.name)
    assert applied.status == 0, applied.err
    assert "serves on" in applied.out
    second = machine.show(operator.unit, "MainPID")
    assert second not in ("0", first)
    again = operator.run("apply", good, "--restart", operator.name)
    assert "nothing was restarted" in again.err
    assert machine.show(operator.unit, "MainPID") == second

    bad = patch(operator, "bad", 'MODE = "serve better"', 'MODE = "crash"')
    failed = operator.run("apply", bad, "--restart", operator.name)
    assert failed.status == 1
    assert "cause: a GPU ran out of memory" in failed.err
    assert "to go back: `rollback bad --with-dependents`" in failed.err
    assert machine.read(engine) == 'MODE = "crash"\n'
    assert operator.run("rollback", "bad").status == 0

    undone = operator.run("apply", bad, "--restart", operator.name, "--undo", "--json")
    assert undone.status == 6
    assert "bad" in undone.err and "serves again as before" in undone.err
    assert undone.json["restart"]["again"]["ready"]
    assert machine.read(engine) == 'MODE = "serve better"\n'
    assert machine.show(operator.unit, "ActiveState") == "active"
    assert operator.run("rollback", "good", "--live").status == 0
    assert machine.read(engine) == old + "\n"


def test_the_install_is_killed_on_the_host(operator: Operator) -> None:
    """Between the last file and the verdict of systemd: undone by `recover`, and systemd knows nothing of it."""
    machine = operator.machine
    operator.launch("--install", "--start")
    old = machine.read(f"/etc/systemd/system/{operator.unit}")
    operator.save(max_running_requests=8)
    machine.write("/run/slow", "#!/bin/sh\necho $PPID $$ >/run/slow.pids\nexec sleep 1000\n", "0755")
    machine.run("mount", "--bind", "/run/slow", "/usr/bin/systemd-analyze")
    try:
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(operator.run("launch", "--install")))
        thread.start()
        machine.run("timeout", "20", "sh", "-c", "until [ -s /run/slow.pids ]; do sleep 0.05; done")
        assert machine.read(f"/etc/systemd/system/{operator.unit}") != old
        assert "at work right now" in operator.run("status").err
        machine.run("sh", "-c", "kill -KILL $(cat /run/slow.pids)")
        thread.join(30)
    finally:
        machine.run("umount", "/usr/bin/systemd-analyze")
    (result,) = results
    assert result.status == 7
    assert "run `ddtree-deploy recover`" in result.err
    assert "was interrupted" in operator.run("status").err
    recovered = operator.run("recover")
    assert f"undid the interrupted install of {operator.unit}: 1 file(s) restored" in recovered.out
    assert machine.read(f"/etc/systemd/system/{operator.unit}") == old
    assert machine.show(operator.unit, "NeedDaemonReload") == "no"
    assert machine.show(operator.unit, "ActiveState") == "active", "what runs goes on"
    operator.launch("--install", "--restart")


@pytest.mark.parametrize("action", ["--install", "--previous"])
def test_the_connection_is_cut(operator: Operator, action: str) -> None:
    """The host goes on by itself; the client comes back and asks what became of it."""
    machine = operator.machine
    operator.launch("--install")
    operator.save(max_running_requests=8)
    if action == "--previous":
        operator.launch("--install")
    # sshd's process of the connection is a parent of the agent's.
    cut = (
        "#!/bin/sh\npid=$PPID\nwhile [ $pid -gt 1 ]; do\n"
        "  if grep -q sshd /proc/$pid/comm; then kill -KILL $pid; sleep 0.5; exit; fi\n"
        "  pid=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$pid/status)\ndone\n"
    )
    machine.write("/run/cut", cut, "0755")
    machine.run("mount", "--bind", "/run/cut", "/usr/bin/systemd-analyze")
    try:
        result = operator.launch(action)
    finally:
        machine.run("umount", "/usr/bin/systemd-analyze")
    assert "the connection was lost during the transaction; the host finished it" in result.err
    assert ("back to install" if action == "--previous" else "1 file(s) read back") in result.out
    running = "16" if action == "--previous" else "8"
    assert f"--max-running-requests {running} " in machine.read(f"/etc/systemd/system/{operator.unit}")
    assert machine.show(operator.unit, "NeedDaemonReload") == "no"


hostile = settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@hostile
@given(
    st.lists(strategies.values, min_size=20, max_size=30),
    st.lists(strategies.values, min_size=10, max_size=15),
)
def test_hostile_values_reach_the_process(operator: Operator, arguments: list[str], values: list[str]) -> None:
    """What systemd hands to the installed service is, byte for byte, what was rendered."""
    variables = {f"HOSTILE_{number}": value for number, value in enumerate(values)}
    operator.save(
        json_model_override_args={f"k{number}": value for number, value in enumerate(arguments)},
        environment={"STANDIN": "serve", **variables},
    )
    rendered = operator.launch("--json").json
    operator.launch("--install", "--restart", "--force")
    seen = operator.seen()
    assert rendered["argv"][1:] == seen["argv"]
    assert {name: seen["environ"].get(name) for name in rendered["environment"]} == rendered["environment"]
    (override,) = [word for word in seen["argv"] if word.startswith('{"k0"')]
    assert list(json.loads(override).values()) == arguments
