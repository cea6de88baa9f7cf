"""How a sharded collection is trained: when, and by all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import increment_version

from embforge.codegen.rules.rule import State
from embforge.collection import EmbeddingCollection
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.norms import RowNorms
from embforge.sharded.replicas import Replicas
from embforge.sharded.stages.all2all import Vectors
from embforge.sharded.stages.data_distributor import Distributor
from embforge.sharded.stages.model_forward import Owner
from embforge.sharded.stages.network import Network
from embforge.sharded.state import HeldShards, held_names
from embforge.storage.static import NO_RULE
from embforge.training.calls import ROWS_CHANGED
from embforge.training.numbers import Numbers
from embforge.training.rule_groups import RuleGroup, RuleGroups
from embforge.training.trainer import Trainer


class SharedTrainer(Trainer):
    """The training of tables that lie in several collections: one set of hyperparameters, which all of them read.

    `parts`: the trainers of the collections that hold rows here, by what a state dict puts before their counters; each
    counts its own updates.
    """

    numbers: Numbers

    def __init__(
        self, groups: RuleGroups, accumulate: bool, device: torch.device, parts: Mapping[str, Trainer]
    ) -> None:
        super().__init__(groups, accumulate, device)
        self.parts = dict(parts)
        for part in self.parts.values():
            assert part.numbers is not None
            part.numbers.hyper = self.numbers.hyper

    def use_scaler(self, scaler: GradScaler | None) -> None:
        super().use_scaler(scaler)
        for part in self.parts.values():
            part.scaler = scaler

    def seed(self, seed: int) -> None:
        super().seed(seed)
        for part in self.parts.values():
            part.seed(seed)

    def drop_gradients(self) -> None:
        for part in self.parts.values():
            part.drop_gradients()

    def counters(self) -> dict[str, Tensor]:
        return {
            prefix + key: counter for prefix, part in self.parts.items() for key, counter in part.counters().items()
        }


class ShardedTraining(HeldShards):
    """What a backward ends with, and what a step is. Every method is called on all ranks alike."""

    trainer: SharedTrainer
    distributor: Distributor
    owner: Owner | None
    vectors: Vectors
    network: Network
    replicas: Replicas | None
    gradient_factor: Tensor | None
    """What gradients of rows are multiplied by; None for nothing."""
    _wires: Exchange
    _row_norms: RowNorms | None
    _frozen: frozenset[str]
    """Tables that are not trained, wherever they lie."""
    _waiting = 0
    """Backward passes whose gradients wait: the same on every rank, whatever it holds."""
    _spoilt = False
    """Whether one of them had gradients that are not finite."""
    updates = 0
    """Updates done."""

    @property
    def sequence_features(self) -> tuple[int, ...]:
        """Features that are not pooled."""
        return tuple(f.index for f in self.geometry.layout.sequence_features)

    def step(self) -> None:
        """One update from all gradients since the last, if they accumulate; nothing if there are none."""
        if self.trainer.accumulate:
            self._apply_gradients()

    def after_backward(self, spoilt: bool) -> None:
        """A backward pass is over: its gradients are used, or wait for `step`, or are `spoilt` and must not be."""
        self._waiting += 1
        self._spoilt |= spoilt
        if not self.trainer.accumulate:
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
        if self.owner is not None and self.owner.module.trainer.accumulate:
            self.owner.module.step()
        if self.replicas is not None:
            self.replicas.step(self.gradient_factor)
        self.updates += 1
        increment_version(self.trainer.numbers.counters)  # by it a forward that is repeated knows that rows changed

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self._waiting, self._spoilt = 0, False
        super().drop_gradients()

    def check_rows(self, updates: int) -> None:
        """Refuses what needs the rows that a forward read, if they have changed since; on all ranks alike."""
        if updates != self.updates:
            raise RuntimeError(ROWS_CHANGED)

    def verdict(self, gradients: list[Tensor]) -> Tensor:
        """0, or infinite if a number on any rank is not finite."""
        found = torch.zeros(1, dtype=torch.float32, device=self._device)
        for gradient in gradients:
            found = torch.where(gradient.isfinite().all(), found, torch.ones_like(found))
        self._wires.all_reduce("verdict", found)
        return torch.where(found > 0, torch.full_like(found, torch.inf), torch.zeros_like(found))

    def training_rows(self) -> bool:
        """Whether any table is trained, wherever it lies."""
        return len(self._frozen) < len(self.spec.tables)

    def states_of(self, table: str) -> tuple[State, ...]:
        """The states of a table's optimizer, as the user gave it."""
        group = self._group_of(table)
        return () if group is None else group.optimizer.update.rule.states

    def _group_of(self, table: str) -> RuleGroup | None:
        groups = self.trainer.groups
        assert groups is not None
        return groups.of_table(groups.tables.index(table))

    def _why_untrainable(self, table: str) -> str:
        return NO_RULE if self._group_of(table) is None else ""

    def _set_table_trainable(self, table: str, wanted: bool) -> None:
        self._frozen = self._frozen - {table} if wanted else self._frozen | {table}
        for held in held_names(self.geometry.placement.by_name[table], self._ranks.rank):
            self._table(held).set_trainable(wanted)

    def _own_collections(self) -> list[EmbeddingCollection]:
        """The collections that hold this rank's rows."""
        return [part.module for part in (self.owner, self.replicas) if part is not None]

    def _shared_trainer(self, groups: RuleGroups, accumulate: bool) -> SharedTrainer:
        parts = {"": self.owner, "replicated.": self.replicas}
        trainers = {prefix: part.module.trainer for prefix, part in parts.items() if part is not None}
        return SharedTrainer(groups, accumulate, self._device, trainers)
