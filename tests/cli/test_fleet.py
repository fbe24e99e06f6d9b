"""One command on many hosts: who is tried, what is said, and what it comes to."""

from __future__ import annotations

import json
import threading
import time

import pytest

from ddtree_deploy.cli.fleet import Fleet
from ddtree_deploy.console import Console
from tests.agent.harness import make_site
from tests.cli.harness import ENGINE, ONE, Stream

HOSTS = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def fleet(cli):
    """Four local hosts in an inventory; alpha and gamma are labelled."""
    lines = []
    for name in HOSTS:
        site = make_site(cli.folder / name, ENGINE)
        lines += [f"[hosts.{name}]", f'local = "{site}"', f'state_dir = "{cli.folder / f"{name}-state"}"']
        lines.append(f'labels = {{ gpu = "{"rtx6000" if name in ("alpha", "gamma") else "h200"}", rack = "a1" }}')
    (cli.folder / "hosts.toml").write_text("\n".join(lines) + "\n")
    cli.inventory = ["--inventory", str(cli.folder / "hosts.toml")]
    cli.every = [word for name in HOSTS for word in ("--host", name)]
    cli.patch("one.patch", ONE)
    return cli


def text(cli, name):
    return next((cli.folder / name).rglob("a.py")).read_text()


def drift(cli, name):
    next((cli.folder / name).rglob("a.py")).write_text("A = 3\n")


def lines(result):
    return [json.loads(line) for line in result.out.splitlines()]


def verdicts(result):
    return {item["host"]: item["verdict"] for item in lines(result)[-1]["hosts"]}


def test_all_of_them(fleet):
    result = fleet.run("apply", "one.patch", *fleet.every, *fleet.inventory)
    assert result.status == 0, result.err
    assert all(text(fleet, name) == "A = 2\n" for name in HOSTS)
    table = result.out[result.out.index("HOST") :].splitlines()
    assert [row.split()[:2] for row in table[1:5]] == [[name, "ok"] for name in HOSTS]
    assert table[5].startswith("4 of 4 ok")
    assert all(f"== {name}: ok" in result.out for name in HOSTS)


def test_by_label(fleet):
    label = ["--label", "gpu=rtx6000", "--label", "rack=a1"]
    assert fleet.run("apply", "one.patch", *label, *fleet.inventory).status == 0
    assert [text(fleet, name) for name in HOSTS] == ["A = 2\n", "A = 1\n", "A = 2\n", "A = 1\n"]
    both = fleet.run("status", *label, "--host", "beta", "--host", "alpha", "--json", *fleet.inventory)
    assert list(verdicts(both)) == ["beta", "alpha", "gamma"]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--label", "gpu=none"], 2, "DD002"),
        (["--label", "gpu"], 2, "KEY=VALUE"),
        (["alpha", "--host", "beta", "--host", "gamma"], 2, "beside --host"),
        (["--host", "alpha", "--host", "beta", "--serial", "0"], 2, "--serial"),
    ],
)
def test_usage(fleet, words, status, says):
    result = fleet.run("status", *words, *fleet.inventory)
    assert (result.status, says in result.err) == (status, True), result.err


def test_one_host_twice_is_one_host(fleet):
    result = fleet.run("status", "--host", "alpha", "--host", "alpha", "--json", *fleet.inventory)
    assert result.json["host"] == "alpha"


def test_the_worst_status_and_a_line_for_each_host(fleet):
    drift(fleet, "beta")
    result = fleet.run("apply", "one.patch", *fleet.every, "--max-fail", "9", "--json", *fleet.inventory)
    assert result.status == 3
    assert verdicts(result) == {"alpha": "ok", "beta": "refused", "gamma": "ok", "delta": "ok"}
    documents = {item["host"]: item for item in lines(result)[:-1]}
    assert documents["beta"]["error"]["code"] == "DD102"
    assert documents["alpha"]["schema"] == "ddtree-deploy.apply/1"
    assert lines(result)[-1]["schema"] == "ddtree-deploy.fleet/1"
    assert "beta: error[DD102]" in result.err


