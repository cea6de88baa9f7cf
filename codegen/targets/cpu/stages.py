"""The facts of `cpu/stages/stages.cpp.j2`: the stages between ranks, on the host."""

from __future__ import annotations

from typing import Any

from embforge.codegen import stages
from embforge.codegen.argument import Record
from embforge.codegen.describe import head_facts
from embforge.codegen.dtypes import DTYPES, narrow_floats
from embforge.codegen.kernel import StageOutcome, arguments_of, records_of
from embforge.codegen.poolings import Divisor
from embforge.codegen.semantics import CHUNK
from embforge.codegen.stages import PACKED, STAGES, StagePlan
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of

STAGE_NOTES = (
    "count, fill: distribute ids to the ranks that own their rows. regroup: puts received ids into a lookup's order.",
    "gather: copies pools that were asked for to where they are sent from.",
    "network_forward, network_backward: partial pools to results, and gradients back.",
    "pack, unpack: rows to bytes with scales, and back.",
)
"""What the stages do, for the head comment of their source."""


def stage_records() -> tuple[Record, ...]:
    """The records in the metadata arrays of all stages, for the source's enums."""
    return records_of(argument for stage in STAGES.values() for argument in stage.arguments)


def stage_types(plan: StagePlan) -> dict[str, str]:
    """The C types of the plan's formats."""
    return {
        "id_type": DTYPES[plan.id_dtype].c_type,
        "wire_id_type": DTYPES[plan.wire_id_dtype].c_type,
        "wire_type": DTYPES[plan.wire_dtype].c_type,
        "gradient_type": DTYPES[plan.gradient_dtype].c_type,
        "out_type": DTYPES[plan.output_dtype].c_type,
    }


def stage_facts(plan: StagePlan) -> dict[str, Any]:
    """Everything that `cpu/stages/stages.cpp.j2` names."""
    isa, formats = isa_of(plan), (plan.wire_dtype, plan.gradient_dtype, plan.output_dtype)
    return {
        **head_facts(plan, STAGE_NOTES),
        "compile_line": " ".join(["c++", *FLAGS, *isa.flags]),
        "isa": isa,
        "formats": narrow_floats([*formats, *(form.name for form in PACKED)]),
        "packings": PACKED,
        "chunk": CHUNK,
        "absent": stages.ABSENT,
        "actions": stages.ACTIONS,
        "selecting": plan.selections,
        "divisors": Divisor,
        "bounds": stages.BOUNDS,
        "records": stage_records(),
        "outcomes": StageOutcome,
        "mistakes": stages.MISTAKES,
        "arguments": {name: arguments_of(plan.target, name) for name in STAGES},
        **stage_types(plan),
    }
