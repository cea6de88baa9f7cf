"""The stages between ranks, whatever runs them: one call for each, by the names of its arguments.

`run("regroup", segments=..., words=..., ...)` takes tensors, whole numbers and None (a null pointer), all results among
them made by the caller. Arguments are those of `codegen/stages.py`; what a backend needs beside them it finds itself.
"""

from __future__ import annotations

from embforge.codegen.stages import StagePlan
from embforge.launch.launchers import launchers_of
from embforge.launch.stage_calls import Stages


def stages_of(plan: StagePlan, kernels: str | None = None) -> Stages:
    """The plan's stages, built and loaded on first use. Raises what `build` raises."""
    key = (plan.text, kernels)
    found = _LOADED.get(key)
    if found is None:
        found = _LOADED.setdefault(key, launchers_of(plan.target).stages(plan, kernels, tuple))
    return found


_LOADED: dict[tuple[str, str | None], Stages] = {}
"""A cache: a plan's text decides its library."""
