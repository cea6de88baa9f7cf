"""How a sharded collection is trained: by whom, when, and by all ranks alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from embforge.codegen.rules.rule import State
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.norms import RowNorms
from embforge.sharded.stages.model_forward import Owner
from embforge.sharded.replicas import Replicas
from embforge.sharded.state import HeldShards, held_names
from embforge.storage.static import NO_RULE
from embforge.training.around import Surrounded
from embforge.training.calls import ROWS_CHANGED
from embforge.training.facade import FusedOptimizer
from embforge.training.numbers import update_is_wanted
from embforge.training.rule_groups import RuleGroup, RuleGroups
from embforge.training.trainer import Trainer


class ShardedTraining(Surrounded, HeldShards):
    """What a user does with the optimizer, and what a backward ends with. Every method is called on all ranks alike."""

    spec: Any
    owner: Owner | None
    replicas: Replicas | None
    gradient_factor: Tensor | None
    _ids: Exchange
    _wires: Exchange
    _trainer: Trainer
    _row_norms: RowNorms | None
    _facade: FusedOptimizer | None = None
    _accumulate: bool
    _waiting = 0
    """Backward passes whose gradients wait: the same on every rank, whatever it holds."""
    _spoilt = False
    """Whether one of them had gradients that are not finite."""
    updates = 0
    """Updates done."""

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a torch.optim.Optimizer: for schedulers, GradScaler and training loops."""
        if self._facade is None:
            self._facade = self._trainer.facade(self)
        return self._facade

    def step(self) -> None:
        """One update from all gradients since the last, if they accumulate; nothing if there are none."""
        if self._accumulate:
            self._apply_gradients()

    def after_backward(self, spoilt: bool) -> None:
        """A backward pass is over: its gradients are used, or wait for `step`, or are `spoilt` and must not be."""
        self._waiting += 1
        self._spoilt |= spoilt
        if not self._accumulate:
            self._apply_gradients()

    def _apply_gradients(self) -> None:
        if not self._waiting:
            return
        if self._spoilt:
            self.drop_gradients()
            return
        self._waiting = 0
        if self._row_norms is not None:
            self._row_norms.share()
        if self.owner is not None and self.owner.module._trainer.accumulate:
            self.owner.module.step()
        if self.replicas is not None:
            self.replicas.step(self.gradient_factor)
        self.updates += 1
        numbers = self._trainer.numbers
        assert numbers is not None
        increment_version(numbers.counters)  # by which a forward that is repeated knows that rows have changed

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self._waiting, self._spoilt = 0, False
        for module in self._modules_trained():
            module.drop_gradients()

    def check_rows(self, updates: int) -> None:
        """Refuses what needs the rows that a forward read, if they have changed since; on all ranks alike."""
        if updates != self.updates:
            raise RuntimeError(ROWS_CHANGED)

    def use_grad_scaler(self, scaler: Any) -> None:
        """As `EmbeddingCollection.use_grad_scaler`; what is not finite on one rank is skipped on all."""
        self._trainer.use_scaler(scaler)
        self._share_scale()

    def has_grad_scaler(self) -> bool:
        """Whether `use_grad_scaler` was called."""
        return self._trainer.has_scaler

    def take_scale(self) -> None:
        """Reads what the loss of the backward pass that runs now was multiplied by."""
        if self._trainer.numbers is not None:
            self._trainer.numbers.take_scale()

    def update_is_wanted(self) -> bool:
        """Whether the backward pass that runs now reaches the rows. All ranks must ask for the same gradients."""
        numbers = self._trainer.numbers
        return numbers is not None and update_is_wanted(numbers.hyper)

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, so that gradients must be looked at."""
        return self._trainer._scales

    def verdict(self, gradients: list[Tensor]) -> Tensor:
        """0, or infinite if a number on any rank is not finite."""
        found = torch.zeros(1, dtype=torch.float32, device=self._device)
        for gradient in gradients:
            found = torch.where(gradient.isfinite().all(), found, torch.ones_like(found))
        self._wires.all_reduce("verdict", found)
        return torch.where(found > 0, torch.full_like(found, torch.inf), torch.zeros_like(found))

    def seed(self, seed: int) -> None:
        """Makes stochastic rounding reproducible, on this number of ranks."""
        self._trainer.seed(seed)
        for module in self._modules_trained():
            module.seed(seed)

    def freeze(self, *tables: str) -> None:
        """No more updates of these tables (of all, if none is named), until `unfreeze`."""
        self._set_trainable(tables, False)

    def unfreeze(self, *tables: str) -> None:
        """Trains these tables again (all, if none is named)."""
        self._set_trainable(tables, True)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTraining:
        """Freezes or unfreezes all tables, as does `requires_grad_` of a model around the module."""
        self._set_trainable((), requires_grad)
        return self

    def training_rows(self) -> bool:
        """Whether any table is trained, wherever it lies."""
        return len(self._frozen) < len(self.spec.tables)

    def states_of(self, table: str) -> tuple[State, ...]:
        """The states of a table's optimizer, as the user gave it."""
        group = self._group_of(table)
        return () if group is None else group.optimizer.update.rule.states

    def _group_of(self, table: str) -> RuleGroup | None:
        groups = self._trainer.groups
        assert groups is not None
        return groups.of_table(groups.tables.index(table))

    def _set_trainable(self, names: tuple[str, ...], wanted: bool) -> None:
        for name in names:
            self.spec.table(name)
            if wanted and self._group_of(name) is None:
                raise TypeError(f"table {name!r}: {NO_RULE}")
        every = [table.name for table in self.spec.tables if not wanted or self._group_of(table.name) is not None]
        for name in names or every:
            self._frozen = self._frozen - {name} if wanted else self._frozen | {name}
            placed = self.geometry.placement.by_name[name]
            for held in held_names(placed, self._ranks.rank):
                self._table(held).set_trainable(wanted)

    _frozen: frozenset[str] = frozenset()
    """Tables that are not trained, whoever holds them."""

    def _modules_trained(self) -> list[Any]:
        return list(self._parts_trained().values())

    def _parts_trained(self) -> dict[str, Any]:
        """The collections that hold rows here, by what a state dict puts before their counters."""
        found = {} if self.owner is None else {"": self.owner.module}
        return found if self.replicas is None else {**found, "replicated.": self.replicas.module}

    def _all_numbers(self) -> list[Any]:
        return [module._trainer.numbers for module in self._modules_trained()] or [self._trainer.numbers]

    def _shared_trainer(self, groups: RuleGroups, accumulate: bool) -> Trainer:
        """One set of hyperparameters for all that this rank trains; each part counts its own updates."""
        trainer = Trainer(groups, accumulate, self._device)
        assert trainer.numbers is not None
        for module in self._modules_trained():
            module._trainer.numbers.hyper = trainer.numbers.hyper
        return trainer

    def _share_scale(self) -> None:
        for module in self._modules_trained():
            module._trainer._scaler = self._trainer._scaler
