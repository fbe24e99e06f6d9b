"""Reading a service's table: each case of refused-services.toml is a table and what must be said about it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch import flags
from ddtree_deploy.launch.service import _READERS, Service
from tests.launch import examples

CASES = Path(__file__).parent.parent / "cases" / "launch"
REFUSED = tomllib.loads((CASES / "refused-services.toml").read_text(encoding="utf-8"))["case"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["why"])
def test_refused(case: dict) -> None:
    with pytest.raises(DeployError) as caught:
        Service.from_table("s", case["table"])
    error = caught.value
    assert error.code == "DD004"
    problems = list(error.details) or [error.message]
    assert len(problems) == len(case["says"]), problems
    for problem, texts in zip(problems, case["says"], strict=True):
        for text in texts:
            assert text in problem
    assert error.message.startswith(problems[0])
    for text in case.get("hides", []):
        assert text not in "\n".join([error.message, error.hint or "", *problems])
        assert text not in repr(error)
    assert all(problem.isprintable() for problem in problems)


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "a b", "a\nb", "ü", "x" * 65])
def test_names_become_file_names(name: str) -> None:
    with pytest.raises(DeployError) as caught:
        Service.from_table(name, {"model": "/m"})
    assert "name" in caught.value.message


def test_only_the_model_is_needed() -> None:
    service = Service.from_table("s", {"model": "org/model"})
    assert (service.model, service.tp, service.running_requests) == ("org/model", 1, 16)
    assert not service.speculative


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"algorithm": "DDTREE", "budget": 22}, 23),
        ({"algorithm": "DDTREE", "budget": 22, "shadow_linear": True}, 16),
        ({"algorithm": "DFLASH", "block_size": 8, "budget": 22}, 8),
        ({"algorithm": "DFLASH"}, 16),
    ],
)
def test_tokens_of_one_verify(changes: dict, tokens: int) -> None:
    assert Service.from_table("s", {"model": "/m", "drafter": "/d", **changes}).verify_tokens == tokens


def test_words_that_only_look_like_secrets() -> None:
    environment = {"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1", "https_proxy": "http://proxy.example:3128"}
    assert Service.from_table("s", {"model": "/m", "environment": environment}).environment == environment


def test_integers_become_text_in_the_environment() -> None:
    service = Service.from_table("s", {"model": "/m", "environment": {"OMP_NUM_THREADS": 4}})
    assert service.environment == {"OMP_NUM_THREADS": "4"}


def test_the_example_reads() -> None:
    assert list(examples.services()) == ["qwen-ddtree", "qwen-dflash"]


@pytest.mark.parametrize("key", sorted(set(flags._FLAGS) - set(flags.SCHEDULED)))
def test_every_flag_has_a_key(key: str) -> None:
    assert key in _READERS


toml_values = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(sorted(_READERS)), st.text(max_size=8)), toml_values, max_size=6))
def test_any_table_is_read_or_refused_by_name(table: dict) -> None:
    try:
        Service.from_table("s", table)
    except DeployError as error:
        assert error.code == "DD004"
        for line in error.details or [error.message]:
            assert line.startswith("services.s.")
            assert line.isprintable()
