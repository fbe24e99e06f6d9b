"""What the tests do inside the engine's scheduler process: settings changed between steps, and instruments.

The engine's own code runs; a probe wraps the worker's methods. Between two steps it can bypass the captured
graphs, load another drafter's weights, set the tree's top-k and spine, or leak states between siblings.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.oracle import oracle_candidates


def run_scheduler_with_probe(*args: Any, **kwargs: Any) -> None:
    """The engine's scheduler process, which then takes remote calls of `gpu_probe`."""
    from sglang.srt.managers import scheduler

    scheduler.Scheduler.gpu_probe = _dispatch
    scheduler.run_scheduler_process(*args, **kwargs)


def _dispatch(scheduler: Any, command: str, answer: str, **arguments: Any) -> None:
    probe = scheduler.__dict__.get("the_probe")
    if probe is None:
        probe = scheduler.the_probe = Probe(scheduler)
    try:
        result = {"value": getattr(probe, command)(**arguments)}
    except Exception:  # noqa: BLE001
        result = {"error": traceback.format_exc()}
    part = Path(answer + ".part")
    part.write_text(json.dumps(result))
    part.rename(answer)


class Probe:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.target_runner = scheduler.tp_worker.model_runner
        self.worker = scheduler.draft_worker
        self.drafter: str | None = None
        self.undo: list[Callable[[], None]] = []
        # Of a worker that grows trees: block, budget, top-k and spine.
        self.sizes = getattr(self.worker, "sizes", None)

    # -- settings ------------------------------------------------------------------------------------

    def configure(self, *, drafter: str | None, eager: bool, spine: bool | None, topk: int | None, leak: bool) -> None:
        """Settings of the next step; what is None is as the engine was started."""
        self.release()
        runners = [self.target_runner] + ([self.worker.draft_model_runner] if self.worker is not None else [])
        for runner in runners:
            if runner.graph_runner is None:
                continue
            vars(runner.graph_runner).pop("can_run", None)
            if eager:
                runner.graph_runner.can_run = lambda forward_batch: False
        if self.worker is None:
            return
        if drafter is not None and drafter != self.drafter:
            self._load_drafter(Path(drafter))
            self.drafter = drafter
        wanted = {name: value for name, value in (("topk", topk), ("spine", spine)) if value is not None}
        if self.sizes is not None:
            self.worker.sizes = dataclasses.replace(self.sizes, **wanted)
        elif wanted or leak:
            raise ValueError(f"this engine grows no tree: {wanted or 'leak'}")
        if leak:
            self._leak_states()

    def _load_drafter(self, folder: Path) -> None:
        from safetensors.torch import load_file

        for file in sorted(folder.glob("*.safetensors")):
            self.worker.draft_model.load_weights(load_file(str(file)).items())
        if self.worker._use_fused_kv_materialize:
            self.worker._init_fused_kv_helper()

    def _leak_states(self) -> None:
        """Have a node's recurrent state follow that of the node before it in the window, whoever's child it is."""
        import torch
        from sglang.srt.speculative.ddtree_states import TreeStates

        def leak(load: Callable[..., Any]) -> Callable[..., Any]:
            def loading(states: Any, tree: Any) -> None:
                load(states, tree)
                if tree is not None:
                    states.moves.zero_()
                    before = torch.arange(states.window, device=states.ancestors.device)
                    states.ancestors.copy_((torch.ones_like(states.ancestors) << before).cumsum(dim=1))

            return loading

        self._wrap(TreeStates, "load", leak)

    def release(self) -> None:
        """Take every instrument off."""
        while self.undo:
            self.undo.pop()()

    def _wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method or function until `release`. An instance gets an attribute of its own."""
        own = vars(owner).get(name)
        wrapped = make(getattr(owner, name) if own is None or not isinstance(owner, type) else own)
        setattr(owner, name, wrapped)
        self.undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    # -- oracle --------------------------------------------------------------------------------------

    def start_oracle(self, texts: list[list[int]], ranks: list[int]) -> None:
        """Put the tokens that follow in these texts among the drafter's candidates: see `oracle_candidates`."""

        def with_batch(grow: Callable[..., Any]) -> Callable[..., Any]:
            def growing(batch: Any, *args: Any, **kwargs: Any) -> Any:
                self.requests = [list(request.origin_input_ids) + list(request.output_ids) for request in batch.reqs]
                return grow(batch, *args, **kwargs)

            return growing

        def with_oracle(head: Callable[..., Any]) -> Callable[..., Any]:
            def drafting(*args: Any, **kwargs: Any) -> Any:
                logp, ids = head(*args, **kwargs)
                rows, scores = oracle_candidates(ids.tolist(), logp.tolist(), self.requests, texts, ranks)
                return logp.new_tensor(scores), ids.new_tensor(rows)

            return drafting

        self._wrap(self.worker, "_grow_tree", with_batch)
        self._wrap(self.worker, "_topk_from_vocab_parallel_head", with_oracle)

    # -- pools ---------------------------------------------------------------------------------------

    def pools(self) -> dict[str, int]:
        """Free cache slots, request rows and recurrent states."""
        requests = self.scheduler.req_to_token_pool
        states = getattr(requests, "mamba_pool", None)
        return {
            "slots": int(self.scheduler.token_to_kv_pool_allocator.available_size()),
            "requests": len(requests.free_slots),
            "states": int(states.available_size()) if states else 0,
        }

    def memory(self) -> dict[str, float]:
        """What verifying keeps of recurrent layers: requests, tokens of each, bytes."""
        linear = getattr(self.target_runner.attn_backend, "linear_attn_backend", None)
        states = getattr(linear, "tree_states", None)
        if states is not None:
            kept = (states.inputs, states.mixed, states.decays, states.betas, states.branches)
            return {"rows": states.rows, "steps": states.window, "window_bytes": sum(map(_bytes, kept))}
        cache = self.scheduler.req_to_token_pool.mamba_pool.mamba_cache
        window = getattr(cache, "intermediate_ssm", None)
        if window is None:
            return {"rows": 0, "steps": 0, "window_bytes": 0}
        size = sum(map(_bytes, (window, *cache.intermediate_conv_window)))
        return {"rows": window.shape[1], "steps": window.shape[2], "window_bytes": size}

    # -- time ----------------------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Record the host's clock around every decode round."""
        self.rounds: list[tuple[int, float, float]] = []

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def timed(batch: Any, **kwargs: Any) -> Any:
                decodes, size = _decodes(batch), batch.batch_size()
                start = time.perf_counter()
                result = forward(batch, **kwargs)
                self.rounds.append((size if decodes else 0, start, time.perf_counter()))
                return result

            return timed

        self._wrap(self.worker, "forward_batch_generation", make)

    def read_clock(self) -> list[tuple[int, float, float]]:
        """Per forward: requests (0: a prefill), start, end, in seconds."""
        return self.rounds

    def start_breakdown(self) -> None:
        """Time the parts of a decode round, on the device by events and on the host."""
        import torch
        from sglang.srt.speculative import dflash_info

        self.spans: list[tuple[int, int, str, Any, Any, float]] = []
        self.round = -1
        parts: list[tuple[Any, str, str]] = [
            (self.worker.draft_model_runner, "forward", "draft"),
            (self.worker, "_greedy_sample_from_vocab_parallel_head", "head"),
            (dflash_info.DFlashVerifyInput, "prepare_for_verify", "prepare"),
            (self.worker.target_worker, "forward_batch_generation", "verify"),
            (dflash_info.DFlashVerifyInput, "verify", "accept"),
            (self.worker, "_update_target_mamba_state_after_verify", "commit"),
            (self.worker, "_append_target_hidden_to_draft_kv", "append"),
        ]
        if self.sizes is not None:
            from sglang.srt.speculative import ddtree_info, ddtree_worker

            parts += [
                (self.worker, "_topk_from_vocab_parallel_head", "head"),
                (ddtree_worker, "build_tree", "build"),
                (ddtree_info.DDTreeVerifyInput, "prepare_for_verify", "prepare-tree"),
                (ddtree_info, "tree_mask", "prepare-tree.mask"),
                (ddtree_info.DDTreeVerifyInput, "verify", "accept-tree"),
                (ddtree_info, "walk_tree", "accept-tree.walk"),
                (ddtree_info, "read_back", "accept-tree.read-back"),
            ]
        for owner, name, label in parts:
            self._wrap(owner, name, functools.partial(self._span, label))

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            whole = self._span("round", forward)

            def timed(batch: Any, **kwargs: Any) -> Any:
                if not _decodes(batch):
                    return forward(batch, **kwargs)
                self.round += 1
                self.size = batch.batch_size()
                self.live = True
                try:
                    return whole(batch, **kwargs)
                finally:
                    self.live = False

            return timed

        self.live = False
        self._wrap(self.worker, "forward_batch_generation", make)
        torch.cuda.synchronize()

    def _span(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return call(*args, **kwargs)
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent = time.perf_counter() - start
            after.record()
            self.spans.append((self.round, self.size, label, before, after, spent))
            return result

        return timed

    def read_breakdown(self) -> list[tuple[int, int, str, float, float]]:
        """Per part: round, requests, label, milliseconds between its events on the device, and on the host."""
        import torch

        torch.cuda.synchronize()
        return [
            (number, size, label, before.elapsed_time(after), spent * 1000)
            for number, size, label, before, after, spent in self.spans
        ]

    def start_kernels(self, first: int, rounds: int) -> None:
        """Profile some decode rounds, counted from the start, by kernel."""
        import torch

        self.kernels: dict[str, list[float]] = {}
        self.count = 0

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def counting(batch: Any, **kwargs: Any) -> Any:
                if _decodes(batch):
                    self.count += 1
                    if self.count == first:
                        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                        self.profiler.start()
                    if self.count == first + rounds:
                        torch.cuda.synchronize()
                        self.profiler.stop()
                        self.kernels = {
                            event.key: [event.self_device_time_total / rounds / 1000, event.count / rounds]
                            for event in self.profiler.key_averages()
                        }
                return forward(batch, **kwargs)

            return counting

        self._wrap(self.worker, "forward_batch_generation", make)

    def read_kernels(self) -> dict[str, list[float]]:
        """Kernel -> milliseconds and launches a round."""
        return self.kernels

    # -- host synchronisation ------------------------------------------------------------------------

    def start_sync_watch(self, mode: str, exempt_read_back: bool) -> None:
        """Watch decode rounds for calls that make the host wait: `warn` counts where, `error` forbids them."""
        import torch

        self.watched = 0
        self.waits: Counter[str] = Counter()
        torch.set_warn_always(True)

        def note(message: Any, category: Any, *_: Any) -> None:
            if "called a synchronizing" in str(message):
                frames = [f for f in traceback.extract_stack() if "/sglang/" in f.filename]
                last = frames[-1]
                self.waits[f"{last.filename.rpartition('/sglang/')[2]}:{last.name}: {last.line}"] += 1

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def watched(batch: Any, **kwargs: Any) -> Any:
                if not _decodes(batch):
                    return forward(batch, **kwargs)
                with warnings.catch_warnings():
                    warnings.simplefilter("always")
                    warnings.showwarning = note
                    torch.cuda.set_sync_debug_mode(mode)
                    try:
                        result = forward(batch, **kwargs)
                    except RuntimeError:
                        self.waits[traceback.format_exc()[-1500:]] += 1
                        raise
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
                self.watched += 1
                return result

            return watched

        self._wrap(self.worker, "forward_batch_generation", make)
        if exempt_read_back:
            from sglang.srt.speculative import ddtree_info

            def exempt(read_back: Callable[..., Any]) -> Callable[..., Any]:
                def call(packed: Any) -> Any:
                    torch.cuda.set_sync_debug_mode("default")
                    try:
                        return read_back(packed)
                    finally:
                        torch.cuda.set_sync_debug_mode(mode)

                return call

            self._wrap(ddtree_info, "read_back", exempt)

    def read_sync_watch(self) -> dict[str, Any]:
        """How many rounds were watched, how often the host waited where, and whether the fused append still serves.

        The worker takes any error of the fused append for a reason not to use it again.
        """
        fused = bool(self.worker._use_fused_kv_materialize)
        return {"rounds": self.watched, "waits": dict(self.waits), "fused": fused}

    # -- recurrent states ----------------------------------------------------------------------------

    def start_state_watch(self, number: int) -> None:
        """Keep the recurrent states that decode round `number` leaves, and then those that prefills leave."""
        self.decoded: dict[tuple[int, ...], list[Any]] = {}
        self.prefilled: dict[tuple[int, ...], list[Any]] = {}
        self.count = 0

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def watched(batch: Any, **kwargs: Any) -> Any:
                decodes = _decodes(batch)
                result = forward(batch, **kwargs)
                if decodes:
                    self.count += 1
                    if self.count == number:
                        self._keep_states(batch, batch.seq_lens.tolist(), self.decoded)
                elif self.count >= number:
                    lengths = [len(request.origin_input_ids) for request in batch.reqs]
                    self._keep_states(batch, lengths, self.prefilled)
                return result

            return watched

        self._wrap(self.worker, "forward_batch_generation", make)

    def _keep_states(self, batch: Any, lengths: list[int], into: dict[tuple[int, ...], list[Any]]) -> None:
        rows = batch.req_to_token_pool.get_mamba_indices(batch.req_pool_indices)
        cache = batch.req_to_token_pool.mamba_pool.mamba_cache
        for request, row, length in zip(batch.reqs, rows.tolist(), lengths, strict=True):
            tokens = tuple((list(request.origin_input_ids) + list(request.output_ids))[:length])
            into[tokens] = [table[:, row].double() for table in (cache.temporal, *cache.conv)]

    def decoded_prefixes(self) -> list[list[int]]:
        """The token sequences whose states were kept after a round."""
        return [list(tokens) for tokens in self.decoded]

    def read_state_watch(self) -> list[dict[str, Any]]:
        """Per kept sequence: relative distance of its states to a prefill's, and of one token's less to that."""
        return [
            {
                "length": len(tokens),
                "ssm": _distance(states[:1], self.prefilled[tokens][:1]),
                "conv": _distance(states[1:], self.prefilled[tokens][1:]),
                "one_off_ssm": _distance(self.prefilled[tokens[:-1]][:1], self.prefilled[tokens][:1]),
                "one_off_conv": _distance(self.prefilled[tokens[:-1]][1:], self.prefilled[tokens][1:]),
            }
            for tokens, states in self.decoded.items()
        ]


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _distance(states: list[Any], reference: list[Any]) -> float:
    """The largest relative difference, in the 2-norm, of any layer's state."""
    return max(
        float((one - other).norm() / other.norm())
        for table, expected in zip(states, reference, strict=True)
        for one, other in zip(table, expected, strict=True)
    )


def _decodes(batch: Any) -> bool:
    return not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
