"""``doctor`` on a small host of this machine: one exec of the real agent, with a stand-in for nvidia-smi."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ddtree_deploy.cli.table import COMMANDS
from tests.agent.test_interpreters import INTERPRETERS
from tests.cli.harness import ENGINE, Cli
from tests.doctor.cases import FOLDER
from tests.doctor.test_agent_parts import kernel_site, make_model

SMI = """#!/bin/sh
case "$*" in
  *--query-gpu=*) {gpu} ;;
  *--query-compute-apps=*) echo "{pid}, GPU-6f1e0c0a-9c3b-4c55-8d2e-0123456789ab, 40000" ;;
  "topo -m") cat {folder}/topo.txt ;;
  "topo -p2p r") cat {folder}/p2p.txt ;;
  *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""
# One GPU of the sample suffices: the second is in a worse state.
WELL = f"head -n 1 {FOLDER}/smi/rtx.csv"


class Host(Cli):
    """A site with a kernel wheel, a model folder, and an inventory that serves it."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        super().__init__(folder, monkeypatch)
        info = self.site / f"sglang-{ENGINE}.dist-info"
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.11\n\n")
        info.rename(self.site / "sglang-0.5.11.dist-info")
        kernel_site(self.site)
        self.model = make_model(folder / "model")
        config = json.loads((FOLDER.parent / "launch/models/qwen3.6-27b.json").read_text())
        (self.model / "config.json").write_text(json.dumps(config))
        self.inventory = folder / "hosts.toml"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.smi(WELL)
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        self.write_inventory()

    def smi(self, gpu: str, pid: int = 0) -> None:
        path = self.bin / "nvidia-smi"
        path.write_text(SMI.format(gpu=gpu, folder=FOLDER / "smi", pid=pid or "none"))
        path.chmod(0o755)

    def write_inventory(self, more: str = "") -> None:
        self.inventory.write_text(
            f"""default_host = "box"
