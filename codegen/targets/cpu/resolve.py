"""The facts of `cpu/resolve/resolve.cpp.j2`: the step that turns ids into rows, on the host."""

from __future__ import annotations

from typing import Any

from embforge.codegen.describe import describe_remaps, head_facts
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.kernel import Outcome, arguments_of, records_of
from embforge.codegen.plan import Plan
from embforge.codegen.spec import NO_ROW
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of

IDS_PER_JOB = 16384
IDS_AHEAD = 16
"""How many ids ahead entries of a remap are requested, because they are read in random order."""


def resolve_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cpu/resolve/resolve.cpp.j2` names."""
    return {
        "compile_line": " ".join(["c++", *FLAGS, *isa_of(plan).flags]),
        "outcomes": Outcome,
        "ids_per_job": IDS_PER_JOB,
        "ids_ahead": IDS_AHEAD,
        "constants": "",
        **remap_facts(plan),
    }


def remap_facts(plan: Plan) -> dict[str, Any]:
    """The facts about a plan's remaps that the sources of all targets need."""
    arguments = arguments_of(plan.target, plan.op)
    return {
        **head_facts(plan, describe_remaps(plan)),
        "id_type": DTYPES[plan.id_dtype].c_type,
        "no_row": NO_ROW,
        "arguments": arguments,
        "records": records_of(arguments),
        "features": _features(plan),
    }


def _features(plan: Plan) -> list[dict[str, Any]]:
    remapped = {table.name: index for index, table in enumerate(plan.spec.tables) if not table.ids_are_rows}
    return [
        {
            "name": feature.name,
            "table": remapped.get(feature.table, -1),
            "has_padding": "true" if feature.padding_idx is not None else "false",
            "padding": feature.padding_idx or 0,
        }
        for feature in plan.spec.features
    ]
