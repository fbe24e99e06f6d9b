"""Redacted facts name no machine and no person, and are judged as before."""

from __future__ import annotations

import json

from ddtree_deploy.doctor.examine import examine
from ddtree_deploy.doctor.redact import redact
from tests.doctor.cases import recorded

UUID = "GPU-5f1e0c0a-9c3b-4c55-8d2e-0123456789ab"
MIG = "MIG-11111111-2222-3333-4444-555555555555"


def named():
    facts = recorded("rtx-pro-6000")
    facts["target"] = "jane@gpu7.lab.example:2222"
    facts["host"]["name"] = "gpu7"
    facts["agent"]["user"] = "jane"
    facts["gpu"]["devices"][0].update(uuid=UUID, serial="1650324012345")
    facts["gpu"]["holders"] = [
        {
            "pid": 7,
            "gpu": UUID,
            "used_mib": 900,
            "command": f"/home/jane/venv/bin/python /home/joe/x.py {MIG} gpu7",
            "cgroup": "user@1000.service",
        }
    ]
    facts["host"]["ports"]["30000"] = {"address": "10.1.2.3", "pid": 7, "command": "x", "unit": None}
    facts["bus"]["cmdline"] = "root=UUID=11111111-2222-3333-4444-555555555555 ro ip=10.9.8.7 iommu=pt host=kite"
    return facts


def test_no_name_is_left():
    text = json.dumps(redact(named()))
    for name in (
        "jane",
        "joe",
        "gpu7",
        "lab.example",
        UUID,
        MIG,
        "1650324012345",
        "10.1.2.3",
        "11111111-2222",
        "10.9.8.7",
        "kite",
    ):
        assert name not in text, name


def test_what_a_check_reads_is_kept():
    assert redact(named())["bus"]["cmdline"] == "iommu=pt"


def test_what_was_the_same_stays_the_same():
    facts = redact(named())
    assert facts["gpu"]["holders"][0]["gpu"] == facts["gpu"]["devices"][0]["uuid"]
    assert [finding.code for finding in examine(facts)] == [finding.code for finding in examine(named())]


def test_nothing_else_is_touched():
    facts = recorded("rtx-pro-6000")
    facts["host"]["name"] = facts["target"] = "gpu"
    assert redact(facts)["gpu"] == facts["gpu"]
    assert redact(facts)["packages"] == facts["packages"]
    assert redact(redact(named())) == redact(named())
