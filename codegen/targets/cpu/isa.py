"""The instruction sets of hosts for which kernels are generated."""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.errors import PlanError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.reading.suggestions import did_you_mean

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")


@dataclass(frozen=True)
class Isa:
    """An instruction set: its vectors, its header and the compiler flags that allow it."""

    name: str
    title: str
    width: int
    header: str | None
    flags: tuple[str, ...]
    registers: int
    """How many registers hold a vector."""
    register_class: str | None
    """The letter for these registers in inline assembly; None: it depends on the processor."""
    streams: bool
    """Whether it can store past the caches."""


ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa(
            "avx512",
            "AVX-512",
            16,
            "immintrin.h",
            ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512", "-mavx2", "-mf16c"),
            registers=32,
            register_class="v",
            streams=True,
        ),
        Isa(
            "avx2",
            "AVX2 and F16C",
            8,
            "immintrin.h",
            ("-mavx2", "-mf16c"),
            registers=16,
            register_class="x",
            streams=True,
        ),
        Isa("neon", "NEON", 4, "arm_neon.h", (), registers=32, register_class="w", streams=False),
        Isa("generic", "plain vectors", 4, None, (), registers=16, register_class=None, streams=False),
    )
}


def isa_of(plan: KernelPlan) -> Isa:
    """The plan's instruction set. If it is not known, `PlanError` names those that are."""
    if plan.arch not in ISAS:
        hint = did_you_mean(plan.arch, ISAS)
        raise PlanError(f"plan field arch={plan.arch!r} is not known for target cpu{hint}; allowed: {', '.join(ISAS)}")
    return ISAS[plan.arch]
