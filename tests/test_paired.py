"""Paired results: bounds against values worked out by hand, and against the binomial distribution itself."""

import math
from fractions import Fraction

import pytest

from epoch_moe.paired import binomial_tail, fewest_draws, paired_result, paired_text, upper_share


def at_most(count: int, draws: int, share: Fraction) -> Fraction:
    return sum(math.comb(draws, k) * share**k * (1 - share) ** (draws - k) for k in range(count + 1))


@pytest.mark.parametrize(("count", "draws"), [(0, 1), (0, 300), (1, 10), (3, 47), (9, 10)])
def test_at_the_bound_so_few_have_a_chance_of_five_percent(count: int, draws: int) -> None:
    share = Fraction(upper_share(count, draws))
    assert float(at_most(count, draws, share)) == pytest.approx(0.05, rel=1e-9)


def test_known_bounds() -> None:
    assert upper_share(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300))
    assert upper_share(7, 7) == 1.0 and upper_share(0, 0) == 1.0
    assert fewest_draws(0.01) == 299 and upper_share(0, 299) <= 0.01 < upper_share(0, 298)
    with pytest.raises(ValueError, match="count=3 of draws=2"):
        upper_share(3, 2)


def test_tails_are_those_of_exact_fractions() -> None:
    for count, draws, share in ((0, 5, 0.3), (3, 5, 0.25), (5, 5, 0.5), (6, 5, 0.5), (40, 100, 0.25)):
        exact = 1 - at_most(count - 1, draws, Fraction(share))
        assert binomial_tail(count, draws, share) == pytest.approx(float(exact), rel=1e-12, abs=1e-300)
    assert binomial_tail(1, 9, 0.0) == 0.0 and binomial_tail(9, 9, 1.0) == 1.0


def test_pairs_are_counted_problem_by_problem() -> None:
    dense, plan = ["a", "b", "c", "d", "e"], ["a", "x", "y", "z", "e"]
    right = [True, True, True, False, False], [True, False, True, True, False]
    result = paired_result(dense, plan, right)
    assert (result["problems"], result["changed"], result["only_dense"], result["only_plan"]) == (5, 3, 1, 1)
    assert result["changed_share"] == 0.6 and result["changed_bound"] == upper_share(3, 5)
    assert result["loss"] == 0.0 and result["loss_bound"] == upper_share(1, 5)
    assert result["loss_chance"] == pytest.approx(0.75)  # 1 of 2 or more by a fair coin
    assert "right only dense: 1, only with the plan: 1 of 5" in paired_text(result)
    unlabelled = paired_result(dense, plan, None)
    assert set(unlabelled) == {"problems", "changed", "changed_share", "changed_bound"}
    assert "right" not in paired_text(unlabelled)
