"""DDTREE's server arguments: resolved before anything depends on the verify window, checked when all is resolved.

Three sizes are at work. The *block* is what the drafter drafts at once: the root and `block - 1` positions,
which is how deep a tree can be. The *budget* is the number of draft nodes in a tree. The *window*, budget + 1,
is what the target verifies per request and round; the engine's pools, graphs and attention backends take it
from `speculative_num_draft_tokens`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# A node's ancestors are the bits of one int64.
MAX_WINDOW = 64
MAX_TOPK = 32
DEFAULT_BLOCK = 16
DEFAULT_TOPK = 8


@dataclass(frozen=True)
class TreeSizes:
    """What a tree is made of: draft `block`, `budget` of draft nodes, `topk` candidates per position, `spine`."""

    block: int
    budget: int
    topk: int
    spine: bool

    @property
    def window(self) -> int:
        """Nodes of a tree, its root included."""
        return self.budget + 1

    @property
    def depth(self) -> int:
        """Drafted positions, which is how deep a tree can be."""
        return self.block - 1


def tree_sizes(args: ServerArgs) -> TreeSizes:
    """The sizes in resolved arguments. Raises ValueError for others."""
    block, budget, topk = (
        args.speculative_dflash_block_size,
        args.speculative_ddtree_budget,
        args.speculative_ddtree_topk,
    )
    if block is None or budget is None or topk is None:
        raise ValueError("DDTREE's arguments are not resolved.")
    return TreeSizes(block, budget, topk, bool(args.speculative_ddtree_spine))


def resolve_ddtree_args(args: ServerArgs) -> None:
    """Settle block, budget, window and top-k, and the defaults that a tree needs where nothing was chosen.

    This comes before memory settings, model adjustments, attention backend and page size are handled:
    each of them reads one of these. Raises ValueError for sizes that do not fit together.
    """
    if args.speculative_algorithm != "DDTREE":
        if given := _given_flags(args):
            logger.warning("Ignored without --speculative-algorithm DDTREE: %s.", ", ".join(given))
        return

    block = _block_size(args)
    if not 2 <= block <= MAX_WINDOW:
        raise ValueError(f"DDTREE needs a draft block of 2 to {MAX_WINDOW} tokens, got {block}.")
    budget = args.speculative_ddtree_budget
    if budget is None:
        budget = block - 1
    if not block - 1 <= budget < MAX_WINDOW:
        raise ValueError(
            f"--speculative-ddtree-budget must be {block - 1} (draft block size {block}, less one) to "
            f"{MAX_WINDOW - 1}, got {budget}: a tree has room for the drafter's whole chain, and its nodes "
            f"with the root are at most {MAX_WINDOW}."
        )
    topk = DEFAULT_TOPK if args.speculative_ddtree_topk is None else args.speculative_ddtree_topk
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"--speculative-ddtree-topk must be 1 to {MAX_TOPK}, got {topk}.")

    shadow = args.speculative_ddtree_shadow_linear
    window = block if shadow else budget + 1
    if args.speculative_num_draft_tokens not in (None, window):
        reason = "the draft block size, as the chain is served" if shadow else "--speculative-ddtree-budget + 1"
        raise ValueError(
            f"--speculative-num-draft-tokens is {args.speculative_num_draft_tokens} but DDTREE verifies "
            f"{window} tokens ({reason}). Leave it out."
        )
    if args.speculative_eagle_topk not in (None, 1):
        logger.warning(
            "DDTREE has no --speculative-eagle-topk: %s is not used. See --speculative-ddtree-topk.",
            args.speculative_eagle_topk,
        )

    args.speculative_dflash_block_size = block
    args.speculative_ddtree_budget = budget
    args.speculative_ddtree_topk = topk
    args.speculative_ddtree_spine = bool(args.speculative_ddtree_spine)
    args.speculative_num_draft_tokens = window
    # The tree is signalled per verify input; this one sizes pools and picks kernels.
    args.speculative_eagle_topk = 1
    if shadow:
        return
    if args.attention_backend is args.prefill_attention_backend is args.decode_attention_backend is None:
        args.attention_backend = "triton"
        logger.info("Use triton as attention backend: DDTREE needs one that takes a tree's mask.")
    if args.page_size is None:
        args.page_size = 1


def check_ddtree_args(args: ServerArgs) -> None:
    """Refuse what a tree cannot be verified with, once all arguments are resolved.

    Raises ValueError that names every fault, its reason and what to use instead.
    """
    from sglang.srt.utils.common import is_cuda

    problems = []
    if not is_cuda():
        problems.append("DDTREE's kernels run on NVIDIA GPUs only. Leave speculative decoding off on this device.")
    if args.speculative_accept_threshold_single != 1.0 or args.speculative_accept_threshold_acc != 1.0:
        problems.append(
            "DDTREE accepts a draft token only where the target draws the same: leave out "
            "--speculative-accept-threshold-single and --speculative-accept-threshold-acc."
        )
    if args.enable_deterministic_inference or args.rl_on_policy_target is not None:
        problems.append(
            "DDTREE draws without the seeds of deterministic inference: leave out "
            "--enable-deterministic-inference and --rl-on-policy-target, or use no speculative decoding."
        )
    if not args.speculative_ddtree_shadow_linear:
        problems += _tree_problems(args)
    if problems:
        raise ValueError("\n".join(problems))


def _tree_problems(args: ServerArgs) -> list[str]:
    """What the target's verify of a tree does not work with; a chain's verify may."""
    problems = []
    prefill, decode = args.get_attention_backends()
    if prefill != "triton" or decode != "triton":
        problems.append(
            f"DDTREE verifies a tree, which attention backend {prefill if prefill != 'triton' else decode} does not "
            f"do here (prefill {prefill}, decode {decode}): it would attend as in a chain, or fail. "
            "Use --attention-backend triton; the drafter may keep another by --speculative-draft-attention-backend."
        )
    if args.page_size != 1:
        problems.append(
            f"DDTREE keeps the cache slots of a path, which pages of {args.page_size} tokens cannot. Use --page-size 1."
        )
    for name in ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend", "mamba_backend"):
        backend = getattr(args, name)
        if backend not in (None, "triton"):
            flag = "--" + name.replace("_", "-")
            problems.append(f"{flag} {backend} cannot verify a tree's recurrent states. Use {flag} triton.")
    window = tree_sizes(args).window
    if args.enable_mamba_extra_buffer() and args.mamba_track_interval < window:
        problems.append(
            f"--mamba-track-interval {args.mamba_track_interval} is shorter than DDTREE's verify window of {window}: "
            f"a round could cross two track points. Use {window} or more, or a smaller --speculative-ddtree-budget."
        )
    if args.get_model_config().is_hybrid_swa:
        problems.append(
            "DDTREE does not verify sliding-window layers: they would measure distance by window index, not by "
            "depth. Use DFLASH."
        )
    if args.enable_two_batch_overlap:
        problems.append("DDTREE does not split a batch in two: leave out --enable-two-batch-overlap.")
    if args.enable_pdmux:
        problems.append("DDTREE does not multiplex prefill and decode: leave out --enable-pdmux.")
    return problems


def _given_flags(args: ServerArgs) -> list[str]:
    names = ("budget", "topk", "spine", "allow_hybrid_unsafe", "shadow_linear")
    values = {name: getattr(args, f"speculative_ddtree_{name}") for name in names}
    return [
        "--speculative-ddtree-" + name.replace("_", "-")
        for name, value in values.items()
        if value is not None and value is not False
    ]


def _block_size(args: ServerArgs) -> int:
    """The draft block size: as given, else as the drafter's configuration says, else the usual one."""
    if args.speculative_dflash_block_size is not None:
        return int(args.speculative_dflash_block_size)
    block = None
    if args.speculative_draft_model_path is not None:
        from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
        from sglang.srt.utils.hf_transformers_utils import get_config

        draft_hf_config = get_config(
            args.speculative_draft_model_path,
            trust_remote_code=args.trust_remote_code,
            revision=args.speculative_draft_model_revision,
            model_override_args=json.loads(args.json_model_override_args),
        )
        block = parse_dflash_draft_config(draft_hf_config=draft_hf_config).resolve_block_size(default=None)
    if block is None:
        block = DEFAULT_BLOCK
        logger.warning("--speculative-dflash-block-size is not set; defaulting to %d for DDTREE.", block)
    return int(block)
