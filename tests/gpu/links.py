"""What is done to trees on purpose: siblings linked in the order that leaks state, and candidates known to be right."""

from __future__ import annotations

from collections.abc import Sequence

# Of ten positions, how many have the right token at the first rank, at the second, ...
_RANKS = (0, 0, 0, 0, 0, 1, 1, 1, 2, 2)


def reversed_links(next_token: Sequence[int], next_sibling: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same tree, every parent's children linked from the last to the first. -1: none."""
    first, after = list(next_token), [-1] * len(next_sibling)
    for parent, child in enumerate(next_token):
        previous = -1
        while child != -1:
            after[child], previous, child = previous, child, next_sibling[child]  # noqa: PLW2901
        first[parent] = previous
    return first, after


def oracle_scores(topk: int) -> list[float]:
    """Log-probabilities by rank, falling slowly enough for trees to branch."""
    return [-0.6 - 0.7 * rank for rank in range(topk)]


def oracle_candidates(
    candidates: Sequence[Sequence[int]], requests: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], depth: int
) -> list[list[int]]:
    """The candidates, `depth` rows a request, with each row's right token at a rank that its position decides.

    `requests`: tokens so far; the right tokens are what follows in the text that begins with them. A request that
    no text begins with keeps its candidates.
    """
    rows = [list(row) for row in candidates]
    for number, tokens in enumerate(requests):
        text = next((text for text in texts if list(text[: len(tokens)]) == list(tokens)), None)
        if text is None:
            continue
        for offset, right in enumerate(text[len(tokens) : len(tokens) + depth]):
            row = rows[number * depth + offset]
            rank = min(_RANKS[(7 * (len(tokens) + offset)) % len(_RANKS)], len(row) - 1)
            at = row.index(right) if right in row else rank
            row[at], row[rank] = row[rank], right
    return rows
