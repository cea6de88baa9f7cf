"""Launches a CUDA plan's forward kernels on torch's current stream. A call never waits for the device.

Kernels write mistakes in their input to a few words of device memory. These are copied to the host after the kernels
and read in the next call, or in `check()`, which waits for the device.
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
    """The loaded kernels of a plan."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._shape = shape_of(plan)

    def _call(self, metadata: Metadata, batch: Batch, sequence_elements: int, bounds_check: str) -> ForwardCall:
        """Launches a call and returns it."""
        device = batch.values.device
        call = forward_call(self.plan, self._shape, metadata, batch, sequence_elements)
        kernels = call.work.kernels
        with self._turn(device, bounds_check, kernels) as turn:
            self._launch(device, kernels, call.arguments(turn.watch.status))
            turn.report()
        return call


class CudaForward(_CudaLookup):
    """A forward that keeps nothing for a backward."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the pooled output, and the flat rows of `none` features if the spec has any.

        Raises the error of an earlier call, as `check` does, if the words of that call have arrived on the host;
        ValueError for a batch that is too large for a launch; `LaunchError` if the driver refuses a kernel;
        RuntimeError in a graph capture if no earlier call has prepared what the call needs.
        """
        call = self._call(metadata, batch, sequence_elements, bounds_check)
        return call.pooled, call.sequence


class CudaForwardTrain(_CudaLookup):
    """A training forward: it returns what its backward needs, too."""

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Returns pooled output, rows of `none` features, divisors and winners: see `TrainKernel`.

        Raises what `CudaForward` raises.
        """
        call = self._call(metadata, batch, sequence_elements, bounds_check)
        return call.pooled, call.sequence, call.divisors, call.winners
