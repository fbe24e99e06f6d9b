"""Drive the engine's DDTREE worker over the toy hybrid model of track_flow.py, verified as a tree.

The target goes over the tree as the recurrent kernels do, with one state in hand and a few in slots, and
"writes" to every cache slot which prefix its token ends; a commit goes down a path once more. So after each
round it can be told of every committed token whether its slot, its draft KV, its position and the request's
states are those of the committed text; and before each verify, whether mask and positions are the tree's.

    tree_flow.py SITE < '[{"algorithm": "DDTREE", "block": 5, "budget": 9, "topk": 3, "spine": false, "ranks": [0, 1],
        "temperature": 0, "seed": 0, "ping_pong": 1, "waves": [[[70, 90]]], "retract": []}, ...]'

`ranks`: of the drafter's candidates at each position, which one is right, drawn from this list (`topk`
itself: none is). "DFLASH" drafts the chain of first candidates. Prints what track_flow.py prints, with
more kinds of `wrong`, and for each scenario "rounds": per round, each request's committed tokens;
"branched": how many rounds committed a path that is not a prefix of the window; "shadow": with
`"shadow": true`, what DDTREE counted while it served the chain: verifies, accepted drafts of the chain
and of the tree, tokens caught, and the lines that it logged every `log_interval` rounds, starting anew.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from types import SimpleNamespace

import torch
import track_flow as flow
from sglang.srt import server_args as engine_args
from sglang.srt.speculative import ddtree_info, ddtree_worker
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.ddtree_states import state_steps
from sglang.srt.speculative.ddtree_worker import DDTreeWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from track_flow import VOCAB, absorb, next_token, state_of

CERTAIN = 1e4  # a logit that leaves sampling no choice


def mark(state) -> float:
    """A number that says which prefix a state is of."""
    return float(state[0][0] * 251 + state[1][1] % 251)


class ToyTreeStates:
    """Stands for `TreeStates`: what a verify was given, and the commit of a path."""

    def __init__(self, target):
        self.target = target

    def load(self, tree, ids):
        self.ancestors = tree.ancestors.tolist()
        self.tokens = ids

    def commit(self, slots, steps, track_slots, track_steps):
        tracked = [None] * len(steps) if track_steps is None else zip(track_slots, track_steps.tolist(), strict=True)
        for row, (slot, step, track) in enumerate(zip(slots.tolist(), steps.tolist(), tracked, strict=True)):
            state, window = self.target.read(slot)
            for node in range(step + 1):
                if not self.ancestors[row][step] >> node & 1:
                    continue
                token = self.tokens[row][node]
                state, window = absorb(state, token), [*window[1:], token]
                if track is not None and track[1] == node:
                    self.target.write(self.target.slot(int(track[0])), state, window)
            self.target.write(self.target.slot(slot), state, window)


class ToyTreeTarget(flow.ToyTarget):
    """Verifies trees and chains, and notes in `kv` which prefix each cache slot ends."""

    def __init__(self, pool):
        super().__init__(pool)
        self.kv: dict[int, float] = {}
        self.wrong = {"mask": 0, "positions": 0, "max_position": 0, "moves": 0}
        if state_steps(engine_args.get_global_server_args()) == 0:
            self.model_runner.attn_backend.linear_attn_backend.tree_states = ToyTreeStates(self)

    def forward_batch_generation(self, batch, is_verify: bool = False):
        result = super().forward_batch_generation(batch, is_verify)
        logits = result.logits_output
        logits.next_token_logits *= CERTAIN
        logits.hidden_states = torch.tensor(self.marks).unsqueeze(1)
        self.kv.update(zip(batch.out_cache_loc.tolist(), self.marks, strict=True))
        return result

    def prefill(self, batch, slots, ids):
        self.marks, start = [], 0
        for slot, length in zip(slots, batch.extend_seq_lens, strict=True):
            state, _ = self.read(slot)
            for token in ids[start : start + length]:
                state = absorb(state, token)
                self.marks.append(mark(state))
            start += length
        return super().prefill(batch, slots, ids)

    def verify(self, batch, slots, ids):
        spec, lengths = batch.spec_info, batch.seq_lens.tolist()
        window = spec.draft_token_num
        rows = [ids[start : start + window] for start in range(0, len(ids), window)]
        if isinstance(spec, DDTreeVerifyInput):
            self.model_runner.attn_backend.linear_attn_backend.tree_states.load(spec.tree, rows)
            above, moves = spec.tree.parents.tolist(), spec.tree.moves.tolist()
        else:
            above, moves = [range(-1, window - 1)] * len(slots), [[0] * window] * len(slots)
        predicted, self.marks = [], []
        mask, start = spec.custom_mask, 0
        for row, (slot, length, tokens) in enumerate(zip(slots, lengths, rows, strict=True)):
            state, conv = self.read(slot)
            kept, of_node, seen, depth = {}, {}, [], []
            for node, token in enumerate(tokens):
                parent, move = above[row][node], moves[row][node]
                take, keep, leaf = (move & 255) - 1, (move >> 8 & 255) - 1, move >> 16
                pad = node > 0 and parent < 0
                if take >= 0:
                    state, conv = kept[take]
                if not pad:
                    # The state in hand is the parent's.
                    self.wrong["moves"] += node > 0 and state != of_node[parent]
                after = absorb(state, token), [*conv[1:], token]
                of_node[node] = after[0]
                if keep >= 0:
                    kept[keep] = after
                parent = 0 if pad else parent
                seen.append((seen[parent] if node else set()) | {node})
                depth.append(depth[parent] + 1 if node else 0)
                if not isinstance(spec, DDTreeVerifyInput):
                    cache = self.pool.mamba_pool.mamba_cache
                    where = cache.intermediate_ssm[:, row, node], cache.intermediate_conv_window[0][:, row, node]
                    self.write(where, *after)
                predicted.append(next_token(after[0]))
                self.marks.append(mark(after[0]))
                if not leaf:
                    state, conv = after
            if not isinstance(spec, DDTreeVerifyInput):
                # The chain's convolution leaves its last window in the request's row, for the commit to mend.
                cache.conv[0][:, slot] = cache.intermediate_conv_window[0][:, row, window - 1]
            masked = mask[start : start + window * (length + window)].view(window, length + window)
            start += masked.numel()
            allowed = [[True] * length + [node in nodes for node in range(window)] for nodes in seen]
            self.wrong["mask"] += masked.tolist() != allowed
            positions = spec.positions[row * window : (row + 1) * window].tolist()
            self.wrong["positions"] += positions != [length + step for step in depth]
        self.wrong["mask"] += start != len(mask)
        return predicted, len(ids)


class ToyTreeScheduler(flow.ToyScheduler):
    """The scheduler with a scripted drafter, and with checks of slots and draft KV after every round."""

    target_class = ToyTreeTarget
    kinds = (*flow.ToyScheduler.kinds, "slots", "draft_kv", "mask", "positions", "max_position", "moves")

    def __init__(self, scenario):
        self.scenario = scenario
        self.algorithm = SpeculativeAlgorithm.from_string(scenario["algorithm"])
        self.block, self.topk = scenario["block"], scenario["topk"]
        self.verified_tokens = state_steps(engine_args.get_global_server_args())
        self.draft_kv: dict[int, tuple[float, int]] = {}
        self.rounds: list[list[int]] = []
        self.branched = 0
        super().__init__(scenario)

    def make_worker(self):
        worker = flow.make_worker(
            self.server_args, self.req_to_token_pool, self.token_to_kv_pool_allocator, self.target, self.chain
        )
        worker.block_size = self.block
        worker._block_pos_offsets = torch.arange(self.block)
        worker._draft_block_spec_info = DFlashVerifyInput(
            draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=self.block
        )
        worker._use_fused_kv_materialize, worker._fused_kv_helper = True, "stands for the kernel"
        worker._append_target_hidden_fused = self.append
        if self.algorithm.is_ddtree():
            worker.__class__ = DDTreeWorker
            worker._topk_from_vocab_parallel_head = lambda hidden, lm_head: self.candidates()
            worker._configure_tree(self.server_args)
        return worker

    def append(self, hidden, positions, slots, max_position):
        # The largest position is asked of the device only where the host cannot know it.
        known = isinstance(self.running.spec_info, DDTreeVerifyInput)
        self.target.wrong["max_position"] += max_position != (int(positions.max()) if known else None)
        rows = zip(slots.tolist(), hidden.flatten().tolist(), positions.tolist(), strict=True)
        self.draft_kv.update((slot, (value, position)) for slot, value, position in rows)

    def candidates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's candidates: at each position one is right, or none, and the order is scripted."""
        logp, ids = [], []
        for req, root in zip(self.running.reqs, self.running.spec_info.verified_id.tolist(), strict=True):
            # Of the request and its text alone: the same for every algorithm and batch.
            rng = random.Random(f"{self.scenario['seed']} {len(req.origin_input_ids)} {len(req.output_ids)}")
            state, _ = self.target.read(int(req.mamba_pool_idx))
            state = absorb(state, root)
            for _ in range(self.block - 1):
                right = next_token(state)
                row = rng.sample([token for token in range(VOCAB) if token != right], self.topk)
                rank = rng.choice(self.scenario["ranks"])
                if rank < self.topk:
                    row[rank] = right
                state = absorb(state, right)
                ids.append(row)
                logp.append(sorted((-rng.expovariate(2.0) for _ in row), reverse=True))
        return torch.tensor(logp, dtype=torch.float32), torch.tensor(ids)

    def chain(self, *, hidden_states, lm_head) -> torch.Tensor:
        return self.candidates()[1][:, 0]

    def request(self, prompt, new):
        req = super().request(prompt, new)
        if self.scenario.get("temperature") and len(prompt) % 3 == 0:
            req.sampling_params.temperature, req.sampling_params.top_k = self.scenario["temperature"], 1 << 30
        return req

    def check_requests(self, reqs, tracked_before):
        super().check_requests(reqs, tracked_before)
        wrong = self.turns[-1]["wrong"]
        for req in reqs:
            if req.finished():
                continue
            tokens = (req.origin_input_ids + req.output_ids)[:-1]
            slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(tokens)].tolist()
            state = state_of([])
            for position, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
                state = absorb(state, token)
                wrong["slots"] += self.target.kv.get(slot) != mark(state)
                wrong["draft_kv"] += self.draft_kv.get(slot) != (mark(state), position)
        wrong.update(self.target.wrong)

    def process_batch_result_decode(self, batch, result):
        self.rounds.append([accepted + 1 for accepted in result.num_accepted_drafts_per_req_cpu])
        super().process_batch_result_decode(batch, result)


