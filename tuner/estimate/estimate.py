"""Estimates what a CUDA plan costs, relative to the default plan and not in units of time.

    cost  = sum over buckets of  bytes of the bucket's rows / min(1, in flight / wanted)
    score = (cost * sectors per output) / (the same of the default plan)

In flight: the bytes of row loads that a multiprocessor has issued before it uses the first of them, with as many of the
plan's blocks as fit on it and as the batch has work for. Wanted: the bytes in flight that keep memory busy. Sectors:
all that is loaded and stored, counted by the emulated GPU; without a count, the score is the ratio of costs. The
estimate knows nothing of caches, clocks, other instructions, launches, long bags, and what else only a GPU can show.
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
    "estimate, never a time: score = cost x sectors per output, divided by the default's; "
    "cost = sum over buckets of row bytes / min(1, bytes in flight per multiprocessor / bytes that keep memory busy)"
)
WANTED, WANTED_SM100 = 32 << 10, 64 << 10
"""Bytes in flight per multiprocessor that keep memory busy, for GPUs up to sm_90 and for sm_100: the latency of memory
times the multiprocessor's share of the bandwidth."""
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
"""Multiprocessors of a usual GPU of each architecture: T4, A100, A40, L40S, H100, B200, B300, RTX 5090."""


@dataclass(frozen=True)
class Demand:
    """The work in a batch."""

    samples: int
    ids: int
    bytes: Mapping[str, float]
    """By a bucket's name: the bytes of rows that are moved; in a backward those of gradients and of rows."""


@dataclass(frozen=True)
class Flight:
    """The row loads that a multiprocessor has in flight in a bucket's loop."""

    bytes: float
    """Bytes in flight if all blocks that fit have work."""
    filled: float
    """The share of those blocks that the batch has work for."""


@dataclass(frozen=True)
class Loop:
    """A bucket's loop over rows, as a plan's params determine it."""

    bucket: str
    block_bytes: float
    """Bytes in flight per block."""
    blocks: int
    """The blocks that fit on a multiprocessor at least."""
    grid: int
    """The blocks that its kernel has for the batch."""


def demand_of(plan: Plan, batch: Batch) -> Demand:
    """The work in a batch for a plan. It is the same for all plans that differ in their params alone."""
    ids = [batch.feature(f.index).stop - batch.feature(f.index).start for f in plan.layout.features]
    moved: dict[str, float] = {}
    if plan.op == "forward":
        for bucket in plan.buckets:
            row = float(mean_moved(bucket.row_bytes, bucket.stride_bytes, SECTOR))
            moved[bucket.label] = row * sum(ids[f.index] for f in bucket.features)
    else:
        for rows in row_buckets(plan):
            row = float(mean_moved(rows.layout.row_bytes, rows.layout.stride_bytes, SECTOR))
            row_and_state = 2 * (row + rows.layout.state_stride_bytes) if plan.update else 0  # read and written back
            occurrences = sum(ids[f.index] for f in plan.layout.features if f.table_index in rows.tables)
            moved[rows.name] = (rows.item_bytes + row_and_state) * occurrences
    return Demand(batch.size, sum(ids), moved)


def cost(demand: Demand, flight: Mapping[str, Flight], arch: str) -> float:
    """Bytes to be moved, divided for each bucket by how busy its bytes in flight keep memory (at most 1)."""
    wanted = WANTED_SM100 if 100 <= arch_named(arch).number < 120 else WANTED
    return sum(
        moved / min(1.0, flight[name].bytes * flight[name].filled / wanted) for name, moved in demand.bytes.items()
    )


def promised_flight(plan: Plan, demand: Demand) -> dict[str, Flight]:
    """For each bucket: what is in flight as far as the params say; nothing is compiled."""
    return {
        loop.bucket: Flight(loop.block_bytes * loop.blocks, _filled(plan, loop.grid, loop.blocks))
        for loop in _loops(plan, demand)
    }


def read_flight(plan: Plan, figures: Iterable[Mapping[str, Any]], demand: Demand) -> dict[str, Flight]:
    """For each bucket: what is in flight by the machine code, the least of all loops of the bucket.

    `figures` are the binary's, one per kernel symbol.
    """
    block = cuda_params(plan).block if plan.op == "forward" else backward_params(plan).block
    grids = {loop.bucket: loop.grid for loop in _loops(plan, demand)}
    flights: dict[str, Flight] = {}
    for symbol in figures:
        resident = symbol["occupancy"] * arch_named(plan.arch).threads / block
        for load in symbol["loads"]:
            name = load["bucket"]
            if name in grids:  # otherwise it is the kernel of long bags
                flight = Flight(load["bytes"], _filled(plan, grids[name], resident))
                flights[name] = min(flight, flights.get(name, flight), key=lambda flight: flight.bytes)
    return flights


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
