"""Where bytes lie: rows in table storage and columns in the output. Derived from the spec alone, for all targets.

A layout is live storage: frozen when a module is made, never changed by the tuner.
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
"""States are fp32."""

Placement = Literal["tail", "section"]
"""Where a row's state lies: in the padding behind the row, where that has room for a number anyway, or in the table's
state section, whose rows hold all other states side by side."""


@dataclass(frozen=True)
class StateLayout:
    """Where one state of a row lies: `offset` bytes behind the start of the table's row (tail) or of the section's."""

    name: str
    extent: Extent
    placement: Placement
    offset: int


@dataclass(frozen=True)
class TableLayout:
    """How one table's rows lie in memory. Row r starts at byte `r * stride_bytes`."""

    table: TableSpec
    row_bytes: int
    stride_bytes: int
    states: tuple[StateLayout, ...] = ()
    state_stride_bytes: int = 0
    """Of the state section; 0: there is none."""
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

    A feature owns columns `[column, column + width)` of the `[B, total]` output; one whose result is a sequence owns
    rows of the flat sequence output instead (`column` is None).
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
    """Columns of the pooled output: the sum of the widths of all features whose results are no sequences."""

    @property
    def sequence_features(self) -> tuple[FeatureLayout, ...]:
        return tuple(f for f in self.features if f.column is None)

    @cached_property
    def divisor_column(self) -> dict[int, int]:
        """From the index of every feature that divides to its column of `divisors`."""
        dividing = (f.index for f in self.features if f.feature.kind.kept == "divisor")
        return {index: column for column, index in enumerate(dividing)}

    @property
    def divisor_width(self) -> int:
        """Columns of `divisors`."""
        return len(self.divisor_column)

    @cached_property
    def winner_column(self) -> dict[int, int]:
        """From the index of every feature that selects to its first column of `winners`; it owns as many as it has
        dims."""
        selecting = [f for f in self.features if f.feature.kind.kept == "winner"]
        firsts = accumulate((f.dim for f in selecting), initial=0)
        return {f.index: first for f, first in zip(selecting, firsts, strict=False)}

    @property
    def winner_width(self) -> int:
        """Columns of `winners`."""
        return sum(self.features[index].dim for index in self.winner_column)

    def kept_column(self, index: int) -> int:
        """Where a feature begins in `divisors` or `winners`, whichever it has columns of; 0: in neither."""
        return self.divisor_column.get(index, self.winner_column.get(index, 0))


def layout_of(spec: CollectionSpec, update: Update | None = None) -> CollectionLayout:
    """The one layout of a spec, with room for the states of an update. States never change where rows lie."""
    return layout_by_table(spec, (update,) * len(spec.tables))


def layout_by_table(spec: CollectionSpec, updates: Sequence[Update | None]) -> CollectionLayout:
    """The layout of a spec whose tables have updates of their own, in the order of the tables.

    It is that of lookups, so ids of tables with `remap` are rows in it.
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
    """The largest power of two that divides `value` and is at most `limit` (0 is divided by all)."""
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


def _with_states(placed: TableLayout, update: Update | None) -> TableLayout:
    """States of elements first, so that all are aligned alike; a row's own number in the row's padding if it fits."""
    if update is None:
        return placed
    tail, section = -(-placed.row_bytes // STATE_BYTES) * STATE_BYTES, 0
    aligned = placed.stride_bytes % STATE_BYTES == 0
    found: dict[str, StateLayout] = {}
    for state in sorted(update.rule.states, key=lambda state: state.extent != "element"):
        if state.extent == "row" and aligned and tail + STATE_BYTES <= placed.stride_bytes:
            found[state.name] = StateLayout(state.name, state.extent, "tail", tail)
            tail += STATE_BYTES
            continue
        found[state.name] = StateLayout(state.name, state.extent, "section", section)
        section += _stride(placed.table.embedding_dim * STATE_BYTES) if state.extent == "element" else STATE_BYTES
    states = tuple(found[state.name] for state in update.rule.states)
    stride = _stride(section) if section else 0
    return replace(placed, states=states, state_stride_bytes=stride, rule=update.rule.name)
