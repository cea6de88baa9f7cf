"""What a backward launches, and how much memory that takes: both follow from the sizes of the batch.

All launchers use these formulas. Only the device knows how many rows occur and how often, so grids are as large as they
may ever have to be, up to a limit beyond which blocks stride, and nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.plan import Plan
from embforge.codegen.semantics import CHUNK
from embforge.codegen.targets.cuda.arch import WARP
from embforge.codegen.targets.cuda.backward_geometry import (
    backward_params,
    is_row_wise,
    key_dtype,
    key_tables,
    partial_width,
    row_buckets,
    scaled_features,
    scaled_width,
    scales_sequence,
)
from embforge.codegen.targets.cuda.launch import KernelLaunch

KERNELS = ("prepare", "gradients", "sources", "runs", "chunks", "levels", "rows")
"""The kernels of a backward and of a reduction, in stream order. Torch sorts before `sources` and
sums up before `runs`."""
EACH = 4
"""Positions per thread of `prepare`."""
MOST_BLOCKS = 2048
"""The most blocks of kernels whose blocks stride over their work."""
GRADIENTS_EACH = 16
"""Numbers per thread of `gradients`, if the batch is large enough."""


@dataclass(frozen=True)
class BackwardShape:
    """All that a plan's launches have in common, so that a call takes a few divisions."""

    symbol: str
    op: str
    block: int
    key_dtype: str
    medium_run: int
    words: int
    """Length of `words`."""
    scalars: int
    """Length of `scalars`."""
    groups: int
    """Rows that a block works on at once, in the bucket where these are fewest."""
    partial_width: int
    scaled_width: int
    scales_sequence: bool
    prepares_gradients: bool
    output_width: int
    weighted: bool
    selects: bool

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every kernel that a call may launch."""
        return tuple(symbol_of(self.symbol, name) for name in KERNELS if name != "gradients" or self.prepares_gradients)


@dataclass(frozen=True)
class BackwardLaunch:
    """The launches of one call and the sizes of its work space, in elements."""

    before_sort: tuple[KernelLaunch, ...]
    before_sum: tuple[KernelLaunch, ...]
    before_rows: tuple[KernelLaunch, ...]
    levels: tuple[KernelLaunch, ...]
    """The launches that make partial sums, from level 0 on."""
    rows: KernelLaunch
    waiting: int
    scaled: int
    partials: int


def symbol_of(symbol: str, name: str) -> str:
    """A kernel's name in the binary."""
    return f"{symbol}_{name}"


def backward_shape(plan: Plan, scalars: int) -> BackwardShape:
    """What all launches of the plan have in common. `scalars`: the length of the argument of that name."""
    buckets, whole = row_buckets(plan), is_row_wise(plan)
    return BackwardShape(
        symbol=plan.symbol,
        op=plan.op,
        block=backward_params(plan).block,
        key_dtype=key_dtype(plan),
        medium_run=backward_params(plan).medium_run,
        words=1 + len(buckets) + len(key_tables(plan)) + 1,
        scalars=scalars,
        groups=max(1, min(b.groups if whole else b.groups // b.tiles for b in buckets)),
        partial_width=partial_width(plan),
        scaled_width=scaled_width(plan),
        scales_sequence=scales_sequence(plan),
        prepares_gradients=plan.op == "backward" or bool(scaled_features(plan)),
        output_width=plan.layout.output_width,
        weighted=any(f.weighted for f in plan.spec.features),
        selects=any(f.kind.selects for f in plan.spec.features),
    )


def backward_launch(shape: BackwardShape, batch: int, num_values: int, sequence_size: int) -> BackwardLaunch:
    """What to launch for a batch of that many samples and ids, and how much memory that takes."""

    def launch(name: str, work: int, each: int, most: int | None = None) -> KernelLaunch:
        grid = max(1, -(-work // each))
        return KernelLaunch(symbol_of(shape.symbol, name), min(grid, most or grid), shape.block, 0)

    before_sort = [launch("prepare", num_values, EACH * shape.block)]
    if shape.prepares_gradients:
        numbers = batch * max(shape.output_width, shape.scaled_width) + sequence_size
        before_sort.append(launch("gradients", numbers, GRADIENTS_EACH * shape.block, MOST_BLOCKS))
    levels = []
    partial_rows = 0
    size = CHUNK
    while num_values > size:
        partial_rows += num_values // size + 1
        windows = num_values // size
        if size == CHUNK:
            levels.append(launch("chunks", windows, shape.groups, MOST_BLOCKS))
        else:
            levels.append(launch("levels", windows, shape.block // WARP, MOST_BLOCKS))
        size *= CHUNK
    return BackwardLaunch(
        before_sort=tuple(before_sort),
        before_sum=(launch("sources", num_values, shape.block),),
        before_rows=(launch("runs", num_values, shape.block),),
        levels=tuple(levels),
        rows=launch("rows", num_values, shape.groups, MOST_BLOCKS),
        waiting=num_values // (shape.medium_run + 1) + 1,
        scaled=batch * shape.scaled_width + (sequence_size if shape.scales_sequence else 0),
        partials=partial_rows * shape.partial_width,
    )
