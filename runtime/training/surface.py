"""The training methods of a module, the same for tables in one process and for tables that are sharded over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from torch.amp import GradScaler

from embforge.codegen.spec import CollectionSpec
from embforge.training.enclosing_model import EnclosedModule
from embforge.training.fused_optimizer import FusedOptimizer
from embforge.training.trainer import Trainer


class TrainingSurface(EnclosedModule):
    """The methods by which a user controls training: optimizer, steps, gradient scaler, seed and freezing.

    A class that derives from it holds the tables, and defines what a step does and how a single table is frozen.
    """

    spec: CollectionSpec
    trainer: Trainer
    """The part of training that does not depend on where the tables are."""
    _facade: FusedOptimizer | None = None

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a torch.optim.Optimizer: for schedulers, GradScaler and training loops."""
        if self._facade is None:
            self._facade = self.trainer.facade(self)
        return self._facade

    @abstractmethod
    def step(self) -> None:
        """Updates rows once from all gradients since the last step, if gradients accumulate.

        Without accumulation it does nothing, because the backward pass has already updated the rows.
        """

    def drop_gradients(self) -> None:
        """Drops accumulated gradients."""
        self.trainer.drop_gradients()

    def use_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Makes updates divide gradients by the scale of a `torch.amp.GradScaler`, and skip gradients that are not
        finite.

        The training loop stays unchanged: `scaler.scale(loss).backward()`, `scaler.step(module.optimizer)`,
        `scaler.update()`. If gradients are not finite on one rank, all ranks skip the update. None removes the scaler.
        """
        self.trainer.use_scaler(scaler)

    def has_grad_scaler(self) -> bool:
        """Whether the module has a gradient scaler, see `use_grad_scaler`."""
        return self.trainer.scaler is not None

    def seed(self, seed: int) -> None:
        """Sets the seed of stochastic rounding, 0 <= seed < 2^63: equal seeds, steps, gradients and numbers of ranks
        give equal rows."""
        self.trainer.seed(seed)

    def freeze(self, *tables: str) -> None:
        """Stops training these tables, or all tables if none is named, until `unfreeze` is called."""
        self._set_trainable(tables, False)

    def unfreeze(self, *tables: str) -> None:
        """Trains these tables again, or all tables that can be trained if none is named."""
        self._set_trainable(tables, True)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes or unfreezes all tables. `requires_grad_` of a model that contains the module does the same."""
        self._set_trainable((), requires_grad)
        return self

    def _set_trainable(self, names: Sequence[str], wanted: bool) -> None:
        for name in names:
            self.spec.table(name)
            if wanted and (why := self._why_untrainable(name)):
                raise TypeError(f"table {name!r}: {why}")
        all_names = [table.name for table in self.spec.tables]
        for name in names or [name for name in all_names if not wanted or not self._why_untrainable(name)]:
            self._set_table_trainable(name, wanted)

    @abstractmethod
    def _why_untrainable(self, table: str) -> str:
        """Why nothing can train a table, and how to change that; empty if it can be trained."""

    @abstractmethod
    def _set_table_trainable(self, table: str, wanted: bool) -> None:
        """Freezes or unfreezes one table."""
