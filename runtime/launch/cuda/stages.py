"""Launches the CUDA kernels of the stages between ranks on torch's current stream; never waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embforge.codegen.stages import StagePlan
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.launch.gpu.backward_call import torch_empty
from embforge.launch.cuda.kernels import CudaKernels
from embforge.launch.gpu.forward_call import Value
from embforge.launch.metadata import FIRST_CALL
from embforge.launch.gpu.stage_call import stage_call


class CudaStages(CudaKernels):
    """All stages, loaded. What `count` finds wrong with a batch it writes to its caller's memory, nowhere else."""

    def __init__(self, plan: StagePlan, cubin: bytes) -> None:
        whole: Any = plan
        super().__init__(whole, cubin)
        self._stages = plan

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage; see `Stages.run`.

        `LaunchError` if the driver refuses a kernel; RuntimeError in a graph capture if a first call has not loaded
        what it needs.
        """
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device(device):
            call = stage_call(self._stages, stage, arguments, torch_empty)
            kernels = [step for step in call.steps if isinstance(step, KernelLaunch)]
            if torch.cuda.is_current_stream_capturing() and not self._are_loaded(device, kernels):
                raise RuntimeError(FIRST_CALL)
            words = call.arguments()
            for step in call.steps:
                if isinstance(step, KernelLaunch):
                    self._launch(device, [step], words)
                else:
                    step()

    def _are_loaded(self, device: torch.device, kernels: list[KernelLaunch]) -> bool:
        return all((device, kernel.symbol) in self._kernels for kernel in kernels)
