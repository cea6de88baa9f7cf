"""Rules that reduce a row to a number, on tables whose columns lie on several ranks.

Each rank reduces its columns; the partial sums of a row are exchanged and added in the order of the columns. The update
kernel takes the numbers as states of the row: its rule is the user's, with every reduction replaced by such a state.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.errors import RuleError
from embforge.codegen.layout import TableLayout
from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.program import Kind, Reduction
from embforge.codegen.rules.rule import Rule, State, Update
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.placement import Rows
from embforge.launch.reference.forward import ieee_sqrt
from embforge.launch.reference.rules import Evaluation, row_sum
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.stages.model_forward import Owner
from embforge.storage.table import Table
from embforge.training.numbers import STEP
from embforge.training.rule_groups import RuleGroups, TableOptimizer

FOLDS = ("sum", "mean", "norm")
SHARED, OF_COLUMNS = "shared_{}", "_columns"
"""What reductions are called as states, and how the name of a rule ends that has such."""


@dataclass(frozen=True)
class SharedRule:
    """A rule whose numbers of a row must be put together from several pieces."""

    group: int
    """Which of the module's groups has it."""
    update: Update
    """As the user gave it."""
    tables: tuple[str, ...]
    """All tables that it trains."""


def needs_norms(geometry: Geometry, groups: RuleGroups) -> tuple[SharedRule, ...]:
    """The rules that reduce rows, of which the columns of a table lie on several ranks."""
    found = []
    for number, group in enumerate(groups.groups):
        update, tables = group.optimizer.update, groups.table_names(group)
        if program_of(update.rule).reductions and any(geometry.placement.by_name[t].columns_split for t in tables):
            found.append(SharedRule(number, update, tables))
    return tuple(found)


def shared_rules(groups: RuleGroups, shared: Sequence[SharedRule]) -> RuleGroups:
    """The groups, with rules whose reductions are states of the row where these are shared."""
    numbers = {rule.group for rule in shared}
    made = [
        replace(group, optimizer=_SharedOptimizer(group.optimizer)) if number in numbers else group
        for number, group in enumerate(groups.groups)
    ]
    return replace(groups, groups=tuple(made))


class _SharedOptimizer:
    """An optimizer whose reductions are given from outside, in all else the user's."""

    def __init__(self, optimizer: TableOptimizer) -> None:
        self._given = optimizer
        rule = optimizer.update.rule
        self.update = replace(optimizer.update, rule=_without_reductions(rule))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_given"], name)


def given_rule(layout: TableLayout) -> str:
    """The name of the rule that the user gave a table, whose own may be one that shares reductions."""
    shares = any(state.name == SHARED.format(0) for state in layout.states)
    return layout.rule.removesuffix(OF_COLUMNS) if shares else layout.rule


def state_names(rule: Rule) -> list[str]:
    """What the reductions of a rule are called as states."""
    return [SHARED.format(number) for number in range(len(program_of(rule).reductions))]


def _without_reductions(rule: Rule) -> Rule:
    program = program_of(rule)
    texts = [_spelled(reduction.text) for reduction in program.reductions]
    if len(set(texts)) != len(texts):
        raise RuleError(
            f"rule {rule.name!r}: {texts} reduce different values by the same words, which cannot be told apart where "
            "columns of a table lie on several ranks; give the values different names, or use row_wise or table_wise"
        )
    names = dict(zip(texts, state_names(rule), strict=True))

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            name = names.get(ast.unparse(node))
            return ast.Name(name, ast.Load()) if name else self.generic_visit(node)

    lines = tuple(ast.unparse(Replace().visit(ast.parse(line))) for line in program.lines)
    kept = tuple(f"{name} = {name}" for name in names.values())
    states = (*rule.states, *(State(name, "row") for name in names.values()))
    made = Rule(f"{rule.name}{OF_COLUMNS}"[:60], (*lines, *kept), states, rule.hyper)
    program_of(made)
    return made


def _spelled(text: str) -> str:
    return ast.unparse(ast.parse(text, mode="eval"))


