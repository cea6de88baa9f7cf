"""How each target's kernels are made: a table of sources and a compiler, source -> bytes. One file a target.

What a target is, apart from that, is in `codegen/target.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from embforge.codegen.errors import PlanError, ToolchainError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.stages import StagePlan
from embforge.codegen.target import target_named

P = TypeVar("P", Plan, StagePlan)


def _takes_all(plan: KernelPlan) -> None:
    """Of plans of this kind a compiler takes every one."""


@dataclass(frozen=True)
class Source(Generic[P]):
    """How an op's source is made: a template, and what it says of a plan."""

    template: str
    kind: type[P]
    """The plans that the op has."""
    says: Callable[[P], dict[str, Any]]
    """Everything the template names, decided in Python."""
    checks: Callable[[P], object] = _takes_all
    """Raises `PlanError` for a plan whose kernels no compiler would take, before anything is rendered."""

    def facts(self, plan: KernelPlan) -> dict[str, Any]:
        """Everything the template names of the plan. `PlanError` for a plan that cannot work."""
        return self.says(self._own(plan))

    def check(self, plan: KernelPlan) -> None:
        """`PlanError` for a plan whose kernels no compiler would take."""
        self.checks(self._own(plan))

    def of_twin(self, target: str) -> Source[P]:
        """The source of a target that runs another one's text."""
        says = self.says
        return replace(self, says=lambda plan: says(plan.on(target)))

    def _own(self, plan: KernelPlan) -> P:
        if not isinstance(plan, self.kind):
            raise PlanError(f"{plan.uri} is no {self.kind.__name__}, which op {plan.op!r} has")
        return plan


Sources = Mapping[str, Source[Plan] | Source[StagePlan]]
"""By op."""


@dataclass(frozen=True)
class Toolchain:
    """What makes a target's binaries."""

    sources: Sources
    compile: Callable[[KernelPlan, Path], bytes]
    """The binary of the plan's rendered source file. `CompileError` shows the log beside numbered lines."""
    fingerprint: Callable[[KernelPlan], dict[str, str]]
    """Labelled facts beside the source that decide the binary: compiler version, resolved flags."""
    resources: Callable[[KernelPlan, bytes], list[dict[str, Any]]]
    """Per kernel symbol in the binary: registers, spill_bytes, shared_bytes, occupancy, ... (empty for cpu)."""


def toolchain_of(target: str) -> Toolchain:
    """The target's toolchain, imported on first use so that no target pays for another's.

    `PlanError` for a target that is not known; `ToolchainError` for the reference, which generates nothing.
    """
    load = TOOLCHAINS.get(target_named(target).name)
    if load is None:
        raise ToolchainError(f"target {target!r} has no kernels to compile; allowed: {', '.join(TOOLCHAINS)}")
    return load()


def check_plan(plan: KernelPlan) -> None:
    """`PlanError` for a plan whose kernels no compiler would take, before anything is rendered."""
    if target_named(plan.target).is_generated:
        toolchain_of(plan.target).sources[plan.op].check(plan)


def _cpu() -> Toolchain:
    from embforge.codegen.targets.cpu.toolchain import CPU

    return CPU


def _cuda() -> Toolchain:
    from embforge.codegen.targets.cuda.toolchain import CUDA

    return CUDA


def _simt() -> Toolchain:
    from embforge.codegen.targets.simt.toolchain import SIMT

    return SIMT


TOOLCHAINS: dict[str, Callable[[], Toolchain]] = {"cpu": _cpu, "cuda": _cuda, "simt": _simt}
"""By target."""
