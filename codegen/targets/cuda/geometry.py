"""How a plan's buckets map to lanes, groups and blocks: every number in the source of a CUDA forward.

A *group* of lanes handles one bag (or row) at a time, one vector per lane. Rows that are wider than a block, or that
would leave many of a block's threads without a group, are cut into column tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from embforge.codegen.buckets import Bucket
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.layout import largest_power_of_two
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import Shape
from embforge.codegen.targets.cuda.arch import MAX_STATIC_SHARED, arch_named

RUNS_WANTED = 16
"""The least number of blocks into which a feature is cut, if the batch is large enough."""
LEAST_INTERLEAVE = 4
"""The bags that a group gets even if the batch is small: with fewer, a warp's groups wait for that with the longest."""
WIDE_ELEMENTS = 8
"""Accumulators per lane from which a bucket is in a kernel of its own, so that it does not cost others registers."""
WIDE_BLOCKS = 2
"""Blocks of 256 threads that a multiprocessor must hold, for the wide kernel and the one for long bags."""
BASE_THREADS = 256
BIG_ROW = 64
"""Bytes of a row from which bytes in flight are promised: other things limit smaller rows."""
MOST_MADE_UP = 16
"""Accumulators per lane up to which there are registers for more rows in flight, to make up for idle threads."""
MOST_WINNERS = 16
"""Accumulators per lane up to which there are registers for their positions."""
MOST_ROWS = 8
MOST_COPIED = 256
"""The most output rows of a block that copies."""
OTHER_SHARED = 128
"""Bytes of shared memory for scalars and alignment, at most."""
MOST_TOTALS = 32 * 1024
"""Bytes of shared memory for the sums of the chunks before the running one, at most."""
SHRINKS = ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
"""What id_tile and bags_per_block are divided by, in turn, until a kernel's shared memory fits."""
GOOD_USE = 0.8
"""The share of a block's threads that must have a vector for a number of tiles to be taken without trying more."""


@dataclass(frozen=True)
class BucketGeometry:
    """The mapping of one bucket. Its numbers are those of the bucket's struct in the source."""

    bucket: Bucket
    first: int
    """Position of its first feature in the kernel's FEATURES."""
    vector: int
    vectors: int
    lanes: int
    tiles: int
    groups: int
    rows: int
    store: int
    winners_store: int
    """Bytes per store of winners, in a bucket that selects and in whose plan a backward will follow."""
    run: int
    """How many bags (pooled: at most, a power of two) or positions (all others) a block owns."""
    min_run: int
    window: int
    block: int

    @property
    def elements(self) -> int:
        return self.vector // DTYPES[self.bucket.dtype].bytes

    @property
    def pooled(self) -> bool:
        return self.bucket.pooling.pooled

    @property
    def wide(self) -> bool:
        return self.elements >= WIDE_ELEMENTS

    @property
    def use(self) -> float:
        """Share of a block's threads that have a vector to load, over all tiles."""
        return self.use_of(self.groups)

    def use_of(self, groups: int) -> float:
        """The same if only this number of groups have work."""
        return min(groups, self.groups) * self.vectors / (self.tiles * self.block)

    @property
    def slots(self) -> int:
        """Ids that a block stages, and one gap per group if windows are even, so that groups read different banks."""
        return self.groups * (self.window | 1)

    @property
    def name(self) -> str:
        """The struct's name in the source."""
        return self.bucket.label

    @property
    def long_kind(self) -> str:
        """The name of the struct for its long bags, which pooled buckets share if they differ only in their shape."""
        weighted = "_weighted" if self.bucket.weighted else ""
        return f"long_{self.bucket.dtype}_{self.bucket.pooling.name}{weighted}_{self.vector}"


def cuda_params(plan: Plan) -> CudaParams:
    """The parameters of a cuda plan of a forward, with their type."""
    assert isinstance(plan.params, CudaParams)
    return plan.params


def trains(plan: Plan) -> bool:
    """Whether the plan is a forward after which a backward will follow, so that it keeps divisors and winners."""
    return plan.op == "forward_train"


