"""How bags past `long_bag` ids are worked on: a block adds up a unit, its groups taking chunks of it at once.

Sums have one order, so nothing here changes a bit.
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
"""In flight a lane, of rows for which bytes in flight are promised and of smaller ones."""
SOURCE_BYTES, ABSENT_BYTES = 32, 8
"""The size of the kernel's struct Source, and what it has more if a padding id is no row."""


@dataclass(frozen=True)
class LongKind:
    """Pooled buckets that differ only in their shape, and so share the code for long bags."""

    name: str
    members: tuple[BucketGeometry, ...]
    rows: int
    """In flight a lane."""

    @property
    def slots(self) -> int:
        """Ids that whole batches of rows take of a chunk: the last may reach beyond it, where nothing is."""
        return -(-CHUNK // self.rows) * self.rows


@dataclass(frozen=True)
class LongGeometry:
    """The kernel for long bags: its loops and its shared memory."""

    kinds: tuple[LongKind, ...]
    chunks: int
    """In work at once."""
    pitch: int
    """Ids from chunk to chunk in shared memory."""
    parts: int
    """Floats that the chunks of one wave leave in shared memory."""
    winner_parts: int
    """Bytes likewise, of buckets that select and whose backward will come; at least 1, because no array is empty."""
    weighted: bool
    shared: int
    """Bytes of the kernel's struct LongStage, which lies in dynamic shared memory."""


def long_geometry(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> LongGeometry:
    """As many chunks at once as there are groups, if a multiprocessor's shared memory holds its blocks then."""
    pooled = tuple(g for g in geometry if g.pooled)
    arch = arch_named(plan.arch)
    room = min(arch.most_shared, arch.shared_bytes // min_blocks(plan, wide=True) - arch.shared_reserved) - OTHER_SHARED
    most = min(max((g.groups for g in pooled), default=1), CHUNK)
    found = (_with_chunks(plan, pooled, chunks) for chunks in range(most, 0, -1))
    return next(g for g in found if g.shared <= room or g.chunks == 1)


def _with_chunks(plan: Plan, pooled: tuple[BucketGeometry, ...], chunks: int) -> LongGeometry:
    names = dict.fromkeys(g.long_kind for g in pooled)
    members = [tuple(g for g in pooled if g.long_kind == name) for name in names]
    kinds = tuple(LongKind(found[0].long_kind, found, _rows(plan, found, chunks)) for found in members)
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
    """Numbers that so many chunks of any of the buckets leave, at least 1."""
    return max((g.elements * g.lanes * min(g.groups, chunks) for g in members), default=1)


def _rows(plan: Plan, members: tuple[BucketGeometry, ...], chunks: int) -> int:
    """Rows for the bytes in flight that the architecture wants, although some threads may have no chunk."""
    wanted = 16 * cuda_params(plan).pipeline[0] * (2 if arch_named(plan.arch).widest_load > 16 else 1)
    big = [g for g in members if g.bucket.row_bytes >= BIG_ROW]
    use = min(g.use_of(chunks) for g in big or members)
    # Past twice the wanted bytes a lane runs out of registers.
    most = min(2 * wanted // members[0].vector, MOST_ROWS if big else MOST_SMALL_ROWS)
    return max(1, min(math.ceil(wanted / use / members[0].vector), most))