def count_branches(scheduler: ToyTreeScheduler):
    """Let the scheduler's worker count the rounds that committed a path which is no prefix of the window."""
    verify = DDTreeVerifyInput.verify

    def counted(self, **kwargs):
        result = verify(self, **kwargs)
        paths = zip(self.accepted_path.tolist(), result[1].tolist(), strict=True)
        scheduler.branched += any(path[:length] != list(range(length)) for path, length in paths)
        return result

    return counted


def run(scenario) -> dict:
    configure(scenario)
    scheduler = ToyTreeScheduler(scenario)
    verify = DDTreeVerifyInput.verify
    DDTreeVerifyInput.verify = count_branches(scheduler)
    try:
        report = flow.run(scenario, scheduler)
    finally:
        DDTreeVerifyInput.verify = verify
    shadow = getattr(scheduler.worker, "shadow", None) if scheduler.algorithm.is_ddtree() else None
    if shadow is not None:
        shadow = [shadow.verifies, shadow.chain_accepted, shadow.tree_accepted, shadow.caught, list(LINES)]
        LINES.clear()
    return {**report, "rounds": scheduler.rounds, "branched": scheduler.branched, "shadow": shadow}


def configure(scenario):
    flow.configure()
    args = engine_args.get_global_server_args()
    args.speculative_algorithm = scenario["algorithm"]
    args.speculative_dflash_block_size = scenario["block"]
    args.decode_log_interval = scenario.get("log_interval", 1000)
    args.speculative_ddtree_shadow_linear = bool(scenario.get("shadow"))
    chain = scenario["algorithm"] == "DFLASH" or scenario.get("shadow")
    args.speculative_num_draft_tokens = scenario["block"] if chain else scenario["budget"] + 1
    args.speculative_ddtree_budget = scenario["budget"]
    args.speculative_ddtree_topk = scenario["topk"]
    args.speculative_ddtree_spine = scenario["spine"]


def top_k_renorm(probs, top_ks):
    """What the engine's kernel does: the `top_k` largest of each row and all that equal the last of them."""
    floor = probs.sort(dim=-1, descending=True).values.gather(1, (top_ks.clamp(max=VOCAB).long() - 1).unsqueeze(1))
    kept = torch.where(probs >= floor, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


class Lines(logging.Handler):
    """Keeps what the shadow mode logs."""

    def emit(self, record):
        if record.getMessage().startswith("DDTREE shadow"):
            LINES.append(record.getMessage())


LINES: list[str] = []
ddtree_worker.logger.addHandler(Lines())
ddtree_worker.logger.setLevel(logging.INFO)
ddtree_info.top_k_renorm_prob = top_k_renorm
one_rank = SimpleNamespace(world_size=1)
ddtree_info.get_tp_group = ddtree_worker.get_tp_group = lambda: one_rank

if __name__ == "__main__":
    print(json.dumps([run(scenario) for scenario in json.load(sys.stdin)]))
