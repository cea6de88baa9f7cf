"""Launches a CUDA plan's forward kernels on torch's current stream. A call never waits for the device.

What a kernel finds wrong with its input it writes to a few words of device memory. They are copied to the host behind
the kernels and looked at in the next call, or in `check()`, which waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.launch import shape_of
from embforge.inputs import Batch
from embforge.launch.cuda.kernels import CudaKernels
from embforge.launch.gpu.forward_call import ForwardCall, forward_call
from embforge.launch.gradients import TrainResult
from embforge.launch.metadata import Metadata


class _CudaLookup(CudaKernels):
    """One plan's loaded kernels."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = shape_of(plan)

    def _call(self, metadata: Metadata, batch: Batch, sequence_elements: int, bounds_check: str) -> ForwardCall:
        """The call, launched."""
        device = batch.values.device
        call = forward_call(self.plan, self._shape, metadata, batch, sequence_elements)
        kernels = call.work.kernels
        with self._turn(device, bounds_check, kernels) as turn:
            self._launch(device, kernels, call.arguments(turn.watch.status))
            turn.tell()
        return call


class CudaForward(_CudaLookup):
    """A forward that keeps nothing for a backward."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the flat rows of `none` features if the spec has any.

        Raises what an earlier call left behind, as `check` does, if its news have arrived; ValueError for a batch that
        no launch can hold; `LaunchError` if the driver refuses a kernel; RuntimeError in a graph capture if a first
        call has not prepared what it needs.
        """
        call = self._call(metadata, batch, sequence_elements, bounds_check)
        return call.pooled, call.sequence


class CudaForwardTrain(_CudaLookup):
    """A forward whose backward will come."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Pooled output, rows of `none` features, divisors and winners, None for what the spec has no feature of.

        Raises what `CudaForward` raises.
        """
        call = self._call(metadata, batch, sequence_elements, bounds_check)
        return call.pooled, call.sequence, call.divisors, call.winners
