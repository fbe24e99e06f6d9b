"""Batch script and manifest: run with stand-ins for Slurm's commands, read with a YAML parser and Kubernetes' rules."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import quoting, schedulers
from ddtree_deploy.launch.argv import NODE_RANK, RENDEZVOUS, Command, build_command
from ddtree_deploy.launch.render import render_command
from ddtree_deploy.launch.service import Service
from tests.launch import strategies

PYTHON = "/opt/sglang/venv/bin/python"
BASE = Service(
    name="glm",
    model="/models/glm",
    python=PYTHON,
    tp=16,
    nodes=2,
    bind="0.0.0.0",
    image="registry.example/sglang:patched",
    gpus=(0, 1),
)


def command(**keys: Any) -> Command:
    return build_command(dataclasses.replace(BASE, **keys))


def on_node(argv: tuple[str, ...], rank: int, rendezvous: str) -> list[str]:
    """The argv that a node is to run."""
    return [{NODE_RANK: str(rank), RENDEZVOUS: rendezvous}.get(word, word) for word in argv]


def options(words: list[str]) -> list[tuple[str, ...]]:
    """Flags with their values, in any order."""
    found: list[list[str]] = []
    for word in words[3:]:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return sorted(map(tuple, found))


def test_the_engines_own_distributed_mode() -> None:
    argv = command().argv
    assert argv[argv.index("--tp-size") + 1] == "16"
    assert argv[argv.index("--nnodes") + 1] == "2"
    assert argv[argv.index("--node-rank") + 1] == NODE_RANK
    assert argv[argv.index("--dist-init-addr") + 1] == RENDEZVOUS
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(command(tp=8, nodes=1, gpus=()).argv)
    names = [setting.name for setting in command().environment]
    assert "NCCL_IB_DISABLE" not in names


def test_several_nodes_are_no_unit() -> None:
    with pytest.raises(DeployError) as caught:
        render_command(command())
    assert caught.value.code == "DD601"
    assert "--format slurm" in str(caught.value.hint)


# Slurm.


def run_batch(folder: Path, given: Command, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where srun starts its task on two nodes, one after the other; tasks print what they got."""
    programs = {
        "scontrol": 'test "$*" = "show hostnames node[7-8]" && printf "node7\\nnode8\\n"',
        "srun": 'test "$1" = --kill-on-bad-exit=1 && shift\nfor id in 0 1; do SLURM_NODEID=$id "$@" || exit 1; done',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    script = folder / "job.sbatch"
    script.write_text(schedulers.render_slurm(given).text, encoding="utf-8")
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]", **environment}
    return subprocess.run(["/bin/bash", script], env=variables, capture_output=True, text=True, check=False)


def printing(folder: Path) -> str:
    """A program in the engine's place, which prints the arguments that it got, each with a NUL behind."""
    program = folder / "it is 100%" / "python"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        "#!/bin/sh\nprintf '%s\\0' \"$0\" \"$@\"\nprintf '\\001'\nprintf '%s' \"$T_A\"\nprintf '\\002'\n"
    )
    program.chmod(0o755)
    return str(program)


def test_the_batch_script_runs_the_argv_on_every_node(tmp_path: Path) -> None:
    given = command(
        python=printing(tmp_path),
        model="/models/it's $HOME `x` %h",
        environment={"T_A": 'a "b" $c'},
        extra_args=("--json-model-override-args", '{"a": "it\'s"}'),
    )
    done = run_batch(tmp_path, given)
    assert done.returncode == 0, done.stderr
    runs = done.stdout.split("\2")[:-1]
    assert len(runs) == 2
    for rank, run in enumerate(runs):
        words, variable = run.split("\1")
        found = words.split("\0")[:-1]
        wanted = on_node(given.argv, rank, "node7:20000")
        assert (found[:3], options(found)) == (wanted[:3], options(wanted))
        assert variable == 'a "b" $c'


def test_the_batch_script_asks_for_what_it_needs(tmp_path: Path) -> None:
    text = schedulers.render_slurm(command(secrets=("HF_TOKEN",))).text
    wanted = {"--job-name=sglang-glm", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"}
    assert wanted <= set(re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE))
    assert "CUDA_VISIBLE_DEVICES" not in text  # Slurm's own
    done = run_batch(tmp_path, command(secrets=("HF_TOKEN",)))
    assert done.returncode != 0
    assert "HF_TOKEN" in done.stderr


