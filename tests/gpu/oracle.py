"""Candidates known to be right, hidden among a drafter's."""

from __future__ import annotations

import math
from collections.abc import Sequence


def oracle_candidates(
    ids: Sequence[Sequence[int]],
    logp: Sequence[Sequence[float]],
    requests: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    ranks: Sequence[int],
) -> tuple[list[list[int]], list[list[float]]]:
    """The candidates and their log-probabilities, with each row's right token at a rank that its position decides.

    `ids` and `logp`: as many rows for each request. `requests`: tokens so far; the right tokens are what follows in
    the first text that begins with them. What is ranked before the right token is almost as likely, all else
    unlikely: trees branch there, and the right path is one of several. Rows without a right token stay.
    """
    rows, scores = [list(row) for row in ids], [list(row) for row in logp]
    depth = len(rows) // len(requests)
    for number, tokens in enumerate(requests):
        text = next((text for text in texts if list(text[: len(tokens)]) == list(tokens)), None)
        if text is None:
            continue
        for offset, right in enumerate(text[len(tokens) : len(tokens) + depth]):
            row = rows[number * depth + offset]
            rank = min(ranks[(7 * (len(tokens) + offset)) % len(ranks)], len(row) - 1)
            at = row.index(right) if right in row else rank
            row[at], row[rank] = row[rank], right
            scores[number * depth + offset] = [
                -math.log(rank + 1) - 0.05 - 0.001 * place if place <= rank else -5.0 - 0.1 * place
                for place in range(len(row))
            ]
    return rows, scores
