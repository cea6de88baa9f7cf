"""Runs the CUDA kernels of the stages between ranks on the CPU by the SIMT executor, and raises the bugs that it finds.

Every tensor of a call is copied to guarded memory, and results are copied back if the whole call succeeds.
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
    """The stages of a loaded image. Threads may share it; their launches take turns."""

    def __init__(self, plan: StagePlan, image: Path) -> None:
        self.plan = plan
        self._image = load_image(image)
        self._calls = count()
        for stage, kernels in KERNELS.items():
            expected = (WORD_BYTES,) * len(STAGES[stage].in_blocks)
            for kernel in kernels:
                loaded = self._image.kernels.get(symbol_of(plan, stage, kernel))
                if loaded is None or loaded.argument_bytes != expected:
                    raise AssertionError(
                        f"the launcher passes arguments of {expected} bytes to {stage}.{kernel}, but image {image} has "
                        f"{loaded}"
                    )

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage: see `Stages.run`. Every call has a different schedule, in the same order in every process.

        Raises `KernelBugError` for a bug in a kernel.
        """
        seed = next(self._calls) % MOST_SEEDS
        guarded = {k: guarded_copy(_with_rows(v)) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        call = stage_call(self.plan, stage, guarded, guarded_empty)
        memory = Memory()
        results, changed = STAGES[stage].used("result"), STAGES[stage].used("changed")
        memory.describe(call.by_name, {*results, *call.space}, {*changed, *call.prepared})
        for step in call.steps:
            if isinstance(step, KernelLaunch):
                launch_kernel(self.plan, self._image, step, call.arguments(), memory.regions, seed=seed)
            else:
                step()
        for name in (*results, *changed):
            original, copy = arguments[name], guarded[name]
            if isinstance(original, Tensor) and isinstance(copy, Tensor) and original.data_ptr() != copy.data_ptr():
                ctypes.memmove(original.data_ptr(), copy.data_ptr(), spanned_bytes(copy))


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)
