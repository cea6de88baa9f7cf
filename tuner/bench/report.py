"""The result of a benchmark: times, ratios, shares, and the machine it ran on."""

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
"""The gather limit's name in a training benchmark, where `LIMIT` names the update limit."""


@dataclass(frozen=True)
class Timing:
    """One contender's time per call, in microseconds."""

    name: str
    note: str
    """How the library was called, or what the limit does and how it prefetches."""
    median: float
    low: float
    high: float
    """`low` and `high` are the 20 % and 80 % quantiles."""
    repeats: int
    samples: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport:
    """The result for one spec and workload. Ratios are paired by round: above 1 means that we are faster."""

    spec: str
    workload: str
    on: str
    batches: int
    ids: int
    """Ids per batch, on average."""
    row_bytes: int
    """Bytes of rows that a batch reads, on average."""
    table_bytes: int
    timings: tuple[Timing, ...]
    ratios: dict[str, Ratio]
    """Each peer's time divided by ours."""
    limit_share: Ratio | None
    """The limit's time divided by ours: 1 means that rows cannot be read (lookup) or changed (training step) faster."""
    differences: dict[str, float]
    """For each contender: the largest difference between its outputs and those of the first contender, relative to the
    largest number. In training it is the difference between its new rows and those that its rule's formula gives."""
    disagreeing: tuple[str, ...]
    """Contenders whose difference is larger than rounding explains."""
    skipped: dict[str, str]
    """Peers that could not take part, and why."""
    others: float | None
    """CPUs that other processes used on average during the measurement; None if the system does not report it."""
    machine: dict[str, str]
    train: str | None = None
    """The update rule of a training step; None if only a lookup was timed."""
    both_share: Ratio | None = None
    """For a training step: the sum of the gather limit's and the update limit's times, divided by our time."""

    @property
    def disturbed(self) -> bool:
        """Whether other processes used so much of the machine that the times cannot be trusted."""
        return self.others is not None and self.others > QUIET

    @property
    def fastest_peer(self) -> str | None:
        """The peer with the shortest time relative to ours; None if no ratio was measured."""
        return min(self.ratios, key=lambda name: self.ratios[name].median, default=None)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the fastest peer we are; None if no ratio was measured."""
        return self.ratios[self.fastest_peer].median if self.fastest_peer is not None else None

    def timing(self, name: str) -> Timing | None:
        """The contender's timing; None if it did not take part."""
        return next((t for t in self.timings if t.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data that `json` can write, with all samples."""
        return {
            **asdict(self),
            "fastest_peer": self.fastest_peer,
            "speedup": self.speedup,
            "disturbed": self.disturbed,
        }


def timings_of(measurement: Measurement, notes: dict[str, str]) -> tuple[Timing, ...]:
    """The timings of all contenders, in microseconds."""
    return tuple(_timing(measurement, name, notes[name]) for name in measurement.samples)


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
    """Size of the largest cache that the system reports, or a typical size if it reports none."""
    sizes = this_cpu().sizes
    return max((sizes[name] for name in sizes if name.endswith("_bytes")), default=USUAL_CACHE_BYTES)


def _timing(measurement: Measurement, name: str, note: str) -> Timing:
    low, high = measurement.spread(name)
    samples = tuple(round(s * 1e6, 3) for s in measurement.samples[name])
    return Timing(name, note, measurement.median(name) * 1e6, low * 1e6, high * 1e6, measurement.repeats[name], samples)
