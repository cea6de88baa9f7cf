"""How bags of more than `long_bag` ids are added up: a block takes a unit, and its groups take chunks of it at once.

All sums have the same order, so none of these numbers changes a bit of a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from embforge.codegen.plan import Plan
from embforge.codegen.semantics import CHUNK
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.geometry import (
    BIG_ROW,
    OTHER_SHARED,
    BucketGeometry,
    cuda_params,
    min_blocks,
    row_bytes,
    trains,
)

MOST_ROWS, MOST_SMALL_ROWS = 24, 16
"""The most rows in flight per lane: of rows for which bytes in flight are promised, and of smaller rows."""
SOURCE_BYTES, ABSENT_BYTES = 32, 8
"""The size of the kernel's struct Source, and by how much it is larger if a padding id is not a row."""


@dataclass(frozen=True)
class LongKind:
    """Pooled buckets that differ only in their shape, and therefore share the code for long bags."""

    name: str
    members: tuple[BucketGeometry, ...]
    rows: int
    """Rows in flight per lane."""

    @property
    def slots(self) -> int:
        """How many ids whole batches of rows cover: the last batch
        may reach beyond the chunk, where there are no ids."""
        return -(-CHUNK // self.rows) * self.rows


@dataclass(frozen=True)
class LongGeometry:
    """The numbers of the kernel for long bags: its loops and its shared memory."""

    kinds: tuple[LongKind, ...]
    chunks: int
    """How many chunks are added up at once."""
    pitch: int
    """Ids from chunk to chunk in shared memory."""
    parts: int
    """Floats that the chunks of one wave write to shared memory."""
    winner_parts: int
    """Bytes that the chunks of one wave write for winners, in buckets that select, if a backward will follow; at least
    1, because arrays cannot be empty."""
    weighted: bool
    shared: int
    """Bytes of the kernel's struct LongStage, which is in dynamic shared memory."""


def long_geometry(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> LongGeometry:
    """The geometry with as many chunks at once as there are groups, or the most with which a multiprocessor's shared
    memory holds all of its blocks."""
    pooled = tuple(g for g in geometry if g.pooled)
    arch = arch_named(plan.arch)
    room = min(arch.most_shared, arch.shared_bytes // min_blocks(plan, wide=True) - arch.shared_reserved) - OTHER_SHARED
    most = min(max((g.groups for g in pooled), default=1), CHUNK)
    candidates = (_with_chunks(plan, pooled, chunks) for chunks in range(most, 0, -1))
    return next(g for g in candidates if g.shared <= room or g.chunks == 1)


def _with_chunks(plan: Plan, pooled: tuple[BucketGeometry, ...], chunks: int) -> LongGeometry:
    names = dict.fromkeys(g.long_kind for g in pooled)
    by_kind = [tuple(g for g in pooled if g.long_kind == name) for name in names]
    kinds = tuple(LongKind(members[0].long_kind, members, _rows(plan, members, chunks)) for members in by_kind)
    pitch = max((kind.slots for kind in kinds), default=CHUNK) | 1
    parts = _parts(pooled, chunks)
    winner_parts = _parts([g for g in pooled if g.bucket.pooling.selects], chunks)
    weighted = any(g.bucket.weighted for g in pooled)
    ids = chunks * pitch
    source = SOURCE_BYTES + (ABSENT_BYTES if plan.spec.has_absent_ids else 0)
    shared = source + ids * row_bytes(plan) + 4 * (ids if weighted else 1) + 4 * parts + 8 * chunks
    shared += winner_parts if trains(plan) else 0
    return LongGeometry(kinds, chunks, pitch, parts, winner_parts, weighted, -(-shared // 8) * 8)


def _parts(members: Sequence[BucketGeometry], chunks: int) -> int:
    """How many numbers this number of chunks writes, in the bucket where they write the most; at least 1."""
    return max((g.elements * g.lanes * min(g.groups, chunks) for g in members), default=1)


def _rows(plan: Plan, members: tuple[BucketGeometry, ...], chunks: int) -> int:
    """Rows in flight per lane, for the bytes in flight that the
    architecture needs although some threads have no chunk."""
    wanted = 16 * cuda_params(plan).pipeline[0] * (2 if arch_named(plan.arch).widest_load > 16 else 1)
    big = [g for g in members if g.bucket.row_bytes >= BIG_ROW]
    use = min(g.use_of(chunks) for g in big or members)
    # With more than twice the wanted bytes, a lane runs out of registers.
    most = min(2 * wanted // members[0].vector, MOST_ROWS if big else MOST_SMALL_ROWS)
    return max(1, min(math.ceil(wanted / use / members[0].vector), most))
