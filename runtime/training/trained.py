"""A collection that trains its own tables: what kernels are told of them, and what a checkpoint holds of training."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout
from embforge.launch.metadata import check_tables, places_of
from embforge.storage.static import NO_RULE, NO_TORCH_GRADIENT
from embforge.storage.table import Table
from embforge.training.calls import Programs, Storage
from embforge.training.surface import TrainingSurface
from embforge.training.trainer import wrong_counter


class KeptStorage(NamedTuple):
    """The tables as a call found them."""

    places: list[int]
    """Where they lay then. Taken before anything else is, because rows may move at any time later."""
    storage: Storage


class Trained(TrainingSurface):
    """Tables in one collection with a way to train them. Lookups come from the class that derives from it."""

    programs: dict[torch.dtype, Programs]
    """The texts of the kernels, by the dtype of ids."""
    layout: CollectionLayout
    _fused: bool
    _bounds_check: str
    _kept: KeptStorage | None
    """What the last call found of the tables."""

    def optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The live states of a fused optimizer, by name: `[rows, dim]` of elements, `[rows]` of rows."""
        self.spec.table(table)
        return self.named_tables()[table].states()

    def step(self) -> None:
        """One update from all gradients since the last, if they accumulate. Else the backward pass has done it."""
        self.trainer.step(self.programs[torch.int64], self.storage())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales accumulated gradients down to a norm over all tables, before `step()`. Returns the norm they had."""
        return self.trainer.clip(self.programs[torch.int64], self.storage(), max_norm)

    def _why_untrainable(self, table: str) -> str:
        if self.named_tables()[table].can_train():
            return ""
        return NO_RULE if self._fused else NO_TORCH_GRADIENT

    def _set_table_trainable(self, table: str, wanted: bool) -> None:
        self.named_tables()[table].set_trainable(wanted)

    def named_tables(self) -> dict[str, Table]:
        """The tables by name, as they are held."""
        tables: Any = self._modules["tables"]
        found: dict[str, Table] = tables._modules
        return found

    def storage(self) -> Storage:
        """The tables as they are now, for kernels."""
        return self._storage(self._weights())

    def _storage(self, tables: list[Tensor]) -> Storage:
        """The tables as they are now; the last call's answer if nothing has changed, which saves most of its time."""
        kept = self._kept
        if kept is None or kept.storage.trainable != self._trainable(tables) or kept.places != places_of(tables):
            check_tables(self.layout, tables)
            kept = self._kept = KeptStorage(places_of(tables), self._new_storage(tables))
        return kept.storage

    def _new_storage(self, tables: list[Tensor]) -> Storage:
        states = [table.section for table in self.named_tables().values()]
        rows = tables if self._fused else [table.detach() for table in tables]
        return Storage(rows, states, self._trainable(tables), self._bounds_check)

    def _trainable(self, tables: list[Tensor]) -> list[bool]:
        if self._fused:
            return [table.trainable for table in self.named_tables().values()]
        return [table.requires_grad for table in tables]

    def _want_gradients(self, tables: list[Tensor], weights: Tensor | None) -> bool:
        if weights is not None and weights.requires_grad:
            return True
        if self._fused:
            for held in self.named_tables().values():  # noqa: SIM110 - any() with a generator takes thrice as long
                if held.trainable:
                    return True
            return False
        for table in tables:  # noqa: SIM110 - as above
            if table.requires_grad:
                return True
        return False

    @abstractmethod
    def _moved(self, device: torch.device) -> None:
        """Tables have gone to a device, or are about to."""

    def _blocks(self) -> list[Tensor]:
        return [table.block for table in self.named_tables().values()]

    def _weights(self) -> list[Tensor]:
        tables: Any = self._modules["tables"]  # not self.tables: attribute look-up in a module is slow
        if self._fused:
            return [table.__dict__["weight"] for table in tables._modules.values()]
        return [table._parameters["weight"] for table in tables._modules.values()]

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
        if local_metadata.get("assign_to_params_buffers", False):  # tables go where their new rows are
            first = state_dict.get(f"{prefix}tables.{self.spec.tables[0].name}.weight")
            if first is not None:
                self._moved(first.device)
        counters = {prefix + key: counter for key, counter in self.trainer.counters().items()}
        skipped = "" if self._fused else prefix + "optim."  # what a trained module has more than one that serves
        unexpected_keys += [
            key for key in unexpected if key not in counters and not (skipped and key.startswith(skipped))
        ]
        for key, counter in counters.items():
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
                continue
            wrong = wrong_counter(key, given, counter)
            if wrong is not None:
                error_msgs.append(wrong)
            elif not counter.is_meta:
                counter.copy_(given)
