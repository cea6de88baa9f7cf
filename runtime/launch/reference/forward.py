"""The definition of a lookup in plain torch operations. Every other backend is tested against its bits.

This code is written to be read, not to be fast, but it is vectorised and works on one feature at a time, so that it
can check batches and tables of real size. Tables are never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout, FeatureLayout, layout_of
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import SUM, Combiner, Divisor, Shape
from embforge.codegen.semantics import CHUNK
from embforge.codegen.spec import CollectionSpec, FeatureSpec
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.metadata import Metadata
from embforge.number_formats import torch_dtype

Load = Callable[[Tensor], Tensor]
"""A function from int64 positions [k] to the items [k, D] at these positions."""

Combine = Callable[[Tensor, Tensor], Tensor]
"""A function from what was combined so far and the next items, both [k, D], to what is combined then.

The result overwrites the first argument, so the function's gradients must not need that argument: those of
`torch.maximum` do, those of `torch.where` do not."""


class ReferenceForward:
    """The reference's forward: it has the interface of a kernel and calls `lookup`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        return lookup(self.plan.spec, batch.values, batch.offsets, batch.weights, tables, bounds_check=bounds_check)

    def check(self) -> None:
        """Does nothing: no error is ever pending."""


def lookup(
    spec: CollectionSpec,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    *,
    bounds_check: str,
    accumulate_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Looks up all features of a batch. Returns the pooled output `[B, output_width]`, and the flat rows of features
    that are not pooled.

    `tables` holds one `[V, D]` tensor for each table of the spec, which may be strided. Results have the spec's output
    dtype; with `accumulate_dtype=torch.float64` they stay float64 (for gradcheck; autograd goes through tables and
    weights). Raises what `raise_bad_input` raises. If `bounds_check` is not "error", ids outside of a table are absent.
    """
    layout = layout_of(spec)
    batch = (offsets.numel() - 1) // len(spec.features)
    raise_bad_input(spec, values, offsets, weights, batch, bounds_check)
    wide = accumulate_dtype == torch.float64
    out_dtype = accumulate_dtype if wide else torch_dtype(spec.output_dtype)
    pooled = [torch.empty((batch, 0), dtype=out_dtype, device=values.device)]
    sequence = [torch.empty(0, dtype=out_dtype, device=values.device)]
    for bags in bags_of(layout, values, offsets, weights, tables, accumulate_dtype):
        result = _result(bags).to(out_dtype)
        if bags.layout.column is None:
            sequence.append(result.flatten())
        else:
            pooled.append(result)
    return torch.cat(pooled, dim=1), torch.cat(sequence)


def bags_of(
    layout: CollectionLayout,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    dtype: torch.dtype,
) -> Iterator[Bags]:
    """Yields the part of each feature of a batch that has no mistakes, in the order of features."""
    batch, offsets = (offsets.numel() - 1) // len(layout.features), offsets.long()
    for feature_layout in layout.features:
        borders = offsets[feature_layout.index * batch : (feature_layout.index + 1) * batch + 1]
        begin, end = int(borders[0]), int(borders[-1])
        used = weights if feature_layout.feature.weighted else None
        yield Bags(
            layout=feature_layout,
            table=tables[feature_layout.table_index],
            begin=begin,
            ids=values[begin:end].long(),
            weights=None if used is None else used[begin:end].to(dtype),
            starts=borders[:-1] - begin,
            lengths=borders.diff(),
            dtype=dtype,
        )


class Bags:
    """The bags of one feature in a batch. Positions count from the feature's first id, which is at `begin` in the
    values of the batch."""

    def __init__(
        self,
        layout: FeatureLayout,
        table: Tensor,
        begin: int,
        ids: Tensor,
        weights: Tensor | None,
        starts: Tensor,
        lengths: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.table = table
        self.begin = begin
        self.weights = weights
        self.starts = starts
        self.lengths = lengths
        self.dtype = dtype
        self.present = _present(ids, table.shape[0], layout.feature)
        self.any_absent = not bool(self.present.all())
        self.ids = ids.masked_fill(~self.present, 0)  # an absent id reads row 0, which is then dropped

    def rows(self, absent: float) -> Load:
        """Loads the row of a position's id, multiplied by its weight. An absent id has `absent` in all columns."""

        def load(positions: Tensor) -> Tensor:
            rows = self.table.index_select(0, self.ids[positions]).to(self.dtype)
            if self.weights is not None:
                rows = rows * self.weights[positions, None]
            return rows.masked_fill(~self.present[positions, None], absent) if self.any_absent else rows

        return load

    def scalars(self, items: Tensor) -> Load:
        """Loads one number of `items` per id. An absent id has 0."""
        column = items.masked_fill(~self.present, 0.0)[:, None]
        return lambda positions: column[positions]

    def count(self) -> Tensor:
        """The number of present ids in each bag, as integers."""
        before = torch.nn.functional.pad(self.present.long().cumsum(0), (1, 0))
        return before[self.starts + self.lengths] - before[self.starts]


def _present(ids: Tensor, rows: int, feature: FeatureSpec) -> Tensor:
    present = (ids >= 0) & (ids < rows)
    if feature.padding_idx is not None and feature.kind.pooled:
        present &= ids != feature.padding_idx
    return present


def _result(bags: Bags) -> Tensor:
    """The results of one feature's bags, by its pooling."""
    kind = bags.layout.feature.kind
    if kind.shape is Shape.SEQUENCE:
        return _rows(bags)
    if kind.shape is Shape.CONCAT:
        return _slots(bags)
    assert kind.combiner is not None
    if kind.combiner.selects:
        return _selection(bags, kind.combiner)
    return _divided(_sum(bags), divisor(bags)) if kind.divides else _sum(bags)


def _canonical_sum(load: Load, bags: Bags, width: int) -> Tensor:
    return canonical_reduce(load, bags.starts, bags.lengths, width, bags.dtype)


def stays(combiner: Combiner, best: Tensor, item: Tensor) -> Tensor:
    """Where a selection keeps `best` and does not take `item`. The first of equal numbers wins, so which of +0 and -0
    is selected depends on their order only; NaN is kept."""
    return (best >= item if combiner.order > 0 else best <= item) | best.isnan()


def canonical_reduce(load: Load, starts: Tensor, lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The canonical sums `[k, width]` of k runs of items. `starts` and `lengths` say which items a run has."""
    return reduce_bags(load, starts, lengths, width, dtype, torch.add, SUM.identity)


def reduce_bags(
    load: Load, starts: Tensor, lengths: Tensor, width: int, dtype: torch.dtype, combine: Combine, identity: float
) -> Tensor:
    """Combines the items of every bag: in order within chunks of 64, then the chunks by the same rule, recursively."""
    while True:
        chunks = (lengths + CHUNK - 1) // CHUNK
        bag = torch.repeat_interleave(chunks)
        first = chunks.cumsum(0) - chunks
        skipped = (torch.arange(bag.numel(), dtype=torch.int64, device=bag.device) - first[bag]) * CHUNK
        combined = _fold(
            load, starts[bag] + skipped, (lengths[bag] - skipped).clamp(max=CHUNK), width, dtype, combine, identity
        )
        if not bool((chunks > 1).any()):
            result = torch.full((lengths.numel(), width), identity, dtype=dtype, device=lengths.device)
            return result.index_copy(0, bag, combined)
        load, starts, lengths = combined.__getitem__, first, chunks


def _fold(
    load: Load, starts: Tensor, lengths: Tensor, width: int, dtype: torch.dtype, combine: Combine, identity: float
) -> Tensor:
    """Combines each run of 1 to 64 items strictly in order. All runs advance together, by one position at a time."""
    lengths, order = lengths.sort(descending=True, stable=True)  # so that the unfinished runs are always a prefix
    starts = starts[order]
    state = torch.full((lengths.numel(), width), identity, dtype=dtype, device=lengths.device)
    ended = torch.bincount(lengths, minlength=CHUNK + 1).cumsum(0).tolist()
    for position in range(CHUNK):
        unfinished = lengths.numel() - ended[position]
        if unfinished == 0:
            break
        state[:unfinished] = combine(state[:unfinished], load(starts[:unfinished] + position))
    return torch.empty_like(state).index_copy(0, order, state)


def _sum(bags: Bags) -> Tensor:
    return _canonical_sum(bags.rows(absent=0.0), bags, bags.layout.dim)


def divisor(bags: Bags) -> Tensor:
    """What the sums of a feature whose pooling divides are divided by, `[B, 1]`; 0 where the result is zeros."""
    root = bags.layout.feature.kind.divisor is Divisor.ROOT
    if bags.weights is None:
        amount = bags.count().to(bags.dtype)[:, None]
    else:
        amount = _canonical_sum(bags.scalars(bags.weights * bags.weights if root else bags.weights), bags, 1)
    return ieee_sqrt(amount) if root else amount


def ieee_sqrt(numbers: Tensor) -> Tensor:
    """The IEEE square root.

    torch's own square root of float32 on a CPU (MKL) is off by one bit for a sixth of all numbers. The root in float64
    rounds to the right float32, because the root of a float32 is never close enough to the middle of two float32."""
    return numbers.double().sqrt().to(numbers.dtype)


def _divided(total: Tensor, denominator: Tensor) -> Tensor:
    """Divides once, as IEEE says; a zero denominator gives zeros."""
    zero = denominator == 0
    return (total / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def _selection(bags: Bags, combiner: Combiner) -> Tensor:
    def select(best: Tensor, item: Tensor) -> Tensor:
        return torch.where(stays(combiner, best, item), best, item)

    rows, start = bags.rows(absent=combiner.identity), combiner.identity
    best = reduce_bags(rows, bags.starts, bags.lengths, bags.layout.dim, bags.dtype, select, start)
    return best.masked_fill((bags.count() == 0)[:, None], 0.0)


def _rows(bags: Bags) -> Tensor:
    return bags.rows(absent=0.0)(torch.arange(bags.ids.numel(), dtype=torch.int64, device=bags.ids.device))


def _slots(bags: Bags) -> Tensor:
    hotness = bags.layout.width // bags.layout.dim
    bag = torch.repeat_interleave(bags.lengths)
    slot = bag * hotness + torch.arange(bag.numel(), dtype=torch.int64, device=bag.device) - bags.starts[bag]
    slots = bags.lengths.numel() * hotness
    result = torch.zeros((slots, bags.layout.dim), dtype=bags.dtype, device=bag.device)
    return result.index_copy(0, slot, _rows(bags)).view(bags.lengths.numel(), bags.layout.width)
