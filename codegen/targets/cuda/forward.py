"""The CUDA target: what the template states about a plan, and NVRTC as its compiler."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from embforge.codegen.describe import bucket_line, describe
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import FeatureLayout
from embforge.codegen.plan import Plan
from embforge.codegen.render import render
from embforge.codegen.semantics import CHUNK
from embforge.codegen.signature import METADATA_WORDS, MISTAKES, STATUS_WORDS, arguments_of, prototype
from embforge.codegen.targets import Source, Target
from embforge.codegen.targets.cuda.arch import Arch, arch_named
from embforge.codegen.targets.cuda.backward import backward_facts
from embforge.codegen.targets.cuda.weight_gradient import weight_gradient_facts
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
from embforge.codegen.targets.cuda.stages import stage_facts
from embforge.codegen.targets.cuda.nvrtc import compile_cubin, nvrtc_fingerprint
from embforge.codegen.targets.cuda.sass import kernel_resources

LOAD_HINT = {"no_allocate": ".L1::no_allocate", "evict_last": ".L1::evict_last", "default": ""}
CONSTANT_MEMORY = 60 * 1024
"""Bytes of constant memory that records may take; the compiler's own constants get the rest of the 64 KB."""
FEATURE_RECORD, SHAPE_RECORD, SEQUENCE_RECORD = 40, 40, 12
"""Bytes of the template's Feature, Shape and SequenceFeature, at most."""
KEPT_COLUMN = ABSENT_ID = 8
"""Bytes that a Feature is larger by if a backward will come, and if a padding id is no row."""
BF16_ARCH, FP8_ARCH = 80, 89
"""The first architectures that convert to bf16 and from fp8 by an instruction."""
MERGE_LEVELS = 5
"""Levels of units of 4096 ids: 64 ** 5 units are more than memory holds."""


def facts_of(plan: Plan) -> dict[str, Any]:
    """Everything `cuda/forward/forward.cu.j2` names. `PlanError` for a plan that cannot work."""
    arch, params, geometry = arch_named(plan.arch), cuda_params(plan), geometry_of(plan)
    table_dtypes = {t.dtype for t in plan.spec.tables}
    narrow = _narrow(plan.spec.output_dtype, arch)
    pooled = [g for g in geometry if g.pooled]
    copied = [g for g in geometry if not g.pooled]
    return {
        "uri": plan.uri,
        "arch": plan.arch,
        "header": _header(plan, geometry),
        "load_hint": LOAD_HINT[params.cache_hint],
        "load_bytes": sorted({g.vector for g in geometry}, reverse=True),
        "table_dtypes": table_dtypes,
        "output_dtype": plan.spec.output_dtype,
        "conversions": _conversions(table_dtypes, narrow, arch),
        "narrow": narrow,
        "id_type": DTYPES[plan.id_dtype].c_type,
        "row_type": row_type(plan),
        "column_type": "int32_t" if plan.layout.output_width < 2**31 else "int64_t",
        "constants": "__constant__" if _constant_bytes(plan, geometry) <= CONSTANT_MEMORY else "__device__",
        "out_type": DTYPES[plan.spec.output_dtype].c_type,
        "threads": params.block,
        "chunk": CHUNK,
        "long_bag": params.long_bag,
        "output_width": plan.layout.output_width,
        "trains": trains(plan),
        "divisor_width": plan.layout.divisor_width,
        "winner_width": plan.layout.winner_width,
        "runs_wanted": RUNS_WANTED,
        "metadata_words": len(METADATA_WORDS),
        "mistakes": MISTAKES,
        "status_words": len(STATUS_WORDS),
        "arguments": arguments_of("cuda", plan.op),
        "prototype": prototype("cuda", plan.op),
        "features": [_feature_facts(plan, f) for g in geometry for f in g.bucket.features],
        "any_absent": plan.spec.has_absent_ids,
        "sequence": _sequence_facts(geometry),
        "buckets": [_bucket_facts(g) for g in geometry],
        "has_pooled": bool(pooled),
        "has_copied": bool(copied),
        "has_sequence": any(g.bucket.pooling == "none" for g in copied),
        "has_concat": any(g.bucket.pooling == "concat" for g in copied),
        "scratch_width": scratch_width(plan),
        "scratch_winners": widest_pooled(plan),
        "queue": {"counters": QUEUE_COUNTERS, "unit_bits": UNIT_BITS},
        "kernels": [
            _kernel_facts(plan, symbol, members)
            for symbol, members in zip(main_symbols(plan), register_classes(geometry), strict=True)
        ],
        "long": _long_facts(plan, long_geometry(plan, geometry)),
    }


