"""What a collection's shape and an instruction set make of a CPU plan's fields, and where they make nothing of them."""

from __future__ import annotations

from embforge.codegen.layout import CollectionLayout, TableLayout
from embforge.codegen.targets.isa import Isa

CACHE_LINE = 64

CACHED_TABLE_BYTES = 1 << 19
"""A table of this size lies in a core's own cache after a few batches: prefetching it only costs instructions."""


def touched_bytes(row_bytes: int) -> int:
    """Bytes of the cache lines that so many bytes lie on, at best."""
    return -(-row_bytes // CACHE_LINE) * CACHE_LINE


def lies_in_cache(table: TableLayout) -> bool:
    """Whether a table, with its states, is so small that its rows are not requested ahead."""
    return (table.stride_bytes + table.state_stride_bytes) * table.table.num_embeddings <= CACHED_TABLE_BYTES


def never_prefetches(layout: CollectionLayout) -> bool:
    """Whether a forward requests no row ahead, whatever `prefetch_bytes` and `prefetch_level` say.

    A backward always has gradients to request.
    """
    return all(lies_in_cache(layout.tables[feature.table_index]) for feature in layout.features)


def row_vectors(dim: int, isa: Isa) -> int:
    """Vectors of a row of so many numbers."""
    return -(-dim // isa.width)


def widest_row_vectors(layout: CollectionLayout, isa: Isa) -> int:
    """Vectors of the widest row: every `tile_vectors` from there on is the same code."""
    return max(row_vectors(table.table.embedding_dim, isa) for table in layout.tables)


def rows_at_once(vectors: int, rows_unrolled: int, isa: Isa) -> int:
    """Rows whose tile of so many vectors is loaded before the first is added: registers hold them beside the sum."""
    rows = rows_unrolled
    while rows > 1 and (rows + 1) * vectors > isa.registers:
        rows //= 2
    return rows


def least_rows_unrolled(layout: CollectionLayout, isa: Isa, tile_vectors: int, rows_unrolled: int) -> int:
    """The least `rows_unrolled` that a forward has the same code with; 1 if no feature is pooled."""
    tiles = set()
    for feature in layout.features:
        if feature.feature.pooling not in ("none", "concat"):
            whole, rest = divmod(row_vectors(feature.dim, isa) - 1, tile_vectors)
            tiles |= {rest + 1, tile_vectors} if whole else {rest + 1}
    return max((rows_at_once(vectors, rows_unrolled, isa) for vectors in tiles), default=1)


def streams_results(layout: CollectionLayout, isa: Isa) -> bool:
    """Whether `stores="streaming"` can act: the processor can, and some row has a whole vector."""
    return isa.streams and any(feature.dim >= isa.width for feature in layout.features)
