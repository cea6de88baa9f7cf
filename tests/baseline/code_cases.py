"""Kernels whose machine code has digests: every template, on several architectures, for every rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import embforge as ef
from baseline.digests import Digests
from baseline.internals import cuda_compiler, host_compiler, kernel_binary, kernel_plans, stages_plan
from baseline.machine_code import code_digest
from baseline.specs import HALF, LATER, MIX, NARROW, ONE, REMAPPED, RULES, WIDE
from baseline.stage_results import FORMATS

CPU_ARCHS, CUDA_ARCHS = ("avx512", "avx2", "generic"), ("sm_75", "sm_90", "sm_100")
ONE_ARCH = {"cpu": "avx2", "cuda": "sm_90"}
TUNED = {
    "cpu": ef.CpuParams(prefetch_bytes=1024, prefetch_level=1, tile_vectors=4, rows_unrolled=4, stores="streaming"),
    "cuda": ef.CudaParams(block=128, pipeline=(8, 2), vector_bytes=16, id_tile=512, cache_hint="evict_last"),
}
COMPILERS: dict[str, Callable[[], str]] = {"cpu": host_compiler, "cuda": cuda_compiler}
"""By target: what its machine code depends on in addition to the source."""


@dataclass(frozen=True)
class CodeCase:
    """The kernels of one spec for one architecture."""

    name: str
    target: str
    plans: Callable[[], dict[str, Any]]
    quick: bool = False

    def digests(self) -> Digests:
        return {name: code_digest(kernel_binary(plan)) for name, plan in self.plans().items()}


def _of_spec(target: str, arch: str, spec: ef.CollectionSpec, rule: str, **options: Any) -> CodeCase:
    def plans() -> dict[str, Any]:
        return kernel_plans(spec, target, arch, RULES[rule], **options)

    return CodeCase(f"{target} {arch}, {spec.name}", target, plans, quick=spec is ONE)


def _stages(target: str, arch: str) -> CodeCase:
    def plans() -> dict[str, Any]:
        return {name: stages_plan(target, arch, formats) for name, formats in FORMATS.items()}

    return CodeCase(f"{target} {arch}, stages", target, plans)


def _rules(target: str, arch: str) -> CodeCase:
    def plans() -> dict[str, Any]:
        return {name: kernel_plans(NARROW, target, arch, rule)["backward"] for name, rule in RULES.items()}

    return CodeCase(f"{target} {arch}, backward by rule", target, plans)


def _tuned(target: str, arch: str) -> CodeCase:
    def plans() -> dict[str, Any]:
        plans = kernel_plans(MIX, target, arch, params=TUNED[target])
        return {name: plan for name, plan in plans.items() if name == "forward"}

    return CodeCase(f"{target} {arch}, other plan fields", target, plans)


def _resolve(target: str, arch: str) -> CodeCase:
    def plans() -> dict[str, Any]:
        return {ids: kernel_plans(REMAPPED, target, arch, id_dtype=ids)["resolve"] for ids in ("int32", "int64")}

    return CodeCase(f"{target} {arch}, resolve", target, plans, quick=True)


def code_cases() -> list[CodeCase]:
    """All cases with machine code; the quick ones first."""
    every = [(target, arch) for target, archs in (("cpu", CPU_ARCHS), ("cuda", CUDA_ARCHS)) for arch in archs]
    return [
        *(_of_spec(target, arch, ONE, "sgd") for target, arch in ONE_ARCH.items()),
        *(_of_spec(target, arch, MIX, "adam", accumulate=True) for target, arch in every),
        *(_stages(target, arch) for target, arch in every),
        *(_of_spec(target, arch, HALF, "rowwise_adagrad", id_dtype="int32") for target, arch in ONE_ARCH.items()),
        *(_of_spec(target, arch, LATER, "adagrad") for target, arch in ONE_ARCH.items()),
        *(_of_spec(target, arch, WIDE, "rowwise_adam") for target, arch in ONE_ARCH.items()),
        *(_rules(target, arch) for target, arch in ONE_ARCH.items()),
        *(_tuned(target, arch) for target, arch in ONE_ARCH.items()),
        *(_resolve(target, arch) for target, arch in ONE_ARCH.items()),
    ]
