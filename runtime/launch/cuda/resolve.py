"""Launches the kernel of a CUDA plan that turns ids into rows, on torch's current stream. It never waits for the
device."""

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
    """The loaded kernel of a plan."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self.plan = plan

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns the rows of the batch's ids: see `ResolveKernel`.

        Raises `LaunchError` if the driver refuses the kernel, and RuntimeError in a graph capture if no earlier call
        has loaded it.
        """
        device = batch.values.device
        with torch.cuda.device(device):
            call = resolve_call(self.plan, metadata, batch)
            if torch.cuda.is_current_stream_capturing() and not self._has_loaded(device, call.kernels):
                raise RuntimeError(FIRST_CALL)
            self._launch(device, call.kernels, call.arguments())
        return call.rows

    def check(self) -> None:
        """Does nothing: the lookup finds mistakes in a batch, so no error is ever pending."""
