"""DDTREE: DFLASH's drafter, verified as a tree."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative import ddtree_guard
from sglang.srt.speculative.ddtree_args import tree_sizes
from sglang.srt.speculative.ddtree_info import DDTreeDraftInput, DDTreeVerifyInput, to_device
from sglang.srt.speculative.ddtree_shadow import ShadowStats, chain_outcomes
from sglang.srt.speculative.ddtree_tree import DraftTree, build_tree, topk_log_probs, tree_mask, walk_tree
from sglang.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput
from sglang.srt.speculative.dflash_worker import DFlashWorker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult  # type: ignore[attr-defined]
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class RankGather:
    """A tensor-parallel group, as gathering candidates needs it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[ranks, *tensor.shape]`, in rank order."""
        out = tensor.new_empty((self.group.world_size, *tensor.shape))
        self.group.all_gather_into_tensor(out.view(-1), tensor.contiguous().view(-1))
        return out


class DDTreeWorker(DFlashWorker):
    """Speculative decoding with a tree of the drafter's candidates (spec-v1, tp>=1/pp=1).

    The drafter is DFLASH's, with its own block size. Of the distributions that it drafts, each request
    gets a tree of `window` nodes, which the target verifies in one forward; the path that the target
    itself would have decoded is committed. In shadow-linear mode the drafter's chain is served, as
    DFLASH does, and the tree is only compared with what the target decoded.
    """

    draft_input_class = DDTreeDraftInput

    def __init__(self, server_args: ServerArgs, *, target_worker: TpModelWorker, **ranks: Any) -> None:
        if not server_args.speculative_ddtree_shadow_linear:
            ddtree_guard.enforce(
                ddtree_guard.check_target(target_worker.model_runner, tree_sizes(server_args).window),
                server_args.speculative_ddtree_allow_hybrid_unsafe,
            )
        super().__init__(server_args, target_worker=target_worker, **ranks)
        self._configure_tree(server_args)
        self._warm_up()

    def _configure_tree(self, server_args: ServerArgs) -> None:
        self.sizes = tree_sizes(server_args)
        self.shadow = ShadowStats() if server_args.speculative_ddtree_shadow_linear else None
        self.shadow_rounds = 0
        if self.tp_rank == 0:
            logger.info("Initialized DDTREE. %s, shadow=%s", self.sizes, self.shadow is not None)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Have the tree's kernels compiled before the first request waits for them."""
        head: Any = self.target_worker.model_runner.model.lm_head
        depth = self.sizes.depth
        hidden = head.weight.new_zeros((depth, head.weight.shape[1]))
        logp, ids = self._topk_from_vocab_parallel_head(hidden, head)
        lens = torch.ones(1, dtype=torch.int64, device=hidden.device)
        tree = build_tree(logp[None], ids[None], lens, lens, self.sizes.window, self.sizes.spine)
        if self.shadow is not None:
            return
        mask = torch.empty(self.sizes.window * (self.sizes.window + 1), dtype=torch.bool, device=hidden.device)
        tree_mask(tree, lens, mask)
        walk_tree(tree, tree.tokens, self.sizes.depth)
        backend = self.target_worker.model_runner.attn_backend
        states = getattr(getattr(backend, "linear_attn_backend", None), "tree_states", None)
        if states is not None:
            # Of a row that pads: compiled, and over at once.
            states.commit(states.no_step[:1], states.no_step[:1])

    def _configure_draft_server_args(self, draft_server_args: ServerArgs) -> None:
        draft_server_args.speculative_algorithm = "DFLASH"
        draft_server_args.speculative_num_draft_tokens = draft_server_args.speculative_dflash_block_size

    def _copy_draft_seq_lens(
        self, batch: ScheduleBatch, draft_prefix_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> int:
        if self.use_compact_draft_cache:
            return super()._copy_draft_seq_lens(batch, draft_prefix_lens, seq_lens_cpu)
        # The drafter sees the whole committed prefix, whose length the host knows.
        seq_lens_cpu.copy_(batch.seq_lens_cpu)
        return int(seq_lens_cpu.sum())

    def _build_verify_input(
        self,
        batch: ScheduleBatch,
        block_ids: torch.Tensor,
        positions_2d: torch.Tensor,
        draft_hidden: torch.Tensor,
        lm_head: Any,
    ) -> DFlashVerifyInput:
        if self.shadow is None:
            return self._build_ddtree_verify_input(batch, block_ids, draft_hidden, lm_head)
        self.shadowed = self._grow_tree(batch, block_ids, draft_hidden, lm_head)
        return super()._build_verify_input(batch, block_ids, positions_2d, draft_hidden, lm_head)

    def _build_ddtree_verify_input(
        self, batch: ScheduleBatch, block_ids: torch.Tensor, draft_hidden: torch.Tensor, lm_head: Any
    ) -> DDTreeVerifyInput:
        tree, _ = self._grow_tree(batch, block_ids, draft_hidden, lm_head)
        verify_input = DDTreeVerifyInput.from_tree(tree, self.sizes.depth)
        verify_input.prepare_for_verify(batch, page_size=1)
        return verify_input

    def _grow_tree(
        self, batch: ScheduleBatch, block_ids: torch.Tensor, draft_hidden: torch.Tensor, lm_head: Any
    ) -> tuple[DraftTree, torch.Tensor]:
        """Each request's tree, of the drafted positions' hidden states `[bs, block_size - 1, hidden]`.

        Also returns the candidates that it is made of, int64 `[bs, block_size - 1, topk]`.
        """
        bs, depth, features = draft_hidden.shape
        logp, ids = self._topk_from_vocab_parallel_head(draft_hidden.reshape(-1, features), lm_head)
        logp, ids = logp.view(bs, depth, -1), ids.view(bs, depth, -1)
        roots = block_ids[:, 0].contiguous()
        return build_tree(logp, ids, roots, batch.seq_lens, self.sizes.window, self.sizes.spine), ids

    def _topk_from_vocab_parallel_head(
        self, hidden_states: torch.Tensor, lm_head: Any, chunk_size: int = 256
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of the target's head for each row of `hidden_states`.

        Returns log-probabilities over the whole vocabulary, fp32 `[rows, topk]`, and global ids, the
        same on all ranks. The logits are stock greedy drafting's, of the same product of matrices.
        """
        shard = lm_head.shard_indices
        num_added = shard.num_added_elements
        weight = lm_head.weight if num_added else lm_head.weight[: shard.num_org_elements]
        tp_group = get_tp_group()
        candidates = [
            topk_log_probs(
                torch.matmul(rows.to(weight.dtype), weight.T),
                self.sizes.topk,
                num_org=shard.num_org_elements,
                num_org_padded=shard.num_org_elements_padded,
                num_added=num_added,
                org_start=shard.org_vocab_start_index,
                added_start=shard.added_vocab_start_index,
                group=RankGather(tp_group) if tp_group.world_size > 1 else None,
            )
            for rows in hidden_states.split(chunk_size)
        ]
        if len(candidates) == 1:
            return candidates[0]
        logp, ids = zip(*candidates, strict=True)
        return torch.cat(logp), torch.cat(ids)

    def _append_target_hidden_to_draft_kv(self, batch: ScheduleBatch, draft_input: DFlashDraftInput) -> None:
        verified = batch.spec_info
        if not isinstance(verified, DDTreeVerifyInput):
            super()._append_target_hidden_to_draft_kv(batch, draft_input)
            return
        assert verified.append_positions is not None
        # After a verify: slots and positions of the committed tokens need no search, nor the largest a wait.
        last = int(batch.seq_lens_cpu.max()) - 1
        self._write_target_hidden(batch, draft_input, verified.append_positions, batch.out_cache_loc, last)

    def forward_batch_generation(self, batch: ScheduleBatch | ModelWorkerBatch, **kwargs: Any) -> GenerationBatchResult:
        result = super().forward_batch_generation(batch, **kwargs)
        accepted = result.num_accepted_drafts_per_req_cpu
        if self.shadow is not None and accepted is not None and self.tp_rank == 0:
            self._record_shadow(self.shadow, accepted, result.next_token_ids)
        return result

    def _record_shadow(self, shadow: ShadowStats, accepted: list[int], last_tokens: torch.Tensor) -> None:
        tree, ids = self.shadowed
        (commit_lens,) = to_device([[count + 1 for count in accepted]], last_tokens.device)
        shadow.record(chain_outcomes(tree, ids, commit_lens, last_tokens).tolist())
        self.shadow_rounds += 1
        if self.shadow_rounds % self.server_args.decode_log_interval == 0:
            logger.info(shadow.take_line())
