"""The part of a module that trains: what a user does with the optimizer, and what a checkpoint holds of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout
from embforge.codegen.spec import CollectionSpec
from embforge.launch.metadata import check_tables, places_of
from embforge.storage.static import StaticTable
from embforge.training.around import Surrounded
from embforge.training.calls import Programs, Storage
from embforge.training.facade import FusedOptimizer
from embforge.training.trainer import Trainer


class KeptStorage(NamedTuple):
    """The tables as a call found them."""

    places: list[int]
    """Where they lay then. Taken before anything else is, because rows may move at any time later."""
    storage: Storage


class Trained(Surrounded):
    """Tables with a way to train them. Lookups come from the class that derives from it."""

    spec: CollectionSpec
    _trainer: Trainer
    _fused: bool
    _facade: FusedOptimizer | None
    _bounds_check: str
    _programs: dict[torch.dtype, Programs]
    _kept: KeptStorage | None
    """What the last call found of the tables."""
    layout: CollectionLayout

    def optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The live states of a fused optimizer, by name: `[rows, dim]` of elements, `[rows]` of rows."""
        self.spec.table(table)
        return self._tables()[table].states()

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a torch.optim.Optimizer: for schedulers, GradScaler and training loops."""
        if self._facade is None:
            self._facade = self._trainer.facade(self)
        return self._facade

    def step(self) -> None:
        """One update from all gradients since the last, if they accumulate. Else the backward pass has done it."""
        self._trainer.step(self._programs[torch.int64], self._storage(self._weights()))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales accumulated gradients down to a norm over all tables, before `step()`. Returns the norm they had."""
        return self._trainer.clip(self._programs[torch.int64], self._storage(self._weights()), max_norm)

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self._trainer.drop_gradients()

    def use_grad_scaler(self, scaler: Any) -> None:
        """Makes updates divide gradients by the scale of a `torch.amp.GradScaler`, and skip those not finite.

        The loop stays as it is: `scaler.scale(loss).backward()`, `scaler.step(module.optimizer)`, `scaler.update()`.
        """
        if not self._fused:
            raise ValueError(
                "use_grad_scaler is for a fused optimizer; without one GradScaler works as with any module"
            )
        self._trainer.use_scaler(scaler)

    def has_grad_scaler(self) -> bool:
        """Whether `use_grad_scaler` was called."""
        return self._trainer.has_scaler

    def seed(self, seed: int) -> None:
        """Makes stochastic rounding reproducible: the same seed, steps and gradients give the same rows."""
        self._trainer.seed(seed)

    def freeze(self, *tables: str) -> None:
        """No more updates of these tables (of all, if none is named), until `unfreeze`."""
        self._set_trainable(tables, False)

    def unfreeze(self, *tables: str) -> None:
        """Trains these tables again (all that can be, if none is named)."""
        self._set_trainable(tables, True)

    def _set_trainable(self, names: Sequence[str], wanted: bool) -> None:
        for name in names:
            self.spec.table(name)
        tables = self._tables()
        for name in names or [name for name, table in tables.items() if not wanted or table.can_train()]:
            tables[name].set_trainable(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Trained:
        """Freezes or unfreezes all tables, as does `requires_grad_` of a model around the module."""
        self._set_trainable((), requires_grad)
        return self

    def _storage(self, tables: list[Any]) -> Storage:
        """The tables as they are now; the last call's answer if nothing has changed, which saves most of its time."""
        kept = self._kept
        if kept is None or kept.storage.trainable != self._trainable(tables) or kept.places != places_of(tables):
            check_tables(self.layout, tables)
            kept = self._kept = KeptStorage(places_of(tables), self._new_storage(tables))
        return kept.storage

    def _new_storage(self, tables: list[Any]) -> Storage:
        states = [table.section for table in self._tables().values()]
        rows = tables if self._fused else [table.detach() for table in tables]
        return Storage(rows, states, self._trainable(tables), self._bounds_check)

    def _trainable(self, tables: list[Any]) -> list[bool]:
        if self._fused:
            return [table.trainable for table in self._tables().values()]
        return [table.requires_grad for table in tables]

    def _want_gradients(self, tables: list[Any], weights: Tensor | None) -> bool:
        if weights is not None and weights.requires_grad:
            return True
        for table in self._tables().values() if self._fused else tables:  # any() with a generator takes thrice as long
            if table.trainable if self._fused else table.requires_grad:
                return True
        return False

    def _tables(self) -> dict[str, StaticTable]:
        tables: Any = self._modules["tables"]
        found: dict[str, StaticTable] = tables._modules
        return found

    @abstractmethod
    def _moved(self, device: torch.device) -> None:
        """Tables have gone to a device, or are about to."""

    def _blocks(self) -> list[Tensor]:
        return [table.block for table in self._tables().values()]

    def _weights(self) -> list[Any]:
        tables: Any = self._modules["tables"]  # not self.tables: attribute look-up in a module is slow
        if self._fused:
            return [table.__dict__["weight"] for table in tables._modules.values()]
        return [table._parameters["weight"] for table in tables._modules.values()]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: counter.clone() for key, counter in self._trainer.counters().items()})

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
        counters = {prefix + key: counter for key, counter in self._trainer.counters().items()}
        skipped = "" if self._fused else prefix + "optim."  # what a trained module has more than one that serves
        unexpected_keys += [
            key for key in unexpected if key not in counters and not (skipped and key.startswith(skipped))
        ]
        for key, counter in counters.items():
            given = state_dict.get(key)
            if given is None:
                missing_keys.append(key)
                continue
            wrong = _wrong_counter(given, counter)
            if wrong:
                error_msgs.append(f"{key}: {wrong} is not allowed; allowed: a tensor of one whole number, at least 0")
            elif not counter.is_meta:
                counter.copy_(given)


def _wrong_counter(given: Any, counter: Tensor) -> str | None:
    """What of a counter in a state dict cannot be."""
    if not isinstance(given, Tensor):
        return repr(given)
    if given.shape != counter.shape:
        return f"shape {tuple(given.shape)}"
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        return str(given.dtype)
    return str(int(given)) if not given.is_meta and int(given) < 0 else None
