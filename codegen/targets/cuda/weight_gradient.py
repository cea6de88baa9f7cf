"""The facts of the CUDA source for the gradient of per-sample weights, and what a call of it launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.backward import bucket_facts, common_facts, light_blocks, sum_facts
from embforge.codegen.targets.cuda.backward_geometry import (
    RowBucket,
    backward_params,
    min_blocks,
    row_buckets,
)
from embforge.codegen.targets.cuda.backward_launch import symbol_of
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.shared_memory import check_shared

KERNELS = ("dots", "shares")
"""The kernels in the order of their launches. The second is launched only if a weighted feature divides."""


def weight_gradient_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cuda/backward/weight_gradient.cu.j2` names. `PlanError` if no feature is weighted, or if there
    is not enough shared memory."""
    buckets = _buckets(plan)
    if not buckets:
        raise PlanError(f"plan field op={plan.op!r} does not fit a collection without a weighted feature")
    check_shared(plan)
    of_table = {table: b.name for b in buckets for table in b.tables}
    row_bytes = {b.elements * DTYPES[b.dtype].bytes for b in buckets}
    common = common_facts(plan, buckets, {b.dtype for b in buckets} | {b.item for b in buckets})
    return common | {
        "symbols": {name: symbol_of(plan.symbol, name) for name in KERNELS},
        "load_bytes": sorted({*row_bytes, *(b.item_load for b in buckets)}, reverse=True),
        "min_blocks": min_blocks(plan),
        "light_blocks": light_blocks(plan),
        "buckets": [bucket_facts(b) for b in buckets],
        "features": [
            facts | {"bucket": of_table[f.table_index] if f.feature.weighted else None}
            for facts, f in zip(common["features"], plan.layout.features, strict=True)
        ],
        "divided": _divided(plan),
        "update": False,
        "row_wise": True,
        "row_sums": True,
        **sum_facts(buckets),
    }


@dataclass(frozen=True)
class WeightsShape:
    """All that the launches of a plan have in common."""

    symbol: str
    block: int
    divided: int
    """How many weighted features divide."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every kernel that a call may launch."""
        return tuple(symbol_of(self.symbol, name) for name in KERNELS[: 2 if self.divided else 1])

    def launches(self, batch: int, num_values: int) -> tuple[KernelLaunch, ...]:
        """What to launch for a batch of `batch` samples and `num_values` ids."""
        work = (num_values, self.divided * batch)
        return tuple(
            KernelLaunch(symbol, max(1, -(-size // self.block)), self.block, 0)
            for symbol, size in zip(self.symbols, work, strict=False)
        )


def weights_shape(plan: Plan) -> WeightsShape:
    """What all launches of the plan have in common."""
    return WeightsShape(plan.symbol, backward_params(plan).block, len(_divided(plan)))


def _divided(plan: Plan) -> list[int]:
    return [f.index for f in plan.layout.features if f.feature.weighted and f.feature.kind.divides]


def _buckets(plan: Plan) -> tuple[RowBucket, ...]:
    """The buckets in which a weighted feature looks up rows."""
    return tuple(b for b in row_buckets(plan) if b.weighted)
