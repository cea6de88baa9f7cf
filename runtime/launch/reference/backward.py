"""The definition of training: what a backward does to rows and states, in plain torch operations.

Like the lookup's reference, this code is written to be read and works on one table at a time. Tables are never copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embforge.codegen.dtypes import FLOATS
from embforge.codegen.layout import CollectionLayout, FeatureLayout
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import Divisor, Shape
from embforge.codegen.rules.rule import COUNTERS, HYPER, Update
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch, raise_bad_input
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata, trainable_of
from embforge.launch.reference.forward import canonical_reduce
from embforge.launch.reference.rounding import random16, rounded
from embforge.launch.reference.rules import apply_rule, row_sum
from embforge.launch.update_kernel import UpdateKernel
from embforge.number_formats import as_indexable
from embforge.storage.states import state_views

FP32 = torch.float32


class ReferenceBackward(UpdateKernel):
    """The reference's backward: it reduces the gradients, then updates rows and states."""

    def __init__(self, plan: Plan) -> None:
        assert plan.update is not None
        self.plan, self._update = plan, plan.update

    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
    ) -> Tensor:
        plan = self.plan
        numbers = hyper.tolist()
        grad_scale = numbers[HYPER.index("grad_scale")]
        trainable = trainable_of(metadata)
        reduced = reduce(plan.spec, plan.layout, tables, trainable, batch, gradients, bounds_check)
        if grad_scale and not _all_finite(gradients):
            return torch.full((1,), torch.inf, dtype=FP32, device=hyper.device)
        inverse = 1.0 / grad_scale if grad_scale else 1.0
        step, seed = (int(counters[COUNTERS.index(name)]) for name in ("step", "seed"))
        writes = []
        for index, (rows, gradient) in enumerate(reduced):
            if not trainable[index]:  # another rule may train it, with other states
                continue
            table_layout = plan.layout.tables[index]
            views = state_views(table_layout, tables[index], states[index])
            old = {name: view[rows] for name, view in views.items()}
            weight = tables[index][rows].to(FP32)
            scaled = gradient * torch.tensor(inverse, dtype=FP32, device=gradient.device)
            weight, new = apply_rule(self._update, numbers, step + 1, scaled, weight, old)
            stored = _stored(self._update, table_layout.table.dtype, weight, seed, step + 1, index, rows)
            writes.append((tables[index], rows, stored))
            writes += [(views[name], rows, new[name]) for name in views]
        for target, rows, new_numbers in writes:  # nothing can fail from here on
            put_rows(target, rows, new_numbers)
        counters[COUNTERS.index("step")] += 1
        return torch.zeros(1, dtype=FP32, device=hyper.device)

    def check(self) -> None:
        """Does nothing: no error is ever pending."""


class ReferenceReduce:
    """The reference's reduction: it computes the gradient of every row that occurs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        plan = self.plan
        return reduce(plan.spec, plan.layout, tables, trainable_of(metadata), batch, gradients, bounds_check)

    def check(self) -> None:
        """Does nothing: no error is ever pending."""


class ReferenceWeightGradient:
    """The reference's gradient of per-sample weights."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        return weight_gradient(self.plan.spec, self.plan.layout, tables, batch, gradients, bounds_check)

    def check(self) -> None:
        """Does nothing: no error is ever pending."""


