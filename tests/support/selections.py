"""The poolings that select (max, min). Tests that loop over them cover a new one without a change."""

from __future__ import annotations

from embforge.codegen.poolings import POOLINGS, Combiner, PoolingName

SELECTIONS: tuple[PoolingName, ...] = tuple(name for name, pooling in POOLINGS.items() if pooling.selects)


def combiner_of(pooling: PoolingName) -> Combiner:
    """The combiner of a pooling that selects: how it compares, and which number it starts with."""
    combiner = POOLINGS[pooling].combiner
    assert combiner is not None and combiner.selects
    return combiner
