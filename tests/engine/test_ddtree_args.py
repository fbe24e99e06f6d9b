"""DDTREE's server arguments: the engine's own handlers in their own order, over a stub of the target's config."""

from __future__ import annotations

import argparse
import dataclasses
import logging

import pytest

from tests.engine import server_args
from tests.engine.server_args import load, model, parse
from tests.engine.standin import execute

pytestmark = pytest.mark.wheel

HYBRID = "Qwen3_5ForConditionalGeneration"
DDTREE = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "drafter"]
DDTREE_SHADOW = "--speculative-ddtree-shadow-linear"
NO_RADIX = ["--disable-radix-cache"]
EXTRA_BUFFER = ["--mamba-scheduler-strategy", "extra_buffer"]


@pytest.fixture(scope="module")
def site(ddtree_site):
    return ddtree_site


@pytest.fixture(scope="module")
def hopper(site):
    return load(site)


def ddtree(module, *flags: str, target=None):
    return parse(module, [*DDTREE, *flags], target)


def sizes(args) -> tuple:
    return (
        args.speculative_dflash_block_size,
        args.speculative_ddtree_budget,
        args.speculative_num_draft_tokens,
        args.speculative_ddtree_topk,
    )


@pytest.mark.parametrize(
    ("draft_block", "flags", "expected"),
    [
        (16, [], (16, 15, 16, 8)),
        (8, [], (8, 7, 8, 8)),
        (None, [], (16, 15, 16, 8)),
        (16, ["--speculative-dflash-block-size", "10"], (10, 9, 10, 8)),
        (16, ["--speculative-ddtree-budget", "31"], (16, 31, 32, 8)),
        (16, ["--speculative-ddtree-budget", "63", "--speculative-ddtree-topk", "32"], (16, 63, 64, 32)),
        (16, ["--speculative-ddtree-budget", "16", "--speculative-num-draft-tokens", "17"], (16, 16, 17, 8)),
        (16, ["--speculative-ddtree-shadow-linear", "--speculative-ddtree-budget", "31"], (16, 31, 16, 8)),
    ],
)
def test_sizes(site, draft_block, flags, expected):
    args = ddtree(load(site, draft_block=draft_block), *flags)
    assert sizes(args) == expected
    assert (args.speculative_eagle_topk, args.speculative_num_steps, args.disable_overlap_schedule) == (1, 1, True)


