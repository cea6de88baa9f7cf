"""Facts about GPU architectures that occupancy and code generation depend on."""

from __future__ import annotations

from dataclasses import dataclass

from embforge.codegen.errors import PlanError
from embforge.codegen.reading.suggestions import did_you_mean
from embforge.codegen.target import GPU_ARCH

WARP = 32
REGISTER_UNIT = 256
"""Warps get registers in units of this many."""
MAX_STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a block may have without asking the driver for more."""


@dataclass(frozen=True)
class Arch:
    """One compute capability: what a multiprocessor holds."""

    name: str
    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 65536
    shared_unit: int = 128
    shared_reserved: int = 1024
    """Bytes of shared memory per block that the driver keeps for itself."""

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that a block may have if the driver is asked."""
        return self.shared_bytes - self.shared_reserved

    @property
    def number(self) -> int:
        return int(self.name.removeprefix("sm_"))

    @property
    def widest_load(self) -> int:
        """Bytes of the widest global load."""
        return 32 if self.number >= 100 else 16


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch("sm_75", 1024, 16, 64 * 1024, shared_unit=256, shared_reserved=0),
        Arch("sm_80", 2048, 32, 164 * 1024),
        Arch("sm_86", 1536, 16, 100 * 1024),
        Arch("sm_89", 1536, 24, 100 * 1024),
        Arch("sm_90", 2048, 32, 228 * 1024),
        Arch("sm_100", 2048, 32, 228 * 1024),
        Arch("sm_103", 2048, 32, 228 * 1024),
        Arch("sm_120", 1536, 24, 100 * 1024),
    )
}

DEFAULT_ARCH = GPU_ARCH
"""The architecture to generate for if there is no GPU (target simt). Its text is checked in under generated/; the text
of other archs differs in sizes, and from sm_100 on in 32-byte loads, so they are worth runs of their own."""

OTHER_SPELLINGS = {
    spelling: name
    for name, a in ARCHS.items()
    for spelling in (str(a.number), f"{a.number / 10:.1f}", f"compute_{a.number}")
}
"""What other tools call compute capabilities, e.g. 90, 9.0 and compute_90."""


def arch_named(name: str) -> Arch:
    """The architecture of that name. If it is not known, `PlanError` names those that are."""
    if name not in ARCHS:
        hint = did_you_mean(name, ARCHS, OTHER_SPELLINGS)
        raise PlanError(f"plan field arch={name!r} is not known for target cuda{hint}; allowed: {', '.join(ARCHS)}")
    return ARCHS[name]


def nearest_arch(major: int, minor: int) -> str:
    """The architecture to generate for on a GPU of that compute capability: the newest known one that it can run.

    Cubins run on a later minor of the same major, never across majors. If there is none, `PlanError` names the known
    ones.
    """
    number = 10 * major + minor
    runnable = [a for a in ARCHS.values() if a.number // 10 == major and a.number <= number]
    if not runnable:
        raise PlanError(
            f"no kernels can be generated for a GPU of compute capability {major}.{minor}; known: {', '.join(ARCHS)}, "
            "and later minors of the same major; use backend='cpu'"
        )
    return max(runnable, key=lambda a: a.number).name


def resident_threads(arch: Arch, threads: int, registers: int, shared_bytes: int) -> int:
    """How many threads of these blocks a multiprocessor holds at
    once: as many as registers, shared memory and limits allow."""
    warps = -(-threads // WARP)
    warp_registers = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    block_shared = -(-(shared_bytes + arch.shared_reserved) // arch.shared_unit) * arch.shared_unit
    blocks = min(
        arch.threads // (warps * WARP),
        arch.blocks,
        arch.registers // (warp_registers * warps),
        arch.shared_bytes // block_shared if block_shared else arch.blocks,
    )
    return blocks * threads