def test_one_node_has_no_rank() -> None:
    text = schedulers.render_slurm(command(tp=8, nodes=1, gpus=())).text
    assert "--node-rank" not in text
    assert "--dist-init-addr" not in text


@pytest.mark.parametrize("name", ["a b", "x;y"])
def test_options_of_sbatch_are_plain_words(name: str) -> None:
    with pytest.raises(DeployError) as caught:
        schedulers.render_slurm(command(name=name))
    assert caught.value.code == "DD601"


# Kubernetes.


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes expands a container's words: `$$` is `$`, `$(NAME)` a variable, all else stays."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def manifest(given: Command) -> tuple[dict[str, Any], dict[str, Any]]:
    group, service = yaml.safe_load_all(schedulers.render_k8s(given).text)
    return group, service


def containers(group: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    template = group["spec"]["leaderWorkerTemplate"]
    found = [template[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker")]
    return found[0], found[1]


def test_the_manifest_runs_the_argv_in_every_pod() -> None:
    given = command(model="/models/it's $HOME $(x)", environment={"T_A": 'a "b" $(HOME) $$'})
    group, service = manifest(given)
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    for rank, container in enumerate(containers(group)):
        variables = {"LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "glm-0.glm"}
        words = [expanded(word, variables) for word in (*container["command"], *container["args"])]
        assert words == on_node(given.argv, rank, "glm-0.glm:20000")
        values = {each["name"]: expanded(each["value"], variables) for each in container["env"]}
        assert values["T_A"] == 'a "b" $(HOME) $$'
        assert "CUDA_VISIBLE_DEVICES" not in values
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        assert mounts["model-0"]["mountPath"] == given.service.model
        assert mounts["shm"]["mountPath"] == "/dev/shm"
    leader, worker = containers(group)
    assert leader["readinessProbe"]["httpGet"] == {"path": "/health", "port": 30000}
    assert "readinessProbe" not in worker
    labels = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert labels != group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]


def test_secrets_are_references() -> None:
    group, _ = manifest(command(secrets=("HF_TOKEN",)))
    for container in containers(group):
        held = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
        reference = {"secretKeyRef": {"name": "sglang-glm", "key": "HF_TOKEN"}}
        assert held == [{"name": "HF_TOKEN", "valueFrom": reference}]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"image": None}, "no container image"),
        ({"bind": "127.0.0.1"}, "probes do not reach 127.0.0.1"),
        ({"name": "Upper"}, "not a name that Kubernetes takes"),
        ({"name": "a_b"}, "not a name that Kubernetes takes"),
        ({"name": "a" * 60}, "not a name that Kubernetes takes"),
    ],
)
def test_what_a_cluster_needs(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(DeployError) as caught:
        schedulers.render_k8s(command(**keys))
    assert caught.value.code == "DD601"
    assert text in caught.value.message


@pytest.mark.parametrize(
    "value", [*strategies.FRAGMENTS, "a\u2028b", "a\u2029 b", "a\ufeffb", "\u200b", " a ", "", "null", "1"], ids=ascii
)
def test_strings_of_yaml(value: str) -> None:
    assert yaml.safe_load(f"- {quoting.yaml_string(value)}\n") == [value]


@settings(max_examples=25, deadline=None)
@given(strategies.nonempty_values, strategies.values, strategies.environments)
def test_hostile_values_survive_the_manifest(model: str, extra: str, environment: dict[str, str]) -> None:
    given = command(model=model, extra_args=("--x", extra), environment=environment)
    group, _ = manifest(given)
    leader, worker = containers(group)
    variables = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "h"}
    assert [expanded(word, variables) for word in (*worker["command"], *worker["args"])] == on_node(
        given.argv, 1, "h:20000"
    )
    values = {each["name"]: expanded(each["value"], variables) for each in leader["env"]}
    own = {name: value for name, value in environment.items() if name not in schedulers._SCHEDULERS_OWN}
    assert {name: values[name] for name in own} == own


@pytest.mark.parametrize("bad", strategies.REFUSED, ids=ascii)
def test_control_characters_are_refused(bad: str) -> None:
    for render in (schedulers.render_slurm, schedulers.render_k8s):
        with pytest.raises(DeployError):
            render(command(model=f"/x{bad}y"))
