from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.oracle import oracle_candidates

RANKS = [0, 0, 1, 2]


def oracle(ids, requests, texts):
    return oracle_candidates(ids, [[-1.0] * len(row) for row in ids], requests, texts, RANKS)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 6))
def test_the_right_token_is_a_candidate_of_every_position_and_no_candidate_twice(topk, length, depth):
    text = list(range(1000, 1000 + length + depth))
    rows, scores = oracle([list(range(topk))] * depth, [text[:length]], [[7], text])
    for offset, (row, score) in enumerate(zip(rows, scores, strict=True)):
        right = row.index(text[length + offset])
        assert len(set(row)) == topk
        assert score == sorted(score, reverse=True)
        assert score[right] > -2
        assert all(value < -4 for value in score[right + 1 :])


def test_right_tokens_come_at_all_ranks():
    text = list(range(1000, 1040))
    rows, _ = oracle([[1, 2, 3]] * 15, [text[:5]], [text])
    assert {row.index(1005 + offset) for offset, row in enumerate(rows)} == {0, 1, 2}


def test_a_right_token_that_is_a_candidate_already_changes_places():
    ((row,), _) = oracle([[6, 7, 8]], [[5]], [[5, 6, 7]])
    assert sorted(row) == [6, 7, 8]


def test_requests_that_follow_no_text_keep_their_candidates():
    assert oracle([[1, 2]], [[9]], [[5, 6, 7]]) == ([[1, 2]], [[-1.0, -1.0]])
    assert oracle([[1, 2], [3, 4]], [[5, 6, 7]], [[5, 6, 7]]) == ([[1, 2], [3, 4]], [[-1.0, -1.0]] * 2)
