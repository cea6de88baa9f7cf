"""Facts about each target that the tuner needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from embforge.tuner.search import constraints_cpu, constraints_cuda
from embforge.tuner.search.constraints import Context, Rules

OPS = ("forward", "backward")


@dataclass(frozen=True)
class Tuning:
    """The rules by which a target's plans are searched, and how much its memory moves at once."""

    rules: Mapping[str, Callable[[Context], Rules]]
    """For each op, the rules that say which points are worth a trial."""
    unit_bytes: int
    """The least number of bytes that memory moves."""
    unit_name: str


_CPU = Tuning({"forward": constraints_cpu.forward_rules, "backward": constraints_cpu.backward_rules}, 64, "cache lines")
_GPU = Tuning({"forward": constraints_cuda.forward_rules, "backward": constraints_cuda.backward_rules}, 32, "sectors")

TUNINGS: dict[str, Tuning] = {"cpu": _CPU, "cuda": _GPU, "simt": _GPU}
"""The facts by target. The reference has nothing to tune."""
