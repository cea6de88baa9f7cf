"""One file a target. A target is a table of facts and a compiler: source -> bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embforge.codegen.plan import Plan


@dataclass(frozen=True)
class Source:
    """How an op's source is made: a template, and what it says of a plan."""

    template: str
    facts: Callable[[Plan], dict[str, Any]]
    """Everything the template names, decided in Python."""


@dataclass(frozen=True)
class Target:
    """What the rest of the toolchain needs to know about a target."""

    name: str
    sources: dict[str, Source]
    """By op."""
    source_suffix: str
    binary_suffix: str
    compile: Callable[[Plan, Path], bytes]
    """The binary of the plan's rendered source file. `CompileError` shows the log beside numbered lines."""
    fingerprint: Callable[[Plan], dict[str, str]]
    """Labelled facts beside the source that decide the binary: compiler version, resolved flags."""
    resources: Callable[[Plan, bytes], list[dict[str, Any]]]
    """Per kernel symbol in the binary: registers, spill_bytes, shared_bytes, occupancy, ... (empty for cpu)."""


def target_named(name: str) -> Target:
    """The target of that name, imported on first use so that no target pays for another's toolchain."""
    if name == "cpu":
        from embforge.codegen.targets.cpu.forward import CPU

        return CPU
    if name == "simt":
        from embforge.codegen.targets.simt.toolchain import SIMT

        return SIMT
    from embforge.codegen.targets.cuda.forward import CUDA

    return CUDA


def check_plan(plan: Plan) -> None:
    """`PlanError` for a plan whose kernels no compiler would take, before anything is rendered."""
    if plan.target not in ("cuda", "simt"):
        return
    if plan.op.startswith("forward"):
        from embforge.codegen.targets.cuda.geometry import geometry_of

        geometry_of(plan)
    else:
        from embforge.codegen.targets.cuda.shared_memory import check_shared

        check_shared(plan)
