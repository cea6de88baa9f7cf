"""Calls the C functions of a library of stages by pointer, on torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, get_num_threads

from embforge.codegen.kernel import StageOutcome
from embforge.codegen.stages import STAGES, StagePlan
from embforge.launch.cpu.forward import torch_parallel_for, words_entry
from embforge.launch.cpu.packing import packer_of
from embforge.launch.stage_calls import Value


class CpuStages:
    """A loaded library of stages."""

    def __init__(self, plan: StagePlan, library: Path) -> None:
        self.plan = plan
        functions = ctypes.CDLL(str(library))
        self._entries: dict[str, tuple[Callable[[bytes], int], Callable[..., bytes]]] = {
            stage: (words_entry(functions, f"{plan.uri}_{stage}"), packer_of(plan.target, stage)) for stage in STAGES
        }
        self._parallel_for = torch_parallel_for()

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage: see `Stages.run`. Raises TypeError for arguments that the stage does not take."""
        entry, pack = self._entries[stage]
        words = {name: _word(value) for name, value in arguments.items()}
        outcome = entry(pack(**words, parallel_for=self._parallel_for, threads=get_num_threads()))
        if outcome == StageOutcome.NO_MEMORY:
            raise MemoryError(f"{self.plan.uri}: not enough memory for stage {stage!r}")


def _word(value: Value) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value
