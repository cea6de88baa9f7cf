"""How the fields of a CPU plan act on a collection with an instruction set, and when they have no effect."""

from __future__ import annotations

from embforge.codegen.layout import CollectionLayout, TableLayout
from embforge.codegen.targets.cpu.isa import Isa

CACHE_LINE = 64

CACHED_TABLE_BYTES = 1 << 19
"""The size up to which a table is in a core's own cache after a few batches: prefetching it only costs instructions."""


def touched_bytes(row_bytes: int) -> int:
    """Bytes of the cache lines that a row touches, at best."""
    return -(-row_bytes // CACHE_LINE) * CACHE_LINE


def fits_in_cache(table: TableLayout) -> bool:
    """Whether a table, with its states, is so small that its rows are not requested ahead."""
    return (table.stride_bytes + table.state_stride_bytes) * table.table.num_embeddings <= CACHED_TABLE_BYTES


def row_vectors(dim: int, isa: Isa) -> int:
    """How many vectors a row of `dim` numbers has."""
    return -(-dim // isa.width)


def rows_at_once(vectors: int, rows_unrolled: int, isa: Isa) -> int:
    """How many rows are loaded before the first is added, of a tile of `vectors`: registers hold them and the sum."""
    rows = rows_unrolled
    while rows > 1 and (rows + 1) * vectors > isa.registers:
        rows //= 2
    return rows


def streams_results(layout: CollectionLayout, isa: Isa) -> bool:
    """Whether `stores="streaming"` has an effect: the processor can, and some row has a whole vector."""
    return isa.streams and any(feature.dim >= isa.width for feature in layout.features)
