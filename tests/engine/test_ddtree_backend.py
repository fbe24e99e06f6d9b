"""What the engine's backends, graph runner, scheduler and metrics make of DDTREE, in its own classes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.engine.standin import execute

pytestmark = pytest.mark.wheel

HYBRID = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
GDN = "sglang/srt/layers/attention/linear/gdn_backend.py"
GRAPHS = "sglang/srt/model_executor/cuda_graph_runner.py"
TRITON = "sglang/srt/layers/attention/triton_backend.py"
WORKER = "sglang/srt/speculative/ddtree_worker.py"
INFO = "sglang/srt/speculative/ddtree_info.py"
TOKENIZER = "sglang/srt/managers/tokenizer_manager.py"
METRICS = "sglang/srt/observability/scheduler_metrics_mixin.py"

CHECKS = (
    "links",
    "padding",
    "stale",
    "cache_steps",
    "mask_buffer",
    "graph_input",
    "requests",
    "draft_arguments",
    "rope_table",
    "sampling",
    "host_copies",
)
FIRST_CHILD, NEXT_SIBLING = [1, 3, -1, -1], [-1, 2, -1, -1]


@pytest.fixture(scope="module")
def reports(ddtree_site, run_child) -> dict:
    return dict(zip(CHECKS, run_child("tree_backend.py", ddtree_site, CHECKS), strict=True))


def check_links(report):
    links = [[FIRST_CHILD] * 2, [NEXT_SIBLING] * 2]
    assert report["tree"] == {"eager": links, "captured": True, "replayed": links, "same memory": True}
    assert report["chain"] == {"eager": None, "captured": False, "replayed": None, "same memory": True}


def check_padding(report):
    assert report["tree"] == {"states": [105, 106, -1, -1], "starts": [0, 4, 8, 8, 8]}
    assert report["full"] == {"states": [105, 106], "starts": [0, 4, 8]}
    assert report["stock count"] == {"states": [105, 106, -1, -1], "starts": [0, 4, 8, 8, 8]}


def check_stale(report):
    children, siblings = report
    assert (children[:3], siblings[:3]) == ([FIRST_CHILD] * 3, [NEXT_SIBLING] * 3)


def check_cache_steps(report):
    assert report["cache_steps"] == report["buffer"]
    assert report["links reach both kernels"]
    assert report["conv links"] == [[FIRST_CHILD] * 2, [NEXT_SIBLING] * 2]


def check_mask_buffer(report):
    for held, needed in report.values():
        assert held >= needed


def check_graph_input(report):
    assert report == {
        "target": ["DDTreeVerifyInput", 2, "mask", "FULL", None, 4],
        "shadow": ["DFlashVerifyInput", 1, "mask", "FULL", "none", 4],
        "drafter": ["DFlashVerifyInput", 1, None, "NULL", "none", 4],
        "dflash": ["DFlashVerifyInput", 1, "mask", "FULL", "none", 4],
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


# Checks that see a replay's links.
REPLAYED = ("links", "stale", "cache_steps")
MUTATIONS = {
    "no links in eager forwards": (
        HYBRID,
        "if self._verifies_tree(forward_batch.spec_info):",
        "if self.topk > 1:",
        "links",
    ),
    "no links at capture": (
        HYBRID,
        "self._verifies_tree(spec_info):\n            # They are",
        "self.topk > 1:\n            # They are",
        "links",
    ),
    "no links at replay": (
        HYBRID,
        "self._verifies_tree(spec_info):\n            # None in",
        "self.topk > 1:\n            # None in",
        *REPLAYED,
    ),
    "topk of a chain": (INFO, "TREE_TOPK = 2", "TREE_TOPK = 1", "graph_input", *REPLAYED),
    "a short request is padding": (HYBRID, "if num_requests is not None:", "if False:", "padding"),
    "stale links": (
        HYBRID,
        "[:bs_without_pad].copy_(\n                    spec_info.retrieve_next_token",
        "[:0].copy_(\n                    spec_info.retrieve_next_token[:0]",
        *REPLAYED,
    ),
    "cache steps of the window": (
        GDN,
        "intermediate_state_cache.shape[1]",
        "forward_batch.spec_info.draft_token_num",
        "cache_steps",
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
    "each rank draws its own": (INFO, "tp_group.broadcast(tokens, src=0)", "pass", "sampling"),
}


# Each of a round's edits is for another check to notice, and no other check may.
ROUNDS = [
    [
        "no links in eager forwards",
        "a short request is padding",
        "cache steps of the window",
        "a mask buffer without the window",
        "captured as a chain",
        "the drafter drafts the window",
        "a silent argmax",
    ],
    ["no links at capture", "shadow captured as a tree", "ties of greedy requests are drawn"],
    ["no links at replay", "captured without a mask", "one temperature for all"],
    ["topk of a chain", "each rank draws its own"],
    ["stale links"],
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
