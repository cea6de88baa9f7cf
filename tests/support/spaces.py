"""Spaces of parameters to search, for a few specs and rules."""

from __future__ import annotations

from functools import cache

from embforge.codegen.machine import host_isa
from embforge.codegen.plans import update_named
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.tuned.hardware import any_gpu
from embforge.codegen.tuned.record import Hardware
from embforge.tuner.search.constraints import Context
from embforge.tuner.search.space import (
    Space,
    space_of,
)

TWO_CORES = Hardware("cpu", "two cores", {"simd": host_isa()}, {"cores": 2})


SPECS = {
    "usual": CollectionSpec([TableSpec("t", 100_000, 64)], [FeatureSpec("f", "t")]),
    "rich": CollectionSpec(
        [TableSpec("a", 50_000, 33, "fp16"), TableSpec("b", 300, 48, "bf16"), TableSpec("c", 5000, 64)],
        [
            FeatureSpec("f", "a", "mean"),
            FeatureSpec("g", "b", "none"),
            FeatureSpec("h", "c", "concat", hotness=3),
            FeatureSpec("w", "a", "sum", weighted=True),
        ],
        "fp16",
    ),
    "copied": CollectionSpec([TableSpec("t", 50_000, 33, "fp16")], [FeatureSpec("f", "t", "none")]),
    "cached": CollectionSpec([TableSpec("t", 200, 4)], [FeatureSpec("f", "t")]),
}


RULES = {None: None, "none": None, "adam": update_named("adam"), "sgd": update_named("sgd")}


def context_of(target: str, spec: str = "usual", rule: str | None = None, arch: str | None = None) -> Context:
    """The context of a forward, or of a backward if a rule is named."""
    arch = arch or (host_isa() if target == "cpu" else "sm_100" if spec == "rich" else "sm_90")
    hardware = TWO_CORES if target == "cpu" else any_gpu(arch)
    return Context("backward" if rule else "forward", target, arch, SPECS[spec], hardware, RULES[rule])


@cache
def made(target: str, spec: str = "usual", rule: str | None = None, arch: str | None = None) -> Space:
    c = context_of(target, spec, rule, arch)
    return space_of(c.op, target, c.arch, c.spec, c.hardware, c.update)
