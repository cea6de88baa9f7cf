"""Which optimizer trains which table: one optimizer for all tables of a collection, or a mapping from tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Protocol

from torch import Tensor

from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.codegen.plans import training_plans
from embforge.codegen.rules.rule import HYPER, Update
from embforge.codegen.spec import CollectionSpec
from embforge.launch.grouped import RulePart, grouped_text
from embforge.launch.kernels import Program

REST = "*"
"""A key of a mapping of optimizers that means all tables that no other entry names."""
BY_RULE = ("backward", "step")
"""The kernels that a collection has once per rule, by their names in `Programs`."""


class TableOptimizer(Protocol):
    """The part of an optimizer of `embforge.optim` that training uses."""

    @property
    def lr(self) -> float | Tensor: ...
    @property
    def update(self) -> Update: ...
    @property
    def hyper_values(self) -> tuple[float, ...]: ...
    @property
    def initial_states(self) -> dict[str, float]: ...
    def check(self, name: str, value: object) -> None: ...


@dataclass(frozen=True)
class RuleGroup:
    """The tables that one optimizer trains: those of an entry of the mapping, or all tables."""

    name: str
    """The key of the entry; empty if one optimizer trains all tables."""
    optimizer: TableOptimizer
    tables: tuple[int, ...]
    """The indices of the tables in the spec."""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the hyperparameters that the group's kernels read, in their order."""
        return (*HYPER, *self.optimizer.update.rule.hyper)


@dataclass(frozen=True)
class RuleGroups:
    """The optimizers of a collection, and the tables that each of them trains. A table in no group is never trained."""

    groups: tuple[RuleGroup, ...]
    tables: tuple[str, ...]
    """The names of all tables of the collection."""

    def of_table(self, place: int) -> RuleGroup | None:
        """The group of the table with this index; None if it is in no group."""
        return next((group for group in self.groups if place in group.tables), None)

    def updates(self) -> tuple[Update | None, ...]:
        """The update of each table's rows; None for a table that is never trained."""
        groups = [self.of_table(place) for place in range(len(self.tables))]
        return tuple(None if group is None else group.optimizer.update for group in groups)

    def different_updates(self) -> tuple[Update, ...]:
        """The updates of all groups, without duplicates."""
        return tuple(dict.fromkeys(group.optimizer.update for group in self.groups))

    def table_names(self, group: RuleGroup) -> tuple[str, ...]:
        """The names of a group's tables."""
        return tuple(self.tables[place] for place in group.tables)

    def for_parts(self, names: Sequence[str], wholes: Sequence[str]) -> RuleGroups:
        """The same groups for a collection whose tables are parts of these tables: `names[k]` is a part of `wholes[k]`.

        A group may have no tables in that collection; its hyperparameters keep their place.
        """
        place = {name: self.tables.index(name) for name in set(wholes)}
        groups = [
            replace(group, tables=tuple(k for k, whole in enumerate(wholes) if place[whole] in group.tables))
            for group in self.groups
        ]
        return RuleGroups(tuple(groups), tuple(names))

    def plans(
        self,
        spec: CollectionSpec,
        target: str,
        arch: str,
        id_dtype: str,
        params: Params,
        backward: Params | None,
        accumulate: bool,
    ) -> dict[str, Plan]:
        """The kernel plans of `training_plans`. With several groups there is one backward and one step per group, under
        names such as `backward[users]`."""
        plans: dict[str, Plan] = {}
        for group in self._running:
            made = training_plans(spec, target, arch, id_dtype, params, backward, group.optimizer.update, accumulate)
            plans |= {self._plan_name(op, group): plan for op, plan in made.items()}
        return plans

    def texts(self, plans: Mapping[str, Plan], kernels: str | None) -> dict[str, str]:
        """The programs of these kernel plans, by the names in `Programs`. Those of several groups are joined to one."""
        texts = {name: Program(plan, kernels).text for name, plan in plans.items()}
        if self._is_one:
            return texts
        for op in BY_RULE:
            parts = [(group, texts.pop(self._plan_name(op, group), "")) for group in self._running]
            if parts[0][1]:
                texts[op] = grouped_text([self._part(group, program) for group, program in parts])
        return texts

    @property
    def _is_one(self) -> bool:
        return len(self.groups) == 1

    @property
    def _running(self) -> tuple[RuleGroup, ...]:
        """The groups whose kernels run: those with tables, or the first group if none has tables, because an update
        must count a step in any case."""
        return tuple(group for group in self.groups if group.tables) or self.groups[:1]

    def _plan_name(self, op: str, group: RuleGroup) -> str:
        return op if self._is_one or op not in BY_RULE else f"{op}[{group.name}]"

    def _part(self, group: RuleGroup, program: str) -> RulePart:
        before = sum(len(other.numbers) for other in self.groups[: self.groups.index(group)])
        return RulePart(program, group.tables, before, len(group.numbers))


