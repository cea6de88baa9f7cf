"""Where bytes lie: rows in table storage and columns in the output. Derived from the spec alone, for all targets.

A layout is live storage: frozen when a module is made, never changed by the tuner.
"""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

MAX_PADDING_WASTE = 0.125
ROW_ALIGNMENTS = (16, 8, 4, 2)


@dataclass(frozen=True)
class TableLayout:
    """How one table's rows lie in memory. Row r starts at byte `r * stride_bytes`."""

    table: TableSpec
    row_bytes: int
    stride_bytes: int

    @property
    def stride_elements(self) -> int:
        return self.stride_bytes // DTYPES[self.table.dtype].bytes

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 32, that divides every row's address (storage is 64-byte aligned)."""
        return largest_power_of_two(self.stride_bytes, 32)


@dataclass(frozen=True)
class FeatureLayout:
    """Where one feature's result goes.

    Pooled and concat features own columns `[column, column + width)` of the `[B, total]` output;
    a `none` feature owns rows of the flat sequence output instead (`column` is None).
    """

    feature: FeatureSpec
    index: int
    table_index: int
    dim: int
    width: int
    column: int | None


@dataclass(frozen=True)
class CollectionLayout:
    """The whole collection's storage and output geometry."""

    tables: tuple[TableLayout, ...]
    features: tuple[FeatureLayout, ...]
    output_width: int
    """Columns of the pooled output: the sum of the widths of all features that are not `none`."""

    @property
    def sequence_features(self) -> tuple[FeatureLayout, ...]:
        return tuple(f for f in self.features if f.column is None)


def layout_of(spec: CollectionSpec) -> CollectionLayout:
    """The one layout of a spec."""
    table_index = {t.name: i for i, t in enumerate(spec.tables)}
    features = []
    column = 0
    for index, feature in enumerate(spec.features):
        table = spec.tables[table_index[feature.table]]
        width = table.embedding_dim * (feature.hotness or 1 if feature.pooling == "concat" else 1)
        pooled = feature.pooling != "none"
        features.append(
            FeatureLayout(
                feature=feature,
                index=index,
                table_index=table_index[feature.table],
                dim=table.embedding_dim,
                width=width,
                column=column if pooled else None,
            )
        )
        column += width if pooled else 0
    return CollectionLayout(tuple(map(_table_layout, spec.tables)), tuple(features), column)


def largest_power_of_two(value: int, limit: int) -> int:
    """The largest power of two that divides `value` and is at most `limit` (0 is divided by all)."""
    power = limit
    while value % power:
        power //= 2
    return power


def _table_layout(table: TableSpec) -> TableLayout:
    row_bytes = table.embedding_dim * DTYPES[table.dtype].bytes
    for alignment in ROW_ALIGNMENTS:
        stride = -(-row_bytes // alignment) * alignment
        if stride - row_bytes <= MAX_PADDING_WASTE * row_bytes:
            return TableLayout(table, row_bytes, stride)
    return TableLayout(table, row_bytes, row_bytes)
