"""A plan's predictions as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from embforge.codegen.planner.search import Choice, describe
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.planner.memory import size
from embforge.codegen.planner.simulate import Simulation, Spread
from embforge.codegen.spec import CollectionSpec


def kind_table(spec: CollectionSpec, plan: ShardPlan, choices: Sequence[Choice]) -> Table:
    """A line per table: its kind and, for a plan that was searched for, the next best. `reasons` says why."""
    table = _plain()
    table.add_column("table", overflow="fold")
    table.add_column("rows x dim", justify="right", no_wrap=True)
    table.add_column("kind", overflow="fold")
    if choices:
        table.add_column("most\non a rank", justify="right", no_wrap=True)
        table.add_column("next best", overflow="fold")
    by_name = {choice.table: choice for choice in choices}
    for one in spec.tables:
        cells = [one.name, f"{one.num_embeddings:,} x {one.embedding_dim}", describe(plan.kind(one.name))]
        if choice := by_name.get(one.name):
            more = f"{duration(choice.second_more, signed=True)} {choice.second}" if choice.second else ""
            cells += [size(choice.memory), more]
        table.add_row(*map(escape, cells))
    return table


def reasons(choices: Sequence[Choice]) -> list[str]:
    """Why tables have their kinds, a line per reason: few reasons serve many tables."""
    tables: dict[str, list[str]] = {}
    for choice in choices:
        tables.setdefault(f"{choice.kind.name}: {choice.why}", []).append(choice.table)
    return [f"why {why} ({', '.join(names)})" for why, names in tables.items()]


def byte_table(simulation: Simulation) -> Table:
    """A line per counter: bytes that a rank sends in a step."""
    table = _plain("bytes that a rank\nsends per step")
    for heading in ("inside its node:\nmean", "\nmost", "by its rail:\nmean", "\nmost"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = [*simulation.node_bytes, *(name for name in simulation.rail_bytes if name not in simulation.node_bytes)]
    for name in names:
        cells = []
        for side in (simulation.node_bytes, simulation.rail_bytes):
            spread = side.get(name)
            cells += [size(spread.mean), size(spread.high)] if spread else ["", ""]
        table.add_row(name, *cells)
    if simulation.replica_bytes:
        table.add_row("replicas (all-reduce)", size(simulation.replica_bytes), size(simulation.replica_bytes), "", "")
    return table


def step_table(simulation: Simulation) -> Table:
    """A line per phase."""
    table = _plain("phase of a step")
    for heading in ("mean rank", "slowest rank", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, spread in simulation.phases.items():
        if spread.high:
            share = spread.high / simulation.seconds
            table.add_row(name, duration(spread.mean), duration(spread.high), f"{share:.0%}")
    table.add_section()
    table.add_row("step", "", duration(simulation.seconds), "")
    table.add_row("step, ids prefetched", "", duration(simulation.prefetched_seconds), "")
    return table


def memory_line(simulation: Simulation) -> str:
    """Memory and imbalance in a sentence."""
    return (
        f"memory a rank: rows and states {_three(simulation.memory)} (least, mean, most), buffers "
        f"{size(simulation.buffers.high)} at most, of {size(simulation.limit)}; imbalance (most over mean): memory "
        f"{simulation.memory.imbalance:.2f}, lookup and update {simulation.work.imbalance:.2f}"
    )


def scaling_table(simulations: Sequence[Simulation]) -> Table:
    """A line per world size; 80 columns hold it."""
    table = _plain()
    table.padding = 0
    headings = ("ranks", "nodes", "memory\nof a rank", "\nbuffers", "sent\ninside", "sent\nby rail", "\nstep")
    for heading in (*headings, "ids pre-\nfetched", "imbal-\nance", "\nsamples"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = simulations[0]
    for one in simulations:
        inside, rail = (sum(s.high for s in side.values()) for side in (one.node_bytes, one.rail_bytes))
        growth = one.world_size / first.world_size * first.seconds / one.seconds
        table.add_row(
            f"{one.world_size:,}",
            f"{one.nodes:,}",
            size(one.memory.high) + ("" if one.fits else " !"),
            size(one.buffers.high),
            size(inside),
            size(rail),
            duration(one.seconds),
            duration(one.prefetched_seconds),
            f"{one.work.imbalance:.2f}",
            f"{growth:.1f}x",
        )
    return table


def _plain(*headings: str) -> Table:
    """A table without lines between columns, which cost three of 80 characters each."""
    return Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def duration(seconds: float, signed: bool = False) -> str:
    """Seconds as people read them."""
    sign = "+" if signed else ""
    if abs(seconds) < 1e-3:
        return f"{1e6 * seconds:{sign}.3g} µs"
    return f"{1e3 * seconds:{sign}.3g} ms" if abs(seconds) < 1 else f"{seconds:{sign}.3g} s"


def _three(spread: Spread) -> str:
    return f"{size(spread.low)}, {size(spread.mean)}, {size(spread.high)}"
