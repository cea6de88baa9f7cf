"""The search of `ShardPlan.auto`: chooses kinds so that the predicted step is short and every rank's memory suffices.

It is greedy and then improves: tables are placed one by one, the largest first, each with the kind that makes the step
of the tables placed so far shortest; then each table is placed again, with all others where they are, until nothing is
gained. A kind's cost is a column of numbers on its ranks (`cost.py`), so trying one takes microseconds, whatever the
number of tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embforge.codegen.dtypes import WireFormat
from embforge.codegen.errors import PlanError
from embforge.codegen.planner.access import Access, Floats, access_of
from embforge.codegen.planner.cost import Costs, Loads, Share, Step, row_of
from embforge.codegen.planner.memory import fits_not
from embforge.codegen.planner.topology import Topology
from embforge.codegen.planner.traffic import Duplicates, Pools, Wire, reductions_of
from embforge.codegen.reading.numbers import size
from embforge.codegen.rules.rule import Update
from embforge.codegen.sharding.kinds import (
    KINDS,
    ColumnWise,
    DataParallel,
    Grid,
    Hierarchical,
    Kind,
    RowWise,
    ShardPlan,
    TableWise,
)
from embforge.codegen.sharding.placement import COLUMN_UNIT, place_table
from embforge.codegen.spec import CollectionSpec, TableSpec

ROUNDS = 3
"""How often every table is placed again, at most."""
MANY = 100_000
"""Tables times ranks that are placed again in a round, at most; the largest tables come first."""
GAIN = 1e-4
"""Smaller changes of the score, as a share, count as no gain."""
EQUAL = 1e-4
"""Scores that differ by less than this share count as equal; then the simpler kind is taken."""
CROWD_WEIGHTS = (1.0, 0.2)
"""Weights of the mean of fourth powers over ranks, which is added to the time of the slowest rank: with the slowest
alone most tables would not matter. There is one search per weight (with many tables and ranks, the first one only), and
the shortest step wins."""


@dataclass(frozen=True)
class Choice:
    """The kind that a table got, and the next best, compared when the table was placed last."""

    table: str
    kind: Kind
    why: str
    memory: float
    """Bytes of the table on the rank that holds most of it."""
    second: str
    """The next best kind; empty if no other was possible."""
    second_more: float
    """Seconds by which a step would be longer with it."""


@dataclass(frozen=True)
class Chosen:
    """A plan with its reasons."""

    plan: ShardPlan
    choices: tuple[Choice, ...]


def choose(
    spec: CollectionSpec,
    topology: Topology,
    *,
    world_size: int | None = None,
    batch_size: int = Step.batch_size,
    update: Update | None = None,
    workload: str | Access = "uniform",
    constraints: Mapping[str, Sequence[str]] | None = None,
    duplicates: Duplicates = "keep",
    pools: Pools = "all",
    forward: WireFormat = "fp32",
    gradients: WireFormat = "fp32",
    step: Step | None = None,
) -> Chosen:
    """Chooses a plan for `world_size` ranks (None: the topology's), with `batch_size` samples each.

    `pools` is that of the module, whose default on CPUs is "different". `constraints` lists the kinds that a table may
    have. `step` replaces all arguments that describe the step. `PlanError` names a table that does not fit, and by how
    much.
    """
    topology = topology if world_size is None else topology.of_size(world_size)
    step = step or Step(batch_size, access_of(workload), update, Wire(forward, gradients, duplicates, pools=pools))
    allowed = _checked(spec, constraints or {})
    costs = Costs(spec, topology, step, spec.remap_bytes, spec.num_remapped)
    searches = CROWD_WEIGHTS if len(spec.tables) * topology.world_size < MANY else CROWD_WEIGHTS[:1]
    runs = [_Search(costs, allowed, weight) for weight in searches]
    for search in runs:
        search.run()
    return min(runs, key=lambda search: search.loads.seconds()).result()


def _checked(spec: CollectionSpec, constraints: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    for table, kinds in constraints.items():
        spec.table(table)
        for kind in kinds:
            if kind not in KINDS:
                raise PlanError(f"constraint of table {table!r}: {kind!r} is not known; allowed: {', '.join(KINDS)}")
        if not kinds:
            raise PlanError(f"constraint of table {table!r}: no kind is left; allowed: {', '.join(KINDS)}")
    return {table.name: tuple(constraints.get(table.name, KINDS)) for table in spec.tables}


@dataclass(frozen=True, eq=False)
class _Try:
    kind: Kind
    share: Share
    score: float
    """The number that the search minimises."""
    seconds: float = np.nan
    """Seconds of the step with this kind."""


class _Search:
    """Places tables one by one on top of those that have been placed."""

    def __init__(self, costs: Costs, allowed: Mapping[str, tuple[str, ...]], crowd_weight: float) -> None:
        self.costs, self.allowed, self.crowd_weight = costs, allowed, crowd_weight
        self.topology = costs.topology
        self.loads = Loads.empty(costs)
        self.taken: dict[str, _Try] = {}
        self.tried: dict[str, dict[str, float]] = {}
        """For each table, the seconds of a step by kind when it was placed last."""
        self.replicas_free = True
        """Whether the all-reduce's latency is left out: it never pays for one replicated table, but may for many."""
        node, rail = self.topology.node_link, self.topology.rail
        self.replicas_fixed = (1 + crowd_weight) * (
            node.time(0.0, self.topology.ranks_per_node - 1) + rail.time(0.0, self.topology.nodes - 1)
        )

    def run(self) -> None:
        largest_first = sorted(self.costs.spec.tables, key=lambda table: (-self._bytes(table), table.name))
        for table in largest_first:
            best = self._best(table)
            if best is None:
                self._make_room(table, largest_first)
            else:
                self._take(table, best)
        self.replicas_free = False
        self._without_replicas(largest_first)
        self._improve(largest_first)

    def result(self) -> Chosen:
        """The plan that was found, with its reasons."""
        ordered = tuple(self._explain(table) for table in self.costs.spec.tables)
        plan = ShardPlan({choice.table: choice.kind for choice in ordered}, explanation_of(ordered, self.loads))
        return Chosen(plan, ordered)

    def _bytes(self, table: TableSpec) -> float:
        return float(table.num_embeddings * sum(row_of(table.embedding_dim, table.dtype, self.costs.step.update)))

    def _take(self, table: TableSpec, choice: _Try) -> None:
        self.taken[table.name] = choice
        self.loads.add(choice.share)

    def _best(self, table: TableSpec, old: _Try | None = None) -> _Try | None:
        tries = self._tries(table, old)
        self.tried[table.name] = {}
        for attempt in tries:
            known = self.tried[table.name].get(attempt.kind.name, np.inf)
            self.tried[table.name][attempt.kind.name] = min(known, attempt.seconds)
        least = min((attempt.score for attempt in tries), default=0.0)
        return next((attempt for attempt in tries if attempt.score <= least * (1 + EQUAL)), None)

    def _tries(self, table: TableSpec, old: _Try | None) -> list[_Try]:
        """All kinds of a table that fit, the old one included, each with the cost of a step with it."""
        limit, memory = self.topology.limit, self.loads["memory"]
        kinds = [(kind, self._share(table, kind)) for kind in self._candidates(table)]
        kinds = [(old.kind, old.share), *kinds] if old is not None else kinds
        kinds = [(kind, share) for kind, share in kinds if (memory[share.ranks] + share.values[0]).max() <= limit]
        if not kinds:
            return []
        loads = self.loads.variants([share for _, share in kinds])
        fits = loads.memory().max(axis=-1) <= limit
        scores, seconds = self._scores(loads)
        if self.replicas_free:
            scores = scores - (loads.total("replicas")[..., 0] > 0) * self.replicas_fixed
        numbers = zip(kinds, fits, scores, seconds, strict=True)
        return [_Try(kind, share, float(score), float(spent)) for (kind, share), fit, score, spent in numbers if fit]

    def _share(self, table: TableSpec, kind: Kind) -> Share:
        n, m = self.topology.world_size, self.topology.ranks_per_node
        return self.costs.share(place_table(table, kind, n, m, []))

    def _candidates(self, table: TableSpec) -> Iterator[Kind]:
        """Kinds worth trying. If a kind leaves the choice of ranks open, it gets those with the least to do so far."""
        n, m, nodes = self.topology.world_size, self.topology.ranks_per_node, self.topology.nodes
        allowed = self.allowed[table.name]
        whole = self._bytes(table)
        free = self.topology.limit - self.loads["memory"]
        busy = self._busy()
        order = np.argsort(busy, kind="stable")

        def least(count: int) -> tuple[int, ...]:
            """`count` ranks that have room for one part each; empty if there are not enough."""
            ranks = order[free[order] >= whole / count][:count]
            return tuple(np.sort(ranks).tolist()) if len(ranks) == count else ()

        if "data_parallel" in allowed and whole <= free.min():
            yield DataParallel()
        if "table_wise" in allowed:
            yield from (TableWise(rank) for rank in least(1))
        counts = [2**power for power in range(1, n.bit_length()) if 2**power < n]
        if "column_wise" in allowed:
            widest = max(1, table.embedding_dim // COLUMN_UNIT)
            for count in [c for c in (*counts, n) if c <= widest and n > 1]:
                if ranks := least(count):
                    yield ColumnWise(count, ranks)
        if "row_wise" in allowed:
            fewest = [c for c in counts if c <= table.num_embeddings and least(c)][:3]
            yield from (RowWise(ranks=least(count)) for count in fewest)
            if nodes > 1 and m not in fewest:
                node = int(np.argmin(busy.reshape(nodes, m).sum(axis=1)))
                yield RowWise(ranks=tuple(range(node * m, (node + 1) * m)))
            yield RowWise()
        # Rules that reduce rows need all pieces of a grid on equally many ranks.
        divides = nodes > 1 or n % 2 == 0 or not reductions_of(self.costs.step.update)
        if "grid" in allowed and divides and n > 1 and max(2, nodes) <= table.embedding_dim:
            yield Grid(None if nodes > 1 else 2)
        if "hierarchical" in allowed and (nodes > 1 or allowed == ("hierarchical",)):
            yield Hierarchical()

    def _busy(self) -> Floats:
        """How many seconds every rank is busy in a step."""
        seconds = np.zeros(self.topology.world_size)
        for times in self.loads.phases().values():
            seconds = seconds + times
        return seconds

    def _make_room(self, table: TableSpec, largest_first: Sequence[TableSpec]) -> None:
        """Places all tables so far and this one as evenly as constraints allow; `PlanError` if that is not enough."""
        self.loads, before = Loads.empty(self.costs), self.taken
        self.taken = {}
        for other in largest_first:
            if other.name in before or other is table:
                even = self._evenest(other)
                self._take(other, even)
                if self.loads.memory().max() > self.topology.limit:
                    raise PlanError(fits_not(other.name, even.kind, self.loads, even.share))

    def _evenest(self, table: TableSpec) -> _Try:
        """The kind with which the fullest rank holds the least."""
        tries = []
        for kind in self._candidates_for_room(table):
            share = self._share(table, kind)
            tries.append(_Try(kind, share, float(self.loads.variants([share]).memory().max())))
        return min(tries, key=lambda attempt: attempt.score)

    def _candidates_for_room(self, table: TableSpec) -> list[Kind]:
        kinds = list(self._candidates(table))
        allowed = self.allowed[table.name]
        emptiest = int(np.argmin(self.loads["memory"]))
        if "table_wise" in allowed:
            kinds.append(TableWise(emptiest))
        if "data_parallel" in allowed:
            kinds.append(DataParallel())
        if "column_wise" in allowed:
            pieces = min(self.topology.world_size, max(1, table.embedding_dim // COLUMN_UNIT))
            ranks = np.argsort(self.loads["memory"], kind="stable")[:pieces]
            kinds.append(ColumnWise(pieces, tuple(sorted(int(rank) for rank in ranks))))
        if "grid" in allowed and not any(isinstance(kind, Grid) for kind in kinds):
            kinds.append(Grid(1))
        return [*kinds, Hierarchical()] if allowed == ("hierarchical",) else kinds

    def _scores(self, loads: Loads) -> tuple[Floats, Floats]:
        """The score and the seconds of a step, for every variant."""
        times = np.stack(list(loads.phases().values()))
        longest = times.max(axis=-1)
        squares = np.square(times / np.maximum(longest, 1e-30)[..., None])
        crowd = longest * np.mean(np.square(squares, out=squares), axis=-1) ** 0.25
        seconds = longest.sum(axis=0)
        return seconds + self.crowd_weight * crowd.sum(axis=0), seconds

    def _without_replicas(self, tables: Sequence[TableSpec]) -> None:
        """Places replicated tables in other ways if a step without any all-reduce is shorter."""
        replicated = [table for table in tables if isinstance(self.taken[table.name].kind, DataParallel)]
        others = {
            table.name: tuple(k for k in self.allowed[table.name] if k != DataParallel.name) for table in replicated
        }
        if not replicated or not all(others.values()):
            return
        before, values, totals = float(self._scores(self.loads)[0]), self.loads.values.copy(), self.loads.totals.copy()
        taken, tried, allowed = dict(self.taken), dict(self.tried), self.allowed
        for table in replicated:
            self.loads.add(self.taken[table.name].share, -1)
        self.allowed = {**allowed, **others}
        for table in replicated:
            best = self._best(table)
            if best is None:
                break
            self._take(table, best)
        else:
            if float(self._scores(self.loads)[0]) < before * (1 - GAIN):
                self.allowed = allowed
                return
        self.loads, self.taken, self.tried = Loads(self.costs, values, totals), taken, tried
        self.allowed = allowed

    def _improve(self, tables: Sequence[TableSpec]) -> None:
        """Places every table again, with all others where they are."""
        score = float(self._scores(self.loads)[0])
        for _ in range(ROUNDS):
            before = score
            for table in tables[: max(1, MANY // self.topology.world_size)]:
                old = self.taken[table.name]
                self.loads.add(old.share, -1)
                best = self._best(table, old)
                new = best if best is not None and best.score < score * (1 - GAIN) else old
                self._take(table, new)
                score = new.score if new is best else score
            if score > before * (1 - GAIN):
                return

    def _explain(self, table: TableSpec) -> Choice:
        mine = self.taken[table.name]
        tried = self.tried[table.name]
        others = {kind: spent for kind, spent in tried.items() if kind != mine.kind.name}
        second = min(others, key=lambda name: others[name]) if others else ""
        more = others[second] - tried.get(mine.kind.name, np.nan) if second else np.nan
        if abs(more) < EQUAL * self.loads.seconds():
            more = 0.0  # to the model they are equal
        return Choice(table.name, mine.kind, self._why(table, mine.kind), mine.share.memory, second, more)

    def _why(self, table: TableSpec, kind: Kind) -> str:
        allowed = self.allowed[table.name]
        if len(allowed) == 1:
            return "no other kind is allowed"
        limit, whole = self.topology.limit, self._bytes(table)
        if isinstance(kind, DataParallel):
            return f"small ({size(whole)}): no ids and no vectors travel"
        if whole > limit:
            return f"{size(whole)}, more than a rank's {size(limit)}"
        return {
            "table_wise": "whole bags on one rank: fewest bytes",
            "column_wise": "whole bags, work and memory spread",
            "row_wise": "work and memory spread",
            "grid": "spread, with fewer partial pools than row_wise",
            "hierarchical": "pools added up inside nodes: fewer bytes on rails",
        }.get(kind.name, "")


def explanation_of(choices: Sequence[Choice], loads: Loads) -> str:
    """The reasons as plain text, one line per table."""
    seconds = loads.seconds()
    lines = [f"predicted step: {1e3 * seconds:.3f} ms; memory per rank: {size(float(loads.memory().max()))} at most"]
    for choice in choices:
        next_best = f"; {choice.second}: {1e3 * choice.second_more:+.3f} ms per step" if choice.second else ""
        lines.append(f"{choice.table}: {describe(choice.kind)}: {choice.why}{next_best}")
    return "\n".join(lines)


def describe(kind: Kind) -> str:
    """A kind in a few words."""
    if isinstance(kind, TableWise) and kind.rank is not None:
        return f"table_wise on rank {kind.rank}"
    ranks = kind.ranks if isinstance(kind, RowWise | ColumnWise) else None
    pieces = kind.pieces if isinstance(kind, ColumnWise | Grid) else None
    words = [kind.name, *([f"in {pieces} pieces"] if pieces else [])]
    if ranks is not None:
        words.append(f"on {len(ranks)} ranks" if len(ranks) > 4 else f"on ranks {', '.join(map(str, ranks))}")
    return " ".join(words)
