"""The part of a module that trains: what a user does with the optimizer, and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embforge.codegen.spec import CollectionSpec
from embforge.storage.static import StaticTable
from embforge.training.calls import Programs, Storage
from embforge.training.facade import FusedOptimizer
from embforge.training.trainer import Trainer


class Trained(nn.Module):
    """Tables with a way to train them. Lookups come from the class that derives from it."""

    spec: CollectionSpec
    _trainer: Trainer
    _fused: bool
    _facade: FusedOptimizer | None
    _bounds_check: str
    _programs: dict[torch.dtype, Programs]

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

    def seed(self, seed: int) -> None:
        """Makes stochastic rounding reproducible: the same seed, steps and gradients give the same rows."""
        self._trainer.seed(seed)

    def freeze(self, *tables: str) -> None:
        """No more updates of these tables (of all, if none is named), until `unfreeze`."""
        self._set_trainable(tables, False)

    def unfreeze(self, *tables: str) -> None:
        """Trains these tables again (all, if none is named)."""
        self._set_trainable(tables, True)

    def _set_trainable(self, names: Sequence[str], wanted: bool) -> None:
        for name in names or [table.name for table in self.spec.tables]:
            self.spec.table(name)
            table = self._tables()[name]
            table.trainable = wanted
            if isinstance(table.weight, nn.Parameter):
                table.weight.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Trained:
        """Freezes or unfreezes all tables."""
        self._set_trainable((), requires_grad)
        return self

    def _storage(self, tables: list[Any]) -> Storage:
        holders = list(self._tables().values())
        if self._fused:
            return Storage(tables, [t.section for t in holders], [t.trainable for t in holders], self._bounds_check)
        trainable = [table.requires_grad for table in tables]
        return Storage([t.detach() for t in tables], [t.section for t in holders], trainable, self._bounds_check)

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

    def _weights(self) -> list[Any]:
        tables: Any = self._modules["tables"]  # not self.tables: attribute look-up in a module is slow
        if self._fused:
            return [table.__dict__["weight"] for table in tables._modules.values()]
        return [table._parameters["weight"] for table in tables._modules.values()]

    def _anchors(self) -> list[Any]:
        return [] if self._facade is None else self._facade.param_groups[0]["params"]

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
        for key, counter in self._trainer.counters().items():
            given = state_dict.get(prefix + key)
            if given is None:
                missing_keys.append(prefix + key)
            elif not counter.is_meta:
                counter.copy_(given)
        # The rest is in the tables. Keys of a fused optimizer are not for a module without one: strict says so.
        own = self._trainer.counters()
        if strict:
            found = [key for key in state_dict if key.startswith(f"{prefix}optim.")]
            unexpected_keys += [key for key in found if key.removeprefix(prefix) not in own]
