"""The definition of how ids of remapped tables become rows, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.codegen.spec import NO_ROW, FeatureSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.metadata import Metadata


class ReferenceResolve:
    """The reference's step from ids to rows: it has the interface of a kernel and works feature by feature."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns the rows of the batch's ids: see `ResolveKernel`."""
        spec, values = self.plan.spec, batch.values
        remapped = [table.name for table in spec.tables if not table.ids_are_rows]
        by_table = dict(zip(remapped, remaps, strict=True))
        ends = batch.offsets[:: batch.batch][1:].tolist() if batch.batch else [0] * len(spec.features)
        rows, begin = values.clone(), 0
        for feature, border in zip(spec.features, [*ends[:-1], values.numel()], strict=True):
            end = max(begin, min(border, values.numel()))  # the lookup finds wrong offsets
            if feature.table in by_table:
                table = spec.table(feature.table)
                rows[begin:end] = _rows(values[begin:end].long(), feature, table, by_table[table.name], values.dtype)
            begin = end
        return rows

    def check(self) -> None:
        """Does nothing: no error is ever pending."""


def _rows(ids: Tensor, feature: FeatureSpec, table: TableSpec, remap: Tensor, dtype: torch.dtype) -> Tensor:
    half = 2 ** (torch.iinfo(dtype).bits - 1)
    known = (ids >= 0) & (ids < remap.numel())
    entries = remap[ids.masked_fill(~known, 0)]
    good = (entries >= NO_ROW) & (entries < table.num_embeddings)
    entries = torch.where(good, entries, table.num_embeddings)
    # The number that represents an id that the table does not know: see codegen/remap.py.
    large = ids + (half - 1) + 1
    smallest = torch.where(large + 2 <= table.num_ids, -2 - large, table.num_embeddings + 1)
    negative = torch.where(large > table.num_embeddings, large, smallest)
    rows = torch.where(known, entries, torch.where(ids < 0, negative, ~ids))
    return rows if feature.padding_idx is None else rows.masked_fill(ids == feature.padding_idx, NO_ROW)
