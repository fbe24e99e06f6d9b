"""Outputs that ought to be equal: where they first differ, and whether rounding explains it.

In bf16 the engine's own batch sizes and kernels disagree wherever two tokens are about equally likely, and
from there on the texts have nothing to do with each other. So only the first difference counts, and it has
to be at a near-tie: both tokens within `NEAR_TIE` of the likeliest, by the engine without speculation fed
with the text before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# In nats. Logits of 8 to 16 are multiples of 0.0625 in bf16: four of these.
NEAR_TIE = 0.25

Answers = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Difference:
    """The first position at which two outputs of a prompt differ, the tokens there and all tokens before."""

    prompt: int
    position: int
    tokens: tuple[int, int]
    before: tuple[int, ...]
    target: str

    @property
    def key(self) -> str:
        """What the answer of `target`'s engine for `before` is kept under."""
        return gap_key(self.before, self.target)

    def shortfall(self, answers: Answers) -> float | None:
        """How much less likely than the likeliest token the worse of the two is, in nats.

        Infinite if it is not among the tokens of the answer; None if there is no answer.
        """
        if self.key not in answers:
            return None
        answer = answers[self.key]
        by_token = {int(token): logprob for logprob, token in answer}
        best = max(logprob for logprob, _ in answer)
        return max(best - by_token.get(token, float("-inf")) for token in self.tokens)


def gap_key(tokens: Sequence[int], target: str) -> str:
    """A name for a token sequence as a target's input."""
    return hashlib.sha256(",".join([target, *map(str, tokens)]).encode()).hexdigest()[:16]


def differences(
    prompts: Sequence[Sequence[int]],
    one: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    target: str = "target",
) -> list[Difference]:
    """The first difference of every prompt that has one; where one output is shorter, up to its end.

    Raises ValueError if the outputs are not those of the same prompts.
    """
    found = []
    for number, (prompt, left, right) in enumerate(zip(prompts, one, other, strict=True)):
        for position, tokens in enumerate(zip(left, right, strict=False)):
            if tokens[0] != tokens[1]:
                found.append(Difference(number, position, tokens, (*prompt, *left[:position]), target))
                break
    return found


def verdict(found: Sequence[Difference], answers: Answers) -> dict[str, Any]:
    """Counts for a report: prompts that differ, those that no near-tie explains, the largest shortfall."""
    shortfalls = [difference.shortfall(answers) for difference in found]
    known = [shortfall for shortfall in shortfalls if shortfall is not None]
    return {
        "differ": len(found),
        "broken": [
            [difference.prompt, difference.position]
            for difference, shortfall in zip(found, shortfalls, strict=True)
            if shortfall is not None and shortfall >= NEAR_TIE
        ],
        "unknown": len(found) - len(known),
        "largest": round(min(max(known), 99.0), 4) if known else 0.0,
    }
