"""Update rules that reduce a row to a number, for tables whose columns are on several ranks.

Each rank reduces its columns. The partial sums of a row are exchanged and added up in the order of columns. The update
kernel reads the results as states of the row: its rule is the user's rule, with every reduction replaced by a state.
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
"""The names of states that hold reductions, and the suffix of the names of rules that have them."""


@dataclass(frozen=True)
class SharedRule:
    """A rule whose reductions of a row must be combined from several ranks."""

    group: int
    """The index of its group among those of the module."""
    update: Update
    """The user's update."""
    tables: tuple[str, ...]
    """All tables that the rule trains."""


def rules_with_split_reductions(geometry: Geometry, groups: RuleGroups) -> tuple[SharedRule, ...]:
    """The rules that reduce rows and train a table whose columns are on several ranks."""
    shared = []
    for number, group in enumerate(groups.groups):
        update, tables = group.optimizer.update, groups.table_names(group)
        if program_of(update.rule).reductions and any(geometry.placement.by_name[t].columns_split for t in tables):
            shared.append(SharedRule(number, update, tables))
    return tuple(shared)


def shared_rules(groups: RuleGroups, shared: Sequence[SharedRule]) -> RuleGroups:
    """The groups, with the rules in `shared` replaced by rules that have states for their reductions."""
    numbers = {rule.group for rule in shared}
    replaced = [
        replace(group, optimizer=_SharedOptimizer(group.optimizer)) if number in numbers else group
        for number, group in enumerate(groups.groups)
    ]
    return replace(groups, groups=tuple(replaced))


class _SharedOptimizer:
    """The user's optimizer, with a rule that has states for its reductions."""

    def __init__(self, optimizer: TableOptimizer) -> None:
        self._original = optimizer
        rule = optimizer.update.rule
        self.update = replace(optimizer.update, rule=_without_reductions(rule))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_original"], name)


def user_rule(layout: TableLayout) -> str:
    """The name of the user's rule for a table. The rule in the layout may be one that shares reductions."""
    shares = any(state.name == SHARED.format(0) for state in layout.states)
    return layout.rule.removesuffix(OF_COLUMNS) if shares else layout.rule


def state_names(rule: Rule) -> list[str]:
    """The names of the states that hold the reductions of a rule."""
    return [SHARED.format(number) for number in range(len(program_of(rule).reductions))]


def _without_reductions(rule: Rule) -> Rule:
    program = program_of(rule)
    texts = [_spelled(reduction.text) for reduction in program.reductions]
    if len(set(texts)) != len(texts):
        raise RuleError(
            f"rule {rule.name!r}: {texts} reduce different values that have the same names, which is not possible if "
            "the columns of a table are on several ranks; rename the values, or use row_wise or table_wise"
        )
    names = dict(zip(texts, state_names(rule), strict=True))

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            name = names.get(ast.unparse(node))
            return ast.Name(name, ast.Load()) if name else self.generic_visit(node)

    lines = tuple(ast.unparse(Replace().visit(ast.parse(line))) for line in program.lines)
    kept = tuple(f"{name} = {name}" for name in names.values())
    states = (*rule.states, *(State(name, "row") for name in names.values()))
    replaced = Rule(f"{rule.name}{OF_COLUMNS}"[:60], (*lines, *kept), states, rule.hyper)
    program_of(replaced)
    return replaced


def _spelled(text: str) -> str:
    return ast.unparse(ast.parse(text, mode="eval"))


class _SharedEvaluation(Evaluation):
    """Evaluates a rule up to its last reduction, with sums over the columns of all ranks."""

    def partial_sums(self, whole_width: int) -> Generator[Tensor, Tensor, list[Tensor]]:
        """A generator that yields, for each reduction, the sums over this rank's columns; send it the sums over all
        columns. Returns the values of all reductions. `whole_width` is the number of columns on all ranks."""
        values: list[Tensor] = []
        for step in self.program.steps:
            if len(values) == len(self.program.reductions):
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
            values.append(total)
            self.values[step.name] = total[:, None]
        return values


