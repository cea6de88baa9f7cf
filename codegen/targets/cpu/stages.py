"""What `cpu/stages/stages.cpp.j2` says of a plan of the stages between ranks."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from embforge.codegen import stages
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.semantics import CHUNK
from embforge.codegen.stages import STAGES, StagePlan, stage_arguments, stage_prototype
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of


def word_enums() -> list[tuple[str, tuple[str, ...]]]:
    """Names of the words of every metadata array, for the source's enums."""
    return [
        ("FEATURE", stages.FEATURE_WORDS),
        ("BUCKETING", stages.BUCKETING_WORDS),
        ("STREAM", stages.STREAM_WORDS),
        ("PLACE", stages.PLACE_WORDS),
        ("SEGMENT", stages.SEGMENT_WORDS),
        ("PICK", stages.PICK_WORDS),
        ("PIECE", stages.PIECE_WORDS),
        ("SOURCE", stages.SOURCE_WORDS),
        ("PART", stages.PART_WORDS),
    ]


def stage_types(plan: StagePlan) -> dict[str, str]:
    """The C types that the plan's formats are."""
    return {
        "id_type": DTYPES[plan.id_dtype].c_type,
        "wire_id_type": DTYPES[plan.wire_id_dtype].c_type,
        "wire_type": DTYPES[plan.wire_dtype].c_type,
        "gradient_type": DTYPES[plan.gradient_dtype].c_type,
        "out_type": DTYPES[plan.output_dtype].c_type,
    }


def stage_facts(plan: Any) -> dict[str, Any]:
    """Everything `cpu/stages/stages.cpp.j2` names."""
    isa = isa_of(plan)
    return {
        "uri": plan.uri,
        "version": version("embforge"),
        "compile_line": " ".join(["c++", *FLAGS, *isa.flags]),
        "isa": isa,
        "chunk": CHUNK,
        "absent": stages.ABSENT,
        "words": word_enums(),
        "mistakes": stages.MISTAKES,
        "prototypes": {name: stage_prototype("cpu", name) for name in STAGES},
        "arguments": {name: stage_arguments("cpu", name) for name in STAGES},
        **stage_types(plan),
    }
