"""Ranks CUDA plans without a GPU: an estimate from compiled code and counted sectors, never a time.

A measured study tries the best plans of the estimate first. No module takes a plan because of an estimate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice, zip_longest
from time import monotonic
from typing import Any

from embforge.codegen.build import build
from embforge.codegen.errors import CompileError, WorkloadError
from embforge.codegen.params import CudaParams, Params
from embforge.codegen.plan import Plan
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.hardware import any_gpu
from embforge.tuner.estimate.estimate import Demand, cost, demand_of, promised_flight, read_flight
from embforge.tuner.estimate.sectors import sector_counter
from embforge.tuner.search.constraints import Context
from embforge.tuner.search.space import Space, alike, covering_points, resource_problem, space_of
from embforge.tuner.workload.workload import GRAMMAR, Workload, make_batch

COUNT_SHARE = 0.5
"""The largest share of the budget that the emulated GPU may take."""
CHUNKED = 2
"""Plans per core that are compiled before the clock is read again."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and how many there are."""


@dataclass(frozen=True)
class StaticRow:
    """A plan and its figures: `registers`, `occupancy`, `bytes_in_flight` and `filled` are those of the worst of its
    kernels that loop over rows."""

    params: Params
    registers: int
    occupancy: float
    bytes_in_flight: int
    """Bytes in flight per multiprocessor if all blocks that fit have work."""
    filled: float
    """The share of those blocks that the batch has work for."""
    sectors_per_output: float | None
    """Counted by the emulated GPU; None if they were not counted."""
    score: float
    """The estimate: the cost divided by the default's, so that less than 1 is better."""
    rank: int = 0


@dataclass(frozen=True)
class StaticReport:
    """An estimate, best plan first. `FORMULA` of `embforge.tuner.estimate.estimate` says how the score is made."""

    op: str
    arch: str
    spec: CollectionSpec
    workload: str
    update: Update | None
    space: Space
    rows: tuple[StaticRow, ...]
    refused: tuple[tuple[Params, str], ...]
    """Plans that do not compile, or whose machine code is not worth a launch, each with the reason."""

    @property
    def default(self) -> StaticRow:
        """The row of the default plan."""
        return next(row for row in self.rows if row.params == self.space.default)


def rank(
    spec: CollectionSpec,
    arch: str,
    op: str,
    workload: Workload,
    budget: float,
    *,
    update: Update | None = None,
    counted: int = 8,
    most: int | None = None,
    progress: Progress | None = None,
) -> StaticReport:
    """Ranks the plans that can be compiled in `budget` seconds, at most `most` of them.

    For the best `counted` of them the emulated GPU counts sectors; only a forward's can be counted. The default plan is
    always compiled and counted. How many plans are compiled and counted depends on the time that they take; which ones,
    their order and their figures depend on the arguments alone. `WorkloadError` for a workload without ids;
    `CompileError` if the default does not compile.
    """
    report_progress = progress or (lambda step, done, total: None)
    began = monotonic()
    batch = make_batch(spec, workload)
    if not batch.values.size:
        raise WorkloadError(
            f"workload {workload}: its batches have no ids, so that no plan moves anything; set batch=N and len= "
            f"to 1 or more; form: {GRAMMAR}"
        )
    longest = int((batch.offsets[1:] - batch.offsets[:-1]).max(initial=0))
    space = space_of(op, "cuda", arch, spec, any_gpu(arch), update, longest_bag=longest)
    context = Context(op, "cuda", arch, spec, any_gpu(arch), update)
    demand = demand_of(context.plan(space.default), batch)
    points = list(islice(_order(space, context, demand), most))
    share = COUNT_SHARE if op == "forward" and counted else 0.0
    compiled = _compile(context, points, began + budget * (1 - share), report_progress)
    rows, refused = [], []
    for params, figures in compiled:
        problem = figures if isinstance(figures, str) else resource_problem(context.plan(params), figures)
        if problem is not None and params != space.default:
            refused.append((params, problem))
        elif not isinstance(figures, str):
            rows.append(_row(context.plan(params), figures, demand))
    rows = _ranked(rows, space)
    if op == "forward" and counted:
        rows = _with_sectors(context, rows, space, counted, workload, began + budget, report_progress)
    return StaticReport(op, arch, spec, str(workload), update, space, tuple(rows), tuple(refused))


