"""What a lookup is asked to do, in one string: `zipf:1.05,len=geo:20,batch=2048`.

    ids    uniform | zipf:S              how often a row is asked for; zipf's hot rows are spread over the table
    len    fixed:L | geo:MEAN | skew:SHORT:LONG:SHARE      ids a bag; without it each feature's hotness, else 1
    batch  samples

Batches are made by numpy from a seed alone: the same string, spec and seed give the same bits everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.errors import EmbforgeError
from embforge.codegen.spec import CollectionSpec, FeatureSpec

GRAMMAR = (
    "[uniform|zipf:S][,len=fixed:L|geo:MEAN|skew:SHORT:LONG:SHARE][,batch=N], e.g. zipf:1.05,len=geo:20,batch=2048"
)
MAX_BATCH = 2**31
ZIPF_HEAD = 2**16
"""Ranks whose probability is summed exactly; past them a sum of k^-S and its integral differ by less than 1e-10."""

Rng = np.random.Generator
Ints = NDArray[np.int64]


class WorkloadError(EmbforgeError, ValueError):
    """A workload string that cannot be read: names the part, what is allowed, and an example."""


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
    """The k-th most wanted row is asked for in proportion to k^-exponent."""

    exponent: float

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}"

    def draw(self, rng: Rng, count: int, rows: int) -> Ints:
        return _spread(self._ranks(rng, count, rows), rows)

    def _ranks(self, rng: Rng, count: int, rows: int) -> Ints:
        """Ranks from 0 by inversion: exact sums for the head, the integral of x^-S for the tail."""
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
    """Lengths from 0 that fall off geometrically around a mean; empty bags occur."""

    mean: float

    def __str__(self) -> str:
        return f"geo:{self.mean:g}"

    def draw(self, rng: Rng, count: int) -> Ints:
        return rng.geometric(1.0 / (self.mean + 1.0), count) - 1


@dataclass(frozen=True)
class Skew:
    """Bags of `short` ids, and a `share` of them with `long` ids instead."""

    short: int
    long: int
    share: float

    def __str__(self) -> str:
        return f"skew:{self.short}:{self.long}:{self.share:g}"

    def draw(self, rng: Rng, count: int) -> Ints:
        return np.where(rng.random(count) < self.share, self.long, self.short).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """One kind of batch. `str()` gives the text that `parse` reads back to an equal workload."""

    ids: IdLaw = Uniform()
    lengths: LengthLaw | None = None
    """None: each feature's hotness, or one id a bag."""
    batch: int = 2048

    def __str__(self) -> str:
        length = f",len={self.lengths}" if self.lengths is not None else ""
        return f"{self.ids}{length},batch={self.batch}"


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of one lookup: ids of all bags, feature-major bag borders, weights if any feature is weighted."""

    size: int
    values: NDArray[Any]
    offsets: NDArray[Any]
    weights: NDArray[np.float32] | None

    def feature(self, index: int) -> slice:
        """Where the ids of one feature stand in `values`."""
        return slice(int(self.offsets[index * self.size]), int(self.offsets[(index + 1) * self.size]))


def parse(text: str) -> Workload:
    """The workload of a string; `WorkloadError` says which part is wrong and what is allowed."""
    parts: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.rpartition("=")
        key = key.strip() or "ids"
        if key not in ("ids", "len", "batch"):
            raise WorkloadError(f"workload {text!r}: unknown key {key!r}; allowed: ids, len, batch; form: {GRAMMAR}")
        if key in parts:
            raise WorkloadError(f"workload {text!r}: {key} is given twice ({parts[key]!r}, {value!r}); form: {GRAMMAR}")
        parts[key] = value.strip()
    reader = _Reader(text)
    return Workload(
        ids=reader.ids(parts["ids"]) if "ids" in parts else Uniform(),
        lengths=reader.lengths(parts["len"]) if "len" in parts else None,
        batch=reader.whole("batch", parts["batch"], 0, MAX_BATCH) if "batch" in parts else Workload.batch,
    )


def make_batch(spec: CollectionSpec, workload: Workload, seed: int = 0, id_dtype: str = "int64") -> Batch:
    """One batch of the workload for a spec. Seeds 0, 1, 2, ... give independent batches.

    A `concat` feature's bags never exceed its hotness. `weights` (one an id, in [0.5, 1.5)) exist if any feature
    is weighted.
    """
    rng = np.random.default_rng([0xE3BF0, seed])
    lengths, values = [], []
    for feature in spec.features:
        drawn = _lengths(rng, workload, feature)
        lengths.append(drawn)
        values.append(workload.ids.draw(rng, int(drawn.sum()), spec.table(feature.table).num_embeddings))
    flat = np.concatenate(values)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    weighted = any(f.weighted for f in spec.features)
    weights = (rng.random(flat.size, dtype=np.float32) + np.float32(0.5)) if weighted else None
    return Batch(workload.batch, flat.astype(id_dtype), offsets.astype(id_dtype), weights)


def _lengths(rng: Rng, workload: Workload, feature: FeatureSpec) -> Ints:
    law = workload.lengths or Fixed(feature.hotness or 1)
    drawn = law.draw(rng, workload.batch)
    if feature.pooling == "concat" and feature.hotness is not None:
        drawn = np.minimum(drawn, feature.hotness)
    return drawn


def _spread(ranks: Ints, rows: int) -> Ints:
    """Ranks to rows by a bijection that puts neighbouring ranks far apart: hot rows never share a page by rank."""
    # Golden-section steps; the factor stays small enough that rank * factor fits 63 bits for the largest tables.
    factor = max(1, min(int(rows * 0.6180339887), (2**63 - 1) // rows - 1))
    while math.gcd(factor, rows) != 1:
        factor -= 1
    spread: Ints = (ranks * factor + rows // 3) % rows
    return spread


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


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of one workload text, whose mistakes it names."""

    text: str

    def ids(self, value: str) -> IdLaw:
        match value.split(":"):
            case ["uniform"]:
                return Uniform()
            case ["zipf", exponent]:
                return Zipf(self.real("zipf exponent", exponent, 0.0, 10.0))
        raise self.error(f"ids={value!r} is not known; allowed: uniform, zipf:S (S about 1)")

    def lengths(self, value: str) -> LengthLaw:
        match value.split(":"):
            case ["fixed", length]:
                return Fixed(self.whole("len=fixed", length, 0, MAX_BATCH))
            case ["geo", mean]:
                return Geometric(self.real("len=geo mean", mean, 0.0, 1e9))
            case ["skew", short, long, share]:
                return Skew(
                    self.whole("len=skew short", short, 0, MAX_BATCH),
                    self.whole("len=skew long", long, 0, MAX_BATCH),
                    self.real("len=skew share", share, 0.0, 1.0),
                )
        raise self.error(f"len={value!r} is not known; allowed: fixed:L, geo:MEAN, skew:SHORT:LONG:SHARE")

    def whole(self, what: str, value: str, low: int, high: int) -> int:
        try:
            number = int(value)
        except ValueError:
            raise self.error(f"{what}={value!r} is not a whole number; allowed: {low} to {high}") from None
        if not low <= number <= high:
            raise self.error(f"{what}={number} is out of range; allowed: {low} to {high}")
        return number

    def real(self, what: str, value: str, low: float, high: float) -> float:
        try:
            number = float(value)
        except ValueError:
            raise self.error(f"{what}={value!r} is not a number; allowed: {low:g} to {high:g}") from None
        if not low <= number <= high:
            raise self.error(f"{what}={number:g} is out of range; allowed: {low:g} to {high:g}")
        return number

    def error(self, problem: str) -> WorkloadError:
        return WorkloadError(f"workload {self.text!r}: {problem}; form: {GRAMMAR}")
