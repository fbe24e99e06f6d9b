"""Whether the loaded target can verify a tree exactly: what its backends, pools and kernels really are.

Arguments say what was asked for; this looks at what was built. A linear layer's state after a node must be
that of the node's own path. DDTREE's own kernels see to that for gated delta net layers
(`ddtree_recurrent`); they are proven against the engine's kernels for a single token, in the source named
below, over pools of the shapes and types looked at here.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.ddtree_states import TreeStates

logger = logging.getLogger(__name__)

UNSAFE_FLAG = "--speculative-ddtree-allow-hybrid-unsafe"

# The kernels whose arithmetic this set's tests compare with its own: module -> sha256 of its source.
PROVEN_KERNELS = {
    "sglang.srt.layers.attention.mamba.causal_conv1d_triton": (
        "1700fae290fb1c28d6968f1f2732067aeba26e92898653f3ec6fcbed3c24e5cb"
    ),
    "sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent": (
        "f4f26ea5cf979b75fd340665e65f1e2d33ab586a501928eb20b1b88f5ed84799"
    ),
}
PROVEN_STATES = (torch.float32, torch.bfloat16)
# Committed inputs of the convolution, one less than its width.
CONV_HISTORY = range(1, 4)


@dataclass(frozen=True)
class Finding:
    """A precondition of an exact tree verify that does not hold, or (`unproven`) is not known to hold."""

    name: str
    problem: str
    mend: str
    unproven: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}. {self.mend}"


def check_target(model_runner: ModelRunner, window: int) -> list[Finding]:
    """What stands against verifying trees of `window` nodes with this target; nothing, if all is proven."""
    backend = model_runner.attn_backend
    linear = getattr(backend, "linear_attn_backend", None)
    findings = _check_attention(model_runner, getattr(backend, "full_attn_backend", backend), window)
    if linear is not None or model_runner.mambaish_config is not None:
        findings += _check_linear(model_runner, linear, window)
    return findings


def enforce(findings: list[Finding], unsafe: bool) -> None:
    """Refuse to start over what is wrong, and over what is unproven unless `unsafe`; warn of the rest.

    Raises ValueError that names each finding.
    """
    wrong = [str(finding) for finding in findings if not finding.unproven]
    if wrong:
        raise ValueError("\n".join(["DDTREE cannot verify trees with this target.", *wrong]))
    unproven = [str(finding) for finding in findings]
    if unproven and not unsafe:
        raise ValueError(
            "\n".join(
                [
                    "DDTREE is not proven exact with this hybrid target. To serve it all the same: "
                    f"{UNSAFE_FLAG}. To measure without risk: --speculative-ddtree-shadow-linear.",
                    *unproven,
                ]
            )
        )
    for line in unproven:
        logger.warning("DDTREE is not proven exact with this hybrid target (%s): %s", UNSAFE_FLAG, line)


def _check_attention(model_runner: ModelRunner, backend: object, window: int) -> list[Finding]:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention

    findings = []
    if type(backend) is not TritonAttnBackend:
        findings.append(
            Finding("attention", f"{type(backend).__name__} does not take a mask", "Use --attention-backend triton")
        )
    elif backend.num_draft_tokens != window:
        findings.append(
            Finding(
                "attention", f"was set up for {backend.num_draft_tokens} tokens, not {window}", "Use one verify window"
            )
        )
    if model_runner.page_size != 1:
        findings.append(Finding("page size", f"is {model_runner.page_size}", "Use --page-size 1"))
    sliding = [
        module.layer_id
        for module in model_runner.model.modules()
        if isinstance(module, RadixAttention) and module.sliding_window_size > -1
    ]
    if sliding or model_runner.sliding_window_size is not None:
        findings.append(
            Finding(
                "sliding window",
                f"layers {sliding} measure distance by window index" if sliding else "the target has one",
                "Use DFLASH",
            )
        )
    return findings


def _check_linear(model_runner: ModelRunner, backend: object, window: int) -> list[Finding]:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    if type(backend) is not GDNAttnBackend:
        return [Finding("linear attention", f"{type(backend).__name__} does not verify trees", "Use DFLASH")]
    findings = []
    kernels = backend.kernel_dispatcher
    for kernel in dict.fromkeys(type(kernel) for kernel in (kernels.decode_kernel, kernels.extend_kernel)):
        if kernel is not TritonGDNKernel:
            findings.append(
                Finding(
                    "linear attention",
                    f"{kernel.__name__} shares its states with no tree",
                    "Use --linear-attn-backend triton, for decode and for prefill",
                )
            )
    return findings + _check_pool(model_runner, backend.tree_states, window) + _check_source()


def _check_pool(model_runner: ModelRunner, states: TreeStates | None, window: int) -> list[Finding]:
    if states is None:
        return [Finding("state pool", "has no room for trees", "Use one set of arguments throughout")]
    findings = []
    requests = model_runner.req_to_token_pool.size
    cache = model_runner.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    if len(cache.conv) != 1:
        findings.append(
            Finding("state pool", f"has {len(cache.conv)} convolution states; a commit moves the first", "Use DFLASH")
        )
    if states.window != window:
        findings.append(
            Finding("state pool", f"is for trees of {states.window} nodes, not {window}", "Use one verify window")
        )
    if states.rows < requests:
        findings.append(
            Finding("state pool", f"has room for {states.rows} requests of {requests}", "Lower --max-running-requests")
        )
    history = cache.conv[0]
    if history.shape[-1] not in CONV_HISTORY:
        findings.append(Finding("convolution", f"a width of {history.shape[-1] + 1} is untested", "Use DFLASH"))
    for size in (states.key_dim, states.value_dim):
        if size & (size - 1):
            findings.append(Finding("state pool", f"has heads of {size}, no power of two", "Use DFLASH"))
    if history.dtype != states.inputs.dtype:
        findings.append(
            Finding(
                "convolution",
                f"its committed inputs are {history.dtype}, a node's {states.inputs.dtype}",
                "Leave SGLANG_MAMBA_CONV_DTYPE at the model's type",
                unproven=True,
            )
        )
    if cache.temporal.dtype not in PROVEN_STATES:
        findings.append(
            Finding(
                "state precision",
                f"commits round to {cache.temporal.dtype}",
                "Use --mamba-ssm-dtype float32 or bfloat16",
                unproven=True,
            )
        )
    return findings


def _check_source() -> list[Finding]:
    changed = []
    for name, proven in PROVEN_KERNELS.items():
        file = importlib.import_module(name).__file__
        if file is None or hashlib.sha256(Path(file).read_bytes()).hexdigest() != proven:
            changed.append(name.rpartition(".")[2])
    if not changed:
        return []
    return [
        Finding(
            "kernels", f"{', '.join(changed)} differ from what was tested", "Use the published engine", unproven=True
        )
    ]
