"""Advice on tables whose rows touch more cache lines or sectors than necessary: what a wider row saves and costs.

Memory moves whole cache lines (CPU, 64 bytes) or sectors (GPU, 32 bytes). The layout of rows follows from the spec and
is fixed when a module is made, so the tuner cannot change it. It names a larger embedding_dim whose rows fit better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import CollectionLayout, TableLayout, layout_of
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.search.targets import TUNINGS

LEAST_SAVED = 0.05
"""If less than this share of the moved bytes would be saved, there is no advice."""


@dataclass(frozen=True)
class Advice:
    """A table whose rows would be cheaper to read if they were a little wider."""

    table: str
    target: str
    dim: int
    better_dim: int
    moved: float
    """Bytes that reading a row moves now, on average over all rows."""
    better_moved: float
    """Bytes that reading a row would move with `better_dim`."""
    table_bytes: int
    better_table_bytes: int
    row_bytes: int
    stride_bytes: int

    @property
    def saved(self) -> float:
        """The share of the moved bytes that is saved."""
        return 1 - self.better_moved / self.moved

    @property
    def sentence(self) -> str:
        """The advice for people: what to do, what it saves and what it costs."""
        return (
            f"layout, calculated and not measured: "
            f"table {self.table!r}: rows of {self.row_bytes} bytes, {self.stride_bytes} apart, cross "
            f"{TUNINGS[self.target].unit_name}, so that reading one moves {self.moved:.4g} bytes on average; with "
            f"embedding_dim={self.better_dim} instead of {self.dim} it would move {self.better_moved:.4g} "
            f"({self.saved:.0%} less), the table would take {self.better_table_bytes / self.table_bytes:.2f} times the "
            f"memory and its features {self.better_dim - self.dim} more columns. The layout is fixed when a module is "
            f"made: to change it, set embedding_dim={self.better_dim} in the spec and make a new module"
        )


def advice(layout: CollectionLayout, target: str) -> list[Advice]:
    """Advice on every table that would gain, with the largest saved share first."""
    candidates = (_advice_on(table, target) for table in layout.tables)
    return sorted((a for a in candidates if a is not None), key=lambda a: -a.saved)


def mean_moved(row_bytes: int, stride_bytes: int, unit: int) -> Fraction:
    """Bytes that reading a row moves, on average over rows `stride_bytes` apart of which the first is aligned.

    `unit` is the size of a cache line or sector.
    """
    period = unit // gcd(stride_bytes, unit)  # rows until one starts at the same offset within a unit as the first
    starts = (index * stride_bytes % unit for index in range(period))
    return Fraction(sum(-(-(start + row_bytes) // unit) for start in starts) * unit, period)


def _advice_on(layout: TableLayout, target: str) -> Advice | None:
    """Advice on one table: the dim that moves the fewest bytes, then takes the least memory, then has the widest rows
    (columns that cost nothing)."""
    unit, table = TUNINGS[target].unit_bytes, layout.table
    size = DTYPES[table.dtype].bytes
    most = -(-layout.row_bytes // unit) * unit // size
    candidates = [layout, *(_layout_with_dim(table, dim) for dim in range(table.embedding_dim + 1, most + 1))]
    best = min(candidates, key=lambda c: (mean_moved(c.row_bytes, c.stride_bytes, unit), c.stride_bytes, -c.row_bytes))
    moved = mean_moved(layout.row_bytes, layout.stride_bytes, unit)
    better = mean_moved(best.row_bytes, best.stride_bytes, unit)
    if better > (1 - LEAST_SAVED) * moved:
        return None
    return Advice(
        table=table.name,
        target=target,
        dim=table.embedding_dim,
        better_dim=best.table.embedding_dim,
        moved=float(moved),
        better_moved=float(better),
        table_bytes=layout.stride_bytes * table.num_embeddings,
        better_table_bytes=best.stride_bytes * table.num_embeddings,
        row_bytes=layout.row_bytes,
        stride_bytes=layout.stride_bytes,
    )


def _layout_with_dim(table: TableSpec, dim: int) -> TableLayout:
    """The layout that the table would have with this embedding_dim."""
    wider = replace(table, embedding_dim=dim)
    return layout_of(CollectionSpec((wider,), (FeatureSpec("any", wider.name),))).tables[0]
