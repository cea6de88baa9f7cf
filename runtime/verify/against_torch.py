"""Compares lookups with torch's own functions, where torch has them, and says how far apart the results may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from embforge.codegen.layout import FeatureLayout, layout_of
from embforge.codegen.semantics import CHUNK
from embforge.codegen.spec import CollectionSpec
from embforge.verify.cases import Drawn

MODES, WEIGHTED_MODES = ("sum", "mean", "max"), ("sum",)
"""The modes of torch.nn.functional.embedding_bag, and those that take per-sample weights."""
SELECTING_MODE = "max"
"""The mode that selects a number. The minimum is the negative of what it selects from negated rows."""
ROUNDOFF = 2.0**-24
"""The largest relative rounding error of one float32 operation."""


class Difference(NamedTuple):
    """How far one feature of one batch is from torch's result."""

    peer: str
    """The function of torch."""
    feature: str
    error: float
    """The largest absolute difference."""
    within_rounding: bool
    """Whether all differences may come from rounding."""


def differences_from_torch(
    spec: CollectionSpec, drawn: Drawn, tables: Sequence[Tensor], result: tuple[Tensor, Tensor]
) -> Iterator[Difference]:
    """Compares every feature that torch can compute: those with torch's modes, minima, and features that are not
    pooled.

    All ids must be rows of their tables.
    """
    pooled, sequence = result
    layout = layout_of(spec)
    batch = pooled.shape[0]
    taken = 0
    for feature in layout.features:
        borders = drawn.offsets[feature.index * batch : (feature.index + 1) * batch + 1].long()
        begin, end = int(borders[0]), int(borders[-1])
        bags = _Bags(
            feature,
            drawn.values[begin:end],
            borders[:-1] - begin,
            int(borders.diff().max()),
            tables[feature.table_index],
        )
        weights = None if drawn.weights is None or not feature.feature.weighted else drawn.weights[begin:end]
        if feature.column is None:
            rows = sequence[taken : taken + (end - begin) * feature.dim].view(-1, feature.dim)
            taken += rows.numel()
            if not feature.feature.weighted:
                yield bags.embedding(rows)
        elif feature.feature.kind.selects or feature.feature.pooling in (MODES if weights is None else WEIGHTED_MODES):
            yield bags.embedding_bag(pooled[:, feature.column : feature.column + feature.width], weights)


class _Bags(NamedTuple):
    """The ids of one feature, with `starts`, the positions of its bags counted from its first id."""

    feature: FeatureLayout
    ids: Tensor
    starts: Tensor
    longest: int
    table: Tensor

    def embedding(self, have: Tensor) -> Difference:
        """The difference of copied rows from torch's. There is none, because torch converts to the output dtype too."""
        ids = self.ids.long().clamp(0, len(self.table) - 1)  # ids that are not rows are set to zeros below
        want = functional.embedding(ids, self.table) if self.table.element_size() > 1 else self.table[ids]
        want = want.float().to(have.dtype).double().masked_fill((ids != self.ids)[:, None], 0.0)
        return self._difference("torch.nn.functional.embedding", have, want, None)

    def embedding_bag(self, have: Tensor, weights: Tensor | None) -> Difference:
        """The difference of pooled bags from torch's.

        Torch computes in float64, so that rounding errors are only ours: those of the canonical sum and of the output
        dtype.
        """
        # Only the rows in use, so that torch neither copies nor converts the whole table.
        used, ids = torch.unique(self.ids.long(), return_inverse=True)
        rows = self.table.index_select(0, used.clamp(0, len(self.table) - 1)).double()  # a padding id may not be a row
        mode, sign, padding = *self._mode(), None
        if self.feature.feature.padding_idx is not None and bool((used == self.feature.feature.padding_idx).any()):
            padding = int((used == self.feature.feature.padding_idx).nonzero())
        name = "torch.nn.EmbeddingBag " + ("weighted " if weights is not None else "") + mode
        name += " of negated rows" if sign < 0 else ""
        if not ids.numel():
            return self._difference(name, have, torch.zeros_like(have, dtype=torch.float64), None)

        def bag(rows: Tensor, weights: Tensor | None) -> Tensor:
            return functional.embedding_bag(
                ids, rows, self.starts, mode=mode, per_sample_weights=weights, padding_idx=padding
            )

        want = sign * bag(sign * rows, None if weights is None else weights.double())
        if self.feature.feature.kind.selects:
            return self._difference(name, have, want.to(have.dtype).double(), None)
        sizes = bag(rows.abs(), None if weights is None else weights.double().abs())
        levels = math.ceil(math.log(max(self.longest, 2), CHUNK))
        output = torch.finfo(have.dtype)
        allowed = (levels * CHUNK + 2) * ROUNDOFF * sizes + output.eps * want.abs() + output.smallest_normal
        return self._difference(name, have, want, allowed)

    def _mode(self) -> tuple[str, int]:
        """Torch's mode, and the sign by which its rows and results are multiplied."""
        combiner = self.feature.feature.kind.combiner
        if combiner is not None and combiner.selects:
            return SELECTING_MODE, combiner.order
        return self.feature.feature.pooling, 1

    def _difference(self, peer: str, have: Tensor, want: Tensor, allowed: Tensor | None) -> Difference:
        """The difference of two results. `allowed`: the largest difference that may come from rounding; None means
        0."""
        apart = (have.double() - want).abs()
        error = float(apart.max()) if apart.numel() else 0.0
        within = bool((apart <= (torch.zeros_like(apart) if allowed is None else allowed)).all())
        return Difference(peer, self.feature.feature.name, error, within)
