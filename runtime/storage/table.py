"""The interface between a collection and its tables: what every kind of table offers, and how a kind is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embforge.codegen.errors import SpecError
from embforge.codegen.layout import TableLayout
from embforge.codegen.spec import TableSpec
from embforge.storage.parameter_table import ParameterTable
from embforge.storage.remap import Remap
from embforge.storage.static import StaticTable

SHOWN_TABLES = 12
"""The most lines that the tables of a collection take when it is printed."""


class Table(Protocol):
    """A table: rows and the optimizer's states in memory, and what turns ids into rows where ids are not rows.

    Kernels read row r at the address of `weight` plus r strides. Code that keeps an address compares it in every call,
    because a table may move. Every table is also an nn.Module, which moves, copies and saves itself.
    """

    layout: TableLayout
    initial: dict[str, float]
    """The values of states before the first update, by name; other states start at 0."""
    weight: Tensor
    """`[rows, dim]`, strided: a parameter, unless a fused optimizer trains the table."""
    section: Tensor
    """The states that are not stored in the padding of the rows."""
    sparse: bool
    """Whether the gradient is sparse. A table with a fused optimizer has no gradient."""
    trainable: bool
    """With a fused optimizer: whether a backward updates the table."""
    remap: Remap | None
    """The row of each id; None where ids are rows."""
    _parameters: dict[str, Any]
    """torch's, of which nn.Module makes `weight` if it is a parameter."""

    @property
    def block(self) -> Tensor:
        """The memory of all rows, with padding and states. Only a table with a fused optimizer has it."""

    @property
    def is_fused(self) -> bool:
        """Whether a fused optimizer trains the table."""

    @property
    def has_rule(self) -> bool:
        """Whether a fused optimizer trains the table unless it is frozen."""

    def states(self) -> dict[str, Tensor]:
        """Live views of the optimizer's states, by name."""

    def reset(self) -> None:
        """Draws new rows and resets states to their values before the first update."""

    def set_trainable(self, wanted: bool) -> None:
        """Freezes or unfreezes the table. TypeError if nothing can train it."""

    def is_trained(self) -> bool:
        """Whether the table is trained, that is, not frozen."""

    def can_train(self) -> bool:
        """Whether a fused optimizer, or one of torch, can train the table."""

    def keys(self, prefix: str) -> dict[str, torch.Size]:
        """The keys of rows and states in a state dict, with their shapes."""

    def all_keys(self, prefix: str) -> set[str]:
        """All keys that a state dict may have for the table."""


def new_table(
    spec: TableSpec,
    layout: TableLayout,
    device: torch.device,
    *,
    sparse: bool = False,
    fused: bool = True,
    initial: Mapping[str, float] | None = None,
    has_rule: bool = True,
) -> Table:
    """A new table of the kind that `TableSpec.storage` names, with uninitialised rows.

    With a fused optimizer (`fused`), its rows and states are plain tensors, `initial` has the values of states before
    the first update, and `has_rule` says whether an optimizer trains this table. Without one, the rows are a parameter,
    whose gradient is `sparse` or dense.
    """
    if spec.storage != "static":  # other kinds of table are chosen here
        raise SpecError(f"table {spec.name!r}: storage={spec.storage!r} has no kind of table; allowed: 'static'")
    remap = None if spec.ids_are_rows else Remap(spec, device)
    if fused:
        return StaticTable(layout, device, fused=True, initial=initial, has_rule=has_rule, remap=remap)
    return ParameterTable(layout, device, sparse=sparse, remap=remap)


def weights_of(tables: Iterable[Table], fused: bool) -> list[Tensor]:
    """The present rows of tables: parameters, unless a fused optimizer trains the tables.

    They are read where nn.Module keeps them, because small lookups take microseconds, and 26 lookups of an attribute
    by name take as long. A kind of table may also compute `weight`.
    """
    try:
        if fused:
            return [table.__dict__["weight"] for table in tables]
        return [table._parameters["weight"] for table in tables]
    except KeyError:
        return [table.weight for table in tables]


def remaps_of(tables: Mapping[str, Table]) -> dict[str, Remap]:
    """The remaps by table name, in the order of the tables, for tables that have one."""
    return {name: table.remap for name, table in tables.items() if table.remap is not None}


class Tables(nn.Module):
    """The tables of a collection by name. A name may contain a dot, which torch reads as a level of modules."""

    def add(self, name: str, table: Table) -> None:
        """Adds a table. Its name may be `forward` or `type`, which `add_module` would refuse."""
        tables: Any = self._modules
        tables[name] = table

    def __repr__(self) -> str:
        """Lists the tables as any module lists its children, but at most `SHOWN_TABLES` lines."""
        lines = [f"({name}): {table!r}" for name, table in self._modules.items()]
        if len(lines) > SHOWN_TABLES:
            lines[SHOWN_TABLES - 1 :] = [f"... and {len(lines) - SHOWN_TABLES + 1} more tables"]
        return "\n  ".join(["Tables(", *lines]) + "\n)"

    def requires_grad_(self, requires_grad: bool = True) -> Tables:
        """Freezes or unfreezes all tables, also those with a fused optimizer, whose rows are not parameters and which
        torch's own method would skip. Tables that cannot be trained stay frozen."""
        tables: Any = self._modules
        for table in tables.values():
            if not requires_grad or table.can_train():
                table.requires_grad_(requires_grad)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tables: Any = self._modules
        known = {key for name, table in tables.items() for key in table.all_keys(f"{prefix}{name}.")}
        # A table without a fused optimizer may serve rows that another module trained: it ignores optimizer states.
        skipped = tuple(f"{prefix}{name}.optim." for name, table in tables.items() if not table.has_rule)
        unexpected_keys += [
            key
            for key in state_dict
            if strict and key.startswith(prefix) and key not in known and not key.startswith(skipped)
        ]
