"""CUDA plans ranked without a GPU: an estimate from compiled code and counted sectors, never a time.

It is the seed of a measured run, which tries the best of it first. Nothing that runs is chosen by it.
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
"""Of the budget, at most, for the emulated GPU."""
CHUNKED = 2
"""Plans a core that are compiled between looks at the clock."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many steps of it are done, and of how many."""


@dataclass(frozen=True)
class StaticRow:
    """A plan and its figures. The headline figures are those of its worst main kernel."""

    params: Params
    registers: int
    occupancy: float
    bytes_in_flight: int
    """A multiprocessor, with all blocks that fit."""
    filled: float
    """Share of those blocks that the batch has work for."""
    sectors_per_output: float | None
    """Counted by the emulated GPU; None: not counted."""
    score: float
    """An estimate: cost against the default's, below 1 is better."""
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
    """Plans that compiled to what is not worth a launch, or not at all, and why."""

    @property
    def default(self) -> StaticRow:
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
    """The best of what can be compiled in `budget` seconds (at most `most` plans), the best `counted` of these with
    sectors counted by the emulated GPU. The default is always among both.

    How many are compiled and counted depends on the time they take; which ones, in which order, and their figures
    depend on nothing but the arguments. Only a forward's sectors can be counted. `WorkloadError` for a workload
    without ids; `CompileError` if the default does not compile.
    """
    tell = progress or (lambda stage, done, total: None)
    began = monotonic()
    batch = make_batch(spec, workload)
    if not batch.values.size:
        raise WorkloadError(
            f"workload {workload}: a batch of it has no ids, so that no plan moves anything; give batch=N and len= "
            f"of 1 or more; form: {GRAMMAR}"
        )
    longest = int((batch.offsets[1:] - batch.offsets[:-1]).max(initial=0))
    space = space_of(op, "cuda", arch, spec, any_gpu(arch), update, longest_bag=longest)
    context = Context(op, "cuda", arch, spec, any_gpu(arch), update)
    demand = demand_of(context.plan(space.default), batch)
    points = list(islice(_order(space, context, demand), most))
    share = COUNT_SHARE if op == "forward" and counted else 0.0
    built = _compile(context, points, began + budget * (1 - share), tell)
    rows, refused = [], []
    for params, found in built:
        problem = found if isinstance(found, str) else resource_problem(context.plan(params), found)
        if problem is not None and params != space.default:
            refused.append((params, problem))
        elif not isinstance(found, str):
            rows.append(_row(context.plan(params), found, demand))
    rows = _ranked(rows, space)
    if op == "forward" and counted:
        rows = _with_sectors(context, rows, space, counted, workload, began + budget, tell)
    return StaticReport(op, arch, spec, str(workload), update, space, tuple(rows), tuple(refused))


def _order(space: Space, context: Context, demand: Demand) -> Iterator[Params]:
    """Every point once: the default, then by turns one of the covering set and one that promises much, as long as there
    are any. Of equal promises the more usual comes first."""

    @cache
    def promise(params: Params) -> float:
        plan = context.plan(params)
        return round(cost(demand, promised_flight(plan, demand), plan.arch))

    promising = sorted(space.points, key=lambda p: (promise(_without_hints(p)), -alike(p, space.default)))
    by_turns = chain.from_iterable(zip_longest(covering_points(space), promising))
    yield from dict.fromkeys(params for params in (space.default, *by_turns) if params is not None)


def _without_hints(params: Params) -> Params:
    """The point without what promises nothing, so that few have to be looked at."""
    if isinstance(params, CudaParams):
        return replace(params, cache_hint=CudaParams.cache_hint, long_bag=CudaParams.long_bag)
    return params


def _compile(
    context: Context, points: Sequence[Params], until: float, tell: Progress
) -> list[tuple[Params, list[dict[str, Any]] | str]]:
    """Figures of each plan, or why it has none, until the time is over; of the first few whatever the time. The first
    is the default."""

    def one(params: Params) -> list[dict[str, Any]] | str:
        try:
            return build(context.plan(params), resources=True).resources
        except CompileError as error:
            if params == points[0]:  # the default, which all others are compared with
                raise
            return f"does not compile: {str(error).splitlines()[0]}"

    workers = os.cpu_count() or 1
    found: list[tuple[Params, list[dict[str, Any]] | str]] = []
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(points), CHUNKED * workers):
            if start and monotonic() >= until:
                break
            tell("compiling", start, len(points))
            chunk = points[start : start + CHUNKED * workers]
            found += zip(chunk, pool.map(one, chunk), strict=True)
    return found


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
    """By score against the default's, counted ones first; of equals the default, then the more occupied."""
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
    tell: Progress,
) -> list[StaticRow]:
    """The rows ranked anew with the default and the best counted, as many as there is time for."""
    count = sector_counter(context.spec, workload)
    default = next(row for row in rows if row.params == space.default)
    wanted = [default, *(row for row in rows if row is not default)][:counted]
    sectors: dict[Params, float] = {}
    for number, row in enumerate(wanted):
        if sectors and monotonic() >= until:
            break
        tell("counting sectors", number, len(wanted))
        sectors[row.params] = count(context.plan(row.params))
    # Without a count a plan is taken to move what the default moves.
    usual = sectors[default.params]
    found = [
        replace(row, sectors_per_output=sectors.get(row.params), score=row.score * sectors.get(row.params, usual))
        for row in rows
    ]
    return _ranked(found, space)