def reduce(
    spec: CollectionSpec,
    layout: CollectionLayout,
    tables: Sequence[Tensor],
    trainable: Sequence[bool],
    batch: Batch,
    gradients: Gradients,
    bounds_check: str,
    dtype: torch.dtype = FP32,
) -> list[tuple[Tensor, Tensor]]:
    """Returns, for every table, the rows that occur in ascending order, and the canonical sums `[n, D]` of what their
    occurrences add. A table that is not trainable has none."""
    raise_bad_input(spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
    features = [_Occurrences(layout, feature, tables, batch, gradients, dtype) for feature in layout.features]
    reduced = []
    for index, table in enumerate(tables):
        using = [f for f in features if f.layout.table_index == index and trainable[index]]
        reduced.append(_reduce_table(using, table, dtype))
    return reduced


def _reduce_table(using: Sequence[_Occurrences], table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Reduces the gradients of one table. `using` are the features that look ids up in it."""
    trained = [feature.trained.nonzero()[:, 0] for feature in using]
    ids = _concatenated([feature.ids[kept] for feature, kept in zip(using, trained, strict=True)], table.device)
    positions = _concatenated(trained, table.device)
    numbers = _concatenated([torch.full_like(kept, number) for number, kept in enumerate(trained)], table.device)
    ids, order = ids.sort(stable=True)
    positions, numbers = positions[order], numbers[order]
    rows, lengths = torch.unique_consecutive(ids, return_counts=True)
    starts = lengths.cumsum(0) - lengths

    def load(sorted_positions: Tensor) -> Tensor:
        items = torch.zeros((sorted_positions.numel(), table.shape[1]), dtype=dtype, device=ids.device)
        for number, feature in enumerate(using):
            of_feature = numbers[sorted_positions] == number
            items[of_feature] = feature.items(positions[sorted_positions[of_feature]])
        return items

    return rows, canonical_reduce(load, starts, lengths, table.shape[1], dtype)


def weight_gradient(
    spec: CollectionSpec,
    layout: CollectionLayout,
    tables: Sequence[Tensor],
    batch: Batch,
    gradients: Gradients,
    bounds_check: str,
    dtype: torch.dtype = FP32,
) -> Tensor:
    """The gradient of every per-sample weight; 0 where the feature is not weighted or the id is absent."""
    raise_bad_input(spec, batch.values, batch.offsets, batch.weights, batch.batch, bounds_check)
    result = torch.zeros(batch.values.numel(), dtype=dtype, device=batch.values.device)
    for feature_layout in layout.features:
        if not feature_layout.feature.weighted:
            continue
        feature = _Occurrences(layout, feature_layout, tables, batch, gradients, dtype)
        kept = feature.present.nonzero()[:, 0]
        dots = torch.zeros(feature.ids.numel(), dtype=dtype, device=result.device)
        rows = tables[feature_layout.table_index][feature.ids[kept]].to(dtype)
        dots[kept] = row_sum(feature.gradient(kept) * rows)
        if feature.divisor is not None:
            dots = dots - _through_the_divisor(feature, dots)
        result[feature.begin : feature.begin + dots.numel()] = dots.masked_fill(~feature.present, 0.0)
    return result


def _through_the_divisor(feature: _Occurrences, dots: Tensor) -> Tensor:
    """The part of a weight's gradient that comes through the bag's divisor, which depends on the weight too."""
    assert feature.divisor is not None
    products = (feature.weights * dots).masked_fill(~feature.present, 0.0)[:, None]
    total = canonical_reduce(products.__getitem__, feature.starts, feature.lengths, 1, dots.dtype)[:, 0]
    divisor = feature.divisor
    root = feature.layout.feature.kind.divisor is Divisor.ROOT
    share = torch.where(divisor == 0, 0.0, total / (divisor * divisor if root else divisor))[feature.sample]
    return share * feature.weights if root else share


class _Occurrences:
    """The ids of one feature, and the gradient that arrives at each of them. Positions count from the feature's first
    id."""

    def __init__(
        self,
        collection: CollectionLayout,
        layout: FeatureLayout,
        tables: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        dtype: torch.dtype,
    ) -> None:
        size, feature = batch.batch, layout.feature
        borders = batch.offsets[layout.index * size : (layout.index + 1) * size + 1].long()
        self.layout, self.dtype, self._gradients = layout, dtype, gradients
        self.begin, end = int(borders[0]), int(borders[-1])
        self.ids = batch.values[self.begin : end].long()
        self.starts, self.lengths = borders[:-1] - self.begin, borders.diff()
        self.sample = torch.repeat_interleave(self.lengths)
        weights = batch.weights if feature.weighted else None
        ones = torch.ones(self.ids.numel(), dtype=dtype, device=self.ids.device)
        self.weights = ones if weights is None else weights[self.begin : end].detach().to(dtype)
        self.present = (self.ids >= 0) & (self.ids < tables[layout.table_index].shape[0])
        if feature.padding_idx is not None and feature.kind.pooled:
            self.present &= self.ids != feature.padding_idx
        self.trained = self.present
        if feature.padding_idx is not None:
            self.trained = self.present & (self.ids != feature.padding_idx)
        column = collection.divisor_column.get(layout.index)
        self.divisor = None if column is None or gradients.divisors is None else gradients.divisors[:, column].to(dtype)
        self._winner_column = collection.winner_column.get(layout.index)
        sequences = [f for f in collection.sequence_features if f.index < layout.index]
        self._sequence_begin = sum(
            int(batch.offsets[(f.index + 1) * size] - batch.offsets[f.index * size]) * f.dim for f in sequences
        )

    def gradient(self, positions: Tensor) -> Tensor:
        """The gradient at each position before its weight is applied: the bag's gradient, divided as the bag was."""
        dim, sample, column = self.layout.dim, self.sample[positions], self.layout.column
        if column is None:
            assert self._gradients.sequence is not None
            end = self._sequence_begin + self.ids.numel() * dim
            return self._gradients.sequence[self._sequence_begin : end].view(-1, dim)[positions].to(self.dtype)
        columns = self._gradients.pooled[:, column : column + self.layout.width]
        if self.layout.feature.kind.shape is Shape.CONCAT:
            slot = positions - self.starts[sample]
            return columns.reshape(columns.shape[0], self.layout.width // dim, dim)[sample, slot].to(self.dtype)
        gradient = columns[sample].to(self.dtype)
        if self.divisor is not None:
            divisor = self.divisor[sample][:, None]
            gradient = torch.where(divisor == 0, 0.0, gradient / divisor)
        if self._winner_column is not None:
            assert self._gradients.winners is not None
            winners = self._gradients.winners[:, self._winner_column : self._winner_column + dim][sample]
            gradient = gradient.masked_fill(winners != (positions + self.begin)[:, None], 0.0)
        return gradient

    def items(self, positions: Tensor) -> Tensor:
        """What the id at each position adds to the gradient of its row."""
        gradient = self.gradient(positions)
        return gradient * self.weights[positions, None] if self.layout.feature.weighted else gradient


def _all_finite(gradients: Gradients) -> bool:
    tensors = (gradients.pooled, gradients.sequence)
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


def _stored(update: Update, dtype: str, weight: Tensor, seed: int, step: int, table: int, rows: Tensor) -> Tensor:
    """New rows in the number format of their table."""
    if not FLOATS[dtype].is_narrow:
        return weight
    random = random16(seed, step, table, rows, weight.shape[1]) if update.rounding == "stochastic" else None
    return rounded(weight, dtype, update.rounding, random)


def put_rows(target: Tensor, rows: Tensor, numbers: Tensor) -> None:
    """Does `target[rows] = numbers`, also for number formats that torch cannot index into."""
    as_indexable(target).index_copy_(0, rows, as_indexable(numbers))


def _concatenated(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.int64, device=device)
