"""The facts of `cuda/forward/forward.cu.j2`: lookups on a GPU."""

from __future__ import annotations

from typing import Any

from embforge.codegen.describe import bucket_line, counted, describe, head_facts
from embforge.codegen.dtypes import DTYPES, FLOATS
from embforge.codegen.kernel import MISTAKES, arguments_of, records_of
from embforge.codegen.layout import FeatureLayout
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import RESULTS, Combiner, Shape, selections_of
from embforge.codegen.semantics import CHUNK
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.formats import format_facts, rounding
from embforge.codegen.targets.cuda.geometry import (
    RUNS_WANTED,
    BucketGeometry,
    copy_sizes,
    cuda_params,
    geometry_of,
    min_blocks,
    register_classes,
    row_type,
    stage_sizes,
    trains,
)
from embforge.codegen.targets.cuda.launch import (
    QUEUE_COUNTERS,
    UNIT_BITS,
    long_symbols,
    main_symbols,
    scratch_width,
    widest_pooled,
)
from embforge.codegen.targets.cuda.long_bags import LongGeometry, LongKind, long_geometry

LOAD_HINT = {"no_allocate": ".L1::no_allocate", "evict_last": ".L1::evict_last", "default": ""}
CONSTANT_MEMORY = 60 * 1024
"""Bytes of constant memory that records may take; the compiler's own constants get the rest of the 64 KiB."""
FEATURE_RECORD, SHAPE_RECORD, SEQUENCE_RECORD = 40, 40, 12
"""Bytes of the template's structures Feature, Shape and SequenceFeature, at most."""
KEPT_COLUMN = ABSENT_ID = 8
"""Bytes by which a Feature is larger if a backward will follow, and if a padding id is not a row."""
MERGE_LEVELS = 5
"""Levels of sums of units of 4096 ids: 64 ** 5 units are more than memory holds."""


