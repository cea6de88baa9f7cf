"""How a plan's buckets map to lanes, groups and blocks: every number that the CUDA template states.

A *group* of lanes handles one bag (or row) at a time, one vector a lane. Rows wider than a block, or that would leave
many of a block's threads without a group, are cut into column tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.buckets import Bucket
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.layout import largest_power_of_two
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.semantics import CHUNK
from embforge.codegen.targets.arch import MAX_STATIC_SHARED, Arch, arch_named

RUNS_WANTED = 16
"""Blocks a feature is cut into at least, batch permitting."""
LEAST_INTERLEAVE = 4
"""Bags a group gets even of small batches: fewer would leave a warp's groups waiting for the one with the longest."""
WIDE_ELEMENTS = 8
"""Accumulators a lane from which a bucket gets its own kernel, so that it does not cost the others registers."""
WIDE_BLOCKS = 2
"""Blocks of 256 threads that a multiprocessor must hold of the wide kernel and of the one for long bags."""
BASE_THREADS = 256
MOST_ROWS = 8
MOST_LONG_ROWS = 16
"""Divides the chunk of the canonical sum, so that no batch of rows crosses its border."""
MOST_COPIED = 256
"""Output rows of a block that copies."""
OTHER_SHARED = 128
"""Bytes of shared memory for scalars and alignment, at most."""
MOST_TOTALS = 32 * 1024
"""Bytes of shared memory for what a block's lanes have summed before the running chunk."""
GOOD_USE = 0.8
"""Share of a block's threads with a vector to load, from which a cut into tiles is good enough."""


@dataclass(frozen=True)
class BucketGeometry:
    """One bucket's mapping. The fields are those of the struct that the template writes for it."""

    bucket: Bucket
    first: int
    """Position of its first feature in the kernel's FEATURES."""
    vector: int
    vectors: int
    lanes: int
    tiles: int
    groups: int
    rows: int
    long_rows: int
    """Rows in flight in the loop for long bags, which has the wide kernel's occupancy."""
    store: int
    run: int
    """Bags (pooled, at most, a power of two) or positions (none, concat) a block owns."""
    min_run: int
    window: int

    @property
    def elements(self) -> int:
        return self.vector // DTYPES[self.bucket.dtype].bytes

    @property
    def pooled(self) -> bool:
        return self.bucket.pooling in ("sum", "max")

    @property
    def wide(self) -> bool:
        return self.elements >= WIDE_ELEMENTS

    @property
    def pitch(self) -> int:
        return self.window | 1

    @property
    def name(self) -> str:
        """The struct's name in the source."""
        return self.bucket.label

    @property
    def long_kind(self) -> str:
        """The struct of its long bags: pooled buckets that differ only in their shape share one."""
        weighted = "_weighted" if self.bucket.weighted else ""
        return f"long_{self.bucket.dtype}_{self.bucket.pooling}{weighted}_{self.vector}"


def cuda_params(plan: Plan) -> CudaParams:
    """The plan's parameters, which a cuda plan is known to have."""
    assert isinstance(plan.params, CudaParams)
    return plan.params


def geometry_of(plan: Plan) -> tuple[BucketGeometry, ...]:
    """The mapping of every bucket, in the order of the kernel's FEATURES. `PlanError` if it cannot work."""
    arch, params = arch_named(plan.arch), cuda_params(plan)
    result, first = [], 0
    for bucket in plan.buckets:
        result.append(_bucket_geometry(plan, bucket, first, arch, params))
        first += len(bucket.features)
    geometry = tuple(result)
    _check_shared(plan, geometry)
    return geometry


def register_classes(geometry: tuple[BucketGeometry, ...]) -> tuple[tuple[BucketGeometry, ...], ...]:
    """Buckets by the kernel they share, ordinary ones first; no class is empty."""
    classes = (tuple(g for g in geometry if not g.wide), tuple(g for g in geometry if g.wide))
    return tuple(c for c in classes if c)


