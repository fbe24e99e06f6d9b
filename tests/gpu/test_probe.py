"""The probe's wrapping and settings, on a worker that is none."""

import dataclasses
from types import SimpleNamespace

import pytest

from tests.gpu.probe import Probe


@dataclasses.dataclass(frozen=True)
class Sizes:
    topk: int = 8
    spine: bool = False


class Worker:
    def __init__(self):
        self.draft_model_runner = SimpleNamespace(graph_runner=SimpleNamespace())
        self.loaded = []

    def forward_batch_generation(self, batch):
        return batch.forward_mode.extends

    def load(self, folder):
        self.loaded.append(folder)


@pytest.fixture
def worker():
    return Worker()


def probe_of(worker, **more):
    runner = SimpleNamespace(graph_runner=SimpleNamespace(captured=True))
    return Probe(SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), draft_worker=worker, **more))


SAME = {"drafter": None, "eager": False, "spine": None, "topk": None, "leak": False}


def batch(extends, size=3):
    mode = SimpleNamespace(extends=extends, is_extend=lambda: extends)
    return SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, batch_size=lambda: size)


def test_settings_last_for_a_step(worker):
    worker.sizes = Sizes()
    probe = probe_of(worker)
    probe.configure(**{**SAME, "spine": True, "topk": 4, "eager": True})
    assert worker.sizes == Sizes(4, True)
    assert (
        probe.target_runner.graph_runner.can_run(None) is worker.draft_model_runner.graph_runner.can_run(None) is False
    )
    probe.configure(**SAME)
    assert worker.sizes == Sizes()
    assert not hasattr(probe.target_runner.graph_runner, "can_run")


def test_a_chain_has_no_spine(worker):
    with pytest.raises(ValueError, match="grows no tree"):
        probe_of(worker).configure(**{**SAME, "spine": True})


def test_a_drafter_is_loaded_once(worker, monkeypatch):
    probe = probe_of(worker)
    monkeypatch.setattr(probe, "_load_drafter", worker.load)
    for drafter in ("/a", "/a", "/b", None):
        probe.configure(**{**SAME, "drafter": drafter})
    assert [str(folder) for folder in worker.loaded] == ["/a", "/b"]


def test_the_clock_tells_decode_rounds_from_prefills_and_comes_off(worker):
    probe = probe_of(worker)
    probe.start_clock()
    assert worker.forward_batch_generation(batch(extends=True)) is True
    assert worker.forward_batch_generation(batch(extends=False)) is False
    assert [size for size, _, _ in probe.read_clock()] == [0, 3]
    probe.configure(**SAME)
    worker.forward_batch_generation(batch(extends=False))
    assert len(probe.read_clock()) == 2
    assert "forward_batch_generation" not in vars(worker)


def test_wrapping_is_undone_in_reverse(worker):
    probe = probe_of(worker)

    class Input:
        def verify(self):
            return "verified"

    for mark in "ab":
        probe._wrap(Input, "verify", lambda call, mark=mark: lambda self: mark + call(self))
    probe._wrap(worker, "load", lambda call: lambda folder: call(f"x{folder}"))
    probe._wrap(worker, "load", lambda call: lambda folder: call(f"y{folder}"))
    assert Input().verify() == "baverified"
    worker.load("1")
    probe.release()
    assert Input().verify() == "verified"
    worker.load("2")
    assert worker.loaded == ["xy1", "2"]
    assert "load" not in vars(worker)


def test_pools(worker):
    pools = SimpleNamespace(free_slots=[1, 2], mamba_pool=SimpleNamespace(available_size=lambda: 3))
    allocator = SimpleNamespace(available_size=lambda: 4)
    probe = probe_of(worker, req_to_token_pool=pools, token_to_kv_pool_allocator=allocator)
    assert probe.pools() == {"slots": 4, "requests": 2, "states": 3}
    del pools.mamba_pool
    assert probe.pools() == {"slots": 4, "requests": 2, "states": 0}
