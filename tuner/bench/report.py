"""What a benchmark found out: times, ratios, shares, and the machine it ran on."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from embforge.codegen.machine import cpu_model, package_version
from embforge.codegen.reading.numbers import size
from embforge.codegen.tuned.hardware import this_cpu
from embforge.tuner.measure.paired import Measurement, Ratio
from embforge.tuner.measure.quiet import QUIET
from embforge.tuner.measure.timers import USUAL_CACHE_BYTES

OURS = "embforge"
LIMIT = "limit"
GATHER_LIMIT = "gather limit"
"""The gather limit's name where the update limit has `LIMIT`."""


@dataclass(frozen=True)
class Timing:
    """One contender's time a call, in microseconds."""

    name: str
    note: str
    """How the library was called, or what the limit prefetched."""
    median: float
    low: float
    high: float
    """20 % and 80 % quantiles."""
    repeats: int
    samples: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport:
    """One workload's result. Ratios are paired by round: above 1 means that we are faster."""

    spec: str
    workload: str
    on: str
    batches: int
    ids: int
    """Mean ids a batch."""
    row_bytes: int
    """Mean bytes of rows that a batch reads."""
    table_bytes: int
    timings: tuple[Timing, ...]
    ratios: dict[str, Ratio]
    """Each peer's time over ours."""
    limit_share: Ratio | None
    """The limit's time over ours: 1 means that rows cannot be read (a lookup) or changed (a training step) faster."""
    differences: dict[str, float]
    """Largest difference of each contender's outputs from the first one's (in training: of its new rows from what its
    rule says), relative to the largest number."""
    disagreeing: tuple[str, ...]
    """Contenders that differ by more than rounding explains."""
    skipped: dict[str, str]
    """Peers that could not take part, and why."""
    others: float | None
    """CPUs that other processes used on average meanwhile, where the system tells."""
    machine: dict[str, str]
    train: str | None = None
    """The update rule of a training step; None: a lookup alone."""
    both_share: Ratio | None = None
    """Of a training step: the gather limit's and the update limit's times together over ours."""

    @property
    def disturbed(self) -> bool:
        """Whether others used so much of the machine that the times are not to be trusted."""
        return self.others is not None and self.others > QUIET

    @property
    def fastest_peer(self) -> str | None:
        """The peer that comes closest to us (or is furthest ahead)."""
        return min(self.ratios, key=lambda name: self.ratios[name].median, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the fastest peer we are."""
        return self.ratios[self.fastest_peer].median if self.fastest_peer is not None else None

    def timing(self, name: str) -> Timing | None:
        """The contender's timing, if it took part."""
        return next((t for t in self.timings if t.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data, all samples included."""
        return {
            **asdict(self),
            "fastest_peer": self.fastest_peer,
            "speedup": self.speedup,
            "disturbed": self.disturbed,
        }


def timings_of(taken: Measurement, notes: dict[str, str]) -> tuple[Timing, ...]:
    """All contenders' timings, in microseconds."""
    return tuple(_timing(taken, name, notes[name]) for name in taken.samples)


def machine_facts() -> dict[str, str]:
    """What a reader must know about the machine to judge a time."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "last_level_cache": size(last_level_cache_bytes(), binary=True),
        "load_before": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fbgemm": package_version("fbgemm-gpu-cpu") or package_version("fbgemm-gpu") or "not installed",
        "embforge": package_version("embforge") or "not installed",
    }


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the system tells of, or a usual one."""
    sizes = this_cpu().sizes
    return max((sizes[name] for name in sizes if name.endswith("_bytes")), default=USUAL_CACHE_BYTES)


def _timing(taken: Measurement, name: str, note: str) -> Timing:
    low, high = taken.spread(name)
    samples = tuple(round(s * 1e6, 3) for s in taken.samples[name])
    return Timing(name, note, taken.median(name) * 1e6, low * 1e6, high * 1e6, taken.repeats[name], samples)
