"""The stages between ranks, on every backend: one call for each, with arguments by name.

`run("regroup", segments=..., words=..., ...)` takes tensors, whole numbers and None (a null pointer). The caller
allocates all results and passes them as arguments. The arguments are those of `codegen/stages.py`; a backend gets
whatever else it needs, such as work space, by itself.
"""

from __future__ import annotations

from embforge.codegen.stages import StagePlan
from embforge.launch.launchers import launchers_of
from embforge.launch.stage_calls import Stages


def stages_of(plan: StagePlan, kernels: str | None = None) -> Stages:
    """The stages of a plan, built and loaded on first use. Raises what `build` raises."""
    key = (plan.text, kernels)
    stages = _LOADED.get(key)
    if stages is None:
        stages = _LOADED.setdefault(key, launchers_of(plan.target).stages(plan, kernels, tuple))
    return stages


_LOADED: dict[tuple[str, str | None], Stages] = {}
"""Loaded stages by the text of their plan and the directory of kernels, which determine them."""
