"""The interface of a kernel that updates rows, on every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata


class UpdateKernel(ABC):
    """The backward of a plan (op "backward")."""

    plan: Plan

    @abstractmethod
    def __call__(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
    ) -> Tensor:
        """Updates rows and states. Returns 0, or infinity if a gradient is not finite and the loss was scaled.

        Mistakes in the batch are found before the first write, including those in ids of frozen tables.
        """

    def follow(
        self,
        metadata: Metadata,
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        batch: Batch,
        gradients: Gradients,
        hyper: Tensor,
        counters: Tensor,
        bounds_check: str,
    ) -> Tensor:
        """Updates rows and states after another kernel was called with this batch. That call reports the mistakes in
        the batch, so this one does not have to."""
        return self(metadata, tables, states, batch, gradients, hyper, counters, bounds_check)

    def reserve(self, batch: Batch) -> None:
        """Allocates the work space of a call with this batch. Raises MemoryError if that is not possible."""
        return  # work space from torch's allocator: the call before has just given back as much

    @abstractmethod
    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""
