"""Makes a kernel that can be called from the text of a program, and says how each kind of kernel is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

from torch import Tensor

from embforge.codegen.plan import Plan
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients, TrainResult
from embforge.launch.grouped import GroupedUpdate, rule_parts
from embforge.launch.launchers import launchers_of
from embforge.launch.metadata import Metadata


@dataclass(frozen=True)
class Program:
    """A plan, and the directory whose kernels are preferred (one that `embforge gen` wrote), if there is one."""

    plan: Plan
    kernels: str | None = None

    @cached_property
    def text(self) -> str:
        """A text from which a new process rebuilds the program: a line with the directory, then the plan's canonical
        text."""
        return f"{self.kernels or ''}\n{self.plan.text}"

    @classmethod
    def from_text(cls, text: str) -> Program:
        kernels, plan = text.split("\n", 1)
        return cls(Plan.from_text(plan), kernels or None)


class Kernel(Protocol):
    """The forward of a plan (op "forward"), on any backend."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the pooled output, and the flat rows of `none` features if the spec has any."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class TrainKernel(Protocol):
    """The training forward of a plan (op "forward_train"), which keeps what its backward needs, on any backend."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> TrainResult:
        """Returns pooled output, rows of `none` features, divisors and winners; each of the last three is None if no
        feature of the spec has it."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class ResolveKernel(Protocol):
    """The step of a plan that turns ids into rows (op "resolve"), on any backend."""

    plan: Plan

    def __call__(self, metadata: Metadata, remaps: Sequence[Tensor], batch: Batch) -> Tensor:
        """Returns the values of the batch with the ids of remapped tables replaced by rows.

        `remaps` are the remaps of the tables that have one, in the order of tables; `metadata` comes from
        `remap_metadata_of`. Ids without a row become -1. An unknown id becomes a number that no lookup takes for a row,
        so that the checks of the lookup find it: see codegen/remap.py.
        """

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class ReduceKernel(Protocol):
    """The kernel that computes the gradients of rows (op "reduce"), on any backend."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns, for every table, the rows that occur in the batch, in ascending order, and the sums of their
        gradients."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


class WeightGradientKernel(Protocol):
    """The kernel that computes the gradients of per-sample weights (op "weight_gradient"), on any backend."""

    plan: Plan

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, gradients: Gradients, bounds_check: str
    ) -> Tensor:
        """Returns one fp32 number per id."""

    def check(self) -> None:
        """Raises the error that an earlier call left pending, if any."""


def kernel_of(program: str, also_needed: Sequence[str] = ()) -> Any:
    """The kernel of a program, built and loaded on first use.

    The op of its plan decides whether it is a `Kernel`, `TrainKernel`, `UpdateKernel`, `ResolveKernel`, `ReduceKernel`
    or `WeightGradientKernel`. A type checker cannot know that, so callers annotate what they get.

    Raises `MissingKernelError`, `CompileError` or `ToolchainError`. `also_needed` are programs that the caller will run
    too, the first of them for the spec of this program: a `MissingKernelError` also names the kernels of these programs
    that are missing.
    """
    kernel = _LOADED.get(program)
    return kernel if kernel is not None else _LOADED.setdefault(program, load_kernel(program, also_needed))


def loaded_kernel(program: str) -> Any:
    """The kernel of a program if it has been loaded already, otherwise None."""
    return _LOADED.get(program)


_LOADED: dict[str, Any] = {}
"""Loaded kernels by the text of their program, which determines them. Never emptied, because captured graphs point into
loaded code."""


def load_kernel(program: str, also_needed: Sequence[str] = ()) -> Any:
    """Does what `kernel_of` does, but returns a new object at every call. The object owns its work space and results,
    which are freed with it.

    If the program has several kernels, they come from `kernel_of` and may be shared.
    """
    parts = rule_parts(program)
    if parts:
        return GroupedUpdate(parts, [kernel_of(part.program, also_needed) for part in parts])
    parsed = Program.from_text(program)
    plan = parsed.plan
    others = partial(_plans_of, tuple(filter(None, also_needed)))
    return launchers_of(plan.target).kernels[plan.op](plan, parsed.kernels, others)


def _plans_of(programs: Sequence[str]) -> list[Plan]:
    """The plans of the kernels that the programs run: one per program, or one per rule of a grouped update."""
    return [
        Program.from_text(text).plan
        for program in programs
        for text in [part.program for part in rule_parts(program)] or [program]
    ]
