"""What the client adds to the agent's answer: services as data, hashes of what an install would write."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.doctor.examine import examine
from ddtree_deploy.doctor.gather import SCHEMA, gather, inventory_table, service_facts, services_of, wanted
from ddtree_deploy.doctor.redact import redact
from ddtree_deploy.hosts.inventory import find_inventory
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.models import read_model
from ddtree_deploy.launch.render import render
from ddtree_deploy.launch.service import Service
from ddtree_deploy.patching.patchset import load_sets
from ddtree_deploy.resources import patches_dir
from tests.agent.harness import make_site
from tests.doctor.cases import FOLDER, recorded
from tests.doctor.test_doctor import Host

MODELS = FOLDER.parent / "launch" / "models"
ROOT = Path(__file__).parents[2]


def services() -> list[Service]:
    shipped = find_inventory(str(ROOT / "inventories" / "example.toml"))
    own = Service.from_table(
        "own",
        {
            "model": "/m",
            "json_model_override_args": {"rope_theta": 1e7, "deep": {"a": [1]}},
            "gpus": [3, 1],
            "tp": 2,
            "environment": {"A": "b c"},
            "radix_cache": False,
            "secrets": ["HF_TOKEN"],
        },
    )
    return [*shipped.services.values(), own]


@pytest.mark.parametrize("service", services(), ids=lambda service: service.name)
def test_a_service_survives_its_table(service):
    table = json.loads(json.dumps(inventory_table(service)))
    assert Service.from_table(service.name, table) == service
    assert {"tp", "port"} <= set(table)


def test_the_recorded_service_is_written_alike():
    (item,) = recorded("rtx-pro-6000")["services"]
    service = Service.from_table("qwen", item["table"])
    assert inventory_table(service) == {**item["table"], "port": 30000}


def test_hashes_are_those_of_what_an_install_writes(tmp_path, monkeypatch):
    """An install reads engine and models on the host, and picks what the inventory leaves out."""
    host = Host(tmp_path, monkeypatch)
    host.write_inventory('python = "/v/bin/python"')
    (item,) = services_of(find_inventory(str(host.inventory)), "box", None)
    size = sum(path.stat().st_size for path in host.model.glob("*.safetensors"))
    model = read_model(json.loads((host.model / "config.json").read_text()), "config.json", weight_bytes=size)
    rendering = render(item.service, engine="0.5.11", python="/v/bin/python", known=Known(model=model))
    (facts,) = host.doctor("--json").json["facts"]["services"]
    assert facts["unit"]["sha256"] == hashlib.sha256(rendering.unit.text.encode()).hexdigest()
    assert facts["unit"]["sha256"] != service_facts(item.service, item.rendering)["unit"]["sha256"]
    assert facts["environment_file"]["path"] == rendering.environment_file.install_path
    assert facts["unit"]["name"] == rendering.unit.name


def test_nothing_is_compared_where_nothing_can_be_installed(tmp_path, monkeypatch):
    host = Host(tmp_path, monkeypatch)
    host.write_inventory('python = "/v/bin/python"\nalgorithm = "DFLASH"\ndrafter = "/gone"')
    (facts,) = host.doctor("--json").json["facts"]["services"]
    assert facts["unit"]["sha256"] is None


def test_services_of_a_host():
    inventory = find_inventory(str(ROOT / "inventories" / "example.toml"))
    assert services_of(inventory, "rtx", None) == []  # the shipped example is nobody's
    (only,) = services_of(inventory, "elsewhere", "qwen-ddtree")
    assert only.service.name == "qwen-ddtree"


def test_a_service_that_cannot_be_rendered_has_no_hash():
    service = Service.from_table("x", {"model": "/m", "attention_backend": "fa3"})
    item = wanted(service, "/v/bin/python")
    assert item.rendering is None
    assert service_facts(service, item.rendering)["unit"] == {"name": "sglang-x.service", "sha256": None}


class HostileSession:
    """A host that answers what it likes."""

    target = Target("box", "local")

    def __init__(self, answer) -> None:
        self.answer = answer

    def call(self, _operation, _request, progress=None):
        return json.loads(json.dumps(self.answer))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"status": 3},
        {"status": {"root": [], "entries": 3}},
        {"status": {"error": ["x"]}},
        {"models": {"/m": {"config": {"architectures": [{}]}, "bytes": 1e300}}, "engine": {"version": "x"}},
        {"services": "mine", "schema": "mine", "client": [], "host": {"ports": [1]}, "gpu": {"devices": [[]]}},
    ],
)
def test_a_host_that_answers_anything(answer):
    item = wanted(Service.from_table("x", {"model": "/m"}), "/v/bin/python")
    facts = gather(HostileSession(answer), [item], list(load_sets(patches_dir()).values()))
    assert facts["schema"] == SCHEMA
    assert [service["name"] for service in facts["services"]] == ["x"]
    assert [finding.known for finding in examine(facts) if finding.code == "DD295"] == [False]
    json.dumps(redact(facts))


def test_the_recording_script(tmp_path):
    """``tests.gpu.doctor_facts``, as it is run on a machine with GPUs."""
    site = make_site(tmp_path)
    out = tmp_path / "facts.json"
    command = [sys.executable, "-m", "tests.gpu.doctor_facts", "--out", str(out), "--site", str(site)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(out.read_text())
    assert facts["engine"]["version"] == "0.5.11"
    assert ran.stdout.count(" | DD2") > 3
