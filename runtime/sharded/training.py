"""The training of sharded collections: when rows are updated, in the same way on all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import increment_version

from embforge.codegen.errors import PlanError
from embforge.codegen.rules.rule import State
from embforge.collection import EmbeddingCollection
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.norms import RowNorms
from embforge.sharded.replicas import Replicas
from embforge.sharded.stages.all2all import Vectors
from embforge.sharded.stages.data_distributor import Distributor
from embforge.sharded.stages.model_forward import Owner
from embforge.sharded.stages.network import Network
from embforge.sharded.state import held_names
from embforge.sharded.whole_tables import WholeTables
from embforge.storage.common import NO_RULE
from embforge.storage.table import Table
from embforge.training.calls import ROWS_CHANGED
from embforge.training.numbers import Numbers
from embforge.training.rule_groups import RuleGroup, RuleGroups
from embforge.training.trainer import Trainer


class SharedTrainer(Trainer):
    """The trainer of tables that are in several collections, which all read the same hyperparameters.

    `parts` are the trainers of the collections that hold rows on this rank, by the prefix of their counters in a state
    dict. Each of them counts its own updates.
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


class ShardedTraining(WholeTables):
    """The training of a sharded collection: what happens at the end of a backward, and in a step. All ranks must call
    the same methods in the same order."""

    trainer: SharedTrainer
    distributor: Distributor
    owner: Owner | None
    vectors: Vectors
    network: Network
    replicas: Replicas | None
    gradient_factor: Tensor | None
    """The factor by which gradients of rows are multiplied; None for 1."""
    _wires: Exchange
    _row_norms: RowNorms | None
    _frozen: frozenset[str]
    """The tables that are not trained, on any rank."""
    _waiting = 0
    """The number of backward passes whose gradients wait for a step. It is the same on all ranks."""
    _spoilt = False
    """Whether one of these passes had gradients that are not finite."""
    updates = 0
    """The number of updates so far."""

    @property
    def sequence_features(self) -> tuple[int, ...]:
        """The features that are not pooled."""
        return tuple(f.index for f in self.geometry.layout.sequence_features)

    def step(self) -> None:
        """Updates rows by all gradients since the last step if gradients accumulate. Does nothing otherwise, or if
        there are no gradients."""
        if self.trainer.accumulate:
            self._apply_gradients()

    def after_backward(self, spoilt: bool) -> None:
        """Ends a backward pass: updates rows, or, if gradients accumulate, lets them wait for `step`. `spoilt` says
        that gradients are not finite and must not be used."""
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
        increment_version(self.trainer.numbers.counters)  # so that a recomputed forward notices that rows changed

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self._waiting, self._spoilt = 0, False
        super().drop_gradients()

    def check_rows(self, updates: int) -> None:
        """Raises RuntimeError if rows have changed since a forward that had made this number of updates. The same on
        all ranks."""
        if updates != self.updates:
            raise RuntimeError(ROWS_CHANGED)

    def verdict(self, gradients: list[Tensor]) -> Tensor:
        """0, or infinity if a gradient on any rank is not finite."""
        bad = torch.zeros(1, dtype=torch.float32, device=self._device)
        for gradient in gradients:
            bad = torch.where(gradient.isfinite().all(), bad, torch.ones_like(bad))
        self._wires.all_reduce("verdict", bad)
        return torch.where(bad > 0, torch.full_like(bad, torch.inf), torch.zeros_like(bad))

    def training_rows(self) -> bool:
        """Whether any table is trained, on any rank."""
        return len(self._frozen) < len(self.spec.tables)

    def states_of(self, table: str) -> tuple[State, ...]:
        """The states of the user's optimizer for a table."""
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

    def _table(self, name: str) -> Table:
        for module in self._own_collections():
            if name in module.named_tables():
                return module.named_tables()[name]
        raise PlanError(f"table {name!r}: this rank holds no part of it")

    def _shared_trainer(self, groups: RuleGroups, accumulate: bool) -> SharedTrainer:
        parts = {"": self.owner, "replicated.": self.replicas}
        trainers = {prefix: part.module.trainer for prefix, part in parts.items() if part is not None}
        return SharedTrainer(groups, accumulate, self._device, trainers)
