"""The seam between a collection and its tables: what every kind of table offers, and where a kind is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embforge.codegen.layout import TableLayout
from embforge.codegen.spec import TableSpec
from embforge.storage.parameter_table import ParameterTable
from embforge.storage.remap import Remap
from embforge.storage.static import StaticTable

SHOWN_TABLES = 12
"""How many lines the tables of a collection take when it is printed."""


class Table(Protocol):
    """Rows and their optimizer's states as memory, and what turns ids into rows where ids are not rows.

    Kernels read row r at the address of `weight` plus r strides. Code that keeps an address compares it in every call,
    because a table may move. A table is an nn.Module too, which moves, copies and saves itself.
    """

    layout: TableLayout
    initial: dict[str, float]
    """What states are before the first update, where that is not 0."""
    weight: Tensor
    """`[rows, dim]`, strided: a parameter, unless a fused optimizer trains the table."""
    section: Tensor
    """The states that do not lie beside the rows."""
    sparse: bool
    """Whether gradients are sparse. A table with a fused optimizer has none."""
    trainable: bool
    remap: Remap | None
    """The step from ids to rows; None: ids are rows."""

    @property
    def block(self) -> Tensor:
        """Of a table with a fused optimizer: all memory of its rows, with padding and states."""

    @property
    def is_fused(self) -> bool:
        """Whether a fused optimizer trains the table."""

    @property
    def has_rule(self) -> bool:
        """Whether a fused optimizer trains the table unless it is frozen."""

    def states(self) -> dict[str, Tensor]:
        """The optimizer's states by name, live."""

    def reset(self) -> None:
        """Rows and states as at the start."""

    def set_trainable(self, wanted: bool) -> None:
        """Freezes or unfreezes the table. TypeError if nothing can train it."""

    def is_trained(self) -> bool:
        """Whether it is not frozen."""

    def can_train(self) -> bool:
        """Whether anything can train the table as it is held."""

    def keys(self, prefix: str) -> dict[str, torch.Size]:
        """Rows and states in the state dict, with their shapes."""

    def all_keys(self, prefix: str) -> set[str]:
        """All that the state dict may hold of the table."""


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
    """A table as its spec's storage says, with uninitialised rows.

    With a fused optimizer (`fused`) its rows and states are plain tensors, and `initial` says what states are before
    the first update; `has_rule`: whether the optimizer trains this table. Without one the rows are a parameter, whose
    gradients are `sparse` or dense.
    """
    assert spec.storage == "static", "the only storage so far; another kind of table is made here"
    remap = None if spec.ids_are_rows else Remap(spec, device)
    if fused:
        return StaticTable(layout, device, fused=True, initial=initial, has_rule=has_rule, remap=remap)
    return ParameterTable(layout, device, sparse=sparse, remap=remap)


def remaps_of(tables: Mapping[str, Table]) -> dict[str, Remap]:
    """The remaps of those tables that have one, by table, in their order."""
    return {name: table.remap for name, table in tables.items() if table.remap is not None}


class Tables(nn.Module):
    """The tables of a collection by name. A name may hold a dot, which torch takes for a level of modules."""

    def add(self, name: str, table: Table) -> None:
        """Takes a table. It may be called `forward` or `type`, which add_module would refuse."""
        tables: Any = self._modules
        tables[name] = table

    def __repr__(self) -> str:
        """As of any module, but of many tables only the first ones."""
        lines = [f"({name}): {table!r}" for name, table in self._modules.items()]
        if len(lines) > SHOWN_TABLES:
            lines[SHOWN_TABLES - 1 :] = [f"... and {len(lines) - SHOWN_TABLES + 1} more tables"]
        return "\n  ".join(["Tables(", *lines]) + "\n)"

    def requires_grad_(self, requires_grad: bool = True) -> Tables:
        """Fused tables have no parameters that torch's own would find. Tables that cannot be trained stay frozen."""
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
        # A table that nothing here trains serves what another module trained: it has no use for an optimizer's states.
        skipped = tuple(f"{prefix}{name}.optim." for name, table in tables.items() if not table.has_rule)
        unexpected_keys += [
            key
            for key in state_dict
            if strict and key.startswith(prefix) and key not in known and not key.startswith(skipped)
        ]