def run_of(g: BucketGeometry, batch: int) -> int:
    """Bags a block owns at this batch size: what the kernel finds by `fair_run`, on the host."""
    return min(max(power_of_two_below(batch // RUNS_WANTED | 1), g.min_run), g.run)


def row_type(plan: Plan) -> str:
    """The C type that holds a checked row number."""
    return "int32_t" if max(t.num_embeddings for t in plan.spec.tables) < 2**31 else "int64_t"


def min_blocks(plan: Plan, wide: bool) -> int:
    """Blocks a multiprocessor must hold, for `__launch_bounds__`."""
    params = cuda_params(plan)
    threads = BASE_THREADS * (WIDE_BLOCKS if wide else params.pipeline[1])
    return max(1, min(threads, arch_named(plan.arch).threads) // params.block)


def stage_sizes(geometry: tuple[BucketGeometry, ...]) -> dict[str, int]:
    """Array lengths of the shared memory of pooled features."""
    pooled = [g for g in geometry if g.pooled]
    return {
        "bags": max((g.run for g in pooled), default=1),
        "groups": max((g.groups for g in pooled), default=1),
        "slots": max((g.groups * g.pitch for g in pooled), default=1),
        "weights": max((g.groups * g.pitch for g in pooled if g.bucket.weighted), default=1),
        "elements": max((g.elements for g in pooled), default=1),
    }


def copy_sizes(geometry: tuple[BucketGeometry, ...]) -> dict[str, int]:
    """Array lengths of the shared memory of features without pooling."""
    copied = [g for g in geometry if not g.pooled]
    return {
        "slots": max((g.run for g in copied), default=1),
        "weights": max((g.run for g in copied if g.bucket.weighted), default=1),
    }


def long_sizes(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> dict[str, int]:
    """Array lengths of the shared memory of long bags."""
    pooled = [g for g in geometry if g.pooled]
    return {
        "chunks": min(max((g.groups for g in pooled), default=1), cuda_params(plan).id_tile // CHUNK),
        "elements": max((g.elements for g in pooled), default=1),
    }


def _bucket_geometry(plan: Plan, bucket: Bucket, first: int, arch: Arch, params: CudaParams) -> BucketGeometry:
    most_elements = MOST_TOTALS // (4 * params.block)
    widest = min(params.vector_bytes, arch.widest_load, most_elements * DTYPES[bucket.dtype].bytes)
    vector = largest_power_of_two(bucket.row_alignment, widest)
    vectors = -(-bucket.row_bytes // vector)
    tiles = _tiles(vectors, params.block)
    lanes = -(-vectors // tiles)
    groups = params.block // lanes
    elements = vector // DTYPES[bucket.dtype].bytes
    # The same bytes in flight whatever the vector; twice as many where accumulators cost occupancy.
    wide_bytes = 2 * 16 * params.pipeline[0]
    lane_bytes = wide_bytes if elements >= WIDE_ELEMENTS else wide_bytes // 2
    rows = power_of_two_below(max(1, min(lane_bytes // vector, MOST_ROWS, params.id_tile // groups)))
    pooled = bucket.pooling in ("sum", "max")
    if pooled:
        run = power_of_two_below(min(params.bags_per_block, groups * params.interleave))
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
        long_rows=max(1, min((wide_bytes if arch.widest_load > 16 else wide_bytes // 2) // vector, MOST_LONG_ROWS)),
        store=_store_bytes(plan, bucket, elements),
        run=run,
        min_run=min(run, power_of_two_below(LEAST_INTERLEAVE * groups)),
        window=params.id_tile // groups // rows * rows,
    )


def _tiles(vectors: int, block: int) -> int:
    """Column tiles of a row: the fewest that use most of the block's threads."""

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
    """Bytes of the widest store that is aligned wherever the bucket writes and never runs over a row's end."""
    size = DTYPES[plan.spec.output_dtype].bytes
    steps = [bucket.dim, elements]
    if bucket.pooling == "none":
        steps += [f.dim for f in plan.layout.sequence_features]
    else:
        steps += [plan.layout.output_width, *(f.column or 0 for f in bucket.features)]
    return min(largest_power_of_two(step * size, 16) for step in steps)


def _check_shared(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> None:
    params = cuda_params(plan)
    id_bytes, row_bytes = DTYPES[plan.id_dtype].bytes, DTYPES[row_type(plan).removesuffix("_t")].bytes
    need = 0
    for members in register_classes(geometry):
        stage, copy = stage_sizes(members), copy_sizes(members)
        pooled = (stage["bags"] + stage["groups"]) * id_bytes + stage["slots"] * row_bytes
        pooled += (2 * stage["groups"] + stage["weights"] + stage["elements"] * params.block) * 4
        copied = copy["slots"] * 16 + copy["weights"] * 4 + 24 * len(plan.layout.sequence_features)
        need = max(need, pooled, copied)
    long = long_sizes(plan, geometry)
    weighted = any(g.pooled and g.bucket.weighted for g in geometry)
    long_bags = long["chunks"] * (CHUNK + 1) * (row_bytes + 4 * weighted)
    need = max(need, long_bags + (long["elements"] * params.block + 2 * long["chunks"]) * 4) + OTHER_SHARED
    if need > MAX_STATIC_SHARED:
        raise PlanError(
            f"plan fields id_tile={params.id_tile}, bags_per_block={params.bags_per_block}, block={params.block}: "
            f"{need} bytes of shared memory a block are needed; allowed: {MAX_STATIC_SHARED}; choose a smaller id_tile"
        )
