"""DDTREE's guard: each precondition of an exact tree verify broken alone, on stand-ins of the engine's own classes."""

from __future__ import annotations

import re

import pytest

from tests.engine.server_args import load, parse

pytestmark = [pytest.mark.wheel, pytest.mark.torch]

FLAG = "--speculative-ddtree-allow-hybrid-unsafe"
SHADOW = "--speculative-ddtree-shadow-linear"

# Fault -> the findings, and what to use instead. Starts under no flag.
WRONG = {
    "other attention": (["attention"], "--attention-backend triton"),
    "attention of another width": (["attention"], "set up for 5 tokens, not 4"),
    "pages": (["page size"], "--page-size 1"),
    "a sliding layer": (["sliding window"], r"layers \[3\]"),
    "a sliding target": (["sliding window"], "Use DFLASH"),
    "other decode kernel": (["linear attention"], "--linear-attn-backend triton"),
    "other prefill kernel": (["linear attention"], "FlashInferGDNKernel"),
    "KDA": (["linear attention"], "KDAAttnBackend"),
    "a subclass of GDN": (["linear attention"], "AscendGDNAttnBackend"),
    "a hybrid without its backend": (["linear attention"], "Use DFLASH"),
    "Mamba2": (["linear attention"], "Mamba2AttnBackend"),
    "no room for trees": (["state pool"], "no room"),
    "another window": (["state pool"], "5 nodes, not 4"),
    "odd heads": (["state pool"], "heads of 96"),
    "fewer rows": (["state pool"], "room for 4 requests of 5"),
    "two conv states": (["state pool"], "2 convolution states"),
    "a wide convolution": (["convolution"], "a width of 5 is untested"),
    "unproven and wrong": (["state pool", "state precision"], "for 4 requests of 5"),
}
# Refused as well, but for the flag.
UNPROVEN = {
    "fp16 state": (["state precision"], "--mamba-ssm-dtype float32 or bfloat16"),
    "bf16 convolution": (["convolution"], "torch.bfloat16, a node's torch.float32"),
    "other kernel source": (["kernels"], "causal_conv1d_triton, fused_sigmoid_gating_recurrent differ"),
}
SOUND = ("none", "attention only", "bf16 state")


@pytest.fixture(scope="module")
def reports(ddtree_site, run_child) -> dict[str, list]:
    (report,) = run_child("tree_backend.py", ddtree_site, [{"guard": [*SOUND, *WRONG, *UNPROVEN]}])
    return report


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_target_starts(name, reports):
    assert reports[name] == [[], "starts", "starts"]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_never_starts(name, reports):
    findings, message = WRONG[name]
    found, without_flag, with_flag = reports[name]
    assert found == findings
    assert re.search(message, without_flag)
    assert with_flag == without_flag
    assert FLAG not in without_flag  # it would not help


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_unproven_starts_with_the_flag(name, reports):
    findings, message = UNPROVEN[name]
    found, without_flag, with_flag = reports[name]
    assert found == findings
    assert re.search(message, without_flag)
    assert FLAG in without_flag
    assert SHADOW in without_flag
    assert with_flag == "starts"


def test_a_kernel_edited_on_the_host_is_unproven(site_with, ddtree_files, wheel_site, run_child):
    path = "sglang/srt/layers/attention/mamba/causal_conv1d_triton.py"
    site = site_with({**ddtree_files, path: (wheel_site / path).read_bytes() + b"\n# edited\n"})
    (report,) = run_child("tree_backend.py", site, [{"guard": ["none"]}])
    found, without_flag, with_flag = report["none"]
    assert (found, with_flag) == (["kernels"], "starts")
    assert "causal_conv1d_triton differ" in without_flag


def test_the_worker_asks_the_guard_first(ddtree_site, run_child):
    """Before it loads a drafter; not in shadow mode, which verifies no tree."""
    (report,) = run_child("tree_backend.py", ddtree_site, ["constructor"])
    assert report == {"tree": ["check", "enforce False", "drafter", "warm up"], "shadow": ["drafter", "warm up"]}


def test_shadow_needs_no_flag(ddtree_site):
    flags = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "drafter", SHADOW]
    args = parse(load(ddtree_site), [*flags, "--linear-attn-backend", "flashinfer"])
    assert not args.speculative_ddtree_allow_hybrid_unsafe
