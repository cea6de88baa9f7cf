"""CUDA C++ for GPUs: one cubin per plan, compiled by NVRTC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embforge.codegen.kernel import KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.render import render
from embforge.codegen.stages import StagePlan
from embforge.codegen.targets import Source, Toolchain
from embforge.codegen.targets.cuda.backward import backward_facts
from embforge.codegen.targets.cuda.forward import forward_facts
from embforge.codegen.targets.cuda.geometry import geometry_of
from embforge.codegen.targets.cuda.nvrtc import compile_cubin, nvrtc_fingerprint
from embforge.codegen.targets.cuda.resolve import resolve_facts
from embforge.codegen.targets.cuda.sass import kernel_resources
from embforge.codegen.targets.cuda.shared_memory import check_shared
from embforge.codegen.targets.cuda.stages import stage_facts
from embforge.codegen.targets.cuda.weight_gradient import weight_gradient_facts


def _compile(plan: KernelPlan, source: Path) -> bytes:
    return compile_cubin(source, plan.arch)


def _fingerprint(plan: KernelPlan) -> dict[str, str]:
    return nvrtc_fingerprint(plan.arch)


def _resources(plan: KernelPlan, binary: bytes) -> list[dict[str, Any]]:
    source = CUDA.sources[plan.op]
    return kernel_resources(plan, render(source.template, source.facts(plan)), binary)


CUDA = Toolchain(
    sources={
        "forward": Source("cuda/forward/forward.cu.j2", Plan, forward_facts, geometry_of),
        "forward_train": Source("cuda/forward/forward.cu.j2", Plan, forward_facts, geometry_of),
        "backward": Source("cuda/backward/backward.cu.j2", Plan, backward_facts, check_shared),
        "reduce": Source("cuda/backward/backward.cu.j2", Plan, backward_facts, check_shared),
        "weight_gradient": Source("cuda/backward/weight_gradient.cu.j2", Plan, weight_gradient_facts, check_shared),
        "resolve": Source("cuda/resolve/resolve.cu.j2", Plan, resolve_facts),
        "stages": Source("cuda/stages/stages.cu.j2", StagePlan, stage_facts),
    },
    compile=_compile,
    fingerprint=_fingerprint,
    resources=_resources,
)
