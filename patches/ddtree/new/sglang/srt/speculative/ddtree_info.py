"""What DDTREE's worker hands to the engine: the draft state between rounds, and a round's verify input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.speculative.ddtree_tree import DraftTree, tree_mask, walk_tree
from sglang.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func
from sglang.srt.utils import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@dataclass
class DDTreeDraftInput(DFlashDraftInput):
    """The draft state of a batch between rounds.

    A round writes the hidden states of its committed tokens to the draft KV cache itself, while slots
    and positions are known on the host: between rounds there are none left, and none to reorder.
    """

    def filter_batch(self, new_indices: torch.Tensor, has_been_filtered: bool = True) -> None:
        self._check_consumed()
        self.verified_id = self.verified_id[new_indices]
        self.ctx_lens = self.ctx_lens[new_indices]
        self.draft_seq_lens = self.draft_seq_lens[new_indices]

    def merge_batch(self, spec_info: DDTreeDraftInput) -> None:  # type: ignore[override]
        self._check_consumed()
        spec_info._check_consumed()
        self.verified_id = torch.cat([self.verified_id, spec_info.verified_id])
        self.ctx_lens = torch.cat([self.ctx_lens, spec_info.ctx_lens])
        self.draft_seq_lens = torch.cat([self.draft_seq_lens, spec_info.draft_seq_lens])

    def _check_consumed(self) -> None:
        if self.target_hidden is not None and self.target_hidden.numel():
            raise RuntimeError("DDTREE draft state has target hidden states that are not in the draft KV cache yet.")


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """The input of a target forward that verifies a tree per request, and the walk down its result.

    The linear layers' backend takes `tree` from it (`ddtree_states.TreeStates`), attention the mask.
    `draft_token` and `positions` are the trees' tables, flat. After `verify`, `accepted_path` int64
    `[bs, max_depth + 1]` holds the window indices of the walk (-1: none), of which the first
    `commit_lens` are committed, `accepted_steps` int64 `[bs]` the last of these, and `append_positions`
    int64 the positions of the committed tokens, in the order of `batch.out_cache_loc`.
    """

    tree: DraftTree | None = None
    max_depth: int = 0
    accepted_steps: torch.Tensor | None = None
    accepted_path: torch.Tensor | None = None
    append_positions: torch.Tensor | None = None

    @classmethod
    def from_tree(cls, tree: DraftTree, max_depth: int) -> DDTreeVerifyInput:
        return cls(
            draft_token=tree.tokens.view(-1),
            positions=tree.positions.view(-1),
            draft_token_num=tree.tokens.shape[1],
            tree=tree,
            max_depth=max_depth,
        )

    @classmethod
    def for_capture(cls, draft_token_num: int, custom_mask: torch.Tensor) -> DDTreeVerifyInput:
        """The input to capture a graph with: a tree's mask and width, without a tree."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(draft_token=nothing, positions=nothing, draft_token_num=draft_token_num, custom_mask=custom_mask)

    @property
    def num_requests(self) -> int | None:
        """How many of a padded batch's rows are requests. None: not known."""
        return None if self.tree is None else self.tree.tokens.shape[0]

    def prepare_for_verify(self, batch: ScheduleBatch, page_size: int, *, build_custom_mask: bool = True) -> None:
        """Allocate a slot per node and build the mask: a tree has one whatever the backend could do without."""
        super().prepare_for_verify(batch, page_size, build_custom_mask=False)
        if batch.forward_mode.is_idle():
            return
        assert self.tree is not None
        window = self.draft_token_num
        numel = window * (int(batch.seq_lens_cpu.sum()) + batch.batch_size() * window)
        out = torch.empty(numel, dtype=torch.bool, device=batch.device)
        self.custom_mask = tree_mask(self.tree, batch.seq_lens, out)

    def verify(
        self, *, batch: ScheduleBatch, logits_output: LogitsProcessorOutput, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Walk each tree along the target's own tokens and commit the path.

        The target's token is its argmax for a greedy request, and for all others a draw from its own
        distribution at that node: whatever the tree holds, what is emitted is what the target alone
        would have emitted. Requests end within a path at their first stop token or length limit;
        cache slots, hidden states and recurrent states of the path end there too.

        Returns the current token int64 `[bs]`, the committed lengths int32 `[bs]`, the hidden states of
        the committed tokens in path order, and the accepted draft tokens per request.
        """
        bs, window = batch.batch_size(), self.draft_token_num
        steps = self.max_depth + 1
        logits, hidden = logits_output.next_token_logits, logits_output.hidden_states
        if self.tree is None or logits is None or hidden is None:
            raise RuntimeError("DDTREE verify requires a tree, and the target's logits and hidden states of it.")
        self._adjust_logits(logits, batch.sampling_info, bs)
        target = target_tokens(logits, batch.sampling_info, window).view(bs, window)
        packed = walk_tree(self.tree, target, self.max_depth)

        paths: list[list[int]] = []
        verified: list[int] = []
        for req, row in zip(batch.reqs, read_back(packed).tolist(), strict=True):
            appended = 0
            for token in row[steps : steps + row[-1]]:
                req.output_ids.append(token)
                appended += 1
                req.check_finished()
                if req.finished():
                    break
            paths.append(row[:appended])
            verified.append(req.output_ids[-1])
            req.spec_verify_ct += 1
            req.spec_accepted_drafts += appended - 1
            req.kv_committed_len += appended
            req.kv_allocated_len = req.kv_committed_len

        commit_lens_cpu = [len(path) for path in paths]
        keep = [row * window + node for row, path in enumerate(paths) for node in path]
        kept = set(keep)
        free = [slot for slot in range(bs * window) if slot not in kept]
        positions = [
            start + step
            for start, length in zip(batch.seq_lens_cpu.tolist(), commit_lens_cpu, strict=True)
            for step in range(length)
        ]
        commit_lens, new_verified_id, self.accepted_steps, keep_index, free_index, self.append_positions = to_device(
            [commit_lens_cpu, verified, [path[-1] for path in paths], keep, free, positions], logits.device
        )
        self.accepted_path = packed[:, :steps]

        slots = batch.out_cache_loc
        batch.token_to_kv_pool_allocator.free(slots[free_index])
        batch.out_cache_loc = slots[keep_index]
        end_offset = batch.seq_lens + commit_lens.to(batch.seq_lens.dtype)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            end_offset,
            batch.out_cache_loc,
            bs,
        )
        batch.seq_lens.copy_(end_offset)
        batch.seq_lens_cpu.add_(torch.tensor(commit_lens_cpu, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(commit_lens_cpu)

        logits_output.hidden_states = None
        return (
            new_verified_id,
            commit_lens.to(torch.int32),
            hidden[keep_index],
            [length - 1 for length in commit_lens_cpu],
        )

    def _adjust_logits(self, logits: torch.Tensor, sampling_info: SamplingBatchInfo, bs: int) -> None:
        """Apply custom processors, penalties and bias to every node of a request alike, as DFLASH does."""
        if len(sampling_info) != bs:
            raise RuntimeError(f"DDTREE verify has sampling parameters of {len(sampling_info)} requests, not {bs}.")
        if sampling_info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, sampling_info, num_tokens_in_batch=self.draft_token_num)
        penalizers = sampling_info.penalizer_orchestrator
        if (penalizers is not None and penalizers.is_required) or sampling_info.logit_bias is not None:
            bias = torch.zeros((bs, logits.shape[1]), dtype=torch.float32, device=logits.device)
            sampling_info.apply_logits_bias(bias)
            logits.view(bs, self.draft_token_num, -1).add_(bias.unsqueeze(1))


def target_tokens(logits: torch.Tensor, sampling_info: SamplingBatchInfo, window: int) -> torch.Tensor:
    """The target's token at every node, int64 `[bs * window]`, of `logits [bs * window, vocabulary]`.

    A greedy request's is the argmax, the lowest id of equals: the filter by top-k keeps all equals. All
    others are drawn from the request's distribution, as the argmax of probabilities over exponential
    variates: an exact draw that needs no cumulative sum, and no synchronisation as `torch.multinomial`
    does. All tensor-parallel ranks get the draws of the first.
    """
    greedy = torch.argmax(logits, dim=-1)
    if sampling_info.is_all_greedy:
        return greedy

    def per_node(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view(-1, 1).expand(-1, window).reshape(-1)

    top_ks = per_node(sampling_info.top_ks)
    probs = torch.softmax(logits / per_node(sampling_info.temperatures).unsqueeze(1), dim=-1)
    if sampling_info.need_top_k_sampling:
        probs = top_k_renorm_prob(probs, top_ks)
    if sampling_info.need_top_p_sampling:
        probs = top_p_renorm_prob(probs, per_node(sampling_info.top_ps))
    if sampling_info.need_min_p_sampling:
        floor = probs.amax(dim=-1, keepdim=True) * per_node(sampling_info.min_ps).unsqueeze(1)
        probs.masked_fill_(probs < floor, 0.0)
    drawn = torch.argmax(probs.div_(torch.empty_like(probs).exponential_()), dim=-1)
    tokens = torch.where(top_ks == 1, greedy, drawn)
    tp_group = get_tp_group()
    if tp_group.world_size > 1:
        tp_group.broadcast(tokens, src=0)
    return tokens


def read_back(packed: torch.Tensor) -> torch.Tensor:
    """The walk's result on the host: a round's one wait for the device."""
    return packed.cpu()


def to_device(columns: list[list[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The columns as int64 tensors on `device`, moved there in one copy that the host does not wait for."""
    flat = torch.tensor(
        [value for column in columns for value in column],
        dtype=torch.int64,
        pin_memory=is_pin_memory_available(device),
    )
    on_device: tuple[torch.Tensor, ...] = flat.to(device, non_blocking=True).split([len(column) for column in columns])
    return on_device
