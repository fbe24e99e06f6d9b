"""What the tree would have caught while the drafter's chain is served: counts of DDTREE's shadow-linear mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from sglang.srt.speculative.ddtree_tree import DraftTree

BEYOND_TOPK = -1
NO_MISMATCH = -2


def chain_outcomes(
    tree: DraftTree, ids: torch.Tensor, commit_lens: torch.Tensor, last_tokens: torch.Tensor
) -> torch.Tensor:
    """What a verify of the drafter's chain says about the tree that was grown of the same candidates.

    `ids` int64 `[bs, depth, k]`: the candidates, of which the first per position are the chain. `commit_lens`
    `[bs]`: tokens that the verify committed, the last of them `last_tokens` `[bs]`. Returns int64 `[bs, 3]`,
    on the device, for `ShadowStats.record`: drafts that the chain got accepted; drafts that the tree would
    have, at least; and the rank at its position of the token that broke the chain, `BEYOND_TOPK`, or
    `NO_MISMATCH` where the chain held to its end or to where the request stopped.

    Beyond a sibling that the tree would have caught nothing is known: the target did not see it.
    """
    bs, depth, _ = ids.shape
    accepted = commit_lens.to(torch.int64) - 1
    offered = ids[torch.arange(bs, device=ids.device), accepted.clamp(max=depth - 1)]
    same = offered == last_tokens.unsqueeze(1)
    rank = torch.where(same.any(dim=1), same.to(torch.int8).argmax(dim=1), BEYOND_TOPK)
    # The chain's own token where a mismatch would be: the request stopped on an accepted draft.
    mismatch = (accepted < depth) & (rank != 0)

    reached = torch.minimum(accepted, tree.on_spine.sum(dim=1) - 1)
    below_spine = (tree.parents >= 0) & tree.on_spine.gather(1, tree.parents.clamp(min=0).to(torch.int64))
    here = (tree.depths == accepted.unsqueeze(1) + 1) & (tree.tokens == last_tokens.unsqueeze(1))
    caught = mismatch & (below_spine & here).any(dim=1)
    rank = torch.where(mismatch, rank, NO_MISMATCH)
    return torch.stack([accepted, reached + caught.to(torch.int64), rank], dim=1)


@dataclass
class ShadowStats:
    """Counts since the last log line."""

    verifies: int = 0
    chain_accepted: int = 0
    tree_accepted: int = 0
    caught: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    def record(self, outcomes: Iterable[Sequence[int]]) -> None:
        """Count one round: rows of `chain_outcomes`, on the host."""
        for chain, tree, rank in outcomes:
            self.verifies += 1
            self.chain_accepted += chain
            self.tree_accepted += tree
            self.caught += tree > chain
            if rank != NO_MISMATCH:
                self.ranks[rank] += 1

    def take_line(self) -> str | None:
        """The counts as a line for the log, and start anew. None: nothing was recorded.

        Accept lengths count the target's own token, as the engine reports them.
        """
        if not self.verifies:
            return None
        chain = 1 + self.chain_accepted / self.verifies
        tree = 1 + self.tree_accepted / self.verifies
        line = f"DDTREE shadow: {self.verifies} verifies, accept len: {chain:.2f} (chain), >= {tree:.2f} (tree)"
        mismatches = self.ranks.total()
        if mismatches:
            line += f", {mismatches} mismatches, caught: {self.caught / mismatches:.1%}, by rank:"
            for rank, count in sorted(self.ranks.items(), key=lambda item: (item[0] == BEYOND_TOPK, item[0])):
                line += f" {'beyond' if rank == BEYOND_TOPK else rank}: {count / mismatches:.1%}"
        vars(self).update(vars(ShadowStats()))
        return line
