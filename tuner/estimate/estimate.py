"""What a CUDA plan would cost, in no unit of time: bytes to be moved over how well bytes in flight keep memory busy.

    cost  = sum over buckets of  bytes of the bucket's rows / min(1, in flight / wanted)
    score = cost * sectors an output, over the same of the default plan

In flight: bytes of row loads that a multiprocessor has under way before the first is used, with as many of the plan's
blocks as fit and as the batch gives it. Wanted: what memory needs so as not to wait. Sectors: all that is loaded and
stored, counted by the emulated GPU; without a count only the cost decides. Not in it: caches, clocks, instructions,
launches, long bags and whatever else only a GPU can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.backward_geometry import backward_params, row_buckets
from embforge.codegen.targets.cuda.backward_geometry import min_blocks as backward_min_blocks
from embforge.codegen.targets.cuda.backward_launch import backward_launch, backward_shape
from embforge.codegen.targets.cuda.geometry import cuda_params, geometry_of, min_blocks, register_classes
from embforge.codegen.targets.cuda.launch import range_of
from embforge.launch.simt.counters import SECTOR
from embforge.tuner.estimate.layout_advice import mean_moved
from embforge.tuner.workload.workload import Batch

FORMULA = (
    "estimate, never a time: score = cost x sectors an output, over the default's; "
    "cost = sum over buckets of row bytes / min(1, bytes in flight a multiprocessor / bytes that memory wants)"
)
WANTED, WANTED_SM100 = 32 << 10, 64 << 10
"""Bytes in flight a multiprocessor: latency times its share of the bandwidth, of GPUs up to sm_90 and of sm_100."""
MULTIPROCESSORS = {
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90": 132,
    "sm_100": 148,
    "sm_103": 148,
    "sm_120": 170,
}
"""Of a usual GPU of the architecture: T4, A100, A40, L40S, H100, B200, B300, RTX 5090."""


@dataclass(frozen=True)
class Demand:
    """What a batch asks for."""

    samples: int
    ids: int
    bytes: Mapping[str, float]
    """Of the rows of each bucket, by its name; gradients and rows of a backward."""


@dataclass(frozen=True)
class Flight:
    """What a multiprocessor has under way in a bucket's loop."""

    bytes: float
    """With all blocks that fit."""
    filled: float
    """Share of those blocks that the batch has work for."""


@dataclass(frozen=True)
class Loop:
    """A bucket's loop over rows, as a plan's params promise it."""

    bucket: str
    block_bytes: float
    """In flight a block."""
    blocks: int
    """That a multiprocessor holds at least."""
    grid: int
    """Blocks of its kernel for the batch."""


def demand_of(plan: Plan, batch: Batch) -> Demand:
    """Of a batch, for all plans that differ in params alone."""
    ids = [batch.feature(f.index).stop - batch.feature(f.index).start for f in plan.layout.features]
    moved: dict[str, float] = {}
    if plan.op == "forward":
        for bucket in plan.buckets:
            row = float(mean_moved(bucket.row_bytes, bucket.stride_bytes, SECTOR))
            moved[bucket.label] = row * sum(ids[f.index] for f in bucket.features)
    else:
        for found in row_buckets(plan):
            row = float(mean_moved(found.placed.row_bytes, found.placed.stride_bytes, SECTOR))
            own = 2 * (row + found.placed.state_stride_bytes) if plan.update else 0
            users = sum(ids[f.index] for f in plan.layout.features if f.table_index in found.tables)
            moved[found.name] = (found.item_bytes + own) * users
    return Demand(batch.size, sum(ids), moved)


def cost(demand: Demand, flight: Mapping[str, Flight], arch: str) -> float:
    """Bytes to be moved, each as many times as memory waits for more to be under way."""
    wanted = WANTED_SM100 if 100 <= arch_named(arch).number < 120 else WANTED
    return sum(
        moved / min(1.0, flight[name].bytes * flight[name].filled / wanted) for name, moved in demand.bytes.items()
    )


def promised_flight(plan: Plan, demand: Demand) -> dict[str, Flight]:
    """By bucket, as the params promise it: no compiler was asked."""
    return {
        loop.bucket: Flight(loop.block_bytes * loop.blocks, _filled(plan, loop.grid, loop.blocks))
        for loop in _loops(plan, demand)
    }


def read_flight(plan: Plan, figures: Iterable[Mapping[str, Any]], demand: Demand) -> dict[str, Flight]:
    """By bucket, as the machine code has it: the least over a bucket's loops. `figures` are those of the binary."""
    block = cuda_params(plan).block if plan.op == "forward" else backward_params(plan).block
    grids = {loop.bucket: loop.grid for loop in _loops(plan, demand)}
    found: dict[str, Flight] = {}
    for symbol in figures:
        resident = symbol["occupancy"] * arch_named(plan.arch).threads / block
        for load in symbol["loads"]:
            name = load["bucket"]
            if name in grids:  # else the kernel of long bags
                here = Flight(load["bytes"], _filled(plan, grids[name], resident))
                found[name] = min(here, found.get(name, here), key=lambda flight: flight.bytes)
    return found


def _filled(plan: Plan, grid: int, resident: float) -> float:
    return min(1.0, grid / MULTIPROCESSORS[plan.arch] / resident)


def _loops(plan: Plan, demand: Demand) -> list[Loop]:
    return _forward_loops(plan, demand) if plan.op == "forward" else _backward_loops(plan, demand)


def _forward_loops(plan: Plan, demand: Demand) -> list[Loop]:
    loops = []
    for members in register_classes(geometry_of(plan)):
        grid = sum(range_of(g).blocks(demand.samples, demand.ids) for g in members)
        blocks = min_blocks(plan, members[0].wide)
        loops += [Loop(g.name, g.rows * g.vector * g.use * g.block, blocks, grid) for g in members]
    return loops


def _backward_loops(plan: Plan, demand: Demand) -> list[Loop]:
    block, blocks = backward_params(plan).block, backward_min_blocks(plan)
    grid = backward_launch(backward_shape(plan, scalars=0), demand.samples, demand.ids, 0).rows.grid
    return [
        Loop(b.name, b.rows * b.elements * DTYPES[b.item].bytes * b.use * block, blocks, grid)
        for b in row_buckets(plan)
    ]
