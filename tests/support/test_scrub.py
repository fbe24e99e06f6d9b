"""Texts and data lose their secrets and names, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.support.scrub import HIDDEN, Scrubber
from tests.doctor.cases import recorded

CASES = json.loads((Path(__file__).parents[1] / "cases/support/scrub.json").read_text())


def scrubber() -> Scrubber:
    one = Scrubber(home="/srv/me")
    one.destination("jane@gpu7.lab.example:2222")
    one.name("container", "web1")
    return one


@pytest.mark.parametrize("case", CASES, ids=[case["text"][:40] for case in CASES])
def test_text(case):
    one = scrubber()
    assert one.text(case["text"]) == case["shown"]
    assert one.text(case["shown"]) == case["shown"]  # nothing more to take out


SECRETS = st.from_regex(r"[A-Za-z0-9_/+.~-]{6,30}", fullmatch=True).map("zQ7".__add__)
CONTEXTS = (
    "x --api-key {} --tp 8",
    "--admin-api-key={}",
    "{{'hf_token': '{}'}}",
    "MY_SECRET={} y",
    "https://u:{}@h/x",
    "-----BEGIN PRIVATE KEY-----\n{}",
    "password = {}",
    "Authorization: Bearer {}",
    "me@{}",
    "/home/{}",
)


@settings(max_examples=60, deadline=None)
@given(secret=SECRETS, context=st.sampled_from(CONTEXTS), before=st.text(max_size=8), after=st.text(max_size=8))
def test_a_secret_is_hidden_whatever_it_is(secret, context, before, after):
    if context.startswith(("me@", "/home/")):
        secret = re.sub(r"[^A-Za-z0-9]", "x", secret)
    text = f"{before}\n{context.format(secret)}\n{after}"
    assert secret not in scrubber().text(text)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    )
)
def test_any_data_keeps_its_shape(value):
    shown = scrubber().value(value)
    json.dumps(shown)
    if isinstance(value, dict | list):
        assert isinstance(shown, type(value))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (
            {"environment": {"FOO": "bar", "NCCL_DEBUG": "INFO", "SGLANG_TOKEN": "x"}},
            {"environment": {"FOO": HIDDEN, "NCCL_DEBUG": "INFO", "SGLANG_TOKEN": HIDDEN}},
        ),
        ({"argv": ["p", "--token", "a", "b", "--tp", "8"]}, {"argv": ["p", "--token", HIDDEN, HIDDEN, "--tp", "8"]}),
        (
            {"api_key": ["a", "b"], "max_tokens": 5, "mask_token_id": 7},
            {"api_key": HIDDEN, "max_tokens": 5, "mask_token_id": 7},
        ),
        ({"secrets": ["HF_TOKEN"], "secrets_file": "/etc/x"}, {"secrets": ["HF_TOKEN"], "secrets_file": "/etc/x"}),
        ({"reason": "because", "serial": "1650", "n": 1}, {"reason": HIDDEN, "serial": HIDDEN, "n": 1}),
        ({"reason": None}, {"reason": None}),
        (
            {"packages": {"installed": {"nvidia-cudnn-cu12": "9.10.2.21"}}},
            {"packages": {"installed": {"nvidia-cudnn-cu12": "9.10.2.21"}}},
        ),
        ({"/home/joe/x": {"bind": "10.0.0.1"}}, {"/home/user-2/x": {"bind": "address-1"}}),
        ({"gpu7": "gpu7"}, {"gpu7": "host-1"}),
    ],
)
def test_data(value, shown):
    assert scrubber().value(value) == shown


def test_the_doctors_facts_stay_as_they_are():
    """Packages, kernels, GPUs, units of a host that names nobody: nothing in them looks like a secret or a name."""
    facts = recorded("rtx-pro-6000")
    assert Scrubber().value(facts) == facts


@pytest.mark.parametrize(
    "text", ["-a " * 30_000, "a=" * 30_000, ":" * 60_000, "a@" * 30_000, "+" * 60_000, "Aa1-" * 15_000, "1." * 30_000]
)
def test_hostile_texts_end(text):
    """Long repetitions neither recurse nor take for ever."""
    assert scrubber().text(text)
