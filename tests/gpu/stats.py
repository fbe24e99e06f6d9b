"""The few statistics that the report needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

RARE = 10


def chi_square(one: Mapping[str, int], other: Mapping[str, int]) -> tuple[float, int, float]:
    """Whether two samples of categories are from one distribution: statistic, degrees of freedom, p-value.

    Categories seen fewer than `RARE` times in both samples together are taken as one. Raises ValueError if
    fewer than two categories remain.
    """
    together = Counter(one) + Counter(other)
    cells: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for name, count in together.items():
        bucket = name if count >= RARE else ""
        cells[bucket] += one.get(name, 0)
        rows[bucket] += count
    if len(rows) < 2:
        raise ValueError("a distribution over one category cannot be compared")
    share = sum(one.values()) / sum(together.values())
    statistic = sum((cells[name] - share * count) ** 2 / (share * (1 - share) * count) for name, count in rows.items())
    freedom = len(rows) - 1
    return statistic, freedom, upper_gamma(freedom / 2, statistic / 2)


def upper_gamma(shape: float, at: float) -> float:
    """The regularised upper incomplete gamma function, by its series or its continued fraction."""
    if at <= 0:
        return 1.0
    scale = math.exp(shape * math.log(at) - at - math.lgamma(shape))
    if at < shape + 1:
        term = total = 1 / shape
        for step in range(1, 10000):
            term *= at / (shape + step)
            total += term
            if term < total * 1e-15:
                break
        return 1 - scale * total
    tiny = 1e-300
    below = at + 1 - shape
    above, ratio = 1 / tiny, 1 / below
    fraction = ratio
    for step in range(1, 10000):
        factor = -step * (step - shape)
        below += 2
        ratio = 1 / (factor * ratio + below or tiny)
        above = below + factor / above or tiny
        fraction *= above * ratio
        if abs(above * ratio - 1) < 1e-15:
            break
    return scale * fraction


def marginal(counts: Mapping[str, int], positions: range) -> Counter[str]:
    """Frequencies of the tokens at some positions, of frequencies of whole outputs."""
    found: Counter[str] = Counter()
    for output, count in counts.items():
        found[",".join(output.split(",")[positions.start : positions.stop])] += count
    return found