def geometry_of(plan: Plan) -> tuple[BucketGeometry, ...]:
    """The mapping of every bucket, in the order of the kernel's FEATURES.

    A kernel that would need too much shared memory stages fewer ids and bags than the parameters say. `PlanError` if
    that is not enough.
    """
    firsts = accumulate((len(bucket.features) for bucket in plan.buckets), initial=0)
    wanted = tuple(
        _bucket_geometry(plan, bucket, first, *SHRINKS[0]) for bucket, first in zip(plan.buckets, firsts, strict=False)
    )
    fitting = {g.first: g for members in register_classes(wanted) for g in _fitted(plan, members)}
    return tuple(fitting[g.first] for g in wanted)


def register_classes(geometry: tuple[BucketGeometry, ...]) -> tuple[tuple[BucketGeometry, ...], ...]:
    """The buckets by the kernel that they share, the wide kernel last. No class is empty."""
    classes = (tuple(g for g in geometry if not g.wide), tuple(g for g in geometry if g.wide))
    return tuple(c for c in classes if c)


def run_of(min_run: int, run: int, batch: int) -> int:
    """How many bags a block owns at this batch size: the number that `fair_run` computes on the device."""
    return min(max(power_of_two_below(batch // RUNS_WANTED | 1), min_run), run)


def row_type(plan: Plan) -> str:
    """The C type that holds a checked row number."""
    return "int32_t" if max(t.num_embeddings for t in plan.spec.tables) < 2**31 else "int64_t"


def min_blocks(plan: Plan, wide: bool) -> int:
    """The number of blocks that a multiprocessor must hold, for `__launch_bounds__`."""
    params = cuda_params(plan)
    threads = BASE_THREADS * (WIDE_BLOCKS if wide else params.pipeline[1])
    return max(1, min(threads, arch_named(plan.arch).threads) // params.block)


def stage_sizes(geometry: tuple[BucketGeometry, ...]) -> dict[str, int]:
    """Array lengths of the shared memory of pooled features."""
    pooled = [g for g in geometry if g.pooled]
    return {
        "bags": max((g.run for g in pooled), default=1),
        "groups": max((g.groups for g in pooled), default=1),
        "slots": max((g.slots for g in pooled), default=1),
        "weights": max((g.slots for g in pooled if g.bucket.weighted), default=1),
        "elements": max((g.elements for g in pooled), default=1),
    }


def copy_sizes(geometry: tuple[BucketGeometry, ...]) -> dict[str, int]:
    """Array lengths of the shared memory of features without pooling."""
    copied = [g for g in geometry if not g.pooled]
    return {
        "slots": max((g.run for g in copied), default=1),
        "weights": max((g.run for g in copied if g.bucket.weighted), default=1),
    }


def _bucket_geometry(plan: Plan, bucket: Bucket, first: int, fewer_ids: int, fewer_bags: int) -> BucketGeometry:
    arch, params = arch_named(plan.arch), cuda_params(plan)
    ids, bags = params.id_tile // fewer_ids, params.bags_per_block // fewer_bags
    most_elements = MOST_TOTALS // (4 * params.block)
    if trains(plan) and bucket.pooling.selects:
        most_elements = min(most_elements, MOST_WINNERS)
    widest = min(params.vector_bytes, arch.widest_load, most_elements * DTYPES[bucket.dtype].bytes)
    vector = largest_power_of_two(bucket.row_alignment, widest)
    vectors = -(-bucket.row_bytes // vector)
    tiles = _tiles(vectors, params.block)
    lanes = -(-vectors // tiles)
    groups = params.block // lanes
    elements = vector // DTYPES[bucket.dtype].bytes
    # The bytes in flight do not depend on the vector; there are twice as many where accumulators cost occupancy.
    lane_bytes = 16 * params.pipeline[0] * (2 if elements >= WIDE_ELEMENTS else 1)
    rows = power_of_two_below(max(1, min(lane_bytes // vector, MOST_ROWS)))
    if arch.widest_load > 16 and elements <= MOST_MADE_UP:
        # Such a GPU needs all bytes in flight that its occupancy
        # allows: more rows make up for threads without a vector.
        rows = math.ceil(rows * params.block * tiles / (groups * vectors))
    rows = min(rows, max(1, ids // groups))
    if bucket.pooling.pooled:
        run = power_of_two_below(min(bags, groups * params.interleave))
    else:
        run = min(MOST_COPIED, groups * max(rows, params.interleave))
    return BucketGeometry(
        bucket=bucket,
        first=first,
        vector=vector,
        vectors=vectors,
        lanes=lanes,
        tiles=tiles,
        groups=groups,
        rows=rows,
        store=_store_bytes(plan, bucket, elements),
        winners_store=_winners_store_bytes(plan, bucket, elements),
        run=run,
        min_run=min(run, power_of_two_below(LEAST_INTERLEAVE * groups)),
        window=max(1, ids // groups) // rows * rows,
        block=params.block,
    )


def _tiles(vectors: int, block: int) -> int:
    """The number of column tiles of a row: the fewest that use most of the block's threads."""

    def use(tiles: int) -> float:
        lanes = -(-vectors // tiles)
        return vectors / (tiles * lanes) * (block // lanes * lanes) / block

    fewest = -(-vectors // block)
    candidates = range(fewest, fewest + 4)
    return next((t for t in candidates if use(t) >= GOOD_USE), max(candidates, key=use))


def power_of_two_below(value: int) -> int:
    """The largest power of two that is not above `value`."""
    return 1 << (value.bit_length() - 1)


def _store_bytes(plan: Plan, bucket: Bucket, elements: int) -> int:
    """Bytes of the widest store that is aligned wherever the bucket writes and never crosses the end of a row."""
    size = DTYPES[plan.spec.output_dtype].bytes
    steps = [bucket.dim, elements]
    if bucket.pooling.shape is Shape.SEQUENCE:
        steps += [f.dim for f in plan.layout.sequence_features]
    else:
        steps += [plan.layout.output_width, *(f.column or 0 for f in bucket.features)]
    return min(largest_power_of_two(step * size, 16) for step in steps)


def _winners_store_bytes(plan: Plan, bucket: Bucket, elements: int) -> int:
    """The same for positions of ids, which a bucket that selects writes if a backward will follow."""
    layout = plan.layout
    steps = [bucket.dim, elements, layout.winner_width]
    steps += [layout.winner_column[f.index] for f in bucket.features if f.index in layout.winner_column]
    return min(largest_power_of_two(step * DTYPES[plan.id_dtype].bytes, 16) for step in steps)


def _fitted(plan: Plan, members: tuple[BucketGeometry, ...]) -> tuple[BucketGeometry, ...]:
    """The buckets of one kernel, with as many ids and bags staged as its shared memory holds."""
    for shrink in SHRINKS:
        shrunk = tuple(_bucket_geometry(plan, g.bucket, g.first, *shrink) for g in members)
        need = shared_bytes(plan, shrunk)
        if need <= MAX_STATIC_SHARED:
            return shrunk
    params = cuda_params(plan)
    heaviest = max(shrunk, key=lambda g: g.elements * g.pooled)
    raise PlanError(
        f"plan fields block={params.block}, id_tile={params.id_tile}, bags_per_block={params.bags_per_block}: a block "
        f"needs {need} bytes of shared memory ({4 * params.block * heaviest.elements} for the running sums of "
        f"{heaviest.name}, {24 * len(plan.layout.sequence_features)} for {len(plan.layout.sequence_features)} 'none' "
        f"features); allowed: {MAX_STATIC_SHARED}; choose a smaller block or split the collection"
    )


def shared_bytes(plan: Plan, members: tuple[BucketGeometry, ...]) -> int:
    """Bytes of shared memory of a block of one kernel, at most."""
    stage, copy = stage_sizes(members), copy_sizes(members)
    pooled = (stage["bags"] + stage["groups"]) * DTYPES[plan.id_dtype].bytes + stage["slots"] * row_bytes(plan)
    pooled += (2 * stage["groups"] + stage["weights"] + stage["elements"] * cuda_params(plan).block) * 4
    copied = copy["slots"] * 16 + copy["weights"] * 4 + 24 * len(plan.layout.sequence_features)
    return OTHER_SHARED + max(
        pooled if any(g.pooled for g in members) else 0, copied if any(not g.pooled for g in members) else 0
    )


def row_bytes(plan: Plan) -> int:
    """Bytes of a checked row number."""
    return DTYPES[row_type(plan).removesuffix("_t")].bytes