def forward_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cuda/forward/forward.cu.j2` names. `PlanError` for a plan that cannot work."""
    arch, params, geometry = arch_named(plan.arch), cuda_params(plan), geometry_of(plan)
    table_dtypes = {t.dtype for t in plan.spec.tables}
    output = FLOATS[plan.spec.output_dtype]
    pooled = [g for g in geometry if g.pooled]
    copied = [g for g in geometry if not g.pooled]
    return {
        **head_facts(plan, _notes(plan, geometry)),
        "load_hint": LOAD_HINT[params.cache_hint],
        "load_bytes": sorted({g.vector for g in geometry}, reverse=True),
        **format_facts(table_dtypes, arch, written=[output.name]),
        "output_dtype": output.name,
        "narrow": rounding(output.name, arch) if output.is_narrow else None,
        "id_type": DTYPES[plan.id_dtype].c_type,
        "row_type": row_type(plan),
        "column_type": "int32_t" if plan.layout.output_width < 2**31 else "int64_t",
        "constants": "__constant__" if _constant_bytes(plan, geometry) <= CONSTANT_MEMORY else "__device__",
        "out_type": output.c_type,
        "threads": params.block,
        "chunk": CHUNK,
        "long_bag": params.long_bag,
        "output_width": plan.layout.output_width,
        "trains": trains(plan),
        "divisor_width": plan.layout.divisor_width,
        "winner_width": plan.layout.winner_width,
        "runs_wanted": RUNS_WANTED,
        "mistakes": MISTAKES,
        "arguments": arguments_of(plan.target, plan.op),
        "records": records_of(arguments_of(plan.target, plan.op)),
        "features": [_feature_facts(plan, f) for g in geometry for f in g.bucket.features],
        "any_absent": plan.spec.has_absent_ids,
        "sequence": _sequence_facts(geometry),
        "pooling_results": RESULTS,
        "combiners": list(dict.fromkeys((*_combiners(pooled), *_selections(pooled)))),
        "selections": [
            {
                "type_name": combiner.type_name,
                "buckets": [g.name for g in pooled if g.bucket.pooling.combiner == combiner],
            }
            for combiner in _selections(pooled)
        ],
        "buckets": [_bucket_facts(g) for g in geometry],
        "has_pooled": bool(pooled),
        "has_copied": bool(copied),
        "has_sequence": any(g.bucket.pooling.shape is Shape.SEQUENCE for g in copied),
        "has_concat": any(g.bucket.pooling.shape is Shape.CONCAT for g in copied),
        "scratch_width": scratch_width(plan),
        "scratch_winners": widest_pooled(plan),
        "queue": {"counters": QUEUE_COUNTERS, "unit_bits": UNIT_BITS},
        "kernels": [
            _kernel_facts(plan, symbol, members)
            for symbol, members in zip(main_symbols(plan), register_classes(geometry), strict=True)
        ],
        "long": _long_facts(plan, long_geometry(plan, geometry)),
    }


def _constant_bytes(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> int:
    """Bytes of the records of features and buckets, at most."""
    record = FEATURE_RECORD + (KEPT_COLUMN if trains(plan) else 0) + (ABSENT_ID if plan.spec.has_absent_ids else 0)
    features = record * len(plan.layout.features) + SEQUENCE_RECORD * len(plan.layout.sequence_features)
    return features + SHAPE_RECORD * len(geometry)


def _kernel_facts(plan: Plan, symbol: str, members: tuple[BucketGeometry, ...]) -> dict[str, Any]:
    wide = members[0].wide
    shapes = {g.bucket.pooling.shape for g in members}
    return {
        "symbol": symbol,
        "wide": wide,
        "min_blocks": min_blocks(plan, wide),
        "pooled": any(g.pooled for g in members),
        "copied": any(not g.pooled for g in members),
        "pooled_stage": stage_sizes(members),
        "copied_stage": copy_sizes(members),
        "shapes": [shape.value for shape in (Shape.SEQUENCE, Shape.CONCAT, Shape.POOLED) if shape in shapes],
        "buckets": [_bucket_facts(g) for g in members],
    }


def _long_facts(plan: Plan, long: LongGeometry) -> dict[str, Any]:
    units_symbol, merge_symbol = long_symbols(plan)
    return {
        "symbol": units_symbol,
        "merge_symbol": merge_symbol,
        "min_blocks": min_blocks(plan, wide=True),
        "levels": MERGE_LEVELS,
        "chunks": long.chunks,
        "pitch": long.pitch,
        "parts": long.parts,
        "winner_parts": long.winner_parts,
        "weighted": long.weighted,
        "shared": long.shared,
        "kinds": [_long_kind_facts(kind) for kind in long.kinds],
    }


def _long_kind_facts(kind: LongKind) -> dict[str, Any]:
    facts = [_bucket_facts(g) for g in kind.members]
    return facts[0] | {
        "name": kind.name,
        "rows": kind.rows,
        "buckets": [g.name for g in kind.members],
        "divides": any(f["divides"] for f in facts),
    }


def _bucket_facts(g: BucketGeometry) -> dict[str, Any]:
    bucket = g.bucket
    comment = bucket_line(bucket)
    return {
        "name": g.name,
        "index": bucket.index,
        "features": [{"hotness": f.feature.slots} for f in bucket.features],
        "comment": comment if len(comment) <= 116 else comment[:113] + "...",
        "element": DTYPES[bucket.dtype].c_type,
        "pooling": bucket.pooling.result,
        "dim": bucket.dim,
        "stride": bucket.stride_bytes,
        "vector": g.vector,
        "elements": g.elements,
        "store": g.store,
        "winners_store": g.winners_store,
        "vectors": g.vectors,
        "lanes": g.lanes,
        "tiles": g.tiles,
        "groups": g.groups,
        "rows": g.rows,
        "pooled": g.pooled,
        "run": g.run,
        "least_run": g.min_run.bit_length() - 1,
        "most_run": g.run.bit_length() - 1,
        "window": g.window,
        "combiner": bucket.pooling.combiner.type_name if bucket.pooling.combiner else None,
        "selects": bucket.pooling.selects,
        "divides": any(f.feature.kind.divides for f in bucket.features),
        "weighted": bucket.weighted,
        "whole": bucket.dim % g.elements == 0,
        "first": g.first,
    }


def _combiners(pooled: list[BucketGeometry]) -> tuple[Combiner, ...]:
    """The combiners of the buckets."""
    return tuple(dict.fromkeys(g.bucket.pooling.combiner for g in pooled if g.bucket.pooling.combiner is not None))


def _selections(pooled: list[BucketGeometry]) -> tuple[Combiner, ...]:
    """The combiners that select, for code that all buckets share."""
    return selections_of(g.bucket.pooling for g in pooled)


def _sequence_facts(geometry: tuple[BucketGeometry, ...]) -> list[dict[str, Any]]:
    """The features whose results are sequences, in the order of the spec: position in FEATURES, dim and bucket."""
    by_index = [
        (f.index, {"slot": g.first + i, "dim": f.dim, "bucket": g.name, "name": f.feature.name})
        for g in geometry
        if g.bucket.pooling.shape is Shape.SEQUENCE
        for i, f in enumerate(g.bucket.features)
    ]
    return [facts for _, facts in sorted(by_index, key=lambda item: item[0])]


def _feature_facts(plan: Plan, f: FeatureLayout) -> dict[str, Any]:
    feature = f.feature
    padding = plan.spec.padding_row(feature)
    return {
        "index": f.index,
        "table": f.table_index,
        "pooling": feature.kind.result,
        "weighted": feature.weighted,
        "hotness": feature.slots,
        "column": -1 if f.column is None else f.column,
        "kept": plan.layout.kept_column(f.index),
        "padding": -1 if padding is None else padding,
        "absent": plan.spec.absent_id(feature) or 0,
        "comment": f"{feature.name} -> {feature.table}",
    }


def _notes(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> list[str]:
    lines = [*describe(plan), "", "Buckets, heaviest rows first:"]
    for g in geometry:
        tiles = f" in {g.tiles} tiles" if g.tiles > 1 else ""
        lines.append(
            f"  {g.name}: {counted(g.vectors, 'load')} of {counted(g.vector, 'byte')} per row{tiles}, "
            f"{counted(g.groups, 'row')} per block at once, {g.rows} in flight per lane"
        )
    return lines
