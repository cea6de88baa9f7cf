"""Statistics of paired samples: whether one is smaller (Wilcoxon), by how much (bootstrap), and what is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from embforge.tuner.measure.paired import Measurement, Ratio

Floats = NDArray[np.float64]

EXACT_BELOW = 50
"""Up to this number of pairs the signed-rank distribution is counted, not approximated."""


def wilcoxon(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """Wilcoxon's one-sided signed-rank test of pairs: the p-value of these samples if `a` were not less than `b`.

    Equal pairs are dropped; if no others are left, the result is 1. It is exact for up to `EXACT_BELOW` pairs whose
    differences are all different in size; otherwise it is the normal approximation with corrections for ties and
    continuity. `ValueError` if the samples are not pairs.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"wilcoxon compares pairs; got samples of shapes {first.shape} and {second.shape}")
    differences = first - second
    differences = differences[differences != 0]
    count = differences.size
    if count == 0:
        return 1.0
    ranks, ties = _ranks(np.abs(differences))
    above = float(ranks[differences > 0].sum())  # small if `a` is less
    if ties.size == 0 and count <= EXACT_BELOW:
        return _exact(count, round(above))
    return _approximate(count, above, ties)


def bootstrap_ratio(slower: Sequence[float] | Floats, faster: Sequence[float] | Floats) -> Ratio:
    """`slower` divided by `faster`, paired: the median with a 95 % bootstrap interval, the same for equal samples."""
    samples = {"slower": tuple(map(float, slower)), "faster": tuple(map(float, faster))}
    return Measurement(samples, {}).ratio("slower", "faster")


def noise_floor(best: Sequence[float] | Floats, duplicate: Sequence[float] | Floats) -> float:
    """The noise between two copies of one kernel, as a share: the end of their ratio's 95 % interval farther from 1."""
    ratio = bootstrap_ratio(duplicate, best)
    return max(ratio.high, 1 / ratio.low) - 1


def _ranks(sizes: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Ranks from 1, where equal numbers share their mean rank; and for each shared rank, how many share it."""
    _, place, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place], counts[counts > 1]


def _exact(count: int, statistic: int) -> float:
    """The probability that a random subset of the ranks 1..count has a sum of at most `statistic`."""
    ways = np.zeros(count * (count + 1) // 2 + 1)
    ways[0] = 1
    for rank in range(1, count + 1):  # each rank is in the set or not; halved at once, so that nothing overflows
        with_it = np.zeros_like(ways)
        with_it[rank:] = ways[:-rank]
        ways = (ways + with_it) / 2
    return float(min(1.0, ways[: statistic + 1].sum()))


def _approximate(count: int, statistic: float, ties: NDArray[np.int64]) -> float:
    mean = count * (count + 1) / 4
    variance = count * (count + 1) * (2 * count + 1) / 24 - float((ties**3 - ties).sum()) / 48
    return 0.5 * math.erfc(-(statistic + 0.5 - mean) / math.sqrt(2 * variance))
