"""Launches the CUDA kernels of the stages between ranks on torch's current stream. It never waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.stages import StagePlan
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.launch.cuda.kernels import CudaLibrary
from embforge.launch.gpu.backward_call import torch_empty
from embforge.launch.gpu.forward_call import Value
from embforge.launch.gpu.stage_call import stage_call
from embforge.launch.metadata import FIRST_CALL


class CudaStages(CudaLibrary):
    """A loaded library of stages. Mistakes in a batch are written only to a tensor of the caller, by stage `count`."""

    def __init__(self, plan: StagePlan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self._stages = plan

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage: see `Stages.run`.

        Raises `LaunchError` if the driver refuses a kernel, and RuntimeError in a graph capture if no earlier call has
        loaded the kernels.
        """
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device(device):
            call = stage_call(self._stages, stage, arguments, torch_empty)
            kernels = [step for step in call.steps if isinstance(step, KernelLaunch)]
            if torch.cuda.is_current_stream_capturing() and not self._has_loaded(device, kernels):
                raise RuntimeError(FIRST_CALL)
            words = call.arguments()
            for step in call.steps:
                if isinstance(step, KernelLaunch):
                    self._launch(device, [step], words)
                else:
                    step()
