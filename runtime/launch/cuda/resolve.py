"""Launches a CUDA plan's step that turns ids into rows on torch's current stream. It never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.cuda.kernels import CudaLibrary
from embforge.launch.gpu.resolve_call import resolve_call
from embforge.launch.metadata import FIRST_CALL, Metadata


class CudaResolve(CudaLibrary):
    """One plan's loaded kernel."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self.plan = plan

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """The rows of a batch's ids, see `ResolveKernel`.

        `LaunchError` if the driver refuses the kernel; RuntimeError in a graph capture if no call has loaded it before.
        """
        device = batch.values.device
        with torch.cuda.device(device):
            call = resolve_call(self.plan, metadata, batch)
            if torch.cuda.is_current_stream_capturing() and not self._has_loaded(device, call.kernels):
                raise RuntimeError(FIRST_CALL)
            self._launch(device, call.kernels, call.arguments())
        return call.rows

    def check(self) -> None:
        """Nothing is ever pending: the lookup finds what is wrong with a batch."""
