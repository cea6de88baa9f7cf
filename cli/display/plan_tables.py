"""Tables of what the planner predicts for a shard plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from embforge.cli.common import plain_table
from embforge.codegen.planner.search import Choice, describe
from embforge.codegen.planner.simulate import Simulation, Spread
from embforge.codegen.reading.numbers import size
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.spec import CollectionSpec


def kind_table(spec: CollectionSpec, plan: ShardPlan, choices: Sequence[Choice]) -> Table:
    """One line per table: its kind and, if the planner searched for it, the next best kind. `reasons` says why."""
    table = plain_table()
    table.add_column("table", overflow="fold")
    table.add_column("rows x dim", justify="right", no_wrap=True)
    table.add_column("kind", overflow="fold")
    if choices:
        table.add_column("most\non a rank", justify="right", no_wrap=True)
        table.add_column("next best", overflow="fold")
    by_name = {choice.table: choice for choice in choices}
    for table_spec in spec.tables:
        cells = [
            table_spec.name,
            f"{table_spec.num_embeddings:,} x {table_spec.embedding_dim}",
            describe(plan.kind(table_spec.name)),
        ]
        if choice := by_name.get(table_spec.name):
            more = f"{duration(choice.second_more, signed=True)} {choice.second}" if choice.second else ""
            cells += [size(choice.memory), more]
        table.add_row(*map(escape, cells))
    return table


def reasons(choices: Sequence[Choice]) -> list[str]:
    """Why tables have their kinds: one line per reason, because many tables share one."""
    tables: dict[str, list[str]] = {}
    for choice in choices:
        tables.setdefault(f"{choice.kind.name}: {choice.why}", []).append(choice.table)
    return [f"why {why} ({', '.join(names)})" for why, names in tables.items()]


def byte_table(simulation: Simulation) -> Table:
    """One line per counter of bytes that a rank sends in a step."""
    table = plain_table("bytes that a rank\nsends per step")
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
    """One line per phase of a step: its time on the mean rank and on the slowest."""
    table = plain_table("phase of a step")
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
    """One sentence about memory and imbalance."""
    return (
        f"memory per rank: rows and states {_three(simulation.memory)} (least, mean, most), buffers "
        f"{size(simulation.buffers.high)} at most, of {size(simulation.limit)}; imbalance (most over mean): memory "
        f"{simulation.memory.imbalance:.2f}, lookup and update {simulation.work.imbalance:.2f}"
    )


def scaling_table(simulations: Sequence[Simulation]) -> Table:
    """One line per world size, within 80 columns."""
    table = plain_table()
    table.padding = 0
    headings = ("ranks", "nodes", "memory\nof a rank", "\nbuffers", "sent\ninside", "sent\nby rail", "\nstep")
    for heading in (*headings, "ids pre-\nfetched", "imbal-\nance", "\nsamples"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = simulations[0]
    for simulation in simulations:
        inside, rail = (sum(s.high for s in side.values()) for side in (simulation.node_bytes, simulation.rail_bytes))
        growth = simulation.world_size / first.world_size * first.seconds / simulation.seconds
        table.add_row(
            f"{simulation.world_size:,}",
            f"{simulation.nodes:,}",
            size(simulation.memory.high) + ("" if simulation.fits else " !"),
            size(simulation.buffers.high),
            size(inside),
            size(rail),
            duration(simulation.seconds),
            duration(simulation.prefetched_seconds),
            f"{simulation.work.imbalance:.2f}",
            f"{growth:.1f}x",
        )
    return table


def duration(seconds: float, signed: bool = False) -> str:
    """Seconds with a unit that suits them, e.g. `1.2 ms`."""
    sign = "+" if signed else ""
    if abs(seconds) < 1e-3:
        return f"{1e6 * seconds:{sign}.3g} µs"
    return f"{1e3 * seconds:{sign}.3g} ms" if abs(seconds) < 1 else f"{seconds:{sign}.3g} s"


def _three(spread: Spread) -> str:
    return f"{size(spread.low)}, {size(spread.mean)}, {size(spread.high)}"
