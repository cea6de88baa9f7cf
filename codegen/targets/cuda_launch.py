"""What a launch of a plan's kernels needs: symbols, grids and buffer sizes, from the batch alone.

One formula for all who launch: the cuda.core launcher and the executor on a CPU. The host knows the batch size and the
number of ids, never a length, so nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.plan import Plan
from embforge.codegen.semantics import CHUNK
from embforge.codegen.signature import MISTAKES, STATUS_WORDS
from embforge.codegen.targets.cuda_geometry import (
    BucketGeometry,
    cuda_params,
    geometry_of,
    register_classes,
    run_of,
)

UNIT = CHUNK * CHUNK
"""Ids of a long bag that one block adds up."""
QUEUE_COUNTERS = 1
"""`queue` begins with (long bags << UNIT_BITS) + units."""
QUEUE_RECORD = 6
"""Then a record a long bag, the kernel's `LongBag`."""
UNIT_BITS = 36
LONG_BLOCKS = 1024
"""Most blocks of the kernels for long bags; they stride over the queue."""


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan: its symbol and how many blocks it needs."""

    symbol: str
    grid: int
    block: int


@dataclass(frozen=True)
class ForwardLaunch:
    """All launches of one forward call, in stream order, and the sizes of its buffers in elements."""

    kernels: tuple[KernelLaunch, ...]
    queue_words: int
    """int64 words of `queue`, 0: pass null. The first QUEUE_COUNTERS must be zero before the first kernel."""
    scratch_floats: int
    """fp32 elements of `scratch`, 0: pass null."""


def status_size() -> int:
    """int64 words of `status`; all zero before the first call."""
    return len(MISTAKES) * len(STATUS_WORDS)


def scratch_width(plan: Plan) -> int:
    """Floats that a unit of a long bag leaves in scratch: the widest pooled row and its weight or count."""
    return max((g.bucket.dim for g in geometry_of(plan) if g.pooled), default=0) + 1


def main_symbols(plan: Plan) -> tuple[str, ...]:
    """One symbol a register class."""
    return (plan.uri, f"{plan.uri}_wide")[: len(register_classes(geometry_of(plan)))]


def long_symbols(plan: Plan) -> tuple[str, str]:
    """The kernels of long bags: units, then the merge."""
    return f"{plan.uri}_long", f"{plan.uri}_merge"


def blocks_of(g: BucketGeometry, batch: int, num_values: int) -> int:
    """Blocks of one bucket: the device's chain of comparisons counts the same."""
    if g.pooled:
        return len(g.bucket.features) * g.tiles * -(-batch // run_of(g, batch))
    if g.bucket.pooling == "none":
        return g.tiles * -(-max(num_values, 1) // g.run)
    return g.tiles * sum(-(-batch * (f.feature.hotness or 1) // g.run) for f in g.bucket.features)


def launch_of(plan: Plan, batch: int, num_values: int) -> ForwardLaunch:
    """What to launch for a batch of that many samples and ids. Kernels without work are left out."""
    params = cuda_params(plan)
    if batch == 0:
        return ForwardLaunch((), 0, 0)
    kernels = [
        KernelLaunch(symbol, sum(blocks_of(g, batch, num_values) for g in members), params.block)
        for symbol, members in zip(main_symbols(plan), register_classes(geometry_of(plan)), strict=True)
    ]
    queue_words = scratch_floats = 0
    if num_values > params.long_bag and any(g.pooled for g in geometry_of(plan)):
        long_bags = num_values // (params.long_bag + 1)
        units = num_values // UNIT + long_bags
        queue_words = QUEUE_COUNTERS + QUEUE_RECORD * long_bags
        scratch_floats = units * scratch_width(plan)
        units_symbol, merge_symbol = long_symbols(plan)
        kernels.append(KernelLaunch(units_symbol, min(units, LONG_BLOCKS), params.block))
        kernels.append(KernelLaunch(merge_symbol, min(long_bags, LONG_BLOCKS), params.block))
    return ForwardLaunch(tuple(k for k in kernels if k.grid), queue_words, scratch_floats)
