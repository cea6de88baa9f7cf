"""The tuner's statistics, against counting everything out and against known truth."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embforge.tuner.measure import stats


def by_enumeration(differences: np.ndarray) -> float:
    """Every assignment of signs is as likely as any other: count those at least as extreme."""
    differences = differences[differences != 0]
    sizes = np.abs(differences)
    ranks = np.array([np.mean(np.flatnonzero(np.sort(sizes) == s)) + 1 for s in sizes])
    observed = ranks[differences > 0].sum()
    sums = np.array([ranks[np.array(signs)].sum() for signs in product([False, True], repeat=len(ranks))])
    return float(np.mean(sums <= observed + 1e-9))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1000, 1000).filter(bool), min_size=1, max_size=10, unique_by=abs))
def test_exact_wilcoxon_is_what_counting_all_signs_gives(differences: list[int]) -> None:
    values = np.array(differences, float)
    got = stats.wilcoxon(values + 5, np.full(values.size, 5.0))
    assert got == pytest.approx(by_enumeration(values), abs=1e-12)


def test_wilcoxon_gives_the_published_p_value_of_darwins_plants() -> None:
    """The example of scipy.stats.wilcoxon's documentation, and the chance that is published there."""
    differences = np.array([6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75.0])
    assert stats.wilcoxon(np.zeros(15), differences) == pytest.approx(0.0206298828125, abs=1e-12)
    assert stats.wilcoxon(differences, np.zeros(15)) == pytest.approx(1 - 0.0206298828125, abs=5e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_approximate_wilcoxon_is_close_to_counting_with_ties(sign: int) -> None:
    differences = sign * np.array([-3, -3, -2, 1, 1, -4, -5, 2, -6, -6, -7, 3, -8, -1.0])
    assert stats.wilcoxon(differences, np.zeros(14)) == pytest.approx(by_enumeration(differences), abs=0.01)


def test_the_approximation_meets_the_exact_chance_where_they_change_over() -> None:
    rng = np.random.default_rng(3)
    sample = rng.normal(0.3, 1, stats.EXACT_BELOW)
    exact = stats.wilcoxon(sample, np.zeros(sample.size))
    ranks = np.argsort(np.argsort(np.abs(sample))) + 1
    statistic = float(ranks[sample > 0].sum())
    assert stats._approximate(sample.size, statistic, np.empty(0, np.int64)) == pytest.approx(exact, abs=0.002)


def test_equal_pairs_are_no_evidence() -> None:
    assert stats.wilcoxon([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert stats.wilcoxon([1, 2, 3, 9], [2, 4, 6, 9]) == pytest.approx(1 / 8)


def test_samples_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        stats.wilcoxon([1, 2], [1, 2, 3])


def test_false_alarms_are_as_rare_as_p_says() -> None:
    rng = np.random.default_rng(0)
    alarms = [stats.wilcoxon(rng.normal(size=20), rng.normal(size=20)) < 0.05 for _ in range(600)]
    assert 0.02 <= np.mean(alarms) <= 0.08


def test_bootstrap_interval_holds_the_true_ratio() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        ratio = stats.bootstrap_ratio(1.1 * rng.lognormal(0, 0.02, 40), rng.lognormal(0, 0.02, 40))
        held += ratio.low <= 1.1 <= ratio.high
    assert held >= 88


def test_noise_floor_grows_with_the_noise_and_is_zero_without() -> None:
    rng = np.random.default_rng(2)
    calm, wild = (stats.noise_floor(rng.lognormal(0, s, 40), rng.lognormal(0, s, 40)) for s in (0.002, 0.05))
    assert 0 < calm < 0.005 < wild < 0.1
    assert stats.noise_floor([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0