def _order(space: Space, context: Context, demand: Demand) -> Iterator[Params]:
    """Every point once: the default, then alternately one of the covering set and the next with the lowest cost by its
    params. If two have the same cost, the one that is more like the default comes first."""

    @cache
    def promised_cost(params: Params) -> float:
        plan = context.plan(params)
        return round(cost(demand, promised_flight(plan, demand), plan.arch))

    promising = sorted(space.points, key=lambda p: (promised_cost(_without_hints(p)), -alike(p, space.default)))
    alternating = chain.from_iterable(zip_longest(covering_points(space), promising))
    yield from dict.fromkeys(params for params in (space.default, *alternating) if params is not None)


def _without_hints(params: Params) -> Params:
    """The point without fields that do not change the promised cost, so that the cost of few points is calculated."""
    if isinstance(params, CudaParams):
        return replace(params, cache_hint=CudaParams.cache_hint, long_bag=CudaParams.long_bag)
    return params


def _compile(
    context: Context, points: Sequence[Params], until: float, progress: Progress
) -> list[tuple[Params, list[dict[str, Any]] | str]]:
    """Compiles points until the time is over, at least the first few. Returns the figures of each, or why it has none.
    The first point is the default."""

    def figures_of(params: Params) -> list[dict[str, Any]] | str:
        try:
            return build(context.plan(params), resources=True).resources
        except CompileError as error:
            if params == points[0]:  # the default, which all others are compared with
                raise
            return f"does not compile: {str(error).splitlines()[0]}"

    workers = os.cpu_count() or 1
    compiled: list[tuple[Params, list[dict[str, Any]] | str]] = []
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(points), CHUNKED * workers):
            if start and monotonic() >= until:
                break
            progress("compiling", start, len(points))
            chunk = points[start : start + CHUNKED * workers]
            compiled += zip(chunk, pool.map(figures_of, chunk), strict=True)
    return compiled


def _row(plan: Plan, figures: list[dict[str, Any]], demand: Demand) -> StaticRow:
    flight = read_flight(plan, figures, demand)
    main = [s for s in figures if any(load["bucket"] in flight for load in s["loads"])]
    return StaticRow(
        params=plan.params,
        registers=max(s["registers"] for s in main),
        occupancy=min(s["occupancy"] for s in main),
        bytes_in_flight=round(min(f.bytes for f in flight.values())),
        filled=min(f.filled for f in flight.values()),
        sectors_per_output=None,
        score=cost(demand, flight, plan.arch),
    )


def _ranked(rows: Sequence[StaticRow], space: Space) -> list[StaticRow]:
    """The rows by their score relative to the default's, those with counted sectors first. If two scores are equal, the
    default comes first, then the higher occupancy."""
    default = next(row for row in rows if row.params == space.default).score
    scored = [replace(row, score=row.score / default) for row in rows]
    scored.sort(
        key=lambda r: (r.sectors_per_output is None, round(r.score, 4), r.params != space.default, -r.occupancy)
    )
    return [replace(row, rank=number) for number, row in enumerate(scored, 1)]


def _with_sectors(
    context: Context,
    rows: Sequence[StaticRow],
    space: Space,
    counted: int,
    workload: Workload,
    until: float,
    progress: Progress,
) -> list[StaticRow]:
    """The rows ranked again after counting the sectors of the default and of the best, as many as there is time for."""
    count = sector_counter(context.spec, workload)
    default = next(row for row in rows if row.params == space.default)
    wanted = [default, *(row for row in rows if row is not default)][:counted]
    sectors: dict[Params, float] = {}
    for number, row in enumerate(wanted):
        if sectors and monotonic() >= until:
            break
        progress("counting sectors", number, len(wanted))
        sectors[row.params] = count(context.plan(row.params))
    # A plan without a count is assumed to move what the default moves.
    assumed = sectors[default.params]
    counted_rows = [
        replace(row, sectors_per_output=sectors.get(row.params), score=row.score * sectors.get(row.params, assumed))
        for row in rows
    ]
    return _ranked(counted_rows, space)
