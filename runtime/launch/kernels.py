"""From a program's text to a kernel that can be called. The only place that knows which backends exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch import Tensor

from embforge.codegen.build import build
from embforge.codegen.plan import Plan
from embforge.inputs import Batch
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
    """A plan's forward, whatever runs it."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the flat rows of `none` features if the spec has any."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


def kernel_of(program: str) -> Kernel:
    """The program's kernel, built and loaded on first use.

    Raises `MissingKernelError`, `CompileError` or `ToolchainError`.
    """
    kernel = _LOADED.get(program)
    return kernel if kernel is not None else _LOADED.setdefault(program, _load(program))


def loaded_kernel(program: str) -> Kernel | None:
    """The program's kernel if anybody has called it yet."""
    return _LOADED.get(program)


_LOADED: dict[str, Kernel] = {}
"""A cache: a program's text decides its kernel. Never emptied, because captured graphs point into loaded code."""


def _load(program: str) -> Kernel:
    parsed = Program.from_text(program)
    plan = parsed.plan
    if plan.target == "reference":
        from embforge.launch.reference import ReferenceForward

        return ReferenceForward(plan)
    built = build(plan, kernels=Path(parsed.kernels) if parsed.kernels else None)
    if plan.target == "cpu":
        from embforge.launch.cpu import CpuForward

        return CpuForward(plan, built.binary)
    if plan.target == "simt":
        from embforge.launch.simt import SimtForward

        return SimtForward(plan, built.binary)
    from embforge.launch.cuda import CudaForward

    return CudaForward(plan, built.binary.read_bytes())
