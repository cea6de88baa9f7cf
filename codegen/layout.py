"""Where bytes are: rows in table storage and columns in the output. It follows from the spec alone, for all targets.

A layout describes live storage: it is fixed when a module is made, and the tuner never changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.poolings import Shape
from embforge.codegen.rules.rule import Extent, Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

MAX_PADDING_WASTE = 0.125
ROW_ALIGNMENTS = (16, 8, 4, 2)
STATE_BYTES = 4
"""The size of a number of a state, which is fp32 in every table."""

Placement = Literal["tail", "section"]
"""Where a state of a row is stored: in the padding after the row (tail), if that has room for a number, or in the
table's state section, whose rows hold all other states next to each other."""


@dataclass(frozen=True)
class StateLayout:
    """Where one state is stored: `offset` bytes after the start of the table's row (tail) or of the section's row."""

    name: str
    extent: Extent
    placement: Placement
    offset: int


@dataclass(frozen=True)
class TableLayout:
    """How the rows of one table are stored. Row r starts at byte `r * stride_bytes`."""

    table: TableSpec
    row_bytes: int
    stride_bytes: int
    states: tuple[StateLayout, ...] = ()
    state_stride_bytes: int = 0
    """Bytes from row to row of the state section; 0: there is none."""
    rule: str = ""
    """The name of the rule whose states these are."""

    @property
    def table_bytes(self) -> int:
        """All memory of the rows, with the padding between them."""
        return self.table.num_embeddings * self.stride_bytes

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

    A feature owns columns `[column, column + width)` of the `[B, total]` output. A feature whose result is a sequence
    owns rows of the flat sequence output instead, and its `column` is None.
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
    """Columns of the pooled output: the sum of the widths of all features whose results are not sequences."""

    @property
    def sequence_features(self) -> tuple[FeatureLayout, ...]:
        return tuple(f for f in self.features if f.column is None)

    @cached_property
    def divisor_column(self) -> dict[int, int]:
        """The column of `divisors` of every feature that divides, by the feature's index."""
        dividing = (f.index for f in self.features if f.feature.kind.kept == "divisor")
        return {index: column for column, index in enumerate(dividing)}

    @property
    def divisor_width(self) -> int:
        """Columns of `divisors`."""
        return len(self.divisor_column)

    @cached_property
    def winner_column(self) -> dict[int, int]:
        """The first column of `winners` of every feature that selects, by the feature's index. The feature owns as many
        columns as it has dims."""
        selecting = [f for f in self.features if f.feature.kind.kept == "winner"]
        firsts = accumulate((f.dim for f in selecting), initial=0)
        return {f.index: first for f, first in zip(selecting, firsts, strict=False)}

    @property
    def winner_width(self) -> int:
        """Columns of `winners`."""
        return sum(self.features[index].dim for index in self.winner_column)

    def kept_column(self, index: int) -> int:
        """The first column of a feature in `divisors` or `winners`; 0 if it has columns in neither."""
        return self.divisor_column.get(index, self.winner_column.get(index, 0))


def layout_of(spec: CollectionSpec, update: Update | None = None) -> CollectionLayout:
    """The one layout of a spec, with room for the states of an update. States never change where rows are stored."""
    return layout_by_table(spec, (update,) * len(spec.tables))


def layout_by_table(spec: CollectionSpec, updates: Sequence[Update | None]) -> CollectionLayout:
    """The layout of a spec whose tables have one update each, in the order of the tables.

    It is the layout of lookups, for which ids of tables with `remap` have been turned into rows.
    """
    spec = spec.by_rows()
    table_index = {t.name: i for i, t in enumerate(spec.tables)}
    features = []
    column = 0
    for index, feature in enumerate(spec.features):
        table = spec.tables[table_index[feature.table]]
        width = table.embedding_dim * (feature.slots or 1)
        has_columns = feature.kind.shape is not Shape.SEQUENCE
        features.append(
            FeatureLayout(
                feature=feature,
                index=index,
                table_index=table_index[feature.table],
                dim=table.embedding_dim,
                width=width,
                column=column if has_columns else None,
            )
        )
        column += width if has_columns else 0
    tables = tuple(
        _with_states(_table_layout(table), update) for table, update in zip(spec.tables, updates, strict=True)
    )
    return CollectionLayout(tables, tuple(features), column)


def largest_power_of_two(value: int, limit: int) -> int:
    """The largest power of two that divides `value` and is at most `limit`. Every power divides 0."""
    power = limit
    while value % power:
        power //= 2
    return power


def _table_layout(table: TableSpec) -> TableLayout:
    row_bytes = table.embedding_dim * DTYPES[table.dtype].bytes
    return TableLayout(table, row_bytes, _stride(row_bytes))


def _stride(row_bytes: int) -> int:
    for alignment in ROW_ALIGNMENTS:
        stride = -(-row_bytes // alignment) * alignment
        if stride - row_bytes <= MAX_PADDING_WASTE * row_bytes:
            return stride
    return row_bytes


def _with_states(rows: TableLayout, update: Update | None) -> TableLayout:
    """The layout of a table's rows, with the states of an update: those of elements first, so that all are aligned
    alike; a row's own number in the row's padding if it fits."""
    if update is None:
        return rows
    tail, section = -(-rows.row_bytes // STATE_BYTES) * STATE_BYTES, 0
    aligned = rows.stride_bytes % STATE_BYTES == 0
    by_name: dict[str, StateLayout] = {}
    for state in sorted(update.rule.states, key=lambda state: state.extent != "element"):
        if state.extent == "row" and aligned and tail + STATE_BYTES <= rows.stride_bytes:
            by_name[state.name] = StateLayout(state.name, state.extent, "tail", tail)
            tail += STATE_BYTES
            continue
        by_name[state.name] = StateLayout(state.name, state.extent, "section", section)
        section += _stride(rows.table.embedding_dim * STATE_BYTES) if state.extent == "element" else STATE_BYTES
    states = tuple(by_name[state.name] for state in update.rule.states)
    stride = _stride(section) if section else 0
    return replace(rows, states=states, state_stride_bytes=stride, rule=update.rule.name)
