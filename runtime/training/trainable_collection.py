"""A collection whose tables are all in this process: its training, the metadata of its tables, and its checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout
from embforge.launch.metadata import addresses_of, check_tables
from embforge.storage.common import NO_RULE, NO_TORCH_GRADIENT
from embforge.storage.table import Table, weights_of
from embforge.training.calls import Programs, TableMemory
from embforge.training.surface import TrainingSurface
from embforge.training.trainer import wrong_counter


class CachedTableMemory(NamedTuple):
    """The memory of the tables in an earlier call."""

    addresses: list[int]
    """The addresses and sizes of the tables. They are read first, because rows may move at any time afterwards."""
    memory: TableMemory


class TrainableCollection(TrainingSurface):
    """Tables in this process and the ways to train them. A class that derives from it adds lookups."""

    programs: dict[torch.dtype, Programs]
    """The programs of the kernels, by the dtype of ids."""
    layout: CollectionLayout
    _fused: bool
    _bounds_check: str
    _cached_memory: CachedTableMemory | None
    """The memory of the tables in the last call."""

    def optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The states that a fused optimizer keeps for a table, by name, as live views.

        A state per element is `[rows, dim]`, a state per row is `[rows]`.
        """
        self.spec.table(table)
        return self.named_tables()[table].states()

    def step(self) -> None:
        """Updates rows once from all gradients since the last step, if gradients accumulate.

        Without accumulation it does nothing, because the backward pass has already updated the rows.
        """
        self.trainer.step(self.programs[torch.int64], self.table_memory())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales accumulated gradients down so that their norm over all tables is at most `max_norm`; call it before
        `step()`. Returns the norm before scaling."""
        return self.trainer.clip(self.programs[torch.int64], self.table_memory(), max_norm)

    def _why_untrainable(self, table: str) -> str:
        if self.named_tables()[table].can_train():
            return ""
        return NO_RULE if self._fused else NO_TORCH_GRADIENT

    def _set_table_trainable(self, table: str, wanted: bool) -> None:
        self.named_tables()[table].set_trainable(wanted)

    def named_tables(self) -> dict[str, Table]:
        """The table objects by name."""
        tables: Any = self._modules["tables"]
        by_name: dict[str, Table] = tables._modules
        return by_name

    def table_memory(self) -> TableMemory:
        """The present memory of the tables, for kernels."""
        return self._table_memory(self._weights())

    def _table_memory(self, tables: list[Tensor]) -> TableMemory:
        """The present memory of the tables. It is that of the last call if nothing has changed, which saves most
        time."""
        cached = self._cached_memory
        if (
            cached is None
            or cached.memory.trainable != self._trainable(tables)
            or cached.addresses != addresses_of(tables)
        ):
            check_tables(self.layout, tables)
            cached = self._cached_memory = CachedTableMemory(addresses_of(tables), self._new_table_memory(tables))
        return cached.memory

    def _new_table_memory(self, tables: list[Tensor]) -> TableMemory:
        states = [table.section for table in self.named_tables().values()]
        rows = tables if self._fused else [table.detach() for table in tables]
        return TableMemory(rows, states, self._trainable(tables), self._bounds_check)

    def _trainable(self, tables: list[Tensor]) -> list[bool]:
        if self._fused:
            return [table.trainable for table in self.named_tables().values()]
        return [table.requires_grad for table in tables]

    def _want_gradients(self, tables: list[Tensor], weights: Tensor | None) -> bool:
        if weights is not None and weights.requires_grad:
            return True
        if self._fused:
            for table in self.named_tables().values():  # noqa: SIM110 - any() with a generator takes three times as long
                if table.trainable:
                    return True
            return False
        for weight in tables:  # noqa: SIM110 - any() with a generator takes three times as long
            if weight.requires_grad:
                return True
        return False

    @abstractmethod
    def _moved(self, device: torch.device) -> None:
        """Called when the tables have moved to a device, or are about to move there."""

    def _blocks(self) -> list[Tensor]:
        return [table.block for table in self.named_tables().values()]

    def _weights(self) -> list[Tensor]:
        tables: Any = self._modules["tables"]  # faster than self.tables, which nn.Module.__getattr__ would look up
        return weights_of(tables._modules.values(), self._fused)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: counter.clone() for key, counter in self.trainer.counters().items()})

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
        unexpected: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs)
        if local_metadata.get("assign_to_params_buffers", False):  # tables move to the device of their new rows
            first = state_dict.get(f"{prefix}tables.{self.spec.tables[0].name}.weight")
            if first is not None:
                self._moved(first.device)
        counters = {prefix + key: counter for key, counter in self.trainer.counters().items()}
        skipped = "" if self._fused else prefix + "optim."  # a module that only serves has no step and no seed
        unexpected_keys += [
            key for key in unexpected if key not in counters and not (skipped and key.startswith(skipped))
        ]
        for key, counter in counters.items():
            loaded = state_dict.get(key)
            if loaded is None:
                missing_keys.append(key)
                continue
            wrong = wrong_counter(key, loaded, counter)
            if wrong is not None:
                error_msgs.append(wrong)
            elif not counter.is_meta:
                counter.copy_(loaded)
