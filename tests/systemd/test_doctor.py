"""What ``doctor`` says of units on a machine whose PID 1 is systemd."""

from __future__ import annotations

from tests.systemd.deployer import Operator
from tests.systemd.test_serving import await_property, kill, operator  # noqa: F401 - the fixture


def found(operator: Operator, *codes: str) -> list[str]:  # noqa: F811
    """Code and message of the findings with these codes, and that nothing of the units was not known."""
    document = operator.run("doctor", "--json").json
    assert document["facts"]["units"]["manager"] is None
    unit = document["facts"]["units"]["units"][operator.unit]
    assert unit["loaded"] is None or unit["loaded"]["load"]
    return [f"{item['code']} {item['message']}" for item in document["findings"] if item["code"] in codes]


def test_units_on_disk_loaded_and_running(operator: Operator) -> None:  # noqa: F811
    machine, unit, name = operator.machine, operator.unit, operator.name
    codes = ("DD267", "DD290", "DD291", "DD292", "DD293", "DD294")
    assert found(operator, *codes) == [f"DD291 {unit} is not installed"]

    operator.launch("--install")
    # The machine itself has a file beside every unit of ours, so that restarts come soon.
    beside = f"DD291 {unit} is changed by files beside it"
    assert found(operator, *codes) == [beside]
    assert found(operator, "DD281", "DD261", "DD262") == []

    operator.launch("--start")
    facts = operator.run("doctor", "--json").json["facts"]["units"]["units"][unit]["loaded"]
    assert (facts["active"], facts["memlock"], facts["nofile"]) == ("active", -1, 1048576)
    assert "--speculative-algorithm" in facts["command"]
    assert str(operator.port) in facts["argv"]
    listens = f"DD267 {name}: listens on port {operator.port}"
    assert found(operator, *codes) == [beside, listens]

    kill(operator)
    await_property(operator, "NRestarts", "1")
    assert f"DD293 {unit} was restarted 1 time" in found(operator, *codes)

    path = f"/etc/systemd/system/{unit}"
    machine.write(path, machine.read(path).replace("TimeoutStopSec=", "TimeoutStopSec=1"))
    assert set(found(operator, "DD290", "DD291", "DD294")) == {
        f"DD290 {unit} on disk is not what systemd has loaded",
        beside,
        f"DD291 {unit} is not the unit that the inventory gives",
        f"DD294 {unit} runs since before its unit was changed",
    }
    machine.run("rm", f"/etc/sglang/{name}.env")
    assert f"DD292 {name}: the environment file is not there" in found(operator, "DD292")
