"""What a user does with the training of a module: one surface for tables in one collection and spread over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from torch.amp import GradScaler

from embforge.codegen.spec import CollectionSpec
from embforge.training.around import Surrounded
from embforge.training.facade import FusedOptimizer
from embforge.training.trainer import Trainer


class TrainingSurface(Surrounded):
    """The optimizer, steps, gradient scaler, seed and freezing of a module.

    A class that derives from it holds the tables, and says what a step is and how a single table is frozen.
    """

    spec: CollectionSpec
    trainer: Trainer
    """How the tables are trained; what is the same for all tables it does itself."""
    _facade: FusedOptimizer | None = None

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a torch.optim.Optimizer: for schedulers, GradScaler and training loops."""
        if self._facade is None:
            self._facade = self.trainer.facade(self)
        return self._facade

    @abstractmethod
    def step(self) -> None:
        """One update from all gradients since the last, if they accumulate. Else the backward pass has done it."""

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self.trainer.drop_gradients()

    def use_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Makes updates divide gradients by the scale of a `torch.amp.GradScaler`, and skip those not finite.

        The loop stays as it is: `scaler.scale(loss).backward()`, `scaler.step(module.optimizer)`, `scaler.update()`.
        What is not finite on one rank is skipped on all.
        """
        self.trainer.use_scaler(scaler)

    def has_grad_scaler(self) -> bool:
        """Whether `use_grad_scaler` was called."""
        return self.trainer.scaler is not None

    def seed(self, seed: int) -> None:
        """Makes stochastic rounding reproducible: the same seed, steps, gradients and number of ranks give the same
        rows."""
        self.trainer.seed(seed)

    def freeze(self, *tables: str) -> None:
        """No more updates of these tables (of all, if none is named), until `unfreeze`."""
        self._set_trainable(tables, False)

    def unfreeze(self, *tables: str) -> None:
        """Trains these tables again (all that can be, if none is named)."""
        self._set_trainable(tables, True)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes or unfreezes all tables, as does `requires_grad_` of a model around the module."""
        self._set_trainable((), requires_grad)
        return self

    def _set_trainable(self, names: Sequence[str], wanted: bool) -> None:
        for name in names:
            self.spec.table(name)
            if wanted and (why := self._why_untrainable(name)):
                raise TypeError(f"table {name!r}: {why}")
        every = [table.name for table in self.spec.tables]
        for name in names or [name for name in every if not wanted or not self._why_untrainable(name)]:
            self._set_table_trainable(name, wanted)

    @abstractmethod
    def _why_untrainable(self, table: str) -> str:
        """Why nothing can train a table, and what would; empty if something can."""

    @abstractmethod
    def _set_table_trainable(self, table: str, wanted: bool) -> None:
        """Freezes or unfreezes one table."""