def _conversions(table_dtypes: Collection[str], narrow: str | None, arch: Arch) -> set[str]:
    """The conversions by one instruction that a kernel needs; any other is arithmetic in its text."""
    fp8 = "fp8_e4m3" in table_dtypes and arch.number >= FP8_ARCH
    wanted = {
        "half_to_float": "fp16" in table_dtypes or fp8,
        "fp8_to_halves": fp8,
        "float_to_half": narrow == "float_to_half",
        "float_to_bf16": narrow == "float_to_bf16",
    }
    return {name for name, needed in wanted.items() if needed}


def _narrow(output_dtype: str, arch: Arch) -> str | None:
    """The function that rounds fp32 to the output type, if that is another."""
    bf16 = "float_to_bf16" if arch.number >= BF16_ARCH else "round_to_bf16"
    return {"fp32": None, "fp16": "float_to_half", "bf16": bf16}[output_dtype]


def _constant_bytes(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> int:
    """Bytes of the records of features and buckets, at most."""
    record = FEATURE_RECORD + (KEPT_COLUMN if trains(plan) else 0) + (ABSENT_ID if plan.spec.has_absent_ids else 0)
    features = record * len(plan.layout.features) + SEQUENCE_RECORD * len(plan.layout.sequence_features)
    return features + SHAPE_RECORD * len(geometry)


def _kernel_facts(plan: Plan, symbol: str, members: tuple[BucketGeometry, ...]) -> dict[str, Any]:
    wide = members[0].wide
    return {
        "symbol": symbol,
        "comment": (
            "Buckets with many accumulators a lane, which would cost the others registers."
            if wide
            else "The grid is the concatenation of block ranges a bucket, heaviest rows first."
        ),
        "min_blocks": min_blocks(plan, wide),
        "pooled": any(g.pooled for g in members),
        "copied": any(not g.pooled for g in members),
        "pooled_stage": stage_sizes(members),
        "copied_stage": copy_sizes(members),
        "steps": _steps(members),
        "buckets": [_dispatch_facts(g) for g in members],
    }


def _steps(members: tuple[BucketGeometry, ...]) -> list[dict[str, str]]:
    """The shared preparation of each kind of bucket in a kernel; the last needs no condition."""
    kinds = {"none": "open_sequence", "concat": "open_slots"}
    found = {g.bucket.pooling for g in members}
    steps = [
        {
            "condition": f"SHAPES[work.bucket].pooling == {kind.upper()}",
            "call": f"{function}(a, stage.copied, work, bad_id)",
        }
        for kind, function in kinds.items()
        if kind in found
    ]
    if any(g.pooled for g in members):
        steps.append({"condition": "", "call": "open_run(a, stage.pooled, work)"})
    steps[-1]["condition"] = ""
    return steps


def _dispatch_facts(g: BucketGeometry) -> dict[str, Any]:
    index, tiles = g.bucket.index, g.tiles
    if g.pooled:
        least, most = g.min_run.bit_length() - 1, g.run.bit_length() - 1
        owns = f"owns_runs({index}, {len(g.bucket.features) * tiles}, {least}, {most})"
        call = f"pool_run<{g.name}>(a, stage.pooled, bad_id)"
    else:
        slots = " + ".join(f"ceil_div<int64_t>({f.feature.hotness} * batch, {g.run})" for f in g.bucket.features)
        concat = f"{tiles} * ({slots})" if tiles > 1 else slots
        blocks = f"sequence_blocks(num_values, {g.run}, {tiles})" if g.bucket.pooling == "none" else concat
        owns = f"owns({index}, {blocks})"
        out = "sequence" if g.bucket.pooling == "none" else "pooled"
        call = f"copy_rows<{g.name}>(stage.copied, {out})"
    return {"index": index, "owns": owns, "call": call}


def _long_facts(plan: Plan, found: LongGeometry) -> dict[str, Any]:
    units_symbol, merge_symbol = long_symbols(plan)
    return {
        "symbol": units_symbol,
        "merge_symbol": merge_symbol,
        "min_blocks": min_blocks(plan, wide=True),
        "levels": MERGE_LEVELS,
        "chunks": found.chunks,
        "pitch": found.pitch,
        "parts": found.parts,
        "winner_parts": found.winner_parts,
        "weighted": found.weighted,
        "shared": found.shared,
        "kinds": [_long_kind_facts(kind) for kind in found.kinds],
    }


def _long_kind_facts(kind: LongKind) -> dict[str, Any]:
    facts = [_bucket_facts(g) for g in kind.members]
    return facts[0] | {
        "name": kind.name,
        "rows": kind.rows,
        "buckets": [g.bucket.index for g in kind.members],
        "divides": _c(any(f["divides"] == "true" for f in facts)),
    }


def _bucket_facts(g: BucketGeometry) -> dict[str, Any]:
    bucket = g.bucket
    comment = bucket_line(bucket)
    return {
        "name": g.name,
        "comment": comment if len(comment) <= 116 else comment[:113] + "...",
        "element": DTYPES[bucket.dtype].c_type,
        "pooling": bucket.pooling.upper(),
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
        "window": g.window,
        "max": _c(bucket.pooling == "max"),
        "divides": _c(any(f.feature.pooling in ("mean", "sqrtn") for f in bucket.features)),
        "weighted": _c(bucket.weighted),
        "whole": _c(bucket.dim % g.elements == 0),
        "first": g.first,
    }


def _sequence_facts(geometry: tuple[BucketGeometry, ...]) -> list[dict[str, int]]:
    """'none' features in spec order: which of FEATURES, its dim and bucket."""
    found = [
        (f.index, {"slot": g.first + i, "dim": f.dim, "bucket": g.bucket.index})
        for g in geometry
        if g.bucket.pooling == "none"
        for i, f in enumerate(g.bucket.features)
    ]
    return [facts for _, facts in sorted(found, key=lambda item: item[0])]


def _feature_facts(plan: Plan, placed: FeatureLayout) -> dict[str, Any]:
    feature = placed.feature
    padding = plan.spec.padding_row(feature)
    return {
        "index": placed.index,
        "table": placed.table_index,
        "pooling": feature.pooling.upper(),
        "weighted": _c(feature.weighted),
        "hotness": feature.hotness if feature.pooling == "concat" else 0,
        "column": -1 if placed.column is None else placed.column,
        "kept": plan.layout.kept_column(placed.index),
        "padding": -1 if padding is None else padding,
        "absent": plan.spec.absent_id(feature) or 0,
        "comment": f"{feature.name} -> {feature.table}",
    }


def _header(plan: Plan, geometry: tuple[BucketGeometry, ...]) -> list[str]:
    lines = [*describe(plan), "", "Buckets, heaviest rows first:"]
    for g in geometry:
        tiles = f" in {g.tiles} tiles" if g.tiles > 1 else ""
        lines.append(
            f"  {g.name}: {g.vectors} loads of {g.vector} bytes a row{tiles}, {g.groups} rows a block at once, "
            f"{g.rows} in flight a lane"
        )
    return lines


def _c(value: bool) -> str:
    return "true" if value else "false"


def _compile(plan: Plan, source: Path) -> bytes:
    return compile_cubin(source, plan.arch)


def _fingerprint(plan: Plan) -> dict[str, str]:
    return nvrtc_fingerprint(plan.arch)


def _resources(plan: Plan, binary: bytes) -> list[dict[str, Any]]:
    source = CUDA.sources[plan.op]
    return kernel_resources(plan, render(source.template, source.facts(plan)), binary)


CUDA = Target(
    name="cuda",
    sources={
        "forward": Source("cuda/forward/forward.cu.j2", facts_of),
        "forward_train": Source("cuda/forward/forward.cu.j2", facts_of),
        "backward": Source("cuda/backward/backward.cu.j2", backward_facts),
        "reduce": Source("cuda/backward/backward.cu.j2", backward_facts),
        "weight_gradient": Source("cuda/backward/weight_gradient.cu.j2", weight_gradient_facts),
        "stages": Source("cuda/stages/stages.cu.j2", stage_facts),
    },
    source_suffix=".cu",
    binary_suffix=".cubin",
    compile=_compile,
    fingerprint=_fingerprint,
    resources=_resources,
)
