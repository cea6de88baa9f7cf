"""From a program's text to a kernel that can be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients, TrainResult
from embforge.launch.grouped import GroupedUpdate, parts_of
from embforge.launch.launchers import launchers_of
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


class ResolveKernel(Protocol):
    """A plan's step that turns ids into rows (op "resolve"), whatever runs it."""

    plan: Plan

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """The batch's values with rows in the place of the ids of remapped tables.

        `remaps`: those of the tables that have one, in order; `metadata` is of `remap_metadata_of`. Ids without a row
        become -1. What an unknown id becomes no lookup takes for a row, so that its checks find it, see
        codegen/remap.py.
        """

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class ReduceKernel(Protocol):
    """A plan's gradients of rows (op "reduce"), whatever runs it."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """The rows of every table that occur, in order, and the sums of their gradients."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class WeightGradientKernel(Protocol):
    """A plan's gradients of per-sample weights (op "weight_gradient"), whatever runs it."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """fp32, one number per id."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


def kernel_of(program: str, beside: Sequence[str] = ()) -> Any:
    """The program's kernel, built and loaded on first use: `Kernel`, `TrainKernel`, `UpdateKernel`, `ReduceKernel` or
    `WeightGradientKernel`, as its plan's op says, which a type checker cannot know: callers annotate what they get.

    Raises `MissingKernelError`, `CompileError` or `ToolchainError`. `beside`: programs that the caller will run too,
    the first of which is of its own spec; the first of these errors names them as well where they are missing.
    """
    kernel = _LOADED.get(program)
    return kernel if kernel is not None else _LOADED.setdefault(program, load_kernel(program, beside))


def loaded_kernel(program: str) -> Any:
    """The program's kernel if anybody has called it yet, else None."""
    return _LOADED.get(program)


_LOADED: dict[str, Any] = {}
"""A cache: a program's text decides its kernel. Never emptied, because captured graphs point into loaded code."""


def load_kernel(program: str, beside: Sequence[str] = ()) -> Any:
    """As `kernel_of`, a new object at every call: its work space and results are its own, and go with it.

    The kernels of a program that is several are those of `kernel_of`, which may be shared.
    """
    parts = parts_of(program)
    if parts:
        return GroupedUpdate(parts, [kernel_of(part.program, beside) for part in parts])
    parsed = Program.from_text(program)
    plan = parsed.plan
    others = partial(_plans_of, tuple(filter(None, beside)))
    return launchers_of(plan.target).kernels[plan.op](plan, parsed.kernels, others)


def _plans_of(programs: Sequence[str]) -> list[Plan]:
    """The plans of the kernels that programs run: one, or one per rule."""
    return [
        Program.from_text(text).plan
        for program in programs
        for text in [part.program for part in parts_of(program)] or [program]
    ]
