"""The constraints of CPU plans: what is known about their parameters before anything is rendered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache

from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.params import CpuBackwardParams, CpuParams
from embforge.codegen.targets.cpu.backward import reduce_facts
from embforge.codegen.targets.cpu.geometry import (
    fits_in_cache,
    row_vectors,
    rows_at_once,
    streams_results,
    touched_bytes,
)
from embforge.codegen.targets.cpu.isa import Isa, isa_of
from embforge.tuner.search.constraints import Context, Idle, Rules

PREFETCH = (
    Idle("prefetch_bytes", "rows are so wide that equally many are prefetched, or every table fits into the cache"),
    Idle("prefetch_level", "nothing is prefetched"),
)
TILES = Idle("tile_vectors", "no row that is added up has as many vectors")
THREADS = (
    Idle("threads", "the machine has no more cores: the same as 0"),
    Idle("grain_bytes", "there is one thread"),
)


def forward_rules(context: Context) -> Rules:
    """The rules of the lookup."""
    isa, layout = isa_of(context.plan(CpuParams())), layout_of(context.spec)
    pooled = {f.dim for f in layout.features if f.feature.kind.pooled}
    streams = streams_results(layout, isa)

    @cache
    def ahead(prefetch_bytes: int) -> tuple[int, ...]:
        return _rows_ahead(layout, prefetch_bytes)

    @cache
    def tiles(tile_vectors: int, rows_unrolled: int) -> Hashable:
        return frozenset(_tiles(pooled, isa, tile_vectors, rows_unrolled))

    def work(params: CpuParams) -> Hashable:
        requested = ahead(params.prefetch_bytes)
        return (
            requested,
            params.prefetch_level if any(requested) else None,
            tiles(params.tile_vectors, params.rows_unrolled),
            streams and params.stores == "streaming",
            _threading(context, params),
        )

    return Rules(
        constraints=(),
        idle=(
            *THREADS,
            *PREFETCH,
            TILES,
            Idle("rows_unrolled", "registers do not hold that number of rows and the sum, or nothing is pooled"),
            Idle("stores", "the instruction set has no streaming stores, or no row fills a vector"),
        ),
        work=work,
    )


def backward_rules(context: Context) -> Rules:
    """The rules of the update of rows, or without an update of the reduction."""
    isa, tables = isa_of(context.plan(CpuBackwardParams())), context.spec.tables
    dims = {t.embedding_dim for t in tables}
    key_bits = {(t.num_embeddings - 1).bit_length() for t in tables}

    updates = context.update is not None  # otherwise only gradients are touched, not rows

    @cache
    def ahead(prefetch_bytes: int) -> tuple[int, ...]:
        facts = reduce_facts(context.plan(CpuBackwardParams(prefetch_bytes=prefetch_bytes)))
        names = ("gradients_ahead", "rows_ahead") if updates else ("gradients_ahead",)
        return tuple(table[name] for table in facts["tables"] for name in names)

    @cache
    def digits(radix_bits: int) -> Hashable:
        return frozenset((bits, _digits(bits, radix_bits)) for bits in key_bits)

    @cache
    def tiles(tile_vectors: int) -> Hashable:
        return frozenset(_tiles(dims, isa, tile_vectors, 1))

    def work(params: CpuBackwardParams) -> Hashable:
        requested = ahead(params.prefetch_bytes)
        return (
            digits(params.radix_bits),
            requested,
            # A row that will be updated is always requested, at the latest before its gradients are added up.
            params.prefetch_level if updates or any(requested) else None,
            tiles(params.tile_vectors),
            _threading(context, params),
        )

    return Rules(
        constraints=(),
        idle=(
            *THREADS,
            Idle("radix_bits", "row numbers of every table are cut into the same digits"),
            *PREFETCH,
            TILES,
        ),
        work=work,
    )


def _threading(context: Context, params: CpuParams | CpuBackwardParams) -> tuple[int, int]:
    """Threads, and bytes per task; 0 bytes if one thread does everything."""
    cores = context.hardware.sizes.get("cores")  # not known for another machine
    threads = 1 if cores == 1 else 0 if cores is not None and params.threads >= cores else params.threads
    return threads, params.grain_bytes if threads != 1 else 0


def _rows_ahead(layout: CollectionLayout, prefetch_bytes: int) -> tuple[int, ...]:
    """How many rows ahead each feature prefetches."""
    tables = [layout.tables[f.table_index] for f in layout.features]
    return tuple(0 if fits_in_cache(t) else -(-prefetch_bytes // touched_bytes(t.row_bytes)) for t in tables)


def _tiles(dims: Iterable[int], isa: Isa, tile_vectors: int, rows_unrolled: int) -> Iterable[Hashable]:
    """The cut of rows of each dim: the vectors of its tiles, and how many rows are loaded together."""
    for dim in dims:
        whole, last = divmod(row_vectors(dim, isa) - 1, tile_vectors)
        sizes = (tile_vectors, last + 1) if whole else (last + 1,)
        yield dim, sizes, tuple(rows_at_once(vectors, rows_unrolled, isa) for vectors in sizes)


def _digits(key_bits: int, radix_bits: int) -> frozenset[tuple[int, int]]:
    """The choices of the sort for such row numbers: passes, and bits per pass."""
    cuts = ((passes, -(-key_bits // passes)) for passes in range(1, max(key_bits, 1) + 1))
    return frozenset(cut for cut in cuts if cut[1] <= radix_bits)
