"""C++ for the host: one shared library a plan, compiled by the machine's own compiler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from embforge.codegen.buckets import Bucket
from embforge.codegen.describe import bucket_line, describe
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import CompileError
from embforge.codegen.layout import FeatureLayout
from embforge.codegen.machine import find_compiler
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.semantics import CHUNK
from embforge.codegen.signature import arguments_of, prototype
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets import Source, Target
from embforge.codegen.targets.cpu.backward import backward_facts, reduce_facts, weight_gradient_facts
from embforge.codegen.targets.cpu.geometry import lies_in_cache, rows_at_once, streams_results, touched_bytes
from embforge.codegen.targets.cpu.stages import stage_facts
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of

BAG_OVERHEAD_BYTES = 64
"""What starting a bag costs, in bytes of rows that could have been read meanwhile."""


def facts(plan: Plan) -> dict[str, Any]:
    """Everything `cpu/forward/forward.cpp.j2` names."""
    isa, params = isa_of(plan), _params(plan)
    buckets = {f.index: b for b in plan.buckets for f in b.features}
    return {
        "uri": plan.uri,
        "version": version("embforge"),
        "description": describe(plan),
        "compile_line": " ".join(["c++", *FLAGS, *isa.flags]),
        "isa": isa,
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
        "arguments": arguments_of("cpu", plan.op),
        "prototype": prototype("cpu", plan.op),
        "buckets": [_bucket_facts(plan.spec, bucket) for bucket in plan.buckets],
        "features": [_feature_facts(plan, placed, buckets[placed.index]) for placed in plan.layout.features],
        "any_absent": plan.spec.has_absent_ids,
    }


def compile_source(plan: Plan, source: Path) -> bytes:
    """The shared library of the rendered source."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="embforge-") as scratch:
        library = Path(scratch) / "kernel.so"
        command = [*compiler.command, *FLAGS, *isa_of(plan).flags, str(source), "-o", str(library)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise CompileError(
                f"{compiler.version} refused the generated source {source}\ncommand: {' '.join(command)}\n"
                + numbered_log(answer.stderr, source.read_text())
            )
        return library.read_bytes()


def fingerprint(plan: Plan) -> dict[str, str]:
    """What decides the binary beside the source: the compiler and its resolved flags, never `native`."""
    compiler = find_compiler()
    return {"compiler": compiler.version, "flags": " ".join([*compiler.command[1:], *FLAGS, *isa_of(plan).flags])}


def numbered_log(log: str, source: str, file: str = "", context: int = 2) -> str:
    """The compiler's log, followed by the lines of the source (`file`, if the log names others too), numbered."""
    lines = source.splitlines()
    found = re.findall(re.escape(file) + r"[:(](\d+)[:)]", log)
    named = sorted({int(n) for n in found if 0 < int(n) <= len(lines)})
    shown = sorted({k for n in named for k in range(max(1, n - context), min(len(lines), n + context) + 1)})
    excerpt = "\n".join(f"{'>' if k in named else ' '} {k:5d} | {lines[k - 1]}" for k in shown)
    return f"{log.rstrip()}\n\n{excerpt}"


def _params(plan: Plan) -> CpuParams:
    assert isinstance(plan.params, CpuParams)
    return plan.params


def _bucket_facts(spec: CollectionSpec, bucket: Bucket) -> dict[str, Any]:
    return {
        "label": bucket.label,
        "comment": bucket_line(bucket),
        "table_type": DTYPES[bucket.dtype].c_type,
        "dim": bucket.dim,
        "stride_bytes": bucket.stride_bytes,
        "weighted": bucket.weighted,
        "padded": any(spec.padding_row(f.feature) is not None for f in bucket.features),
        "is_max": bucket.pooling == "max",
    }


def _feature_facts(plan: Plan, placed: FeatureLayout, bucket: Bucket) -> dict[str, Any]:
    feature = placed.feature
    pooled = bucket.pooling in ("sum", "max")
    runner = "pool_bags" if pooled else "concat_bags"
    result_bytes = placed.width * DTYPES[plan.spec.output_dtype].bytes
    if plan.op == "forward_train" and feature.pooling == "max":
        result_bytes += placed.dim * DTYPES[plan.id_dtype].bytes
    padding = plan.spec.padding_row(feature) if pooled else None
    return {
        "name": feature.name,
        "table_index": placed.table_index,
        "pooling": feature.pooling,
        "dim": placed.dim,
        "column": placed.column or 0,
        "padding": -1 if padding is None else padding,
        "absent": plan.spec.absent_id(feature) or 0,
        "hotness": feature.hotness if feature.pooling == "concat" else 0,
        "ahead": _rows_ahead(plan, placed, bucket),
        "kept": plan.layout.kept_column(placed.index),
        "run": "nullptr" if feature.pooling == "none" else f"{runner}<{bucket.label}>",
        "copy_rows": f"copy_rows<{bucket.label}>" if feature.pooling == "none" else "nullptr",
        "sum_units": f"sum_units<{bucket.label}>" if pooled else "nullptr",
        "merge_units": f"merge_units<{bucket.label}>" if pooled else "nullptr",
        "record_floats": f"Records<{bucket.label}>::floats" if pooled else "0",
        "row_cost": touched_bytes(bucket.row_bytes) + (result_bytes if feature.pooling == "none" else 0),
        "bag_cost": 0 if feature.pooling == "none" else result_bytes + BAG_OVERHEAD_BYTES,
    }


def _rows_ahead(plan: Plan, placed: FeatureLayout, bucket: Bucket) -> int:
    if lies_in_cache(plan.layout.tables[placed.table_index]):
        return 0
    return -(-_params(plan).prefetch_bytes // touched_bytes(bucket.row_bytes))


CPU = Target(
    name="cpu",
    sources={
        "forward": Source("cpu/forward/forward.cpp.j2", facts),
        "forward_train": Source("cpu/forward/forward.cpp.j2", facts),
        "backward": Source("cpu/backward/backward.cpp.j2", backward_facts),
        "reduce": Source("cpu/backward/backward.cpp.j2", reduce_facts),
        "weight_gradient": Source("cpu/backward/weight_gradient.cpp.j2", weight_gradient_facts),
        "stages": Source("cpu/stages/stages.cpp.j2", stage_facts),
    },
    source_suffix=".cpp",
    binary_suffix=".so",
    compile=compile_source,
    fingerprint=fingerprint,
    resources=lambda plan, binary: [],
)
