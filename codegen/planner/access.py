"""How often rows are looked up: expected numbers of ids, different rows and pools of a step, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.errors import PlanError
from embforge.codegen.sharding.kinds import By
from embforge.codegen.spec import FeatureSpec

HEAD = 4096
"""How many of the most frequent rows are assigned to shards one by one; the others count as spread evenly."""
CLASSES = 512
"""How many groups of rows with similar probability the others are summed in."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Access:
    """The law of ids: the k-th most frequent row occurs in proportion to k^-skew; with skew 0 all rows are equally
    frequent. Frequent rows are scattered over the table."""

    skew: float = 0.0
    length: float | None = None
    """Mean number of ids per bag; None: each feature's hotness, or 1 if it has none."""

    def __str__(self) -> str:
        ids = f"zipf:{self.skew:g}" if self.skew else "uniform"
        return ids if self.length is None else f"{ids}, {self.length:g} ids per bag"

    def ids_per_sample(self, feature: FeatureSpec) -> float:
        """Mean number of ids in a bag of a feature."""
        if self.length is None:
            return float(feature.hotness or 1)
        return min(self.length, float(feature.hotness or 1)) if feature.slots else self.length

    def unique(self, count: float, rows: int) -> float:
        """The expected number of different rows among `count` ids."""
        return _unique(float(count), rows, self.skew)

    def pools(self, feature: FeatureSpec, samples: int, rows: int, asked: Floats, held: Floats) -> Floats:
        """How many pools a rank requests from each shard: one for each bag with several ids there, and one for each
        different single id.

        `asked` and `held` are the shares of the table's ids and of its rows that each shard has.
        """
        length = self.ids_per_sample(feature)
        if length <= 1:
            single, none = length * asked, 1 - length * asked
        else:  # each id falls into a shard independently of the others
            single, none = length * asked * (1 - asked) ** (length - 1), (1 - asked) ** length
        several = samples * np.maximum(0.0, 1 - none - single)
        if feature.weighted:
            return several + samples * single
        different: Floats = several + np.minimum(samples * single, self.unique(samples * single.sum(), rows) * held)
        return different

    def shares(self, rows: int, shards: int, by: By) -> Floats:
        """The share of a table's ids that each shard gets."""
        return _shares(rows, shards, by, self.skew)


def access_of(text: str | Access) -> Access:
    """The access that a text means: `uniform` or `zipf:S`; `PlanError` for any other text."""
    if isinstance(text, Access):
        return text
    name, _, number = text.partition(":")
    try:
        skew = float(number) if name == "zipf" else 0.0
    except ValueError:
        skew = math.nan
    if name not in ("uniform", "zipf") or (name == "uniform" and number) or not 0 <= skew <= 10:
        raise PlanError(f"workload {text!r} is not known; allowed: uniform, zipf:S with S from 0 to 10, e.g. zipf:1.05")
    return Access(skew)


@lru_cache(maxsize=65536)
def _unique(count: float, rows: int, skew: float) -> float:
    chances, members = _classes(rows, skew)
    # 1 - (1 - p)^count, accurate for small p and large counts
    with np.errstate(divide="ignore"):
        seen = -np.expm1(count * np.log1p(-chances))
    return float(min(np.sum(seen * members), count))


@lru_cache(maxsize=4096)
def _shares(rows: int, shards: int, by: By, skew: float) -> Floats:
    if by == "modulo":
        held = rows // shards + (np.arange(shards) < rows % shards)
    else:
        size = -(-rows // shards)
        held = np.clip(rows - np.arange(shards) * size, 0, size)
    if not skew:
        return _frozen(held / rows)
    ranks = np.arange(min(rows, HEAD))
    chances = _head(rows, skew)
    places = _scattered(ranks, rows)
    owners = places % shards if by == "modulo" else places // (-(-rows // shards))
    hot = np.bincount(owners, weights=chances, minlength=shards)
    cold_rows = held - np.bincount(owners, minlength=shards)
    rest = max(0.0, 1.0 - float(chances.sum()))
    return _frozen(hot + rest * cold_rows / max(1, rows - len(ranks)))


def _scattered(ranks: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """The rows that have these ranks by frequency in workloads of `bench` and `tune`: golden-section steps."""
    factor = max(1, min(int(rows * 0.6180339887), (2**63 - 1) // rows - 1))
    while math.gcd(factor, rows) != 1:
        factor -= 1
    scattered: NDArray[np.int64] = (ranks * factor + rows // 3) % rows
    return scattered


def _head(rows: int, skew: float) -> Floats:
    """The probabilities of the most frequent rows."""
    chances, members = _classes(rows, skew)
    return chances[: int(np.sum(np.cumsum(members) <= min(rows, HEAD) + 0.5))]


@lru_cache(maxsize=4096)
def _classes(rows: int, skew: float) -> tuple[Floats, Floats]:
    """Probabilities of rows, and how many rows have each: the first `HEAD` one by one, then in growing groups."""
    if not skew:
        return _frozen(np.array([1.0 / rows])), _frozen(np.array([float(rows)]))
    head = min(rows, HEAD)
    chances, members = np.arange(1, head + 1, dtype=np.float64) ** -skew, np.ones(head)
    if rows > head:
        borders = np.unique(np.round(np.geomspace(head, rows, min(CLASSES, rows - head) + 1)))
        low, high = borders[:-1] + 0.5, borders[1:] + 0.5
        exponent = 1.0 - skew
        areas = np.log(high / low) if skew == 1.0 else (high**exponent - low**exponent) / exponent
        chances = np.concatenate([chances, areas / (high - low)])
        members = np.concatenate([members, high - low])
    return _frozen(chances / np.sum(chances * members)), _frozen(members)


def _frozen(values: Floats) -> Floats:
    values = np.asarray(values, dtype=np.float64)
    values.setflags(write=False)  # it is kept in a cache, so no caller may change it
    return values
