"""How each target's kernels are made: a table of sources, and a compiler that turns a source into bytes.

There is one folder per target. Other facts about targets are in `codegen/target.py`.
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


def _accept(plan: KernelPlan) -> None:
    """The check for plans of which a compiler takes every one."""


@dataclass(frozen=True)
class Source(Generic[P]):
    """How the source of an op is made: a template, and the facts about a plan that it prints."""

    template: str
    plan_type: type[P]
    """The type of the op's plans."""
    decide: Callable[[P], dict[str, Any]]
    """Makes everything that the template names."""
    checks: Callable[[P], object] = _accept
    """Raises `PlanError` for a plan whose kernels no compiler would take, before anything is rendered."""

    def facts(self, plan: KernelPlan) -> dict[str, Any]:
        """Everything that the template names, for a plan. `PlanError` for a plan that cannot work."""
        return self.decide(self._own(plan))

    def check(self, plan: KernelPlan) -> None:
        """`PlanError` for a plan whose kernels no compiler would take."""
        self.checks(self._own(plan))

    def of_twin(self, target: str) -> Source[P]:
        """The source for a target that runs the text of `target`."""
        decide = self.decide
        return replace(self, decide=lambda plan: decide(plan.on(target)))

    def _own(self, plan: KernelPlan) -> P:
        if not isinstance(plan, self.plan_type):
            raise PlanError(f"{plan.uri} is not a {self.plan_type.__name__}, as plans of op {plan.op!r} are")
        return plan


Sources = Mapping[str, Source[Plan] | Source[StagePlan]]
"""The source of each op."""


@dataclass(frozen=True)
class Toolchain:
    """What makes a target's binaries."""

    sources: Sources
    compile: Callable[[KernelPlan, Path], bytes]
    """The binary of the plan's rendered source file. `CompileError` shows the compiler's log and numbered lines."""
    fingerprint: Callable[[KernelPlan], dict[str, str]]
    """Labelled facts that decide the binary in addition to the source: compiler version, resolved flags."""
    resources: Callable[[KernelPlan, bytes], list[dict[str, Any]]]
    """For each kernel symbol in the binary: registers, spill_bytes, shared_bytes, occupancy, ... (none for cpu)."""


def toolchain_of(target: str) -> Toolchain:
    """The target's toolchain. It is imported on first use, so that using one target does not import the others.

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
"""What imports the toolchain of each target."""
