"""Features of one collection whose inner loop is the same code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import CollectionLayout, FeatureLayout, TableLayout

PoolingClass = Literal["sum", "max", "concat", "none"]

POOLING_CLASS: dict[str, PoolingClass] = {
    "sum": "sum",
    "mean": "sum",
    "sqrtn": "sum",
    "max": "max",
    "concat": "concat",
    "none": "none",
}
"""sum, mean and sqrtn share their loop; the division is an epilogue chosen at run time."""


@dataclass(frozen=True)
class Bucket:
    """Features that share dim, table dtype, pooling class and weightedness."""

    index: int
    dim: int
    dtype: str
    pooling: PoolingClass
    weighted: bool
    stride_bytes: int
    row_alignment: int
    features: tuple[FeatureLayout, ...]

    @property
    def row_bytes(self) -> int:
        return self.dim * DTYPES[self.dtype].bytes

    @property
    def label(self) -> str:
        """Names the bucket in generated source: `d64_fp32_sum_weighted`."""
        return f"d{self.dim}_{self.dtype}_{self.pooling}" + ("_weighted" if self.weighted else "")


def buckets_of(layout: CollectionLayout) -> tuple[Bucket, ...]:
    """The collection's buckets, heaviest row first, features in spec order."""
    groups: dict[tuple[int, str, PoolingClass, bool], list[FeatureLayout]] = {}
    for placed in layout.features:
        table = layout.tables[placed.table_index].table
        key = (placed.dim, table.dtype, POOLING_CLASS[placed.feature.pooling], placed.feature.weighted)
        groups.setdefault(key, []).append(placed)
    ordered = sorted(groups.items(), key=lambda item: -item[0][0] * DTYPES[item[0][1]].bytes)
    return tuple(
        _bucket(index, layout.tables[members[0].table_index], key, members)
        for index, (key, members) in enumerate(ordered)
    )


def _bucket(
    index: int,
    table: TableLayout,
    key: tuple[int, str, PoolingClass, bool],
    members: list[FeatureLayout],
) -> Bucket:
    dim, dtype, pooling, weighted = key
    return Bucket(
        index=index,
        dim=dim,
        dtype=dtype,
        pooling=pooling,
        weighted=weighted,
        stride_bytes=table.stride_bytes,
        row_alignment=table.alignment,
        features=tuple(members),
    )
