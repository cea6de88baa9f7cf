"""How often rows are asked for: what a plan expects of the ids of a step, in closed form."""

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
"""Most wanted rows whose places are looked at one by one; the rest of the table counts as spread evenly."""
CLASSES = 512
"""Groups of ranks of like probability over which the rest is summed."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Access:
    """The k-th most wanted row is asked for in proportion to k^-skew; 0: all alike. Hot rows lie scattered."""

    skew: float = 0.0
    length: float | None = None
    """Ids a bag; None: each feature's hotness, else 1."""

    def __str__(self) -> str:
        ids = f"zipf:{self.skew:g}" if self.skew else "uniform"
        return ids if self.length is None else f"{ids}, {self.length:g} ids a bag"

    def ids_a_sample(self, feature: FeatureSpec) -> float:
        """Mean ids of a bag."""
        if self.length is None:
            return float(feature.hotness or 1)
        return min(self.length, float(feature.hotness or 1)) if feature.pooling == "concat" else self.length

    def unique(self, count: float, rows: int) -> float:
        """Different rows among so many ids."""
        return _unique(float(count), rows, self.skew)

    def pools(self, feature: FeatureSpec, samples: int, rows: int, asked: Floats, held: Floats) -> Floats:
        """Pools that a rank asks each shard for: of bags of several ids there, and of different single ids.

        `asked`, `held`: which part of the table's ids and of its rows each shard has."""
        length = self.ids_a_sample(feature)
        if length <= 1:
            single, none = length * asked, 1 - length * asked
        else:  # every id falls into a shard by itself
            single, none = length * asked * (1 - asked) ** (length - 1), (1 - asked) ** length
        several = samples * np.maximum(0.0, 1 - none - single)
        if feature.weighted:
            return several + samples * single
        found: Floats = several + np.minimum(samples * single, self.unique(samples * single.sum(), rows) * held)
        return found

    def shares(self, rows: int, shards: int, by: By) -> Floats:
        """Which part of a table's ids each shard gets."""
        return _shares(rows, shards, by, self.skew)


def access_of(text: str | Access) -> Access:
    """`uniform` or `zipf:S`; `PlanError` for anything else."""
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
    # 1 - (1 - p)^count, for any size of either
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
    """Where the workloads of `bench` and `tune` put a rank: golden-section steps through the table."""
    factor = max(1, min(int(rows * 0.6180339887), (2**63 - 1) // rows - 1))
    while math.gcd(factor, rows) != 1:
        factor -= 1
    placed: NDArray[np.int64] = (ranks * factor + rows // 3) % rows
    return placed


def _head(rows: int, skew: float) -> Floats:
    """The chances of the most wanted rows."""
    chances, members = _classes(rows, skew)
    return chances[: int(np.sum(np.cumsum(members) <= min(rows, HEAD) + 0.5))]


@lru_cache(maxsize=4096)
def _classes(rows: int, skew: float) -> tuple[Floats, Floats]:
    """Chances of rows, and how many rows have each: the first `HEAD` one by one, then in growing groups."""
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
    values.setflags(write=False)  # kept by a cache: nobody may change it
    return values
