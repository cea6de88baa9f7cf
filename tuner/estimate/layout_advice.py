"""What another layout of rows would save: for tables whose rows lie across more cache lines or sectors than they need.

Memory moves whole lines (CPU, 64 bytes) and sectors (GPU, 32 bytes). A layout follows from the spec and is frozen when
a module is made, so the tuner never changes it: it says what a dim that fits would save and what it would cost.
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
"""Share of the moved bytes below which no advice is given."""


@dataclass(frozen=True)
class Advice:
    """A table whose rows would be cheaper to read if they were a little wider."""

    table: str
    target: str
    dim: int
    better_dim: int
    moved: float
    """Bytes that reading a row moves now, in the mean over all rows."""
    better_moved: float
    table_bytes: int
    better_table_bytes: int
    row_bytes: int
    stride_bytes: int

    @property
    def saved(self) -> float:
        """Share of the moved bytes."""
        return 1 - self.better_moved / self.moved

    @property
    def sentence(self) -> str:
        """What to do, what it saves and what it costs."""
        return (
            f"layout, by arithmetic and not measured: "
            f"table {self.table!r}: rows of {self.row_bytes} bytes, {self.stride_bytes} apart, lie across "
            f"{TUNINGS[self.target].unit_name} so that reading one moves {self.moved:.4g} bytes in the mean; with "
            f"embedding_dim={self.better_dim} instead of {self.dim} it would move {self.better_moved:.4g} "
            f"({self.saved:.0%} less), the table would take {self.better_table_bytes / self.table_bytes:.2f} times the "
            f"memory and its features {self.better_dim - self.dim} more columns. Rows are laid out when a module is "
            f"made: to take it, set embedding_dim={self.better_dim} in the spec and make the module anew"
        )


def advice(layout: CollectionLayout, target: str) -> list[Advice]:
    """Of every table that would gain; the one that saves the largest share first."""
    found = (_advice_on(placed, target) for placed in layout.tables)
    return sorted((a for a in found if a is not None), key=lambda a: -a.saved)


def mean_moved(row_bytes: int, stride_bytes: int, unit: int) -> Fraction:
    """Bytes that reading a row moves, in the mean over rows that are `stride_bytes` apart from an aligned start."""
    period = unit // gcd(stride_bytes, unit)  # rows until one begins where the first did
    starts = (index * stride_bytes % unit for index in range(period))
    return Fraction(sum(-(-(start + row_bytes) // unit) for start in starts) * unit, period)


def _advice_on(placed: TableLayout, target: str) -> Advice | None:
    """What moves the fewest bytes, among those what takes the least memory, and of its row all that is paid for."""
    unit, table = TUNINGS[target].unit_bytes, placed.table
    size = DTYPES[table.dtype].bytes
    most = -(-placed.row_bytes // unit) * unit // size
    candidates = [placed, *(_placed(table, dim) for dim in range(table.embedding_dim + 1, most + 1))]
    best = min(candidates, key=lambda c: (mean_moved(c.row_bytes, c.stride_bytes, unit), c.stride_bytes, -c.row_bytes))
    moved = mean_moved(placed.row_bytes, placed.stride_bytes, unit)
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
        table_bytes=placed.stride_bytes * table.num_embeddings,
        better_table_bytes=best.stride_bytes * table.num_embeddings,
        row_bytes=placed.row_bytes,
        stride_bytes=placed.stride_bytes,
    )


def _placed(table: TableSpec, dim: int) -> TableLayout:
    """The table's layout if its dim were another."""
    wider = replace(table, embedding_dim=dim)
    return layout_of(CollectionSpec((wider,), (FeatureSpec("any", wider.name),))).tables[0]