Optimizers = TableOptimizer | Mapping[Any, TableOptimizer | None] | RuleGroups | None
"""The types of an `optimizer` argument. The keys of a mapping are a table's name, a tuple of names, or `REST`."""


def rule_groups(optimizer: Optimizers, spec: CollectionSpec) -> RuleGroups | None:
    """The groups that an `optimizer` argument makes of the tables of a spec; None for None.

    TypeError or ValueError names the entry that is not allowed.
    """
    names = tuple(table.name for table in spec.tables)
    if optimizer is None or isinstance(optimizer, RuleGroups):
        return optimizer
    if not isinstance(optimizer, Mapping):
        return RuleGroups((RuleGroup("", _checked(optimizer), tuple(range(len(names)))),), names)
    taken: dict[str, object] = {}
    entries: list[tuple[str, TableOptimizer | None, tuple[str, ...]]] = []
    for key, value in optimizer.items():
        named = _names_of(key, names)
        for name in named:
            if name in taken:
                raise ValueError(
                    f"optimizer: table {name!r} is named by the entries {taken[name]!r} and {key!r}; name it in one"
                )
            taken[name] = key
        entries.append((key if isinstance(key, str) else ", ".join(named), value, named))
    rest = tuple(name for name in names if name not in taken)
    if REST in optimizer and not rest:
        raise ValueError(
            f"optimizer: {REST!r} stands for tables that no other entry names, but all are named; remove it"
        )
    if rest and REST not in optimizer:
        raise ValueError(
            f"optimizer: table {rest[0]!r} is in no entry; name it (with None it is never trained), or add an entry "
            f"{REST!r} for all tables that no other entry names"
        )
    groups = tuple(
        RuleGroup(name, _checked(value, name), tuple(map(names.index, rest if name == REST else named)))
        for name, value, named in entries
        if value is not None
    )
    if not groups:
        raise ValueError(
            "optimizer: no entry has an optimizer, so nothing would be trained; for a module that only looks up, pass "
            "optimizer=None"
        )
    return RuleGroups(groups, names)


def _names_of(key: object, tables: Sequence[str]) -> tuple[str, ...]:
    """The names of the tables in a key of the mapping; none for `REST`."""
    if key == REST:
        return ()
    named = key if isinstance(key, tuple) else (key,)
    for name in named:
        if not isinstance(name, str):
            raise TypeError(
                f"optimizer: {key!r} is no key; allowed: the name of a table, a tuple of names, or {REST!r} for all "
                "others"
            )
        if name not in tables:
            close = get_close_matches(name, tables, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"tables: {', '.join(tables)}"
            raise ValueError(f"optimizer: {name!r} is no table of this collection; {hint}")
    if not named:
        raise ValueError("optimizer: an empty tuple names no table; name at least one")
    return named


def _checked(optimizer: Any, entry: str = "") -> TableOptimizer:
    if isinstance(getattr(optimizer, "update", None), Update):
        checked: TableOptimizer = optimizer
        return checked
    if entry:
        raise TypeError(
            f"optimizer: entry {entry!r}: got {optimizer!r}; allowed: one of embforge.optim, such as "
            "ef.optim.Adam(lr=1e-3), or None: its tables are never trained"
        )
    raise TypeError(
        f"optimizer: got {optimizer!r}; allowed: one of embforge.optim, such as ef.optim.Adam(lr=1e-3), a mapping from "
        "tables to optimizers, or None: then give module.parameters() to an optimizer of torch.optim (sparse=False "
        "makes dense gradients)"
    )
