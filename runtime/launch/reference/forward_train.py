"""The truth of a forward whose backward will come: a lookup, and what only the forward knows of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embforge.codegen.layout import layout_of
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch
from embforge.launch.gradients import TrainResult
from embforge.launch.metadata import Metadata
from embforge.launch.reference.forward import Bags, bags_of, divisor, lookup, reduce_bags, stays


class ReferenceForwardTrain:
    """The reference as a backend: the call of a kernel, answered by `lookup_train`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        return lookup_train(
            self.plan.spec, batch.values, batch.offsets, batch.weights, tables, bounds_check=bounds_check
        )

    def check(self) -> None:
        """Nothing is ever pending."""


def lookup_train(
    spec: CollectionSpec,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    *,
    bounds_check: str,
    accumulate_dtype: torch.dtype = torch.float32,
) -> TrainResult:
    """`lookup`, and then, a row a sample and a column as the layout places it:

    - divisors, in `accumulate_dtype`: what a feature that divides divided by; 0 where its result is zeros,
    - winners, in the dtype of ids: the position in `values` of the id whose number a feature that selects took for a
      column; -1 in a bag without a present id.

    Either is None if the spec has no such feature. Autograd goes through what `lookup` returns.
    """
    pooled, sequence = lookup(
        spec, values, offsets, weights, tables, bounds_check=bounds_check, accumulate_dtype=accumulate_dtype
    )
    layout = layout_of(spec)
    divisors, winners = [], []
    with torch.no_grad():
        for bags in bags_of(layout, values, offsets, weights, tables, accumulate_dtype):
            if bags.placed.index in layout.divisor_column:
                divisors.append(divisor(bags))
            elif bags.placed.index in layout.winner_column:
                winners.append(_winners(bags).to(values.dtype))
    return (
        pooled,
        sequence if layout.sequence_features else None,
        torch.cat(divisors, dim=1) if divisors else None,
        torch.cat(winners, dim=1) if winners else None,
    )


def _winners(bags: Bags) -> Tensor:
    """Reduces pairs of a number and its position, side by side in float64, which holds both exactly."""
    combiner = bags.placed.feature.kind.combiner
    assert combiner is not None
    dim, rows = bags.placed.dim, bags.rows(absent=combiner.identity)

    def pairs(positions: Tensor) -> Tensor:
        places = (bags.begin + positions).double().masked_fill(~bags.present[positions], -torch.inf)
        return torch.cat([rows(positions).double(), places[:, None].expand(-1, dim)], dim=1)

    def select(best: Tensor, item: Tensor) -> Tensor:
        """As `lookup` does, but that the first present id is taken even if its number is what a bag begins with."""
        kept = stays(combiner, best[:, :dim], item[:, :dim]) & (best[:, dim:] >= 0)
        return torch.where(kept.repeat(1, 2), best, item)

    best = reduce_bags(pairs, bags.starts, bags.lengths, 2 * dim, torch.float64, select, -torch.inf)
    return best[:, dim:].clamp(min=-1).long()
