"""What a kernel that updates rows can be asked for, on every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata


class UpdateKernel(ABC):
    """A plan's backward (op "backward")."""

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

        What is wrong with the batch is found before the first write, also where it concerns frozen tables.
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
        """As a call, where another kernel was just called with this batch, and reports what is wrong with it."""
        return self(metadata, tables, states, batch, gradients, hyper, counters, bounds_check)

    def reserve(self, batch: Batch) -> None:
        """Sees to the memory that a call with this batch works in: MemoryError if there is none."""
        return  # where it comes from torch's allocator, the call before has just given back as much

    @abstractmethod
    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""