[hosts.box]
local = {json.dumps(str(self.site))}
state_dir = {json.dumps(str(self.state))}
[services.qwen]
model = {json.dumps(str(self.model))}
environment_directory = {json.dumps(str(self.folder / "etc"))}
hybrid = true
{more}
[services.elsewhere]
host = "other"
model = "/models/x"
[hosts.other]
ssh = "ops@192.0.2.1"
"""
        )

    def doctor(self, *arguments: str):
        return self.run("doctor", "--inventory", str(self.inventory), *arguments)


@pytest.fixture
def host(tmp_path, monkeypatch):
    return Host(tmp_path, monkeypatch)


def every_file(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def test_the_whole_way(host):
    before = every_file(host.folder)
    result = host.doctor("--json")
    assert every_file(host.folder) == before, "the doctor writes nothing on the host"
    document = result.json
    assert (document["schema"], document["host"]) == ("ddtree-deploy.doctor/1", "box")
    codes = {finding["code"] for finding in document["findings"] if finding["severity"] == "error"}
    # What the small host lacks: a whole kernel wheel, the engine's requirements, a free verdict of its versions.
    assert {"DD222", "DD223"} <= codes
    assert (result.status, document["exit_status"]) == (1, 1)
    facts = document["facts"]
    assert [service["name"] for service in facts["services"]] == ["qwen"]
    assert facts["gpu"]["devices"][0]["capability"] == "12.0"
    assert facts["models"][str(host.model)]["weights"].keys() == {"a.safetensors", "b.safetensors"}
    # Every field that a check reads is one that the agent gives.
    gaps = [finding["evidence"] for finding in document["findings"] if "was not gathered" in str(finding["evidence"])]
    assert [gap for gap in gaps if "sglang" not in gap[0]] == []


@pytest.mark.parametrize("python", dict.fromkeys([INTERPRETERS[0], INTERPRETERS[-1]]))
def test_on_the_oldest_and_the_newest_python(host, python):
    facts = host.doctor("--json", "--python", python).json["facts"]
    assert [name for name, part in facts.items() if isinstance(part, dict) and set(part) == {"error"}] == []


def test_the_text(host):
    result = host.doctor()
    lines = result.out.splitlines()
    assert "  error   DD223  sglang-kernel was built for another torch" in lines
    at = lines.index("  error   DD223  sglang-kernel was built for another torch")
    assert lines[at + 1] == (
        " " * 19 + "1 symbol of sgl_kernel/sm100/common_ops.abi3.so in no library of torch, such as _ZN2at4goneEv"
    )
    assert lines[at + 2].startswith(" " * 19 + "mend: ")
    assert lines[-1].startswith("box: ")
    severities = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    first = {word: severities.index(word) for word in ("error", "warning", "note") if word in severities}
    assert first["error"] == 0


def test_recorded_facts_are_judged_alike(host):
    document = host.doctor("--json").json
    path = host.folder / "facts.json"
    path.write_text(json.dumps(document))
    again = host.doctor("--facts", str(path), "--json").json
    assert again["findings"] == document["findings"]
    path.write_text(json.dumps(document["facts"]))
    assert host.doctor("--facts", str(path), "--json").json["findings"] == document["findings"]
    redacted = host.doctor("--facts", str(path), "--json", "--redact")
    assert "5f1e0c0a" in path.read_text()
    assert "5f1e0c0a" not in redacted.out


@pytest.mark.parametrize("text", ["", "[]", "{", '{"facts": 3}', '{"schema": "other/1"}', "[" * 100_000])
def test_a_file_that_holds_no_facts(host, text):
    path = host.folder / "facts.json"
    path.write_text(text)
    result = host.doctor("--facts", str(path))
    assert (result.status, result.err.count("error[DD007]")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--live"], "DD001"),
        (["--facts", "x", "--deep"], "DD001"),
        (["--facts", "x", "box"], "DD001"),
        (["--facts", "/no/such/file"], "DD007"),
        (["--service", "none"], "DD006"),
    ],
)
def test_bad_usage(host, arguments, code):
    result = host.doctor(*arguments)
    assert (result.status, f"error[{code}]" in result.err) == (2, True), result.err


def test_a_driver_that_fails(host):
    host.smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    result = host.doctor("--json")
    (finding,) = [finding for finding in result.json["findings"] if finding["code"] == "DD201"]
    assert finding["evidence"][0] == "Failed to initialize NVML: Driver/library version mismatch"


def test_a_driver_that_does_not_know_every_field(host):
    short = f"head -n 1 {FOLDER}/smi/rtx.csv | cut -d, -f1-9"
    refusal = "echo 'Field \"mig.mode.current\" is not a valid field to query.'; exit 2"
    host.smi(f'case "$*" in *mig.mode*) {refusal} ;; esac; {short}')
    (device,) = host.doctor("--json").json["facts"]["gpu"]["devices"]
    assert (device["memory_mib"], device["mig"]) == (97887, None)


def test_no_driver(host):
    (host.bin / "nvidia-smi").unlink()
    result = host.doctor()
    absent = shutil.which("nvidia-smi", path=os.environ["PATH"] + ":/usr/local/bin:/usr/bin") is None
    assert ("nvidia-smi: not found" in result.out) == absent
    assert "\nnot known\n" in result.out


def test_secrets_stay_on_the_host(host):
    (host.folder / "etc").mkdir()
    (host.folder / "etc" / "qwen.secrets.env").write_text("HF_TOKEN=hf_verysecret\n")
    host.write_inventory('secrets = ["HF_TOKEN"]')
    result = host.doctor("--json")
    assert result.json["facts"]["files"][str(host.folder / "etc" / "qwen.secrets.env")]["names"] == ["HF_TOKEN"]
    assert "hf_verysecret" not in result.out + result.err


def test_a_service_that_is_looked_at_alone(host):
    facts = host.doctor("--json", "--service", "elsewhere").json["facts"]
    assert [service["name"] for service in facts["services"]] == ["elsewhere"]
    assert facts["models"] == {
        "/models/x": {**facts["models"]["/models/x"], "there": False, "config": None, "weights": {}}
    }


def test_deep_checks_run_in_processes_of_their_own(host):
    """The host's torch is an empty folder: each process says so, and the command ends well."""
    document = host.doctor("--json", "--deep", "--deep-seconds", "20").json
    deep = document["facts"]["deep"]
    assert deep["skipped"] is None
    assert deep["all_reduce"]["ranks"].keys() == {"0"}
    assert all(rank["error"] for rank in deep["all_reduce"]["ranks"].values())
    assert "flashinfer" in deep["imports"]["flashinfer"]["error"]
    assert {"DD254", "DD255"} <= {finding["code"] for finding in document["findings"]}


def test_deep_checks_leave_held_gpus_alone(host):
    host.smi(f"tail -n 1 {FOLDER}/smi/rtx.csv", pid=os.getpid())
    deep = host.doctor("--json", "--deep").json["facts"]["deep"]
    assert deep == {"skipped": f"process {os.getpid()} holds a GPU", "all_reduce": None, "imports": {}}
    assert host.doctor("--json", "--deep", "--live", "--deep-seconds", "20").json["facts"]["deep"]["skipped"] is None


def test_the_command_is_listed():
    assert "doctor" in COMMANDS
