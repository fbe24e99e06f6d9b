"""Whether the loaded target can verify a tree exactly: what its backends, pools and kernels really are.

Arguments say what was asked for; this looks at what was built. A linear layer's state after a node must be
that of the node's own path. That holds for kernels that read each node's parent state, fed with links in
every forward, over buffers of exactly one step per node: `causal_conv1d_update` and the gated delta rule's
`fused_sigmoid_gating_delta_rule_update`, in the source named below.
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

logger = logging.getLogger(__name__)

UNSAFE_FLAG = "--speculative-ddtree-allow-hybrid-unsafe"

# The kernels that this set's tests compare with replayed paths: module -> sha256 of its source.
PROVEN_KERNELS = {
    "sglang.srt.layers.attention.mamba.causal_conv1d_triton": (
        "1700fae290fb1c28d6968f1f2732067aeba26e92898653f3ec6fcbed3c24e5cb"
    ),
    "sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent": (
        "f4f26ea5cf979b75fd340665e65f1e2d33ab586a501928eb20b1b88f5ed84799"
    ),
    "sglang.srt.layers.attention.mamba.mamba_state_scatter_triton": (
        "6f52629d360090d9b0f2ca60c5c825f141bb84416e9864381fa46ce2befed608"
    ),
}
# The tree branch of the convolution kernel covers histories of these many inputs.
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
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    findings = []
    if type(backend) is GDNAttnBackend:
        kernel: object = backend.kernel_dispatcher.verify_kernel
        if type(kernel) is not TritonGDNKernel:
            findings.append(
                Finding(
                    "linear attention",
                    f"{type(kernel).__name__} does not take tree links",
                    "Use --linear-attn-backend triton, for decode and for prefill",
                )
            )
    elif type(backend) is Mamba2AttnBackend:
        findings.append(
            Finding("linear attention", "the selective scan's tree states are untested", "Use DFLASH", unproven=True)
        )
    else:
        return [Finding("linear attention", f"{type(backend).__name__} does not take tree links", "Use DFLASH")]
    return findings + _check_pool(model_runner, window) + _check_source()


def _check_pool(model_runner: ModelRunner, window: int) -> list[Finding]:
    requests = model_runner.req_to_token_pool.size
    cache = model_runner.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    if len(cache.conv) != 1:
        return [
            Finding("state pool", f"has {len(cache.conv)} convolution states; a commit moves the first", "Use DFLASH")
        ]
    findings = []
    for name, states in (("delta rule", cache.intermediate_ssm), ("convolution", cache.intermediate_conv_window[0])):
        rows, steps = states.shape[1:3]
        if steps != window:
            findings.append(
                Finding("state pool", f"has {steps} {name} steps, not {window}", "Use one verify window throughout")
            )
        if rows < requests:
            findings.append(
                Finding(
                    "state pool",
                    f"has {name} states for {rows} requests of {requests}",
                    "Lower --max-running-requests",
                )
            )
    history = cache.conv[0].shape[-1]
    if history not in CONV_HISTORY:
        findings.append(Finding("convolution", f"a width of {history + 1} has no tree branch", "Use DFLASH"))
    if cache.intermediate_ssm.dtype != torch.float32:
        findings.append(
            Finding(
                "state precision",
                f"a node's state is rounded to {cache.intermediate_ssm.dtype} before its children read it, "
                "as in decoding token by token but not as in verifying a chain",
                "Use --mamba-ssm-dtype float32",
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