class _Shared(Evaluation):
    """A rule as far as its last reduction, which others complete: a generator of partial sums that is sent whole
    ones."""

    def partial_sums(self, whole_width: int) -> Generator[Tensor, Tensor, list[Tensor]]:
        found: list[Tensor] = []
        for step in self.program.steps:
            if len(found) == len(self.program.reductions):
                break
            if not isinstance(step, Reduction):
                self.define(step)
                continue
            x = self.tensor(self.value(step.value)).expand(self.shapes[Kind.ELEMENT])
            total = yield row_sum(x * x if step.fold == "norm" else x)
            if step.fold == "mean":
                total = total / torch.full((1,), float(whole_width), dtype=total.dtype, device=total.device)
            elif step.fold == "norm":
                total = ieee_sqrt(total)
            found.append(total)
            self.values[step.name] = total[:, None]
        return found


class RowNorms:
    """The exchange of one module."""

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        exchange: Exchange,
        owner: Owner | None,
        rules: Sequence[SharedRule],
        device: torch.device,
    ) -> None:
        self.rank, self.exchange, self.owner, self.rules, self.device = rank, exchange, owner, rules, device
        self.held = [_held(geometry, number) for number in range(geometry.world_size)]
        """Of each rank, the tables of its own collection."""

    def share(self) -> None:
        """Fills the states of the rows whose gradients wait, rule by rule. All ranks must call."""
        # Also where no row waits: the step counts, as on ranks whose rows occur.
        reduced = [] if self.owner is None else self.owner.merge()
        for rule in self.rules:
            everywhere = [[held for held in of_rank if held.table in rule.tables] for of_rank in self.held]
            own = [place for place, held in enumerate(self.held[self.rank]) if held.table in rule.tables]
            self._share(rule, everywhere, own, [reduced[place] for place in own])

    def _share(
        self, rule: SharedRule, everywhere: list[list[_Held]], own: list[int], reduced: list[tuple[Tensor, Tensor]]
    ) -> None:
        """One rule's. `everywhere`: its tables on each rank; `own`: where they are in this rank's own collection."""
        evaluations = self._evaluations(rule, everywhere[self.rank], own, reduced)
        rows = [held.whole_rows(local) for held, (local, _) in zip(everywhere[self.rank], reduced, strict=True)]
        sums = [next(evaluation) for evaluation in evaluations]
        finished: list[list[Tensor]] = [[] for _ in evaluations]
        for _ in program_of(rule.update.rule).reductions:
            whole, sums = self._exchange(everywhere, rows, sums), []
            for index, (evaluation, total) in enumerate(zip(evaluations, whole, strict=True)):
                try:
                    sums.append(evaluation.send(total))
                except StopIteration as stop:
                    finished[index] = stop.value
        for table, (local, _), values in zip(self._tables(own), reduced, finished, strict=True):
            states = table.states()
            for name, value in zip(state_names(rule.update.rule), values, strict=True):
                states[name][local] = value

    def _tables(self, places: Sequence[int]) -> list[Table]:
        held = [] if self.owner is None else list(self.owner.module.named_tables().values())
        return [held[place] for place in places]

    def _evaluations(
        self, rule: SharedRule, held: list[_Held], own: list[int], reduced: list[tuple[Tensor, Tensor]]
    ) -> list[Generator[Tensor, Tensor, list[Tensor]]]:
        """The rule on the rows whose gradients wait, table by table."""
        if self.owner is None:
            return []
        numbers = self.owner.module.trainer.numbers
        assert numbers is not None
        scale, step = numbers.get("grad_scale", rule.group) or 1.0, int(numbers.counters[STEP]) + 1
        evaluations = []
        for table, (rows, gradient), placed in zip(self._tables(own), reduced, held, strict=True):
            states = {name: state[rows] for name, state in table.states().items()}
            evaluation = _Shared(
                rule.update, numbers.values(rule.group), step, gradient / scale, table.weight[rows].float(), states,
                torch.float32,
            )  # fmt: skip
            evaluations.append(evaluation.partial_sums(placed.whole_width))
        return evaluations

    def _exchange(self, everywhere: list[list[_Held]], rows: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
        """For every table of a rule, the sums over all its columns, added in their order.

        `everywhere`: these tables on each rank. `rows`: of each of this rank's tables the rows that `sums` are of, by
        their numbers in the whole table. Every holder of a row has a gradient for it, so that both sides know which
        rows travel, in the order of the rows.
        """
        mine = everywhere[self.rank]
        known = dict(zip((held.key for held in mine), zip(rows, sums, strict=True), strict=True))
        out = [
            [known[held.key][1][held.shared(known[held.key][0], others)] for held in mine if held.meets(others)]
            for others in (() if rank == self.rank else held for rank, held in enumerate(everywhere))
        ]
        wanted = {
            held.key: (rank, held.wanted([known[own.key][0] for own in mine if own.table == held.table]))
            for rank, others in enumerate(everywhere)
            for held in others
            if rank != self.rank and held.meets(mine)
        }
        coming = [0] * len(everywhere)
        for rank, whole in wanted.values():
            coming[rank] += whole.numel()
        flat = [total for totals in out for total in totals]
        received = self.exchange.all_to_all(
            "row_norms",
            torch.cat(flat) if flat else torch.empty(0, dtype=torch.float32, device=self.device),
            [sum(total.numel() for total in totals) for totals in out],
            coming,
        )
        parts = received.split([whole.numel() for _, whole in wanted.values()])
        known |= {key: (whole, part) for (key, (_, whole)), part in zip(wanted.items(), parts, strict=True)}
        return [_whole(held, whole, total, known) for held, whole, total in zip(mine, rows, sums, strict=True)]


def _whole(held: _Held, rows: Tensor, mine: Tensor, known: dict[Key, tuple[Tensor, Tensor]]) -> Tensor:
    """The sums over all columns of a table's rows, piece by piece in the order of the columns."""
    added = torch.zeros_like(mine)
    for number in range(held.pieces):
        part = torch.zeros_like(mine)
        for (table, piece, _), (whole, sums) in known.items():
            if (table, piece) == (held.table, number) and whole.numel():
                place = torch.searchsorted(whole, rows).clamp_(max=whole.numel() - 1)
                part = torch.where(whole[place] == rows, sums[place], part)
        added = added + part
    return added


Key = tuple[str, int, int]
"""A table, a piece of its columns, and a shard of its rows."""


@dataclass(frozen=True)
class _Held:
    """A table of a rank's own collection: some columns of some rows of a table."""

    table: str
    number: int
    """Of the piece of columns."""
    pieces: int
    whole_width: int
    rows: Rows

    @property
    def key(self) -> Key:
        return (self.table, self.number, self.rows.shard)

    def whole_rows(self, local: Tensor) -> Tensor:
        """The numbers in the whole table of rows of this shard; in the same order, because shards keep it."""
        if self.rows.by == "modulo":
            return local * self.rows.shards + self.rows.shard
        return local + self.rows.shard * self.rows.capacity

    def meets(self, others: Sequence[_Held]) -> bool:
        """Whether a rank that holds these has other columns of this table, and any of the same rows."""
        return any(self._beside(other) for other in others)

    def _beside(self, other: _Held) -> bool:
        if self.table != other.table or self.number == other.number:
            return False
        return self.rows.shards != other.rows.shards or self.rows.shard == other.rows.shard

    def shared(self, rows: Tensor, others: Sequence[_Held]) -> Tensor:
        """Which of this shard's rows are also held by a rank that has other columns of the table."""
        beside = [other for other in others if self._beside(other)]
        return torch.stack([other.holds(rows) for other in beside]).any(dim=0)

    def wanted(self, rows: Sequence[Tensor]) -> Tensor:
        """Those of some rows of the table that this shard holds, in their order."""
        whole: Tensor = torch.unique(torch.cat(list(rows)))
        return whole[self.holds(whole)]

    def holds(self, rows: Tensor) -> Tensor:
        """Which rows of the whole table lie in this shard."""
        shards: Tensor = rows % self.rows.shards if self.rows.by == "modulo" else rows // self.rows.capacity
        return shards.eq(self.rows.shard)


def _held(geometry: Geometry, rank: int) -> list[_Held]:
    found = []
    for placed in geometry.placement.tables:
        for number, piece in enumerate(placed.pieces):
            if rank in piece.owners:
                rows = placed.rows(piece, piece.owners.index(rank))
                found.append(_Held(placed.table.name, number, len(placed.pieces), placed.table.embedding_dim, rows))
    return found
