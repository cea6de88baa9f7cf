"""The facts of `cuda/resolve/resolve.cu.j2`, the step that turns ids into rows, and what a call of it launches."""

from __future__ import annotations

from typing import Any

from embforge.codegen.plan import Plan
from embforge.codegen.targets.cpu.resolve import remap_facts
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.formats import format_facts
from embforge.codegen.targets.cuda.launch import KernelLaunch

THREADS = 256
IDS_PER_THREAD = 4
MIN_BLOCKS = 4
"""The least number of blocks per multiprocessor: 4 reads of remaps per thread fill its memory pipeline."""
FEATURE_RECORD = 16
CONSTANT_MEMORY = 60 * 1024


def resolve_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cuda/resolve/resolve.cu.j2` names."""
    fits = FEATURE_RECORD * len(plan.spec.features) <= CONSTANT_MEMORY
    return {
        "symbol": plan.symbol,
        "load_hint": "",
        "load_bytes": [],
        **format_facts(set(), arch_named(plan.arch)),
        "threads": THREADS,
        "ids_per_thread": IDS_PER_THREAD,
        "min_blocks": MIN_BLOCKS,
        "constants": "__constant__" if fits else "__device__",
        **remap_facts(plan),
    }


def resolve_launch(plan: Plan, num_values: int) -> KernelLaunch:
    """The launch for a batch of `num_values` ids, which must be at least one."""
    return KernelLaunch(plan.symbol, -(-num_values // (THREADS * IDS_PER_THREAD)), THREADS, 0)
