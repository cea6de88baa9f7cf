"""The constraints of CUDA plans: what codegen's geometry says about their parameters before anything is rendered."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cache

from embforge.codegen.errors import PlanError
from embforge.codegen.params import CudaBackwardParams, CudaParams
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.backward_geometry import RowBucket, row_buckets
from embforge.codegen.targets.cuda.backward_geometry import min_blocks as backward_min_blocks
from embforge.codegen.targets.cuda.geometry import (
    BucketGeometry,
    geometry_of,
    min_blocks,
    register_classes,
    shared_bytes,
)
from embforge.codegen.targets.cuda.long_bags import LongGeometry, long_geometry
from embforge.tuner.search.constraints import Constraint, Context, Idle, Rules

CHOICES = {f.name: f.metadata["choices"] for f in fields(CudaParams)}
SMALLEST_LONG_BAG = min(CHOICES["long_bag"])


@dataclass(frozen=True)
class _Mapping:
    """The mapping of rows to lanes at a point: what the source states, except for a few numbers of the params."""

    classes: tuple[tuple[BucketGeometry, ...], ...]
    key: Hashable
    """Points with equal keys have equal sources."""
    shared: tuple[int, ...]
    """Bytes of shared memory per block, for each class of buckets."""


def forward_rules(context: Context) -> Rules:
    """The rules of the lookup; `PlanError` if the default cannot work."""
    arch = arch_named(context.arch)
    geometry_of(context.plan(CudaParams()))
    mapping = _mappings(context)

    def refuses_shared(params: CudaParams) -> bool:
        return mapping(params) is None

    def refuses_blocks(params: CudaParams) -> bool:
        mapped = mapping(params)
        assert mapped is not None
        return any(
            (shared + arch.shared_reserved) * _blocks(context, params, members[0].wide) > arch.shared_bytes
            for members, shared in zip(mapped.classes, mapped.shared, strict=True)
        )

    def work(params: CudaParams) -> Hashable:
        mapped = mapping(params)
        assert mapped is not None
        ordinary = not all(members[0].wide for members in mapped.classes)
        splits = any(g.pooled for members in mapped.classes for g in members) and _may_be_long(context)
        return (
            mapped.key,
            _blocks(context, params, wide=False) if ordinary else None,
            params.cache_hint,
            params.long_bag if splits else None,
        )

    return Rules(
        constraints=(
            Constraint(
                "shared memory of a block",
                "a block's ids, bags and running sums do not fit into the 48 KiB that it gets by default",
                refuses_shared,
            ),
            Constraint(
                "shared memory of a multiprocessor",
                "the blocks that `pipeline` requires on a multiprocessor do not fit into its shared memory together: "
                "it would limit registers without gaining anything",
                refuses_blocks,
            ),
        ),
        idle=(
            Idle("vector_bytes", "no row is aligned for wider loads, or the GPU has none (32 bytes: from sm_100 on)"),
            Idle("bags_per_block", "a block owns fewer bags anyway: `interleave` for each of its groups"),
            Idle("interleave", "a block owns no more bags, because `bags_per_block` is the lower limit"),
            Idle(
                "id_tile", "a block's groups stage the same number of whole batches of rows, or shared memory is full"
            ),
            Idle(
                "pipeline",
                "a multiprocessor holds no more threads, or vectors are so wide that fewer rows are in flight",
            ),
            Idle("long_bag", "nothing is pooled, or no bag of this traffic is long enough to be split"),
        ),
        work=work,
    )


def backward_rules(context: Context) -> Rules:
    """The rules of the update of rows, or without an update of the reduction."""

    def work(params: CudaBackwardParams) -> Hashable:
        plan = context.plan(params)
        buckets = tuple(_row_numbers(b) for b in row_buckets(plan))
        return params.block, params.medium_run, backward_min_blocks(plan), buckets

    return Rules(
        constraints=(),
        idle=(
            Idle("vector_bytes", "no row and no gradient is aligned for wider accesses"),
            Idle(
                "pipeline", "the update's states and sums leave registers for fewer blocks, or gradients in flight end"
            ),
        ),
        work=work,
    )


def _mappings(context: Context) -> Callable[[CudaParams], _Mapping | None]:
    """A function from points to mappings; None for a point whose shared memory does not fit. It caches, because many
    points have the same mapping."""

    longs: dict[tuple[int, int, int], Hashable] = {}  # all that they depend on: ids and bags staged change no lanes

    @cache
    def mapping_of(
        block: int, rows: int, vector_bytes: int, id_tile: int, bags_per_block: int, interleave: int
    ) -> _Mapping | None:
        params = CudaParams(
            block,
            _pipeline(rows),
            vector_bytes=vector_bytes,
            id_tile=id_tile,
            bags_per_block=bags_per_block,
            interleave=interleave,
        )
        plan = context.plan(params)
        try:
            geometry = geometry_of(plan)
        except PlanError:
            return None
        classes = register_classes(geometry)
        if (block, rows, vector_bytes) not in longs:
            longs[block, rows, vector_bytes] = _long_numbers(long_geometry(plan, geometry))
        key = tuple(_bucket_numbers(g) for g in geometry), longs[block, rows, vector_bytes]
        return _Mapping(classes, key, tuple(shared_bytes(plan, members) for members in classes))

    return lambda p: mapping_of(p.block, p.pipeline[0], p.vector_bytes, p.id_tile, p.bags_per_block, p.interleave)


def _pipeline(rows: int) -> tuple[int, int]:
    """Some choice of `pipeline` with this number of rows in flight."""
    pipeline: tuple[int, int] = next(choice for choice in CHOICES["pipeline"] if choice[0] == rows)
    return pipeline


def _bucket_numbers(g: BucketGeometry) -> tuple[int, ...]:
    """The facts about a bucket in the source of a lookup."""
    unused = {"bucket", "winners_store"} | (set() if g.pooled else {"window", "min_run"})
    return tuple(getattr(g, f.name) for f in fields(g) if f.name not in unused)


def _long_numbers(geometry: LongGeometry) -> Hashable:
    """The facts about long bags in the source of a lookup; none if no bucket is pooled."""
    kinds = tuple((kind.name, kind.rows) for kind in geometry.kinds)
    return (kinds, geometry.chunks, geometry.pitch, geometry.parts, geometry.shared) if kinds else None


def _row_numbers(b: RowBucket) -> tuple[Hashable, ...]:
    return tuple(getattr(b, f.name) for f in fields(b) if f.name != "layout")


def _blocks(context: Context, params: CudaParams, wide: bool) -> int:
    return min_blocks(context.plan(params), wide)


def _may_be_long(context: Context) -> bool:
    return context.longest_bag is None or context.longest_bag > SMALLEST_LONG_BAG
