"""The stages between ranks, whatever runs them: one call for each, by the names of its arguments.

`run("regroup", segments=..., words=..., ...)` takes tensors, whole numbers and None (a null pointer), all results among
them made by the caller. Arguments are those of `codegen/stages.py`; what a backend needs beside them it finds itself.
"""

from __future__ import annotations

import ctypes
import struct
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, get_num_threads

from embforge.codegen.stages import STAGES, StagePlan, stage_arguments
from embforge.launch.building import build_here
from embforge.launch.cpu.forward import torch_parallel_for

Value = Tensor | int | None
NO_MEMORY = -1
_HOST_ARGUMENTS = ("parallel_for", "threads")


class Stages(Protocol):
    """A loaded library of stages."""

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage. A batch's mistakes are no exceptions here: `count` writes them down."""


class CpuStages:
    """The generated C++ functions, called by pointer, on torch's own threads."""

    def __init__(self, plan: StagePlan, library: Path) -> None:
        self.plan = plan
        loaded = ctypes.CDLL(str(library))
        self._entries: dict[str, tuple[Any, Any, tuple[str, ...]]] = {}
        for stage in STAGES:
            entry = getattr(loaded, f"{plan.uri}_{stage}_words")
            entry.restype, entry.argtypes = ctypes.c_int64, [ctypes.c_char_p]
            names = tuple(argument.name for argument in stage_arguments("cpu", stage))
            given = tuple(name for name in names if name not in _HOST_ARGUMENTS)
            if names != (*given, *_HOST_ARGUMENTS):
                raise AssertionError(f"stage {stage} takes {names}; the pool's arguments must be the last")
            self._entries[stage] = entry, struct.Struct(f"{len(names)}q").pack, given
        self._parallel_for = torch_parallel_for()

    def run(self, stage: str, **arguments: Value) -> None:
        entry, pack, names = self._entries[stage]
        words = [_word(arguments[name]) for name in names]
        if len(arguments) != len(names):
            raise AssertionError(f"stage {stage} takes {names}, got {tuple(arguments)}")
        if entry(pack(*words, self._parallel_for, get_num_threads())) == NO_MEMORY:
            raise MemoryError(f"{self.plan.uri}: no memory for stage {stage!r}")


def _word(value: Value) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value


def stages_of(plan: StagePlan, kernels: str | None = None) -> Stages:
    """The plan's stages, built and loaded on first use. Raises what `build` raises."""
    key = (plan.text, kernels)
    found = _LOADED.get(key)
    return found if found is not None else _LOADED.setdefault(key, _load(plan, kernels))


_LOADED: dict[tuple[str, str | None], Stages] = {}
"""A cache: a plan's text decides its library."""

_HOMES = {
    "cpu": ("stages", "CpuStages"),
    "simt": ("stages_simt", "SimtStages"),
    "cuda": ("stages_cuda", "CudaStages"),
    "reference": ("stages_reference", "ReferenceStages"),
}


def _load(plan: StagePlan, kernels: str | None) -> Stages:
    module, name = _HOMES[plan.target]
    kind = getattr(import_module(f"embforge.launch.{module}"), name)
    if plan.target == "reference":
        return kind(plan)  # type: ignore[no-any-return]
    built = build_here(plan, kernels)
    return kind(plan, built.binary.read_bytes() if plan.target == "cuda" else built.binary)  # type: ignore[no-any-return]