def test_a_failure_stops_what_has_not_begun(fleet):
    drift(fleet, "beta")
    result = fleet.run("apply", "one.patch", *fleet.every, "--serial", "1", "--json", *fleet.inventory)
    assert (result.status, verdicts(result)) == (
        3,
        {"alpha": "ok", "beta": "refused", "gamma": "not tried", "delta": "not tried"},
    )
    assert [text(fleet, name) for name in HOSTS] == ["A = 2\n", "A = 3\n", "A = 1\n", "A = 1\n"]
    shown = fleet.run("apply", "one.patch", *fleet.every, "--serial", "1", *fleet.inventory)
    assert "1 of 4 ok, 2 not tried" in shown.out


def test_max_fail(fleet):
    drift(fleet, "alpha")
    drift(fleet, "gamma")
    one = ["apply", "one.patch", *fleet.every, "--serial", "1", "--json", *fleet.inventory, "--max-fail", "1"]
    assert list(verdicts(fleet.run(*one)).values()) == ["refused", "ok", "refused", "not tried"]


def test_reading_goes_on(fleet):
    for path in fleet.folder.glob("alpha/**/srt"):
        path.rename(path.with_name("gone"))
    result = fleet.run("status", *fleet.every, "--serial", "1", "--json", *fleet.inventory)
    assert list(verdicts(result).values())[1:] == ["ok"] * 3
    assert verdicts(result)["alpha"] not in ("ok", "not tried")


def test_findings_are_no_failures(fleet):
    assert fleet.run("apply", "one.patch", *fleet.every, *fleet.inventory).status == 0
    drift(fleet, "alpha")
    result = fleet.run("status", *fleet.every, "--serial", "1", "--json", *fleet.inventory, "--max-fail", "0")
    assert (result.status, list(verdicts(result).values())) == (1, ["findings", "ok", "ok", "ok"])


def make(hosts, **options):
    out, err = Stream(), Stream()
    chosen = {"serial": None, "max_fail": 0, "json_mode": True, **options}
    return Fleet(Console(out, err), hosts, chosen["serial"], chosen["max_fail"], chosen["json_mode"]), out, err


def test_hosts_are_at_work_at_the_same_time():
    together = threading.Barrier(8)
    fleet, _, _ = make([str(number) for number in range(8)])
    assert fleet.run(lambda _host, _console: together.wait(20) * 0) == 0


def test_a_lot_waits_for_the_one_before():
    running: set[str] = set()
    most = []

    def one(host, _console):
        running.add(host)
        most.append(len(running))
        time.sleep(0.01)
        running.discard(host)
        return 0

    fleet, _, _ = make([str(number) for number in range(7)], serial=2)
    assert (fleet.run(one), max(most) <= 2, len(most)) == (0, True, 7)


def test_interrupted(monkeypatch):
    """The first Ctrl-C begins with nothing more and waits for what is at work."""
    fleet, out, err = make(["a", "b", "c"], serial=1)
    ended = []

    def one(host, _console):
        ended.append(host)
        return 0

    shown = fleet.show

    def show(*arguments):
        monkeypatch.setattr(fleet, "show", shown)
        shown(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "show", show)
    assert fleet.run(one) == 130
    assert ended == ["a"]
    assert "no further host" in err.text()
    assert json.loads(out.text().splitlines()[-1])["exit_status"] == 130


def test_what_a_fault_of_this_program_does_to_the_others(fleet, monkeypatch):
    from ddtree_deploy.deploy import status

    real = status.read_status

    def read(session, *rest):
        if session.target.name == "beta":
            raise RuntimeError("a bug")
        return real(session, *rest)

    monkeypatch.setattr(status, "read_status", read)
    result = fleet.run("status", *fleet.every, "--json", *fleet.inventory)
    assert (result.status, verdicts(result)["beta"], verdicts(result)["delta"]) == (8, "fault", "ok")