REFUSED = {
    "smaller than the chain": (["--speculative-ddtree-budget", "14"], "must be 15"),
    "larger than the kernels": (["--speculative-ddtree-budget", "64"], "to 63"),
    "no candidates": (["--speculative-ddtree-topk", "0"], "1 to 32"),
    "too many candidates": (["--speculative-ddtree-topk", "33"], "1 to 32"),
    "a block of one": (["--speculative-dflash-block-size", "1"], "2 to 64"),
    "another window": (["--speculative-num-draft-tokens", "16", "--speculative-ddtree-budget", "31"], "Leave it out"),
    "another block in shadow": (
        ["--speculative-num-draft-tokens", "32", "--speculative-ddtree-shadow-linear"],
        "the chain is served",
    ),
    "FA3": (["--attention-backend", "fa3"], "--attention-backend triton"),
    "FA3 for prefill": (
        ["--prefill-attention-backend", "fa3", "--decode-attention-backend", "triton"],
        "--attention-backend triton",
    ),
    "FA3 for decode": (
        ["--prefill-attention-backend", "triton", "--decode-attention-backend", "fa3"],
        "--attention-backend triton",
    ),
    "FA4": (["--attention-backend", "fa4"], "--attention-backend triton"),
    "FlashInfer": (["--attention-backend", "flashinfer"], "--attention-backend triton"),
    "pages": (["--page-size", "16"], "--page-size 1"),
    "FlashInfer delta net": (["--linear-attn-backend", "flashinfer"], "--linear-attn-backend triton"),
    "FlashInfer delta net in decode": (["--linear-attn-decode-backend", "flashinfer"], "decode-backend triton"),
    "CuTe delta net in decode": (["--linear-attn-decode-backend", "cutedsl"], "decode-backend triton"),
    "FlashInfer delta net in prefill": (["--linear-attn-prefill-backend", "flashinfer"], "prefill-backend triton"),
    "deterministic": (["--enable-deterministic-inference"], "without the seeds"),
    "reinforcement learning": (["--rl-on-policy-target", "fsdp"], "without the seeds"),
    "typical acceptance": (["--speculative-accept-threshold-single", "0.5"], "accept-threshold"),
    "two batches": (["--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
    "multiplexed": (["--enable-pdmux"], "--enable-pdmux"),
    # What DFLASH refuses.
    "data parallel attention": (["--enable-dp-attention"], "DDTREE speculative decoding does not support dp attention"),
    "pipeline": (["--pp-size", "2"], "DDTREE speculative decoding only supports pp_size == 1"),
    "a draft window below the block": (["--speculative-dflash-draft-window-size", "15"], "block_size=16"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED])
def test_refused(hopper, flags, message):
    with pytest.raises(ValueError, match=message):
        ddtree(hopper, *flags)


def test_no_drafter_is_refused(hopper):
    with pytest.raises(ValueError, match=r"DDTREE .* requires setting --speculative-draft-model-path"):
        parse(hopper, ["--speculative-algorithm", "DDTREE"])


def test_sliding_window_targets_are_refused(hopper):
    with pytest.raises(ValueError, match="sliding-window"):
        ddtree(hopper, target=model(swa=True))


def test_other_devices_are_refused(site):
    with pytest.raises(ValueError, match="NVIDIA"):
        ddtree(load(site, gpu="none"))


def test_every_fault_is_named_at_once(hopper):
    with pytest.raises(ValueError, match=r"(?s)--attention-backend triton.*--page-size 1"):
        ddtree(hopper, "--attention-backend", "fa3", "--page-size", "64")


def test_a_draft_window_is_compared_with_the_block(hopper):
    args = ddtree(hopper, "--speculative-ddtree-budget", "31", "--speculative-dflash-draft-window-size", "20")
    assert args.speculative_dflash_draft_window_size == 20


@pytest.mark.parametrize("gpu", ["hopper", "blackwell"])
@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", HYBRID])
def test_backends_left_out_are_a_trees(site, gpu, arch):
    """The GPU's own default would be chosen before the speculative handler runs, and would be refused by it."""
    module = load(site, gpu=gpu)
    args = ddtree(module, *NO_RADIX, target=model(arch))
    assert (args.get_attention_backends(), args.page_size) == (("triton", "triton"), 1)
    chain = parse(module, ["--speculative-algorithm", "DFLASH", *DDTREE[2:], *NO_RADIX], model(arch))
    if (gpu, arch) != ("blackwell", HYBRID):
        assert chain.get_attention_backends()[0] != "triton"


def test_the_drafter_keeps_its_backend(hopper):
    args = ddtree(hopper, "--speculative-draft-attention-backend", "fa3")
    assert args.speculative_draft_attention_backend == "fa3"


def test_running_requests_are_as_many_as_dflash_s(hopper):
    for target in (model(), model(HYBRID)):
        assert ddtree(hopper, *NO_RADIX, target=target).max_running_requests == 48
        assert ddtree(hopper, *NO_RADIX, "--max-running-requests", "3", target=target).max_running_requests == 3


def test_track_interval_covers_the_window(hopper):
    flags = [*EXTRA_BUFFER, "--mamba-track-interval", "16"]
    assert ddtree(hopper, *flags, target=model(HYBRID)).speculative_num_draft_tokens == 16
    # The Mamba handler comes first, and by then knows the window.
    with pytest.raises(AssertionError, match=r"mamba_track_interval 16 .* speculative_num_draft_tokens 17"):
        ddtree(hopper, *flags, "--speculative-ddtree-budget", "16", target=model(HYBRID))
    # For a target that this handler does not know, the late check says it.
    with pytest.raises(ValueError, match="--mamba-track-interval 16 is shorter"):
        ddtree(hopper, *flags, "--speculative-ddtree-budget", "16")


def test_shadow_serves_what_dflash_serves(hopper):
    """No tree is verified: what only a tree rules out is left as it is for DFLASH, and so is every default."""
    dflash = ["--speculative-algorithm", "DFLASH", *DDTREE[2:]]
    for flags in ([], ["--attention-backend", "fa3", "--page-size", "16"], ["--linear-attn-backend", "flashinfer"]):
        for target in (None, model(HYBRID)):
            shadow = vars(ddtree(hopper, DDTREE_SHADOW, *NO_RADIX, *flags, target=target))
            chain = vars(parse(hopper, [*dflash, *NO_RADIX, *flags], target))
            differ = {name for name in chain if shadow[name] != chain[name]} - {"random_seed"}
            assert differ == {
                "speculative_algorithm",
                "speculative_dflash_block_size",
                "speculative_ddtree_budget",
                "speculative_ddtree_topk",
                "speculative_ddtree_spine",
                "speculative_ddtree_shadow_linear",
            }


def test_flags_without_the_algorithm_are_named(hopper, caplog):
    with caplog.at_level(logging.WARNING):
        parse(hopper, ["--speculative-ddtree-budget", "31", DDTREE_SHADOW])
    assert "--speculative-ddtree-budget, --speculative-ddtree-shadow-linear" in caplog.text


def test_command_line_round_trip(hopper):
    given = {
        "speculative_ddtree_budget": 20,
        "speculative_ddtree_topk": 4,
        "speculative_ddtree_spine": True,
        "speculative_ddtree_allow_hybrid_unsafe": True,
    }
    flags = ["--speculative-ddtree-budget", "20", "--speculative-ddtree-topk", "4", "--speculative-ddtree-spine"]
    args = ddtree(hopper, *flags, "--speculative-ddtree-allow-hybrid-unsafe")
    assert {name: getattr(args, name) for name in given} == given
    assert ddtree(hopper, "--no-speculative-ddtree-spine").speculative_ddtree_spine is False


def test_accept_rate_is_of_the_depth(hopper):
    assert ddtree(hopper, "--speculative-ddtree-budget", "31").max_accepted_drafts() == 15
    assert parse(hopper, ["--speculative-algorithm", "DFLASH", *DDTREE[2:]]).max_accepted_drafts() == 15
    ngram = parse(hopper, [])
    ngram.speculative_num_draft_tokens = 12
    assert ngram.max_accepted_drafts() == 11


DFLASH_FLAGS = [
    [],
    ["--speculative-dflash-block-size", "8"],
    ["--speculative-num-draft-tokens", "8"],
    ["--speculative-num-draft-tokens", "8", "--speculative-dflash-block-size", "9"],
    ["--speculative-dflash-block-size", "0"],
    ["--speculative-dflash-draft-window-size", "12"],
    ["--speculative-dflash-draft-window-size", "64"],
    ["--speculative-eagle-topk", "4", "--speculative-num-steps", "3"],
    ["--attention-backend", "flashinfer", "--page-size", "16", "--enable-mixed-chunk"],
    ["--pp-size", "2"],
    ["--enable-dp-attention"],
]


@pytest.mark.parametrize("flags", DFLASH_FLAGS, ids=" ".join)
@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", HYBRID])
def test_dflash_is_what_it_was(site, wheel_site, flags, arch):
    def outcome(module):
        try:
            args = parse(module, ["--speculative-algorithm", "DFLASH", *DDTREE[2:], *NO_RADIX, *flags], model(arch))
        except ValueError as error:
            return str(error)
        return {name: value for name, value in vars(args).items() if "ddtree" not in name and name != "random_seed"}

    assert outcome(load(site)) == outcome(load(wheel_site))


def test_other_algorithms_choices_are_kept(hopper):
    parser = argparse.ArgumentParser()
    hopper.ServerArgs.add_cli_args(parser)
    (algorithm,) = [action for action in parser._actions if action.dest == "speculative_algorithm"]
    assert set(algorithm.choices) == {"DFLASH", "DDTREE", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"}


# -- the algorithm itself -----------------------------------------------------------------------------


def spec_info(site):
    return execute(
        site / "sglang/srt/speculative/spec_info.py",
        {
            "sglang.srt.speculative.ddtree_worker": {"DDTreeWorker": "tree worker"},
            "sglang.srt.speculative.dflash_worker": {"DFlashWorker": "chain worker"},
        },
    )


def test_ddtree_is_a_kind_of_dflash(site, wheel_site):
    algorithm = spec_info(site).SpeculativeAlgorithm
    tree = algorithm.from_string("ddtree")
    assert tree is algorithm.DDTREE
    assert (tree.is_dflash(), tree.is_ddtree(), tree.is_eagle(), tree.supports_spec_v2()) == (True, True, False, False)
    assert (algorithm.DFLASH.is_dflash(), algorithm.DFLASH.is_ddtree()) == (True, False)
    stock = spec_info(wheel_site).SpeculativeAlgorithm
    assert {item.name: item.value for item in stock}.items() < {item.name: item.value for item in algorithm}.items()
    for item in stock:
        assert algorithm[item.name].is_dflash() == item.is_dflash()


def test_workers(site):
    algorithm = spec_info(site).SpeculativeAlgorithm
    args = argparse.Namespace(disable_overlap_schedule=True)
    assert algorithm.DDTREE.create_worker(args) == "tree worker"
    assert algorithm.DFLASH.create_worker(args) == "chain worker"
    args.disable_overlap_schedule = False
    for item in (algorithm.DDTREE, algorithm.DFLASH):
        with pytest.raises(ValueError, match=f"{item.name} does not support overlap"):
            item.create_worker(args)


def test_limits_are_the_kernels(site):
    args = execute(site / server_args.DDTREE_ARGS, {})
    kernels = execute(site / "sglang/srt/speculative/ddtree_kernels.py", {})
    assert (args.MAX_WINDOW, args.MAX_TOPK) == (kernels.MAX_WINDOW, kernels.MAX_TOPK)


# -- order: each of these edits re-opens a trap -----------------------------------------------------------


def edited(site_with, ddtree_files, path: str, old: str, new: str):
    source = ddtree_files[path].decode()
    assert source.count(old) == 1
    return load(site_with({**ddtree_files, path: source.replace(old, new).encode()}))


def test_resolving_late_is_noticed(site_with, ddtree_files):
    module = edited(
        site_with,
        ddtree_files,
        server_args.ENGINE_ARGS,
        "        resolve_ddtree_args(self)\n",
        "",
    )
    late = module.ServerArgs._handle_speculative_decoding

    def handle(self):
        module.resolve_ddtree_args(self)
        late(self)

    module.ServerArgs._handle_speculative_decoding = handle
    with pytest.raises(ValueError, match="--attention-backend triton"):
        ddtree(module, *NO_RADIX)


def test_fields_are_the_flags(hopper):
    fields = {field.name for field in dataclasses.fields(hopper.ServerArgs) if "ddtree" in field.name}
    parser = argparse.ArgumentParser()
    hopper.ServerArgs.add_cli_args(parser)
    assert fields == {action.dest for action in parser._actions if "ddtree" in action.dest}
