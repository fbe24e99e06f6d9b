"""Mamba track slots in DFLASH on later engines: each family of dflash-fixes mends what its versions have."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from ddtree_deploy.patching.patchset import load_set
from ddtree_deploy.resources import patches_dir
from ddtree_deploy.snapshots.pristine import unpack
from tests.conftest import ENGINES
from tests.engine.standin import execute
from tests.engine.test_mamba_track import INFO, check_flow, check_next_slots
from tests.engine.versions import fixed_files, method, settings, small_site

pytestmark = pytest.mark.wheel

FIRST_WORKER = ("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1")
SECOND_WORKER = ("0.5.14", "0.5.15.post1", "0.5.18")
WORKER = "sglang/srt/speculative/dflash_worker_v2.py"
# Three requests, two of which cross an interval after the batch has changed.
SHORT = {"seed": 0, "ping_pong": 1, "waves": [[[70, 90], [20, 60]], [], [[9, 40]]]}
PROCESSOR = "sglang/srt/managers/scheduler_components/batch_result_processor.py"


def test_every_engine_that_is_downloaded_is_tested():
    assert set(FIRST_WORKER + SECOND_WORKER) == set(ENGINES) - {"0.5.11"}
    served = load_set(patches_dir() / "dflash-fixes")
    assert set(ENGINES) <= set(served.engines)


# -- the first worker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", FIRST_WORKER)
def test_verify_tracks_into_each_requests_next_slot(version, engine_tree, tmp_path):
    tree = engine_tree(version)
    check_next_slots(small_site(tmp_path / "fixed", fixed_files(version, tree)))
    with pytest.raises(AssertionError):
        check_next_slots(small_site(tmp_path / "stock", {INFO: tree[INFO]}))


@pytest.fixture(scope="module", params=["0.5.12.post1", "0.5.13.post1"])
def flows(request, wheelhouse, engine_tree, run_child, tmp_path_factory):
    """The reports of the whole way, as published and with the fixes."""
    version = request.param
    (wheel,) = wheelhouse.glob(f"sglang-{version}-*.whl")
    site = unpack(wheel, tmp_path_factory.mktemp("later") / "site")
    stock = run_child("track_flow.py", site, [SHORT])
    for path, data in fixed_files(version, engine_tree(version)).items():
        (site / path).write_bytes(data)
    return stock, run_child("track_flow.py", site, [SHORT])


@pytest.mark.torch
def test_every_saved_state_is_that_of_its_prefix(flows):
    (stock,), (fixed,) = flows
    check_flow(fixed)
    assert fixed["turns"][0]["crossings"] > 0
    assert fixed["turns"][1]["prefix_hits"] > 0
    with pytest.raises(AssertionError):
        check_flow(stock)
    assert stock["turns"][0]["wrong"]["tracked"] > 0


# -- the second worker --------------------------------------------------------------------------------


def prepared(source_folder, *, idle: bool = False) -> list[str]:
    """What the real `prepare_for_verify` does to a batch, in order."""
    done: list[str] = []
    module = execute(
        source_folder / INFO,
        {
            "sglang.srt.speculative.spec_utils": {
                "prepare_mamba_track_for_verify": lambda batch: done.append("track indices")
            },
            "sglang.srt.model_executor.forward_batch_info": {
                "ForwardBatch": SimpleNamespace(init_new=lambda *args, **kwargs: done.append("forward batch")),
                "ForwardMode": SimpleNamespace(
                    IDLE=SimpleNamespace(is_idle=lambda: True), TARGET_VERIFY=SimpleNamespace(is_idle=lambda: False)
                ),
            },
        },
    )
    runner = SimpleNamespace(
        decode_cuda_graph_runner=None, attn_backend=SimpleNamespace(init_forward_metadata=lambda batch: None)
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: idle))
    verify = module.DFlashVerifyInput(draft_token=[], positions=None, draft_token_num=4)
    verify.prepare_for_verify(batch, SimpleNamespace(model_runner=runner))
    return done


@pytest.mark.parametrize("version", SECOND_WORKER)
def test_track_indices_are_rebuilt_before_the_forward_batch_takes_them(version, engine_tree, tmp_path):
    tree = engine_tree(version)
    stock = small_site(tmp_path / "stock", {INFO: tree[INFO]})
    fixed = small_site(tmp_path / "fixed", {INFO: tree[INFO], **fixed_files(version, tree)})
    assert prepared(fixed) == ["track indices", "forward batch"]
    assert prepared(fixed, idle=True) == ["forward batch"]
    # 0.5.18 does so itself; what it lacks is the test for a crossing.
    assert prepared(stock) == prepared(fixed) if version == "0.5.18" else ["forward batch"]


def steps_saved(source: bytes, interval: int, before: list[int], accepted: list[int]) -> list[int]:
    """The verify step, by request, whose state the real worker saves to the track slot; -1 for none."""
    import torch

    update = method(
        source,
        "DFlashWorkerV2",
        "_update_target_mamba_state_after_verify",
        {"torch": torch, **settings(interval)},
    )
    saved: list[dict[str, object]] = []
    backend = SimpleNamespace(update_mamba_state_after_mtp_verify=lambda **given: saved.append(given))
    worker = SimpleNamespace(
        _need_mamba_verify_commit=True,
        server_args=SimpleNamespace(mamba_track_interval=interval),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend, model=None)),
    )
    lengths = torch.tensor(before, dtype=torch.int64)
    batch = SimpleNamespace(
        seq_lens=lengths,  # advances when the result is processed
        mamba_track_indices=torch.arange(len(before)),
        req_pool_indices=torch.arange(len(before)),
        tree_cache=SimpleNamespace(page_size=1),
    )
    commit = torch.tensor(accepted, dtype=torch.int32)
    update(worker, batch=batch, seq_lens_pre_verify=lengths.clone(), commit_lens=commit)
    (given,) = saved
    assert given["last_correct_step_indices"].tolist() == [length - 1 for length in accepted]
    return given["mamba_steps_to_track"].tolist()


def crossings(source: bytes, interval: int, before: list[int], accepted: list[int]) -> list[int]:
    """The step, by request, that the real scheduler takes for saved when it processes the result; -1 for none."""
    check = method(source, "SchedulerBatchResultProcessor", "_mamba_check_track_boundary", settings(interval))
    processor = SimpleNamespace(tree_cache=SimpleNamespace(page_size=1))
    batch = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False))
    result = SimpleNamespace(num_correct_drafts_per_req_cpu=[length - 1 for length in accepted])
    found = []
    for number, (start, length) in enumerate(zip(before, accepted, strict=True)):
        # One token more is known than has a state: the bonus token.
        crossed, tracked = check(processor, SimpleNamespace(seqlen=start + length + 1), batch, result, number)
        found.append(tracked - start - 1 if crossed else -1)
    return found


@pytest.mark.torch
@pytest.mark.parametrize("version", SECOND_WORKER)
def test_the_worker_saves_what_the_scheduler_takes_for_saved(version, engine_tree):
    tree = engine_tree(version)
    rng = random.Random(5)
    block, interval = 8, 64
    before = [rng.randrange(1, 400) for _ in range(900)] + [63, 64, 55, 56, 127, 128]
    accepted = [rng.randrange(1, block + 1) for _ in before]
    wanted = crossings(tree[PROCESSOR], interval, before, accepted)
    assert sum(step >= 0 for step in wanted) > 20
    assert steps_saved(fixed_files(version, tree)[WORKER], interval, before, accepted) == wanted
    # As published, nothing is ever saved.
    assert set(steps_saved(tree[WORKER], interval, before, accepted)) == {-1}
