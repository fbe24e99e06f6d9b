import math
import random
from collections import Counter

import pytest

from tests.gpu.stats import chi_square, marginal, upper_gamma


# Closed forms: half an integer by erfc, an integer by the Poisson sum.
@pytest.mark.parametrize("at", [0.01, 0.5, 1.4, 1.6, 5.0, 30.0])
def test_upper_gamma_at_a_half(at):
    assert upper_gamma(0.5, at) == pytest.approx(math.erfc(math.sqrt(at)), rel=1e-10)


@pytest.mark.parametrize("shape", [1, 2, 7, 40])
@pytest.mark.parametrize("at", [0.3, 1.0, 6.9, 8.1, 60.0])
def test_upper_gamma_at_integers(shape, at):
    poisson = math.exp(-at) * math.fsum(at**k / math.factorial(k) for k in range(shape))
    assert upper_gamma(shape, at) == pytest.approx(poisson, rel=1e-10)


def test_chi_square_of_a_known_table():
    statistic, freedom, p_value = chi_square({"a": 30, "b": 70}, {"a": 50, "b": 50})
    assert statistic == pytest.approx(8.3333, abs=1e-4)
    assert (freedom, p_value) == (1, pytest.approx(0.003892, abs=1e-6))


def test_p_values_of_equal_distributions_are_spread_evenly():
    draw = random.Random(1)
    values = [
        chi_square(*(Counter(str(draw.randrange(9)) for _ in range(count)) for count in (400, 700)))[2]
        for _ in range(300)
    ]
    for share in (0.1, 0.5, 0.9):
        assert sum(value < share for value in values) / 300 == pytest.approx(share, abs=0.09)


def test_rare_categories_are_taken_as_one():
    rare = {str(number): 1 for number in range(500)}
    assert chi_square({"a": 500, **rare}, {"a": 500, **rare})[1:] == (1, 1.0)


def test_one_category_is_no_distribution():
    with pytest.raises(ValueError, match="one category"):
        chi_square({"a": 10}, {"a": 20})


def test_marginals_count_tokens_at_positions():
    counts = {"1,2,3": 4, "1,5,3": 1, "9,2,3": 2}
    assert marginal(counts, range(1, 2)) == {"2": 6, "5": 1}
    assert marginal(counts, range(2)) == {"1,2": 4, "1,5": 1, "9,2": 2}
