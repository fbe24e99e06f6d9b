"""Replies about services that lie: honest ones are recorded from a real agent, then one place of one is changed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.replies import check_message, check_reply
from tests.hosts.test_replies import Liar, changed, tell_a_lie
from tests.serve.test_without_systemd import Box

CASES = json.loads((Path(__file__).parents[1] / "cases/replies/units.json").read_text())
INSTALL = ("launch", "--install", "--no-systemd")
START, STOP, PREVIOUS = (("launch", option) for option in ("--start", "--stop", "--previous"))
#: Command line -> the operation of its last exec.
LAST = {
    INSTALL: "unit_install",
    START: "unit_serve",
    ("status",): "units",
    ("logs",): "unit_log",
    STOP: "unit_serve",
    PREVIOUS: "unit_restore",
    ("recover",): "units_recover",
}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        one = Box(tmp_path_factory.mktemp("box"), patch)
        yield one, Liar(one, patch, ["--inventory", str(one.folder / "hosts.toml")])
        lock = one.etc / "svc.run/lock"
        if lock.exists() and lock.read_text().strip():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(lock.read_text()), signal.SIGTERM)


@pytest.fixture(scope="module")
def liar(box):
    return box[1]


@pytest.fixture(scope="module")
def recorded(box):
    """Command line -> the replies that it got; of a service's second install, and of an interruption."""
    one, liar = box
    one.launch(*INSTALL[1:])
    one.save(MORE="1")
    found = {command: liar.record(*command) for command in LAST}
    status = json.loads(found["status",][-1][-1][1])
    install = status["services"][0]["install"]
    history = {"id": "t", "kind": "install", "sets": [{"name": "svc", "version": "1"}], "who": "x"}
    history["time"] = install["time"]
    status["services"][0].update(interrupted=history, holder={"who": "x", "command": "launch"})
    rewrite(found["status",], status)
    one_recovered = {"unit": "sglang-svc.service", "action": "undone", "paths": ["/etc/x"], "notes": ["n"]}
    rewrite(found["recover",], {"recovered": [{**one_recovered, "history": history}]})
    return found


def rewrite(messages, result) -> None:
    """Have the last exec answer with another result."""
    (at,) = [at for at, (kind, _payload) in enumerate(messages[-1]) if kind == b"Q"]
    messages[-1][at] = (b"Q", json.dumps(result).encode("ascii"))


@pytest.fixture(scope="module")
def honest(recorded):
    """Operation -> its honest result."""
    found = {operation: recorded[command][-1] for command, operation in LAST.items()}
    found.update(unit_look=recorded[INSTALL][-2], unit_serve=recorded[START][-1])
    return {name: json.loads(next(data for kind, data in frames if kind == b"Q")) for name, frames in found.items()}


def test_honest_replies_are_believed(liar, recorded):
    for command, messages in recorded.items():
        result = liar.replay(messages, *command)
        assert result.status == 0, (command, result.err)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_one_changed_place_never_breaks_the_command(liar, recorded, data):
    command = data.draw(st.sampled_from(list(recorded)))
    messages = [list(message) for message in recorded[command]]
    # An install looks at the host right before.
    which = data.draw(st.sampled_from([-1, -2] if command == INSTALL else [-1]))
    path = tell_a_lie(data, messages[which])
    for extra in ([], ["--json"]):
        result = liar.replay(messages, *command, *extra)
        assert result.status != 8, (command, path, result.err)
        if extra:
            json.loads(result.out)


@pytest.mark.parametrize("case", CASES, ids=[f"{case['operation']}-{case['at'][-1]}" for case in CASES])
def test_what_is_said_of_a_lie(honest, case):
    operation = case["operation"]
    args = {"paths": list(honest["unit_look"]["entries"])}
    check_reply("box", operation, args, honest[operation])
    with pytest.raises(DeployError) as caught:
        check_reply("box", operation, args, changed(honest[operation], case["at"], case["lie"]))
    assert caught.value.code == "DD307"
    assert case["words"] in str(caught.value)


def test_a_file_that_was_asked_for_is_not_told(honest):
    with pytest.raises(DeployError, match="it says nothing of /etc/x"):
        check_reply("box", "unit_look", {"paths": ["etc/x"]}, honest["unit_look"])


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("unit_serve", {"phase": ["x"], "elapsed_s": 1}),
        ("unit_serve", {"phase": "x", "elapsed_s": {}}),
        ("unit_serve", {"phase": "x"}),
        ("unit_log", {"lines": "x"}),
        ("unit_log", {"lines": [None]}),
        ("unit_log", []),
    ],
)
def test_messages_on_the_way(operation, message):
    with pytest.raises(DeployError) as caught:
        check_message("box", operation, message)
    assert caught.value.code == "DD307"
