"""What the engine's backends, graph runner, scheduler and metrics make of DDTREE, in its own classes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.engine.standin import execute

pytestmark = pytest.mark.wheel

HYBRID = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
GDN = "sglang/srt/layers/attention/linear/gdn_backend.py"
MIXIN = "sglang/srt/model_executor/model_runner_kv_cache_mixin.py"
STATES = "sglang/srt/speculative/ddtree_states.py"
GRAPHS = "sglang/srt/model_executor/cuda_graph_runner.py"
TRITON = "sglang/srt/layers/attention/triton_backend.py"
WORKER = "sglang/srt/speculative/ddtree_worker.py"
INFO = "sglang/srt/speculative/ddtree_info.py"
TOKENIZER = "sglang/srt/managers/tokenizer_manager.py"
METRICS = "sglang/srt/observability/scheduler_metrics_mixin.py"

CHECKS = (
    "trees",
    "who_keeps",
    "padding",
    "stale",
    "dispatch",
    "memory",
    "mask_buffer",
    "graph_input",
    "requests",
    "draft_arguments",
    "rope_table",
    "warm_up",
    "sampling",
    "host_copies",
)
PARENTS, MOVES, ANCESTORS = [-1, 0, 0, 2], [0, 1 << 16, 0, 1 << 16], [1, 3, 5, 13]
TREES = [[PARENTS] * 2, [MOVES] * 2, [ANCESTORS] * 2]
CHAINS = [[[-1, 0, 1, 2]] * 2, [[0] * 4] * 2, [[1, 3, 7, 15]] * 2]


@pytest.fixture(scope="module")
def reports(ddtree_site, run_child) -> dict:
    return dict(zip(CHECKS, run_child("tree_backend.py", ddtree_site, CHECKS), strict=True))


def check_trees(report):
    for name in ("eager", "replay"):
        assert report[f"{name} before"] == CHAINS
        assert report[name] == TREES
        assert report[f"{name} same memory"]
        assert report[f"{name} of no tree"]


def check_who_keeps(report):
    # Trees, states of the engine's own per request, its convolution windows.
    assert report == {
        "target": [True, 0, 0],
        "shadow": [False, 4, 4],
        "dflash": [False, 4, 4],
        "drafter": [False, 0, 0],
    }


def check_padding(report):
    assert report["tree"] == {"states": [105, 106, -1, -1], "starts": [0, 4, 8, 8, 8]}
    assert report["full"] == {"states": [105, 106], "starts": [0, 4, 8]}
    assert report["stock count"] == {"states": [105, 106, -1, -1], "starts": [0, 4, 8, 8, 8]}


def check_stale(report):
    assert report == TREES


def check_dispatch(report):
    assert report == {
        "output": "output",
        "layer": 2,
        "slots": [105, 106, -1],
        "tensors": [[12, 8], "a", "b"],
        "commit": [[105, 106], [3, 1], [8, 9], [-1, 0]],
    }


def check_memory(report):
    # Per node and layer 8 channels twice and 2 gates of 2 heads; one branch slot for 4 nodes, three for 32.
    assert report["4"] == [4 * 3 * (2 * 8 * 4 + 16) + 1 * 32] * 2
    assert report["32"] == [32 * 3 * (2 * 8 * 2 + 16) + 3 * 32] * 2
    assert report["chain"] == [4 * 3 * (8 * 3 * 4 + 8 * 4)] * 2
    assert report["reserved"] == [5 * report["4"][0], 5 * report["chain"][0]]


def check_mask_buffer(report):
    for held, needed in report.values():
        assert held >= needed


def check_graph_input(report):
    assert report == {
        "target": ["DDTreeVerifyInput", "mask", "FULL", 4],
        "shadow": ["DFlashVerifyInput", "mask", "FULL", 4],
        "drafter": ["DFlashVerifyInput", None, "NULL", 4],
        "dflash": ["DFlashVerifyInput", "mask", "FULL", 4],
    }


def check_requests(report):
    assert report["plain"] == [None, None]
    for kind in ("logprobs", "grammar"):
        dflash, ddtree = report[kind]
        assert dflash.startswith("DFLASH speculative decoding does not support")
        assert ddtree == dflash.replace("DFLASH", "DDTREE")


def check_draft_arguments(report):
    assert report == ["DFLASH", 16]


def check_rope_table(report):
    assert report == [["written", "too long", "asked"], [9, 10]]


def check_warm_up(report):
    tree = ["build_tree_kernel", "merge_candidates_kernel", "order_tree_kernel", "shard_candidates_kernel"]
    verify = ["tree_mask_kernel", "walk_tree_kernel"]
    states = ["commit_convolution_kernel", "tree_recurrence_kernel"]
    assert report == {
        "tree": [sorted(tree + verify + states), True],
        "attention": [sorted(tree + verify), True],
        "shadow": [tree, True],
    }


def check_sampling(report):
    assert report.pop("all greedy") == [1, 1]
    assert set(report.pop("other rank")) == {0}
    for frequencies, probabilities in report.values():
        # 20 000 draws: five standard deviations.
        for seen, expected in zip(frequencies, probabilities, strict=True):
            assert abs(seen - expected) <= 5 * (expected * (1 - expected) / 20000) ** 0.5
    assert report["greedy"][0] == [0, 1, 0, 0, 0]


def check_host_copies(report):
    assert report == [[1, 2], [], [3], [4, 5, 6]]


@pytest.mark.torch
@pytest.mark.parametrize("name", CHECKS)
def test_backends(name, reports):
    globals()[f"check_{name}"](reports[name])


MUTATIONS = {
    "no tree in eager forwards": (
        GDN,
        "self._load_tree(forward_batch.forward_mode, forward_batch.spec_info)",
        "pass",
        "trees",
    ),
    "no tree at replay": (GDN, "self._load_tree(forward_mode, spec_info)\n", "pass\n", "trees", "stale"),
    "a new table for each tree": (
        STATES,
        "self.parents[:requests].copy_(tree.parents)",
        "self.parents = tree.parents",
        "trees",
    ),
    "shadow verifies trees": (STATES, " and not args.speculative_ddtree_shadow_linear", "", "who_keeps"),
    "a short request is padding": (HYBRID, "if num_requests is not None:", "if False:", "padding"),
    "a verify by the engine's kernels": (
        GDN,
        "if is_target_verify and self.tree_states is not None:",
        "if False:",
        "dispatch",
    ),
    "a commit by the engine's kernels": (HYBRID, "if tree_states is not None:", "if False:", "dispatch"),
    "the layer's number for its place": (
        GDN,
        "self.req_to_token_pool.mamba_map[layer.layer_id]",
        "layer.layer_id",
        "dispatch",
    ),
    "branch states not reserved": (STATES, " + _slots(window) * prod(params.shape.temporal) * 4", "", "memory"),
    "a state reserved, whatever is kept": (
        MIXIN,
        "max_running_requests * verify_bytes(",
        "max_running_requests * config.mamba2_cache_params.mamba_cache_per_req + 0 * verify_bytes(",
        "memory",
    ),
    "a mask buffer without the window": (
        TRITON,
        "(self.max_context_len + (self.num_draft_tokens or 0))",
        "self.max_context_len",
        "mask_buffer",
    ),
    "captured as a chain": (GRAPHS, "self.model_runner.spec_algorithm.is_ddtree()\n", "False\n", "graph_input"),
    "captured without a mask": (INFO, "custom_mask=custom_mask)", "custom_mask=None)", "graph_input"),
    "shadow captured as a tree": (
        GRAPHS,
        "and not self.model_runner.server_args.speculative_ddtree_shadow_linear",
        "",
        "graph_input",
    ),
    "the drafter drafts the window": (
        WORKER,
        "draft_server_args.speculative_dflash_block_size",
        "draft_server_args.speculative_num_draft_tokens",
        "draft_arguments",
    ),
    "a silent argmax": (INFO, "torch.where(top_ks == 1, greedy, drawn)", "greedy", "sampling"),
    "ties of greedy requests are drawn": (INFO, "torch.where(top_ks == 1, greedy, drawn)", "drawn", "sampling"),
    "one temperature for all": (
        INFO,
        "per_node(sampling_info.temperatures)",
        "per_node(torch.ones_like(sampling_info.temperatures))",
        "sampling",
    ),
    "the commit is not warm": (WORKER, "if states is not None:", "if False:", "warm_up"),
    "each rank draws its own": (INFO, "tp_group.broadcast(tokens, src=0)", "pass", "sampling"),
}


# Each of a round's edits is for another check to notice, and no other check may.
ROUNDS = [
    [
        "no tree in eager forwards",
        "a short request is padding",
        "a verify by the engine's kernels",
        "branch states not reserved",
        "a mask buffer without the window",
        "captured as a chain",
        "the drafter drafts the window",
        "a silent argmax",
        "shadow verifies trees",
    ],
    [
        "no tree at replay",
        "a commit by the engine's kernels",
        "a state reserved, whatever is kept",
        "shadow captured as a tree",
        "ties of greedy requests are drawn",
    ],
    [
        "a new table for each tree",
        "the layer's number for its place",
        "captured without a mask",
        "one temperature for all",
    ],
    ["each rank draws its own", "the commit is not warm"],
]


@pytest.mark.torch
@pytest.mark.parametrize("names", ROUNDS, ids=lambda names: names[0].replace(" ", "-"))
def test_the_checks_notice(names, site_with, ddtree_files, run_child):
    files, expected = dict(ddtree_files), set()
    for name in names:
        path, old, new, *checks = MUTATIONS[name]
        source = files[path].decode()
        assert source.count(old) == 1
        files[path] = source.replace(old, new).encode()
        expected |= set(checks)
    reports = run_child("tree_backend.py", site_with(files), CHECKS)
    noticed = set()
    for check, report in zip(CHECKS, reports, strict=True):
        try:
            globals()[f"check_{check}"](report)
        except (AssertionError, TypeError):  # no links at all
            noticed.add(check)
    assert noticed == expected


def test_every_edit_is_tried():
    assert sorted(name for names in ROUNDS for name in names) == sorted(MUTATIONS)


# -- metrics, without torch -----------------------------------------------------------------------------


def test_accept_rate_and_length(ddtree_site):
    """Of 10 rounds with 30 accepted drafts, 15 possible in each, 40 tokens emitted."""
    module = execute(ddtree_site / TOKENIZER, {"uvloop": {"EventLoopPolicy": lambda: None}})
    manager = SimpleNamespace(server_args=SimpleNamespace(max_accepted_drafts=lambda: 15))
    answer = SimpleNamespace(
        spec_verify_ct=[10], spec_accepted_drafts=[30], completion_tokens=[40], spec_acceptance_histogram=None
    )
    meta: dict = {}
    module.TokenizerManager._calculate_spec_decoding_metrics(manager, meta, answer, 0)
    assert meta == {
        "spec_accept_rate": 0.2,
        "spec_accept_length": 4.0,
        "spec_accepted_drafts": 30,
        "spec_proposed_drafts": 150,
        "spec_verify_ct": 10,
    }


def test_the_log_line_says_the_same(ddtree_site):
    module = execute(ddtree_site / METRICS, {})
    lines: list[str] = []
    module.logger = SimpleNamespace(info=lines.append)
    module.RECORD_STEP_TIME = module.LOG_FORWARD_ITERS = module.ENABLE_METRICS_DEVICE_TIMER = False
    scheduler = MagicMock(
        current_scheduler_metrics_enabled=False,
        enable_mfu_metrics=False,
        forward_ct_decode=0,
        last_decode_stats_tic=0.0,
        num_generated_tokens=40,
        spec_num_accepted_tokens=40,
        spec_num_forward_ct=10,
        waiting_queue=[],
    )
    scheduler.spec_algorithm.is_none.return_value = False
    scheduler.get_pool_stats.return_value.get_decode_usage_msg_parts.return_value = []
    scheduler.server_args.decode_log_interval = 40
    scheduler.server_args.language_only = False
    scheduler.server_args.max_accepted_drafts.return_value = 15
    module.SchedulerMetricsMixin.report_decode_stats(scheduler, True, SimpleNamespace(reqs=[]))
    assert "accept len: 4.00, accept rate: 0.20" in lines[0]
