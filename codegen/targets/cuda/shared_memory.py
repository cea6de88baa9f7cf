"""Shared memory of the kernels of a CUDA backward: how much a block needs, and whether that is allowed."""

from __future__ import annotations

from embforge.codegen.errors import PlanError
from embforge.codegen.plan import Plan
from embforge.codegen.rules.emit import rule_facts
from embforge.codegen.semantics import ROW_LANES
from embforge.codegen.targets.cuda.arch import MAX_STATIC_SHARED, WARP
from embforge.codegen.targets.cuda.backward_geometry import RowBucket, backward_params, row_buckets, sums_rows

SCALARS = 32
"""Bytes of the single numbers in a structure and of the padding that aligns them, at most."""


def check_shared(plan: Plan) -> None:
    """`PlanError` if a block of one of the plan's kernels needs more shared memory than there is."""
    need = shared_bytes(plan)
    if need <= MAX_STATIC_SHARED:
        return
    params, sums, sequences = backward_params(plan), _sums(plan), _sequences(plan)
    raise PlanError(
        f"plan field block={params.block}: a block of op {plan.op!r} needs {need} bytes of shared memory ({sums} for "
        f"sums over rows, {sequences} for {len(plan.layout.sequence_features)} 'none' features); allowed: "
        f"{MAX_STATIC_SHARED}; choose a smaller block or split the collection"
    )


def shared_bytes(plan: Plan) -> int:
    """Bytes of shared memory of the kernel that needs the most: at least the size of the structures in its template."""
    if plan.op == "weight_gradient":
        block = backward_params(plan).block
        dots = 4 * block + _sums(plan) + _sequences(plan)
        return SCALARS + max(dots, 8 * block)
    per_bucket = 12 if plan.update is not None else 20  # a share and a first run; in a reduction also a position
    scalars = 0 if plan.update is None else 4 * len(rule_facts(plan.update)["rule"]["scalar_fields"])
    rows = per_bucket * (len(row_buckets(plan)) + 1) + scalars + _sums(plan)
    return SCALARS + max(rows, _sequences(plan))


def _sums(plan: Plan) -> int:
    """Bytes of the struct SumStage: the terms of a block, and the interleaved sums of its rows."""
    if not sums_rows(plan):
        return 0
    buckets: tuple[RowBucket, ...] = row_buckets(plan)
    if plan.op == "weight_gradient":
        buckets = tuple(b for b in buckets if b.weighted)
    block = backward_params(plan).block
    elements, per_warp = max(b.elements for b in buckets), max(b.per_warp for b in buckets)
    return 4 * block * elements + 4 * block // WARP * per_warp * ROW_LANES


def _sequences(plan: Plan) -> int:
    """Bytes of the struct Sequences: the begin, the size and the position of every `none` feature."""
    return 24 * len(plan.layout.sequence_features)
