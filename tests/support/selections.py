"""The poolings that select: what tests of every selection go through, so that a further one needs no place in them."""

from __future__ import annotations

from embforge.codegen.poolings import POOLINGS, Combiner, PoolingName

SELECTIONS: tuple[PoolingName, ...] = tuple(name for name, pooling in POOLINGS.items() if pooling.selects)


def combiner_of(pooling: PoolingName) -> Combiner:
    """How a selection compares, and what it begins with."""
    combiner = POOLINGS[pooling].combiner
    assert combiner is not None and combiner.selects
    return combiner
