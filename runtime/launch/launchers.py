"""The table of the classes that run the kernels of each target. Only this file knows the classes of all backends; it
imports them on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from embforge.codegen.kernel import KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.stages import StagePlan
from embforge.codegen.target import target_named
from embforge.launch.building import build_here
from embforge.launch.stage_calls import Stages

P = TypeVar("P", bound=KernelPlan)
K = TypeVar("K")
AlsoNeeded = Callable[[], Iterable[Plan]]
"""Returns the plans whose kernels the caller will need too. The error about a missing kernel names those of them that
are missing, too."""
Load = Callable[[P, str | None, AlsoNeeded], K]
"""Builds the kernel of a plan, or takes it from a directory, and loads it. Raises what `build` raises."""


@dataclass(frozen=True)
class Launchers:
    """How the kernels of a target are loaded."""

    kernels: Mapping[str, Load[Plan, object]]
    """What loads the kernel of each op: a `Kernel`, `TrainKernel`, `UpdateKernel`, `ResolveKernel`, ..."""
    stages: Load[StagePlan, Stages]
    """What loads the library of stages."""


def launchers_of(target: str) -> Launchers:
    """The launchers of a target. Raises `PlanError` if there is no such target."""
    return LAUNCHERS[target_named(target).name]()


def _from_library(kind: Callable[[P, Path], K]) -> Load[P, K]:
    """How to load a kernel whose class takes the path of a shared library."""

    def load(plan: P, kernels: str | None, also_needed: AlsoNeeded) -> K:
        built = build_here(plan, kernels, also_needed)
        return kind(built.plan, built.binary)

    return load


def _from_code(kind: Callable[[P, bytes], K]) -> Load[P, K]:
    """How to load a kernel whose class takes the bytes of a binary, for a driver."""

    def load(plan: P, kernels: str | None, also_needed: AlsoNeeded) -> K:
        built = build_here(plan, kernels, also_needed)
        return kind(built.plan, built.binary.read_bytes())

    return load


def _from_nothing(kind: Callable[[P], K]) -> Load[P, K]:
    """How to load a kernel that needs no generated code."""
    return lambda plan, kernels, also_needed: kind(plan)


def _cpu() -> Launchers:
    from embforge.launch.cpu import backward as cpu_backward
    from embforge.launch.cpu import forward as cpu
    from embforge.launch.cpu import stages as stages_cpu
    from embforge.launch.cpu.resolve import CpuResolve

    return Launchers(
        {
            "forward": _from_library(cpu.CpuForward),
            "forward_train": _from_library(cpu.CpuForwardTrain),
            "backward": _from_library(cpu_backward.CpuBackward),
            "reduce": _from_library(cpu_backward.CpuReduce),
            "weight_gradient": _from_library(cpu_backward.CpuWeightGradient),
            "resolve": _from_library(CpuResolve),
        },
        _from_library(stages_cpu.CpuStages),
    )


def _cuda() -> Launchers:
    from embforge.launch.cuda import backward as cuda_backward
    from embforge.launch.cuda import forward as cuda
    from embforge.launch.cuda import stages as stages_cuda
    from embforge.launch.cuda.resolve import CudaResolve

    return Launchers(
        {
            "forward": _from_code(cuda.CudaForward),
            "forward_train": _from_code(cuda.CudaForwardTrain),
            "backward": _from_code(cuda_backward.CudaBackward),
            "reduce": _from_code(cuda_backward.CudaReduce),
            "weight_gradient": _from_code(cuda_backward.CudaWeightGradient),
            "resolve": _from_code(CudaResolve),
        },
        _from_code(stages_cuda.CudaStages),
    )


def _simt() -> Launchers:
    from embforge.launch.simt import backward as simt_backward
    from embforge.launch.simt import forward as simt
    from embforge.launch.simt import stages as stages_simt
    from embforge.launch.simt.resolve import SimtResolve

    return Launchers(
        {
            "forward": _from_library(simt.SimtForward),
            "forward_train": _from_library(simt.SimtForwardTrain),
            "backward": _from_library(simt_backward.SimtBackward),
            "reduce": _from_library(simt_backward.SimtReduce),
            "weight_gradient": _from_library(simt_backward.SimtWeightGradient),
            "resolve": _from_library(SimtResolve),
        },
        _from_library(stages_simt.SimtStages),
    )


def _reference() -> Launchers:
    from embforge.launch.reference import backward as reference_backward
    from embforge.launch.reference import forward as reference
    from embforge.launch.reference import forward_train as reference_train
    from embforge.launch.reference import stages as stages_reference
    from embforge.launch.reference.resolve import ReferenceResolve

    return Launchers(
        {
            "forward": _from_nothing(reference.ReferenceForward),
            "forward_train": _from_nothing(reference_train.ReferenceForwardTrain),
            "backward": _from_nothing(reference_backward.ReferenceBackward),
            "reduce": _from_nothing(reference_backward.ReferenceReduce),
            "weight_gradient": _from_nothing(reference_backward.ReferenceWeightGradient),
            "resolve": _from_nothing(ReferenceResolve),
        },
        _from_nothing(stages_reference.ReferenceStages),
    )


LAUNCHERS: dict[str, Callable[[], Launchers]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "simt": _simt,
    "reference": _reference,
}
"""The launchers by the name of their target. The classes of a target are imported when its function is called."""
