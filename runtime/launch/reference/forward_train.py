"""The definition of a training forward: a lookup, and what the backward needs of it."""

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
    """The reference's training forward: it has the interface of a kernel and calls `lookup_train`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        return lookup_train(
            self.plan.spec, batch.values, batch.offsets, batch.weights, tables, bounds_check=bounds_check
        )

    def check(self) -> None:
        """Does nothing: no error is ever pending."""


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
    """Returns what `lookup` returns, and two tensors with one row per sample, whose columns the layout assigns:

    - divisors, in `accumulate_dtype`: what a feature whose pooling divides divided by; 0 where its result is zeros,
    - winners, in the dtype of ids: for each column of a feature whose pooling selects, the position in `values` of the
      id that the number came from; -1 for a bag without a present id.

    The rows of features that are not pooled, the divisors and the winners are None if the spec has no such feature.
    Autograd goes through what `lookup` returns.
    """
    pooled, sequence = lookup(
        spec, values, offsets, weights, tables, bounds_check=bounds_check, accumulate_dtype=accumulate_dtype
    )
    layout = layout_of(spec)
    divisors, winners = [], []
    with torch.no_grad():
        for bags in bags_of(layout, values, offsets, weights, tables, accumulate_dtype):
            if bags.layout.index in layout.divisor_column:
                divisors.append(divisor(bags))
            elif bags.layout.index in layout.winner_column:
                winners.append(_winners(bags).to(values.dtype))
    return (
        pooled,
        sequence if layout.sequence_features else None,
        torch.cat(divisors, dim=1) if divisors else None,
        torch.cat(winners, dim=1) if winners else None,
    )


def _winners(bags: Bags) -> Tensor:
    """Finds winners by reducing pairs of a number and its position, next to each other in float64, which holds both
    exactly."""
    combiner = bags.layout.feature.kind.combiner
    assert combiner is not None
    dim, rows = bags.layout.dim, bags.rows(absent=combiner.identity)

    def pairs(positions: Tensor) -> Tensor:
        in_values = (bags.begin + positions).double().masked_fill(~bags.present[positions], -torch.inf)
        return torch.cat([rows(positions).double(), in_values[:, None].expand(-1, dim)], dim=1)

    def select(best: Tensor, item: Tensor) -> Tensor:
        """Selects as `lookup` does, but takes the first present id even if its number equals the start of a bag."""
        kept = stays(combiner, best[:, :dim], item[:, :dim]) & (best[:, dim:] >= 0)
        return torch.where(kept.repeat(1, 2), best, item)

    best = reduce_bags(pairs, bags.starts, bags.lengths, 2 * dim, torch.float64, select, -torch.inf)
    return best[:, dim:].clamp(min=-1).long()
