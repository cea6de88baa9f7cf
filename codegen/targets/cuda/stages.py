"""The facts of `cuda/stages/stages.cu.j2`: the kernels of the stages between ranks, and their arguments."""

from __future__ import annotations

from typing import Any

from embforge.codegen import stages
from embforge.codegen.describe import head_facts
from embforge.codegen.dtypes import narrow_floats
from embforge.codegen.kernel import arguments_of
from embforge.codegen.poolings import Divisor
from embforge.codegen.semantics import CHUNK
from embforge.codegen.stages import PACKED, STAGES, StagePlan
from embforge.codegen.targets.cpu.stages import STAGE_NOTES, stage_records, stage_types
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.formats import format_facts, rounding

THREADS = 128
"""Threads per block, in every stage."""
COUNTERS = 1024
"""Counters of a warp that distributes ids of pooled features: how many pairs of shard and sample it handles at once."""
SAMPLES = 32
"""Samples per block that pools or that spreads gradients."""
ROW_BITS = 42
"""How many bits of a key hold a row. The key of an id of a sequence has its row
there; the key of a pool has a row with one bit less, because the highest marks
pools that no bags share. The other bits, except for the sign, hold the stream."""
MOST_STREAMS = 2 ** (63 - ROW_BITS) - 2
"""The most streams for which keys have bits."""

KERNELS: dict[str, dict[str, str]] = {
    "count": {
        "borders": "check_borders",
        "pooled": "count_pooled",
        "divisors": "sum_divisors",
        "totals": "sum_lengths",
        "keys": "make_keys",
        "pools": "make_pool_keys",
        "heads": "mark_heads",
        "firsts": "find_firsts",
        "slots": "give_slots",
    },
    "fill": {"lengths": "fill_lengths", "asked": "fill_asked", "pooled": "fill_pooled", "sequence": "fill_sequence"},
    "regroup": {"values": "regroup_values", "borders": "regroup_borders"},
    "gather": {"rows": "gather_rows"},
    "network_forward": {"pool": "pool_network"},
    "network_backward": {"spread": "spread_network"},
    "pack": {"rows": "pack_rows"},
    "unpack": {"rows": "unpack_rows"},
}
"""The kernels of each stage, in the order of their launches, and the function that each of them calls."""


def symbol_of(plan: StagePlan, stage: str, kernel: str) -> str:
    """A kernel's name in the binary."""
    return f"{plan.symbol}_{stage}_{kernel}"


def stage_facts(plan: StagePlan) -> dict[str, Any]:
    """Everything that `cuda/stages/stages.cu.j2` names."""
    arch = arch_named(plan.arch)
    formats = {plan.wire_dtype, plan.gradient_dtype, plan.output_dtype}
    narrow = {form.name: rounding(form.name, arch) for form in narrow_floats(formats)}
    return {
        **head_facts(plan, STAGE_NOTES),
        # For the primitives and numbers that all CUDA sources share.
        "load_hint": "",
        "load_bytes": [16, 8, 4, 2],
        **format_facts(formats | {"fp32"}, arch, written=formats, packed=[form.name for form in PACKED]),
        "output_dtype": "fp32",
        "narrow": None,
        "narrow_formats": narrow,
        "roundings": set(narrow.values()),
        "threads": THREADS,
        "chunk": CHUNK,
        "counters": COUNTERS,
        "samples": SAMPLES,
        "row_bits": ROW_BITS,
        "absent": stages.ABSENT,
        "actions": stages.ACTIONS,
        "selecting": plan.selections,
        "divisors": Divisor,
        "bounds": stages.BOUNDS,
        "packings": PACKED,
        "records": stage_records(),
        "mistakes": stages.MISTAKES,
        "structs": {stage: "".join(word.title() for word in stage.split("_")) for stage in STAGES},
        "arguments": {stage: arguments_of(plan.target, stage) for stage in STAGES},
        "kernels": [
            {"stage": stage, "symbol": symbol_of(plan, stage, name), "function": function}
            for stage, kernels in KERNELS.items()
            for name, function in kernels.items()
        ],
        **stage_types(plan),
    }
