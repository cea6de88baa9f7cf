"""The facts of `cpu/forward/forward.cpp.j2`: lookups on the host."""

from __future__ import annotations

from typing import Any

from embforge.codegen.buckets import Bucket
from embforge.codegen.describe import bucket_line, describe, head_facts
from embforge.codegen.dtypes import DTYPES, narrow_floats
from embforge.codegen.kernel import Outcome, arguments_of, records_of
from embforge.codegen.layout import FeatureLayout
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import RESULTS, Shape
from embforge.codegen.semantics import CHUNK
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cpu.geometry import fits_in_cache, rows_at_once, streams_results, touched_bytes
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of

BAG_OVERHEAD_BYTES = 64
"""The cost of starting a bag, in bytes of rows that could be read in the same time."""


def forward_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cpu/forward/forward.cpp.j2` names."""
    isa, params = isa_of(plan), _params(plan)
    buckets = {f.index: b for b in plan.buckets for f in b.features}
    return {
        **head_facts(plan, describe(plan)),
        "compile_line": " ".join(["c++", *FLAGS, *isa.flags]),
        "isa": isa,
        "formats": narrow_floats([plan.spec.output_dtype, *(table.dtype for table in plan.spec.tables)]),
        "chunk": CHUNK,
        "params": params,
        "rows_at_once": [rows_at_once(n, params.rows_unrolled, isa) for n in range(1, params.tile_vectors + 1)],
        "streams": params.stores == "streaming" and streams_results(plan.layout, isa),
        "id_type": DTYPES[plan.id_dtype].c_type,
        "out_type": DTYPES[plan.spec.output_dtype].c_type,
        "result_bytes": isa.width * DTYPES[plan.spec.output_dtype].bytes,
        "output_width": plan.layout.output_width,
        "trains": plan.op == "forward_train",
        "divisor_width": plan.layout.divisor_width,
        "winner_width": plan.layout.winner_width,
        "arguments": arguments_of(plan.target, plan.op),
        "records": records_of(arguments_of(plan.target, plan.op)),
        "outcomes": Outcome,
        "pooling_results": RESULTS,
        "combiners": list(dict.fromkeys(b.pooling.combiner for b in plan.buckets if b.pooling.combiner)),
        "buckets": [_bucket_facts(plan.spec, bucket) for bucket in plan.buckets],
        "features": [_feature_facts(plan, f, buckets[f.index]) for f in plan.layout.features],
        "any_absent": plan.spec.has_absent_ids,
    }


def _params(plan: Plan) -> CpuParams:
    assert isinstance(plan.params, CpuParams)
    return plan.params


def _bucket_facts(spec: CollectionSpec, bucket: Bucket) -> dict[str, Any]:
    combiner = bucket.pooling.combiner
    return {
        "label": bucket.label,
        "comment": bucket_line(bucket),
        "table_type": DTYPES[bucket.dtype].c_type,
        "dim": bucket.dim,
        "stride_bytes": bucket.stride_bytes,
        "weighted": bucket.weighted,
        "padded": any(spec.padding_row(f.feature) is not None for f in bucket.features),
        "combiner": combiner.type_name if combiner else None,
    }


def _feature_facts(plan: Plan, f: FeatureLayout, bucket: Bucket) -> dict[str, Any]:
    feature = f.feature
    pooled, sequence = feature.kind.pooled, feature.kind.shape is Shape.SEQUENCE
    result_bytes = f.width * DTYPES[plan.spec.output_dtype].bytes
    if plan.op == "forward_train" and feature.kind.kept == "winner":
        result_bytes += f.dim * DTYPES[plan.id_dtype].bytes
    padding = plan.spec.padding_row(feature) if pooled else None
    return {
        "name": feature.name,
        "table": f.table_index,
        "pooling": feature.kind.result,
        "dim": f.dim,
        "column": f.column or 0,
        "padding": -1 if padding is None else padding,
        "absent": plan.spec.absent_id(feature) or 0,
        "hotness": feature.slots,
        "ahead": _rows_ahead(plan, f, bucket),
        "kept": plan.layout.kept_column(f.index),
        "bucket": bucket.label,
        "row_cost": touched_bytes(bucket.row_bytes) + (result_bytes if sequence else 0),
        "bag_cost": 0 if sequence else result_bytes + BAG_OVERHEAD_BYTES,
    }


def _rows_ahead(plan: Plan, f: FeatureLayout, bucket: Bucket) -> int:
    if fits_in_cache(plan.layout.tables[f.table_index]):
        return 0
    return -(-_params(plan).prefetch_bytes // touched_bytes(bucket.row_bytes))
