import pytest

from tests.gpu.compare import NEAR_TIE, differences, gap_key, verdict

PROMPTS = [[1, 2], [3], [4]]


def test_the_first_difference_of_every_prompt_with_all_that_came_before():
    found = differences(PROMPTS, [[5, 6, 7], [5, 6, 7], [8, 9]], [[5, 9, 0], [5, 6, 7], [8, 9, 1]])
    assert [(d.prompt, d.position, d.tokens, d.before) for d in found] == [(0, 1, (6, 9), (1, 2, 5))]


def test_outputs_of_other_prompts_are_no_comparison():
    with pytest.raises(ValueError, match="shorter"):
        differences(PROMPTS, [[1]], [[1]])


def test_near_ties_are_told_from_the_rest():
    found = differences(PROMPTS, [[5], [5], [5]], [[6], [6], [6]])
    answers = {
        found[0].key: [[-1.0, 5], [-1.0 - NEAR_TIE / 2, 6]],
        found[1].key: [[-1.0, 6], [-1.0 - NEAR_TIE, 5]],
    }
    assert verdict(found, answers) == {"differ": 3, "broken": [[1, 0]], "unknown": 1, "largest": NEAR_TIE}


def test_a_token_that_was_not_among_the_likeliest_breaks_the_rule():
    found = differences([[1]], [[5]], [[6]])
    assert verdict(found, {found[0].key: [[-1.0, 5], [-1.01, 7]]})["broken"] == [[0, 0]]


def test_both_tokens_must_be_near_the_likeliest_not_only_each_other():
    found = differences([[1]], [[5]], [[6]])
    assert verdict(found, {found[0].key: [[-0.1, 9], [-3.0, 5], [-3.0, 6]]})["broken"] == [[0, 0]]


def test_a_sequence_is_another_to_another_target():
    assert gap_key([1, 23], "target") != gap_key([1, 23], "attention")
    assert gap_key([1, 23], "target") != gap_key([12, 3], "target")
