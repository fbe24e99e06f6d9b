"""Mamba track slots in DFLASH: dflash-fixes 0001."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.standin import execute

pytestmark = pytest.mark.wheel

INFO = "sglang/srt/speculative/dflash_info.py"
CASES = json.loads((Path(__file__).parents[1] / "cases" / "dflash-track.json").read_text())["cases"]
by_name = {"ids": lambda case: case["name"].replace(" ", "-")}


# -- prepare_for_verify by itself, without torch ------------------------------------------------------


class Rows(list):
    """Of a tensor, what the code under test asks for: a column of numbers, or rows of them."""

    device = "cpu"

    def to(self, *args, **kwargs):
        return self

    def unsqueeze(self, dim):
        return self

    def squeeze(self, dim):
        return self

    def gather(self, dim, columns):
        return Rows(row[column] for row, column in zip(self, columns, strict=True))


def prepared(site: Path, *, extra_buffer: bool = True, idle: bool = False, reqs=((7, 8, 0), (3, 4, 1))):
    """A batch after the real `prepare_for_verify`, with what prefill left in it before.

    `reqs`: each request's two track slots and which of them is next.
    """
    module = execute(
        site / INFO,
        {
            "torch": {"stack": Rows, "tensor": lambda values, **kwargs: Rows(values), "int64": "int64"},
            "sglang.srt.server_args": {
                "get_global_server_args": lambda: SimpleNamespace(enable_mamba_extra_buffer=lambda: extra_buffer)
            },
        },
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: idle),
        input_ids=None,
        seq_lens=0,
        tree_cache=None,
        req_pool_indices=None,
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        out_cache_loc=None,
        device="cpu",
        reqs=[
            SimpleNamespace(mamba_ping_pong_track_buffer=Rows(slots), mamba_next_track_idx=following)
            for *slots, following in reqs
        ],
        batch_size=lambda: len(reqs),
        mamba_track_indices="from prefill",
        mamba_track_mask="from prefill",
        mamba_track_seqlens="from prefill",
    )
    verify = module.DFlashVerifyInput(draft_token=[0] * 4 * len(reqs), positions=None, draft_token_num=4)
    verify.prepare_for_verify(batch, 1, build_custom_mask=False)
    return batch


def tracking(batch) -> tuple:
    return batch.mamba_track_indices, batch.mamba_track_mask, batch.mamba_track_seqlens


def check_next_slots(site: Path) -> None:
    assert tracking(prepared(site)) == ([7, 4], None, None)
    assert tracking(prepared(site, reqs=((5, 0),))) == ([5], None, None)


def test_verify_tracks_into_each_request_s_next_slot(trees):
    check_next_slots(trees["patched"])


def test_stock_fails_the_same_check(trees):
    with pytest.raises(AssertionError):
        check_next_slots(trees["stock"])


@pytest.mark.parametrize("change", [{"extra_buffer": False}, {"idle": True}])
def test_nothing_else_is_touched(change, trees):
    assert tracking(prepared(trees["patched"], **change)) == ("from prefill",) * 3


# -- the whole way: worker, scheduler, pools and radix cache ------------------------------------------


def check_flow(report: dict) -> None:
    assert report["leaked"] == {"states": 0, "kv": 0}
    for turn in report["turns"]:
        assert turn["wrong"] == {"live": 0, "tracked": 0, "tree": 0, "output": 0}


@pytest.fixture(scope="module")
def reports(trees, run_child) -> dict[str, list[dict]]:
    return {tree: run_child("track_flow.py", site, CASES) for tree, site in trees.items()}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, **by_name)
def test_every_saved_state_is_that_of_its_prefix(case, reports):
    report = reports["patched"][CASES.index(case)]
    check_flow(report)
    first, second = report["turns"]
    assert first["crossings"] > 0
    assert second["prefix_hits"] > 0
    assert (first["retractions"] > 0) == ("retract" in case)


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, **by_name)
def test_stock_poisons_the_radix_cache(case, reports):
    report = reports["stock"][CASES.index(case)]
    if case.get("stock"):
        check_flow(report)
        return
    with pytest.raises(AssertionError):
        check_flow(report)
    first, second = report["turns"]
    # Silent at first: what runs is right, what is saved is not. The second turn pays.
    assert (first["wrong"]["live"], first["wrong"]["output"]) == (0, 0)
    assert first["wrong"]["tracked"] > 0
    assert second["wrong"]["output"] > 0


@pytest.mark.torch
def test_random_schedules(trees, run_child):
    rng = random.Random(11)
    schedules = [
        {
            "seed": seed,
            "ping_pong": rng.choice((1, 2)),
            "waves": [
                [[rng.randrange(1, 140), rng.randrange(1, 120)] for _ in range(rng.choice((0, 0, 1, 2)))]
                for _ in range(10)
            ]
            + [[[30, 90]]],
            "retract": rng.sample(range(2, 30), 2),
        }
        for seed in range(6)
    ]
    reports = run_child("track_flow.py", trees["patched"], schedules)
    for report in reports:
        check_flow(report)
    assert sum(turn["crossings"] for report in reports for turn in report["turns"]) > 20


MUTATIONS = {
    "slot numbers not rebuilt": (
        "            self._prepare_mamba_track(batch)",
        "            batch.mamba_track_mask = None",
    ),
    "always the first slot": ("[req.mamba_next_track_idx for req", "[0 for req"),
    "the slot last saved to": ("[req.mamba_next_track_idx for req", "[1 - req.mamba_next_track_idx for req"),
    "requests in another order": (
        "[req.mamba_ping_pong_track_buffer for req in batch.reqs]",
        "[req.mamba_ping_pong_track_buffer for req in batch.reqs[::-1]]",
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=[name.replace(" ", "-") for name in MUTATIONS])
def test_the_flow_notices_a_broken_fix(mutation, site_with, patched_files, run_child):
    old, new = mutation
    source = patched_files[INFO].decode()
    assert source.count(old) == 1
    site = site_with({**patched_files, INFO: source.replace(old, new).encode()})
    case = next(case for case in CASES if case["ping_pong"] == 2)
    (report,) = run_child("track_flow.py", site, [case])
    with pytest.raises(AssertionError):
        check_flow(report)
