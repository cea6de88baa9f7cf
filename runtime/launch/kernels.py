"""From a program's text to a kernel that can be called. The only place that knows which backends exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.building import build_here
from embforge.launch.gradients import TrainResult
from embforge.launch.grouped import GroupedUpdate, parts_of
from embforge.launch.metadata import Metadata


@dataclass(frozen=True)
class Program:
    """A plan, and the directory whose kernels to prefer (what `embforge gen` emitted), if any."""

    plan: Plan
    kernels: str | None = None

    @cached_property
    def text(self) -> str:
        """Rebuilds the program in a fresh process: the directory's line, then the plan's canonical text."""
        return f"{self.kernels or ''}\n{self.plan.text}"

    @classmethod
    def from_text(cls, text: str) -> Program:
        kernels, plan = text.split("\n", 1)
        return cls(Plan.from_text(plan), kernels or None)


class Kernel(Protocol):
    """A plan's forward (op "forward"), whatever runs it."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the flat rows of `none` features if the spec has any."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class TrainKernel(Protocol):
    """A plan's forward whose backward will come (op "forward_train"), whatever runs it."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Pooled output, rows of `none` features, divisors and winners, None for what the spec has no feature of."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


def kernel_of(program: str) -> Any:
    """The program's kernel, built and loaded on first use: `Kernel`, `TrainKernel`, ..., as its plan's op says.

    Raises `MissingKernelError`, `CompileError` or `ToolchainError`.
    """
    kernel = _LOADED.get(program)
    return kernel if kernel is not None else _LOADED.setdefault(program, load_kernel(program))


def loaded_kernel(program: str) -> Any:
    """The program's kernel if anybody has called it yet, else None."""
    return _LOADED.get(program)


_LOADED: dict[str, Any] = {}
"""A cache: a program's text decides its kernel. Never emptied, because captured graphs point into loaded code."""


_KERNELS = {
    ("forward", "reference"): ("reference", "ReferenceForward"),
    ("forward", "cpu"): ("cpu", "CpuForward"),
    ("forward", "simt"): ("simt", "SimtForward"),
    ("forward", "cuda"): ("cuda", "CudaForward"),
    ("forward_train", "reference"): ("reference_train", "ReferenceForwardTrain"),
    ("forward_train", "cpu"): ("cpu", "CpuForwardTrain"),
    ("forward_train", "simt"): ("simt", "SimtForwardTrain"),
    ("forward_train", "cuda"): ("cuda", "CudaForwardTrain"),
    ("backward", "reference"): ("reference_backward", "ReferenceBackward"),
    ("backward", "cpu"): ("cpu_backward", "CpuBackward"),
    ("backward", "simt"): ("simt_backward", "SimtBackward"),
    ("backward", "cuda"): ("cuda_backward", "CudaBackward"),
    ("reduce", "reference"): ("reference_backward", "ReferenceReduce"),
    ("reduce", "cpu"): ("cpu_backward", "CpuReduce"),
    ("reduce", "simt"): ("simt_backward", "SimtReduce"),
    ("reduce", "cuda"): ("cuda_backward", "CudaReduce"),
    ("weight_gradient", "reference"): ("reference_backward", "ReferenceWeightGradient"),
    ("weight_gradient", "cpu"): ("cpu_backward", "CpuWeightGradient"),
    ("weight_gradient", "simt"): ("simt_backward", "SimtWeightGradient"),
    ("weight_gradient", "cuda"): ("cuda_backward", "CudaWeightGradient"),
}
"""By op and target: the module here and the class in it, imported on first use."""


def load_kernel(program: str) -> Any:
    """As `kernel_of`, a new object at every call: its work space and results are its own, and go with it.

    The kernels of a program that is several are those of `kernel_of`, which may be shared.
    """
    parts = parts_of(program)
    if parts:
        return GroupedUpdate(parts, [kernel_of(part.program) for part in parts])
    parsed = Program.from_text(program)
    plan = parsed.plan
    module, name = _KERNELS[plan.op, plan.target]
    kind = getattr(import_module(f"embforge.launch.{module}"), name)
    if plan.target == "reference":
        return kind(plan)
    built = build_here(plan, parsed.kernels)
    return kind(built.plan, built.binary.read_bytes() if plan.target == "cuda" else built.binary)
