"""What of a host comes into a bundle when the host is unwell, or lies."""

from __future__ import annotations

import contextlib
import json

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.support.bundle import members
from ddtree_deploy.support.parts import Parts, of_host
from ddtree_deploy.support.scrub import Scrubber

STATE = {"active": "failed", "restarts": 3}
ENTRY = {"id": "t-1", "kind": "apply", "who": "ann@desk as root", "reason": "mine", "sets": [], "time": "x"}


class Session:
    """A host that gives these answers: data, or an error."""

    target = Target("box", "local")

    def __init__(self, answers, log=()) -> None:
        self.answers, self.log = answers, log

    def call(self, operation, _request, progress=None):
        answer = self.answers.get(operation, DeployError("DD311", "no sglang of ann@desk"))
        if isinstance(answer, DeployError):
            raise answer
        return answer

    @contextlib.contextmanager
    def exchange(self, _operation, _request):
        yield self

    def frames(self):
        yield "J", {"lines": list(self.log)}


def bundle(session: Session) -> tuple[Parts, dict[str, str]]:
    parts = Parts()
    of_host(parts, session, {}, [])
    return parts, {name: text for name, (_about, text) in members(parts, Scrubber(), [], "box").items()}


def test_the_last_errors():
    answers = {
        "history": {"history": [{**ENTRY, "outcome": "done"}, {**ENTRY, "outcome": "undone by recover"}]},
        "units": {"services": [{"unit": "a", "state": STATE}, {"unit": "b", "state": None}], "notes": []},
    }
    log = ["a user's question", "torch.OutOfMemoryError: CUDA out of memory. api_key=S3cret ann@desk"]
    parts, found = bundle(Session(answers, log))
    errors = json.loads(found["host/errors.json"])
    assert [item["outcome"] for item in errors["transactions"]] == ["undone by recover"]
    assert (errors["transactions"][0]["who"], errors["transactions"][0]["reason"]) == ("user-1@host-1 as root", "***")
    assert errors["services"]["a"]["line"].endswith("CUDA out of memory. api_key=*** user-1@host-1")
    assert list(errors["services"]) == ["a"]
    assert [(item["part"], item["code"]) for item in parts.errors] == [
        ("host/status.json", "DD311"),
        ("host/doctor.json", "DD311"),
    ]
    everything = "".join(found.values())
    assert not any(word in everything for word in ("ann", "desk", "mine", "question", "S3cret"))


def test_a_lost_connection_is_not_tried_four_times():
    parts, found = bundle(Session({"status": DeployError("DD306", "no agent"), "history": {"history": []}}))
    assert [item["part"] for item in parts.errors] == ["host/status.json"]
    assert sorted(found) == ["CONTENTS.txt", "errors.json"]


def test_a_host_that_answers_anything():
    deep = json.loads("[" * 900 + "]" * 900)
    for answer in (
        {},
        {"services": 3},
        {"services": [{"unit": []}]},
        {"services": [None]},
        {"history": [{"sets": deep}]},
    ):
        parts, found = bundle(Session({"status": answer, "history": answer, "units": answer, "doctor": {}}))
        assert {item["code"] for item in parts.errors} <= {"DD307"}
        assert "CONTENTS.txt" in found
        for name, text in found.items():
            if name.endswith(".json"):
                json.loads(text)


def test_too_deep_to_be_shown():
    deep: list = []
    for _ in range(3000):
        deep = [deep]
    parts = Parts()
    parts.take("deep.json", "deep", lambda: {"deep": deep})
    found = members(parts, Scrubber(), [], None)
    assert "deep.json" not in found
    assert "Not to be had: deep.json: [DD307]" in found["CONTENTS.txt"][1]