class RowNorms:
    """Computes the reductions of rows whose columns are on several ranks, for one module."""

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
        """For each rank, the tables of its own collection."""

    def share(self) -> None:
        """Computes the states that hold reductions, for all rows whose gradients wait, rule by rule. All ranks must
        call."""
        # Also if no row waits: the step must be counted, as on ranks whose rows occur.
        reduced = [] if self.owner is None else self.owner.merge()
        for rule in self.rules:
            everywhere = [[held for held in of_rank if held.table in rule.tables] for of_rank in self.held]
            own = [index for index, held in enumerate(self.held[self.rank]) if held.table in rule.tables]
            self._share(rule, everywhere, own, [reduced[index] for index in own])

    def _share(
        self, rule: SharedRule, everywhere: list[list[_Held]], own: list[int], reduced: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Computes the reductions of one rule. `everywhere` has its tables on each rank, `own` the indices of those in
        this rank's own collection, `reduced` their rows and gradients."""
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

    def _tables(self, indices: Sequence[int]) -> list[Table]:
        tables = [] if self.owner is None else list(self.owner.module.named_tables().values())
        return [tables[index] for index in indices]

    def _evaluations(
        self, rule: SharedRule, held: list[_Held], own: list[int], reduced: list[tuple[Tensor, Tensor]]
    ) -> list[Generator[Tensor, Tensor, list[Tensor]]]:
        """Evaluations of a rule for the rows whose gradients wait, table by table."""
        if self.owner is None:
            return []
        numbers = self.owner.module.trainer.numbers
        assert numbers is not None
        scale, step = numbers.get("grad_scale", rule.group) or 1.0, int(numbers.counters[STEP]) + 1
        evaluations = []
        for table, (rows, gradient), shard in zip(self._tables(own), reduced, held, strict=True):
            states = {name: state[rows] for name, state in table.states().items()}
            evaluation = _SharedEvaluation(
                rule.update, numbers.values(rule.group), step, gradient / scale, table.weight[rows].float(), states,
                torch.float32,
            )  # fmt: skip
            evaluations.append(evaluation.partial_sums(shard.whole_width))
        return evaluations

    def _exchange(self, everywhere: list[list[_Held]], rows: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
        """For every table of a rule, the sums over all its columns, added up in the order of columns.

        `everywhere` has these tables on each rank. `rows` has for each table of this rank the rows of `sums`, by their
        numbers in the whole table. All ranks that hold columns of a row have a gradient for it, so that sender and
        receiver know which rows are sent; their order is ascending.
        """
        own_shards = everywhere[self.rank]
        known = dict(zip((held.key for held in own_shards), zip(rows, sums, strict=True), strict=True))
        outgoing = [
            [known[held.key][1][held.shared(known[held.key][0], others)] for held in own_shards if held.meets(others)]
            for others in (() if rank == self.rank else held for rank, held in enumerate(everywhere))
        ]
        incoming = {
            held.key: (rank, held.held_rows([known[own.key][0] for own in own_shards if own.table == held.table]))
            for rank, others in enumerate(everywhere)
            for held in others
            if rank != self.rank and held.meets(own_shards)
        }
        receive_sizes = [0] * len(everywhere)
        for rank, whole in incoming.values():
            receive_sizes[rank] += whole.numel()
        flat = [total for totals in outgoing for total in totals]
        received = self.exchange.all_to_all(
            "row_norms",
            torch.cat(flat) if flat else torch.empty(0, dtype=torch.float32, device=self.device),
            [sum(total.numel() for total in totals) for totals in outgoing],
            receive_sizes,
        )
        parts = received.split([whole.numel() for _, whole in incoming.values()])
        known |= {key: (whole, part) for (key, (_, whole)), part in zip(incoming.items(), parts, strict=True)}
        return [
            _whole_sums(held, whole, total, known) for held, whole, total in zip(own_shards, rows, sums, strict=True)
        ]


def _whole_sums(held: _Held, rows: Tensor, own: Tensor, known: dict[Key, tuple[Tensor, Tensor]]) -> Tensor:
    """The sums over all columns of a table's rows, piece by piece in the order of columns. `known` has the rows and
    the sums of each shard."""
    added = torch.zeros_like(own)
    for number in range(held.pieces):
        part = torch.zeros_like(own)
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
    """A shard that a rank holds: some columns of some rows of a table."""

    table: str
    number: int
    """The number of the piece of columns."""
    pieces: int
    """The number of pieces of the table."""
    whole_width: int
    """The number of columns of the table."""
    rows: Rows

    @property
    def key(self) -> Key:
        return (self.table, self.number, self.rows.shard)

    def whole_rows(self, local: Tensor) -> Tensor:
        """The numbers in the whole table of rows of this shard. Ascending numbers stay ascending."""
        if self.rows.by == "modulo":
            return local * self.rows.shards + self.rows.shard
        return local + self.rows.shard * self.rows.capacity

    def meets(self, others: Sequence[_Held]) -> bool:
        """Whether a rank that holds these shards has other columns of some rows of this shard."""
        return any(self._has_other_columns(other) for other in others)

    def _has_other_columns(self, other: _Held) -> bool:
        if self.table != other.table or self.number == other.number:
            return False
        return self.rows.shards != other.rows.shards or self.rows.shard == other.rows.shard

    def shared(self, rows: Tensor, others: Sequence[_Held]) -> Tensor:
        """For each of these rows of this shard: whether a rank with the shards `others` has other columns of it."""
        with_other_columns = [other for other in others if self._has_other_columns(other)]
        return torch.stack([other.holds(rows) for other in with_other_columns]).any(dim=0)

    def held_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """The rows of the whole table that are in `rows` and in this shard, in ascending order."""
        whole: Tensor = torch.unique(torch.cat(list(rows)))
        return whole[self.holds(whole)]

    def holds(self, rows: Tensor) -> Tensor:
        """Which rows of the whole table are in this shard."""
        shards: Tensor = rows % self.rows.shards if self.rows.by == "modulo" else rows // self.rows.capacity
        return shards.eq(self.rows.shard)


def _held(geometry: Geometry, rank: int) -> list[_Held]:
    """The shards that a rank holds, in the order of its own collection."""
    shards = []
    for placement in geometry.placement.tables:
        table, pieces = placement.table, placement.pieces
        for number, piece in enumerate(pieces):
            if rank in piece.owners:
                rows = placement.rows(piece, piece.owners.index(rank))
                shards.append(_Held(table.name, number, len(pieces), table.embedding_dim, rows))
    return shards
