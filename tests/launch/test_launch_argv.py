"""From service to argv and environment: rules, versions, legality, notes."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from packaging.version import Version

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import flags
from ddtree_deploy.launch.argv import build_command
from ddtree_deploy.launch.known import Known
from ddtree_deploy.launch.service import Service
from tests.launch import models

PYTHON = "/opt/sglang/venv/bin/python"


def service(**keys: object) -> Service:
    return Service.from_table("s", {"model": "/models/m", "python": PYTHON, **keys})


def speculative(algorithm: str = "DFLASH", **keys: object) -> Service:
    budget = {"budget": 15} if algorithm == "DDTREE" else {}
    return service(algorithm=algorithm, drafter="/models/d", **{**budget, **keys})


def words(given: Service, **options: object) -> list[str]:
    return list(build_command(given, **options).argv)


def value_of(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def environment(given: Service, **options: object) -> dict[str, str]:
    return {setting.name: setting.value for setting in build_command(given, **options).environment}


def test_the_least_service() -> None:
    assert words(service()) == [
        *(PYTHON, "-m", "sglang.launch_server", "--model-path", "/models/m"),
        *("--host", "127.0.0.1", "--port", "30000", "--tp-size", "1"),
        *("--max-running-requests", "16", "--cuda-graph-max-bs", "16", "--enable-metrics"),
    ]


def test_the_flags_of_a_tree() -> None:
    given = speculative("DDTREE", topk=8, block_size=16, allow_hybrid_unsafe=True, shadow_linear=True)
    argv = words(given)
    at = argv.index("--speculative-algorithm")
    assert argv[at : at + 12] == [
        *("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "/models/d"),
        *("--speculative-dflash-block-size", "16", "--speculative-ddtree-budget", "15"),
        *("--speculative-ddtree-topk", "8"),
        *("--speculative-ddtree-allow-hybrid-unsafe", "--speculative-ddtree-shadow-linear"),
    ]


def test_no_speculation_flag_without_speculation() -> None:
    given = service(drafter="/d", budget=15, topk=8, block_size=16, shadow_linear=True, hybrid=True)
    assert not [word for word in words(given) if word.startswith(("--speculative", "--mamba"))]
    notes = build_command(given).notes
    for key in ("drafter", "budget", "topk", "block_size", "shadow_linear"):
        assert f"`{key}` has no effect: the algorithm is none" in notes


def test_chain_ignores_the_tree_with_a_note() -> None:
    command = build_command(speculative(budget=15, block_size=16))
    assert "--speculative-ddtree-budget" not in command.argv
    assert [note for note in command.notes if "no effect" in note] == [
        "`budget` has no effect: the algorithm is DFLASH"
    ]


@pytest.mark.parametrize(
    ("keys", "strategy"),
    [
        ({"hybrid": True}, "extra_buffer"),
        ({"hybrid": True, "mamba_scheduler_strategy": "extra_buffer"}, "extra_buffer"),
        ({"hybrid": True, "radix_cache": False}, None),
        ({"hybrid": True, "radix_cache": False, "mamba_scheduler_strategy": "no_buffer"}, "no_buffer"),
        ({"hybrid": False}, None),
        ({}, None),
    ],
)
def test_strategy_of_a_hybrid_target(keys: dict, strategy: str | None) -> None:
    command = build_command(speculative(**keys))
    argv = list(command.argv)
    assert (value_of(argv, "--mamba-scheduler-strategy") if strategy else None) == strategy
    assert ("--mamba-scheduler-strategy" in argv) == (strategy is not None)
    assert ("--disable-radix-cache" in argv) == (keys.get("radix_cache") is False)
    assert any("recurrent layers" in item for item in command.unchecked) == ("hybrid" not in keys)


@pytest.mark.parametrize(("tp", "expected"), [(1, False), (2, False), (4, True), (8, True)])
def test_custom_all_reduce_is_off_above_two_gpus(tp: int, expected: bool) -> None:
    assert ("--disable-custom-all-reduce" in words(service(), tp=tp)) is expected
    assert "--disable-custom-all-reduce" not in words(service(custom_all_reduce=True), tp=tp)
    assert "--disable-custom-all-reduce" in words(service(custom_all_reduce=False), tp=tp)


def test_running_requests_and_graph_sizes() -> None:
    argv = words(service(max_running_requests=6))
    assert value_of(argv, "--max-running-requests") == "6"
    assert value_of(argv, "--cuda-graph-max-bs") == "6"
    assert value_of(words(service(cuda_graph_max_bs=4)), "--cuda-graph-max-bs") == "4"


def test_json_is_one_word() -> None:
    override = {"rope_theta": 10000000, "text": 'it\'s 100% "$HOME"'}
    text = value_of(words(service(json_model_override_args=override)), "--json-model-override-args")
    assert json.loads(text) == override


def test_engine_config_is_two_words_and_comes_first() -> None:
    argv = words(service(engine_config="/etc/sglang/x.yaml"))
    assert argv[3:5] == ["--config", "/etc/sglang/x.yaml"]


def test_extra_arguments_stand_as_they_are_at_the_end() -> None:
    assert words(service(extra_args=["--log-level", "", "a b"]))[-3:] == ["--log-level", "", "a b"]


@pytest.mark.parametrize(
    ("engine", "window", "strategy", "graphs"),
    [
        ("0.5.11", "--speculative-dflash-draft-window-size", "--mamba-scheduler-strategy", "--cuda-graph-max-bs"),
        ("0.5.12.post1", "--speculative-draft-window-size", "--mamba-scheduler-strategy", "--cuda-graph-max-bs"),
        ("0.5.13.post1", "--speculative-draft-window-size", "--mamba-scheduler-strategy", "--cuda-graph-max-bs"),
        ("0.5.14", "--speculative-draft-window-size", "--mamba-radix-cache-strategy", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "--speculative-draft-window-size", "--mamba-radix-cache-strategy", "--cuda-graph-max-bs-decode"),
    ],
)
def test_names_of_versions(engine: str, window: str, strategy: str, graphs: str) -> None:
    given = speculative(hybrid=True, draft_window=4096)
    for argv in (words(given, engine=engine), words(dataclasses.replace(given, engine=engine))):
        assert value_of(argv, window) == "4096"
        assert value_of(argv, strategy) == "extra_buffer"
        assert value_of(argv, graphs) == "16"


def test_engine_versions_outside_the_table() -> None:
    with pytest.raises(DeployError) as caught:
        build_command(service(), engine="0.5.10")
    assert caught.value.code == "DD602"
    with pytest.raises(DeployError) as caught:
        build_command(service(), engine="latest")
    assert caught.value.code == "DD601"
    assert any("newer than 0.5.23" in note for note in build_command(service(), engine="0.6.0").notes)


@pytest.mark.parametrize("tp", [-1, 0, 3, 5, 6, 7, 9, 16])
def test_illegal_tp(tp: int) -> None:
    with pytest.raises(DeployError) as caught:
        build_command(service(), tp=tp)
    assert caught.value.code == "DD602"
    assert f"tp {tp} " in caught.value.message
    assert "1, 2, 4, 8" in caught.value.message


def test_tp_beyond_the_listed_gpus() -> None:
    with pytest.raises(DeployError) as caught:
        build_command(service(gpus=[4, 5, 6, 7]), tp=8)
    assert caught.value.code == "DD602"
    assert "8 GPUs" in caught.value.message
    assert environment(service(gpus=[4, 5, 6, 7]), tp=2)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "CUDA_VISIBLE_DEVICES" not in environment(service())
    assert any("8 GPUs" in item for item in build_command(service(), tp=8).unchecked)


@pytest.mark.parametrize("backend", ["fa3", "flashmla", "cutlass_mla", "trtllm_mla", "nsa", "trtllm_mha"])
def test_backends_without_kernels_for_this_gpu(backend: str) -> None:
    with pytest.raises(DeployError) as caught:
        build_command(service(attention_backend=backend))
    assert caught.value.code == "DD602"
    assert backend in caught.value.message
    assert "flashinfer or triton" in caught.value.message
    assert backend in words(service(attention_backend=backend, compute_capability="9.0"))


def test_all_refusals_at_once() -> None:
    with pytest.raises(DeployError) as caught:
        build_command(speculative(attention_backend="fa3", draft_attention_backend="fa3"), tp=3)
    assert len(caught.value.details) == 3


@pytest.mark.parametrize(("backend", "engine"), [("trtllm_mha", "0.5.23"), ("dsa", "0.5.17")])
def test_backends_that_came_later(backend: str, engine: str) -> None:
    assert backend in words(service(attention_backend=backend), engine=engine)


def test_environment() -> None:
    env = environment(speculative(gpus=list(range(8)), cuda_home="/opt/cuda-13"), tp=8)
    assert env == {
        "PATH": "/opt/sglang/venv/bin:/opt/cuda-13/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "CUDA_HOME": "/opt/cuda-13",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_LEVEL": "SYS",
        "OMP_NUM_THREADS": "8",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    }


def test_environment_of_less() -> None:
    env = environment(service(), engine="0.5.14")
    assert set(env) == {"PATH", "CUDA_HOME", "OMP_NUM_THREADS"}
    assert "SGLANG_ENABLE_JIT_DEEPGEMM" not in environment(service(compute_capability="9.0"))


def test_the_inventory_wins_over_a_default() -> None:
    env = environment(service(environment={"NCCL_P2P_LEVEL": "PHB", "EXTRA": "x"}), tp=4)
    assert (env["NCCL_P2P_LEVEL"], env["EXTRA"]) == ("PHB", "x")


def test_interpreter() -> None:
    bare = dataclasses.replace(service(), python=None)
    with pytest.raises(DeployError) as caught:
        build_command(bare)
    assert caught.value.code == "DD601"
    assert "python" in str(caught.value.hint)
    assert words(bare, python="/x/bin/python3")[0] == "/x/bin/python3"
    assert words(service(), python="/x/bin/python3")[0] == "/x/bin/python3"
    for wrong in ("python3", "/x:y/bin/python"):
        with pytest.raises(DeployError):
            build_command(bare, python=wrong)


def test_everything_has_a_reason() -> None:
    command = build_command(speculative("DDTREE", hybrid=True, topk=8), tp=8)
    assert all(part.reason and part.reason.isprintable() for part in (*command.arguments, *command.environment))


def test_the_drafter_rope_note_ends_where_the_fault_does() -> None:
    def told(given: Service, engine: str) -> bool:
        return any("rope" in note for note in build_command(given, engine=engine).notes)

    assert told(speculative(), "0.5.11")
    assert told(speculative(), "0.5.12.post1")
    assert not told(speculative(), "0.5.13")
    assert not told(speculative(json_model_override_args={"rope_theta": 1e7}), "0.5.11")
    assert not told(service(), "0.5.11")


def test_root_is_said() -> None:
    assert any("root" in note for note in build_command(service()).notes)
    assert not any("root" in note for note in build_command(service(user="sglang")).notes)


def declared_flags(server_args: Path) -> dict[str, ast.Call]:
    """Option strings that the engine's parser declares, each with its ``add_argument`` call."""
    tree = ast.parse(server_args.read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
    ]
    return {
        argument.value: call
        for call in calls
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def takes_no_value(call: ast.Call) -> bool:
    actions = [keyword.value for keyword in call.keywords if keyword.arg == "action"]
    return any(isinstance(action, ast.Constant) and action.value == "store_true" for action in actions)


@pytest.mark.wheel
def test_every_flag_exists_in_the_published_engine(wheel_site: Path) -> None:
    declared = declared_flags(wheel_site / "sglang" / "srt" / "server_args.py")
    assert len(declared) > 300
    keys = set(flags._FLAGS) - set(flags.DDTREE_KEYS)
    missing = {key: flags.flag(key, flags.DEFAULT) for key in keys if flags.flag(key, flags.DEFAULT) not in declared}
    assert missing == {}
    assert not [
        flags.flag(key, flags.DEFAULT) for key in flags.DDTREE_KEYS if flags.flag(key, flags.DEFAULT) in declared
    ]


@pytest.mark.wheel
def test_the_published_engine_would_parse_what_is_rendered(wheel_site: Path) -> None:
    """Flags with a value have one, switches have none, and both are spelt in full."""
    declared = declared_flags(wheel_site / "sglang" / "srt" / "server_args.py")
    full: dict[str, object] = {
        "served_name": "n", "revision": "r", "trust_remote_code": True, "quantization": "fp8", "context_length": 4096,
        "drafter_revision": "r", "block_size": 16, "draft_window": 64, "draft_attention_backend": "triton",
        "radix_cache": False, "mamba_scheduler_strategy": "no_buffer", "mamba_track_interval": 64,
        "mamba_ssm_dtype": "bfloat16", "custom_all_reduce": False, "mem_fraction_static": 0.8,
        "chunked_prefill_size": -1, "attention_backend": "triton", "kv_cache_dtype": "auto",
        "moe_runner_backend": "triton", "reasoning_parser": "qwen3", "tool_call_parser": "qwen3_coder",
        "json_model_override_args": {"a": 1}, "model_loader_extra_config": {"num_threads": 4},
        "engine_config": "/etc/x.yaml",
    }  # fmt: skip
    command = build_command(speculative(**full))
    for argument in command.arguments:
        name, *values = argument.words
        assert name in declared
        assert len(values) == (0 if takes_no_value(declared[name]) else 1), argument.words
    used = {argument.words[0] for argument in command.arguments}
    elsewhere = (*flags.DDTREE_KEYS, *flags.SCHEDULED, "nodes")
    assert used == {flags.flag(key, flags.DEFAULT) for key in flags._FLAGS if key not in elsewhere}


@pytest.mark.wheel
def test_extra_arguments_may_be_any_other_flag(wheel_site: Path) -> None:
    """Only what a key writes, and what would show a secret, is kept out of `extra_args`."""
    declared = declared_flags(wheel_site / "sglang" / "srt" / "server_args.py")
    owned = {name for name in declared if flags.owner(name) is not None}
    written = {flags.flag(key, flags.DEFAULT) for key in flags._FLAGS}
    aliases = {"--model", "--tensor-parallel-size", "--speculative-draft-model", "--speculative-num-draft-tokens"}
    assert owned == {name for name in written if name in declared} | aliases
    assert {name for name in declared if flags.secret(name)} == {
        "--api-key",
        "--admin-api-key",
        "--ssl-keyfile-password",
    }


def test_versions_are_in_order() -> None:
    assert flags.OLDEST <= flags.DEFAULT <= flags.NEWEST
    assert all(isinstance(since, Version) for since, _ in flags._RENAMED.values())


@pytest.mark.parametrize(
    ("engine", "installed", "name"),
    [
        ("0.5.11", None, "--cuda-graph-max-bs"),
        ("0.5.14", None, "--cuda-graph-max-bs-decode"),
        # What is installed counts, whatever version it calls itself; where it has both, the newer name.
        ("0.5.11", {"--cuda-graph-max-bs-decode"}, "--cuda-graph-max-bs-decode"),
        ("0.5.20", {"--cuda-graph-max-bs"}, "--cuda-graph-max-bs"),
        ("0.5.18", {"--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"}, "--cuda-graph-max-bs-decode"),
        ("0.5.18", set(), "--cuda-graph-max-bs-decode"),
    ],
)
def test_names_of_what_is_installed(engine: str, installed: set[str] | None, name: str) -> None:
    assert flags.flag("cuda_graph_max_bs", Version(engine), installed) == name


@pytest.mark.parametrize(
    ("positions", "context", "expected"), [(40960, None, "1"), (40960, 32768, None), (262144, None, None)]
)
def test_a_longer_context_than_the_drafters_is_allowed_only_where_it_is(
    positions: int, context: int | None, expected: str | None
) -> None:
    drafter = dataclasses.replace(models.drafter("qwen3.6-27b-dflash"), context=positions)
    known = Known(model=models.target("qwen3.6-27b"), drafter=drafter)
    given = speculative(tp=8, **({} if context is None else {"context_length": context}))
    assert environment(given, known=known).get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == expected
    assert environment(given).get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == "1"
