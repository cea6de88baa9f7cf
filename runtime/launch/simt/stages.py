"""Runs the CUDA kernels of the stages between ranks on the CPU by the SIMT executor, and raises what it finds wrong.

Every tensor of a call is copied to where nothing lies near it, and results are copied back once all went well.
"""

from __future__ import annotations

import ctypes
from itertools import count
from pathlib import Path

from torch import Tensor

from embforge.codegen.stages import STAGES, StagePlan
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.stages import KERNELS, symbol_of
from embforge.launch.gpu.forward_call import Value
from embforge.launch.gpu.stage_call import stage_call
from embforge.launch.simt.abi import load_image
from embforge.launch.simt.forward import MOST_SEEDS
from embforge.launch.simt.guarded import guarded_copy, guarded_empty, spanned_bytes
from embforge.launch.simt.run import WORD_BYTES, Memory, launch_kernel


class SimtStages:
    """All stages in an image. Threads may share it; their launches take turns."""

    def __init__(self, plan: StagePlan, image: Path) -> None:
        self.plan = plan
        self._image = load_image(image)
        self._calls = count()
        for stage, kernels in KERNELS.items():
            wanted = (WORD_BYTES,) * len(STAGES[stage].in_blocks)
            for kernel in kernels:
                found = self._image.kernels.get(symbol_of(plan, stage, kernel))
                if found is None or found.argument_bytes != wanted:
                    raise AssertionError(f"the launcher passes {wanted} to {stage}.{kernel}, image {image} has {found}")

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage; see `Stages.run`. Every call has another schedule, the same ones in every process.

        `KernelBugError` for what a kernel does wrong.
        """
        seed = next(self._calls) % MOST_SEEDS
        placed = {k: guarded_copy(_with_rows(v)) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        call = stage_call(self.plan, stage, placed, guarded_empty)
        memory = Memory()
        results, changed = STAGES[stage].used("result"), STAGES[stage].used("changed")
        memory.describe(call.given, {*results, *call.space}, {*changed, *call.prepared})
        for step in call.steps:
            if isinstance(step, KernelLaunch):
                launch_kernel(self.plan, self._image, step, call.arguments(), memory.regions, seed=seed)
            else:
                step()
        for name in (*results, *changed):
            given, there = arguments[name], placed[name]
            if isinstance(given, Tensor) and isinstance(there, Tensor) and given.data_ptr() != there.data_ptr():
                ctypes.memmove(given.data_ptr(), there.data_ptr(), spanned_bytes(there))


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)
