"""Laws by which the ids and bag lengths of one feature are drawn, from a numpy generator alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ZIPF_HEAD = 2**16
"""Ranks whose probability is summed exactly; after them a sum of k^-S and its integral differ by less than 1e-10."""

Rng = np.random.Generator
Ints = NDArray[np.int64]


class IdLaw(Protocol):
    """How the ids of one feature are drawn."""

    def draw(self, rng: Rng, count: int, rows: int) -> Ints: ...


class LengthLaw(Protocol):
    """How many ids a bag holds."""

    def draw(self, rng: Rng, count: int) -> Ints: ...


@dataclass(frozen=True)
class Uniform:
    """Every row is as likely as any other."""

    def __str__(self) -> str:
        return "uniform"

    def draw(self, rng: Rng, count: int, rows: int) -> Ints:
        return rng.integers(0, rows, count, dtype=np.int64)


@dataclass(frozen=True)
class Zipf:
    """The k-th most frequent row is drawn with a probability proportional to k^-exponent."""

    exponent: float

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}"

    def draw(self, rng: Rng, count: int, rows: int) -> Ints:
        return spread(self._ranks(rng, count, rows), rows)

    def _ranks(self, rng: Rng, count: int, rows: int) -> Ints:
        """Ranks from 0 by inversion of the distribution: exact sums for the head, the integral of x^-S for the tail."""
        s, head = self.exponent, min(rows, ZIPF_HEAD)
        cumulative = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -s)
        tail = _power_integral(head + 0.5, rows + 0.5, s)
        drawn = rng.random(count) * (cumulative[-1] + tail)
        ranks: Ints = np.searchsorted(cumulative, drawn, side="right").astype(np.int64)
        past = ranks >= head
        beyond = _power_integral_inverse(head + 0.5, drawn[past] - cumulative[-1], s)
        ranks[past] = np.clip(np.floor(beyond + 0.5).astype(np.int64) - 1, head - 1, rows - 1)
        return ranks


@dataclass(frozen=True)
class Fixed:
    """Every bag holds `length` ids."""

    length: int

    def __str__(self) -> str:
        return f"fixed:{self.length}"

    def draw(self, rng: Rng, count: int) -> Ints:
        return np.full(count, self.length, dtype=np.int64)


@dataclass(frozen=True)
class Geometric:
    """Bag lengths from 0 on with a geometric distribution of this mean; empty bags occur."""

    mean: float

    def __str__(self) -> str:
        return f"geo:{self.mean:g}"

    def draw(self, rng: Rng, count: int) -> Ints:
        return rng.geometric(1.0 / (self.mean + 1.0), count) - 1


@dataclass(frozen=True)
class Skew:
    """A `share` of the bags has `long` ids, the others have `short` ids."""

    short: int
    long: int
    share: float

    def __str__(self) -> str:
        return f"skew:{self.short}:{self.long}:{self.share:g}"

    def draw(self, rng: Rng, count: int) -> Ints:
        return np.where(rng.random(count) < self.share, self.long, self.short).astype(np.int64)


def spread(ranks: Ints, rows: int) -> Ints:
    """The rows of ranks, by a bijection that puts neighbouring ranks far apart, so that hot rows do not share pages."""
    # Golden-section steps; the factor is small enough that rank * factor fits 63 bits for the largest tables.
    factor = max(1, min(int(rows * 0.6180339887), (2**63 - 1) // rows - 1))
    while math.gcd(factor, rows) != 1:
        factor -= 1
    rows_of: Ints = (ranks * factor + rows // 3) % rows
    return rows_of


def _power_integral(low: float, high: float, s: float) -> float:
    """The integral of x^-s from low to high."""
    if s == 1.0:
        return math.log(high / low)
    return float((high ** (1.0 - s) - low ** (1.0 - s)) / (1.0 - s))


def _power_integral_inverse(low: float, area: NDArray[np.float64], s: float) -> NDArray[np.float64]:
    """The x at which the integral of x^-s from low reaches area."""
    if s == 1.0:
        reached: NDArray[np.float64] = low * np.exp(area)
        return reached
    base = np.maximum(low ** (1.0 - s) + area * (1.0 - s), np.finfo(np.float64).tiny)
    reached = base ** (1.0 / (1.0 - s))
    return reached
