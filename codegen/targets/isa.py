"""Instruction sets of the host that kernels are written for, and facts about its caches."""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.errors import PlanError
from embforge.codegen.plan import Plan

CACHE_LINE = 64

CACHED_TABLE_BYTES = 1 << 19
"""A table of this size lies in a core's own cache after a few batches: prefetching it only costs instructions."""

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")


@dataclass(frozen=True)
class Isa:
    """An instruction set: its vectors, its header and the compiler flags that allow it."""

    name: str
    title: str
    width: int
    header: str | None
    flags: tuple[str, ...]


ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa(
            "avx512",
            "AVX-512",
            16,
            "immintrin.h",
            ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512", "-mavx2", "-mf16c"),
        ),
        Isa("avx2", "AVX2 and F16C", 8, "immintrin.h", ("-mavx2", "-mf16c")),
        Isa("neon", "NEON", 4, "arm_neon.h", ()),
        Isa("generic", "plain vectors", 4, None, ()),
    )
}


def isa_of(plan: Plan) -> Isa:
    """The plan's instruction set; `PlanError` names the known ones."""
    if plan.arch not in ISAS:
        raise PlanError(f"plan field arch={plan.arch!r} is not known for target cpu; allowed: {', '.join(ISAS)}")
    return ISAS[plan.arch]
