"""Features of one collection whose inner loop is the same code."""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import CollectionLayout, FeatureLayout, TableLayout
from embforge.codegen.poolings import Pooling


@dataclass(frozen=True)
class Bucket:
    """Features that share dim, table dtype, inner loop and weightedness."""

    index: int
    dim: int
    dtype: str
    pooling: Pooling
    """The pooling without a division: some of its features are divided afterwards, which is decided at run time."""
    weighted: bool
    stride_bytes: int
    row_alignment: int
    features: tuple[FeatureLayout, ...]

    @property
    def row_bytes(self) -> int:
        return self.dim * DTYPES[self.dtype].bytes

    @property
    def label(self) -> str:
        """The bucket's name in generated source: `d64_fp32_sum_weighted`."""
        return f"d{self.dim}_{self.dtype}_{self.pooling.name}" + ("_weighted" if self.weighted else "")


def buckets_of(layout: CollectionLayout) -> tuple[Bucket, ...]:
    """The collection's buckets, those with the most bytes per row first, with features in the spec's order."""
    groups: dict[tuple[int, str, Pooling, bool], list[FeatureLayout]] = {}
    for feature in layout.features:
        table = layout.tables[feature.table_index].table
        key = (feature.dim, table.dtype, feature.feature.kind.undivided, feature.feature.weighted)
        groups.setdefault(key, []).append(feature)
    ordered = sorted(groups.items(), key=lambda item: -item[0][0] * DTYPES[item[0][1]].bytes)
    return tuple(
        _bucket(index, layout.tables[members[0].table_index], key, members)
        for index, (key, members) in enumerate(ordered)
    )


def _bucket(
    index: int,
    table: TableLayout,
    key: tuple[int, str, Pooling, bool],
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
