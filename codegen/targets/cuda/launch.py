"""What a launch of a plan's kernels needs: symbols, grids and buffer sizes, which follow from the sizes of the batch.

Both launchers use these formulas: that for GPUs, and that for the executor on a CPU. The host knows the batch size and
the number of ids, but no lengths, so nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.kernel import MISTAKES, STATUS_WORDS
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import Shape
from embforge.codegen.semantics import CHUNK
from embforge.codegen.targets.cuda.arch import MAX_STATIC_SHARED
from embforge.codegen.targets.cuda.geometry import (
    OTHER_SHARED,
    BucketGeometry,
    cuda_params,
    geometry_of,
    register_classes,
    run_of,
    trains,
)
from embforge.codegen.targets.cuda.long_bags import long_geometry

UNIT = CHUNK * CHUNK
"""The ids of a long bag that one block adds up."""
QUEUE_COUNTERS = 1
"""`queue` begins with (long bags << UNIT_BITS) + units."""
QUEUE_RECORD = 6
"""Words of the record that `queue` holds after that for each long bag: the kernel's `LongBag`."""
UNIT_BITS = 36
LONG_BLOCKS = 1024
"""The most blocks of the kernels for long bags, which stride over the queue."""


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan: its symbol, how many blocks it needs, and what a block takes."""

    symbol: str
    grid: int
    block: int
    """Threads per block."""
    shared: int
    """Bytes of dynamic shared memory."""

    @property
    def opts_in(self) -> bool:
        """Whether a block needs more shared memory than the driver allows before it is asked for more."""
        return self.shared + OTHER_SHARED > MAX_STATIC_SHARED


@dataclass(frozen=True)
class ForwardLaunch:
    """All launches of one forward call, in stream order, and the sizes of its buffers in elements."""

    kernels: tuple[KernelLaunch, ...]
    queue_words: int
    """int64 words of `queue`; 0: pass null. The first QUEUE_COUNTERS must be zero before the first kernel."""
    scratch_floats: int
    """fp32 elements of `scratch`; 0: pass null."""


def status_size() -> int:
    """int64 words of `status`, which must all be zero before the first call."""
    return len(MISTAKES) * len(STATUS_WORDS)


def widest_pooled(plan: Plan) -> int:
    """Elements of the widest pooled row."""
    return max((g.bucket.dim for g in geometry_of(plan) if g.pooled), default=0)


def scratch_width(plan: Plan) -> int:
    """Floats that a unit of a long bag writes to scratch: the widest pooled row, the winners of the widest row that is
    selected if a backward will follow, and weight or count."""
    selected = (g.bucket.dim for g in geometry_of(plan) if g.bucket.pooling.selects)
    return widest_pooled(plan) + (max(selected, default=0) if trains(plan) else 0) + 1


def main_symbols(plan: Plan) -> tuple[str, ...]:
    """The symbols of the main kernels, one per register class."""
    return (plan.symbol, f"{plan.symbol}_wide")[: len(register_classes(geometry_of(plan)))]


def long_symbols(plan: Plan) -> tuple[str, str]:
    """The symbols of the kernels for long bags: units, then the merge."""
    return f"{plan.symbol}_long", f"{plan.symbol}_merge"


@dataclass(frozen=True)
class BlockRange:
    """The number of a bucket's blocks as a function of the batch. Comparisons in the kernel give the same number."""

    shape: Shape
    """The shape of its features' results."""
    factor: int
    """Blocks per run: tiles, multiplied by the number of features if all of them are cut in the same way."""
    min_run: int
    run: int
    hotness: tuple[int, ...]
    """The hotness of each of its `concat` features."""

    def blocks(self, batch: int, num_values: int) -> int:
        """The number of blocks for a batch of `batch` samples and `num_values` ids."""
        if self.shape is Shape.SEQUENCE:
            return self.factor * -(-max(num_values, 1) // self.run)
        if self.shape is Shape.CONCAT:
            return self.factor * sum(-(-batch * slots // self.run) for slots in self.hotness)
        return self.factor * -(-batch // run_of(self.min_run, self.run, batch))


@dataclass(frozen=True)
class LaunchShape:
    """All that the launches of a plan have in common, so that a call takes only a few divisions."""

    block: int
    kernels: tuple[tuple[str, tuple[BlockRange, ...]], ...]
    """The symbol and the ranges of blocks of each main kernel."""
    long_symbols: tuple[str, str] | None
    """The kernels of long bags, if the plan pools at all."""
    long_bag: int
    long_shared: int
    """Bytes of dynamic shared memory of the first kernel for long bags. No other kernel has any."""
    scratch_width: int

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every kernel that a call may launch."""
        return (*(symbol for symbol, _ in self.kernels), *(self.long_symbols or ()))

    def shared_of(self, symbol: str) -> int:
        """Bytes of dynamic shared memory per block of that kernel."""
        return self.long_shared if self.long_symbols and symbol == self.long_symbols[0] else 0


def shape_of(plan: Plan) -> LaunchShape:
    """What all launches of the plan have in common."""
    params, geometry = cuda_params(plan), geometry_of(plan)
    return LaunchShape(
        block=params.block,
        kernels=tuple(
            (symbol, tuple(range_of(g) for g in members))
            for symbol, members in zip(main_symbols(plan), register_classes(geometry), strict=True)
        ),
        long_symbols=long_symbols(plan) if any(g.pooled for g in geometry) else None,
        long_bag=params.long_bag,
        long_shared=long_geometry(plan, geometry).shared,
        scratch_width=scratch_width(plan),
    )


def range_of(g: BucketGeometry) -> BlockRange:
    """The range of blocks of a bucket."""
    features = g.bucket.features
    shape = g.bucket.pooling.shape
    hotness = tuple(f.feature.slots for f in features) if shape is Shape.CONCAT else ()
    return BlockRange(shape, g.tiles * (len(features) if g.pooled else 1), g.min_run, g.run, hotness)


def launch_of(shape: LaunchShape, batch: int, num_values: int) -> ForwardLaunch:
    """What to launch for a batch of `batch` samples and `num_values` ids. Kernels without work are left out."""
    if batch == 0:
        return ForwardLaunch((), 0, 0)
    kernels = [
        KernelLaunch(symbol, sum(r.blocks(batch, num_values) for r in ranges), shape.block, 0)
        for symbol, ranges in shape.kernels
    ]
    queue_words = scratch_floats = 0
    if num_values > shape.long_bag and shape.long_symbols:
        long_bags = num_values // (shape.long_bag + 1)
        units = num_values // UNIT + long_bags
        queue_words = QUEUE_COUNTERS + QUEUE_RECORD * long_bags
        scratch_floats = units * shape.scratch_width
        units_symbol, merge_symbol = shape.long_symbols
        kernels.append(KernelLaunch(units_symbol, min(units, LONG_BLOCKS), shape.block, shape.shared_of(units_symbol)))
        kernels.append(KernelLaunch(merge_symbol, min(long_bags, LONG_BLOCKS), shape.block, 0))
    return ForwardLaunch(tuple(k for k in kernels if k.grid), queue_words, scratch_floats)
