"""The targets of the kernels, judged workload by workload. A missed target is always printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench.report import BenchReport
from embforge.tuner.measure.quiet import QUIET


@dataclass(frozen=True)
class Targets:
    """The targets of a suite's workloads."""

    over_peers: float
    """How many times as fast as the faster peer every workload must be."""
    of_limit_instead: float | None
    """A workload that reaches this share of the limit passes even if it misses `over_peers`."""
    of_limit_large: float
    """The share of the limit that workloads with tables far larger than the cache must reach."""
    geometric_mean: float
    """How many times as fast as the faster peer all workloads must be, by the geometric mean."""


FORWARD = Targets(over_peers=1.2, of_limit_instead=0.9, of_limit_large=0.8, geometric_mean=1.5)
TRAINING = Targets(over_peers=1.5, of_limit_instead=None, of_limit_large=0.6, geometric_mean=2.5)


@dataclass(frozen=True)
class Verdict:
    """One target for one workload (or for all of them): what is asked, what was measured, and whether it is reached."""

    criterion: str
    measured: str
    passed: bool


def targets_of(workload: BenchWorkload) -> Targets:
    """The targets of a workload's suite."""
    return FORWARD if workload.train is None else TRAINING


def judge(workload: BenchWorkload, report: BenchReport) -> list[Verdict]:
    """The verdicts on one workload. Targets whose contenders did not run are left out."""
    targets = targets_of(workload)
    what = "outputs agree" if workload.train is None else "rows follow the rule"
    verdicts = [
        Verdict(what, f"{name} differs by {report.differences[name]:.1e}", False) for name in report.disagreeing
    ]
    if report.disturbed:
        asked = f"other processes use at most {QUIET:g} CPUs"
        verdicts.append(Verdict(asked, f"{report.others:.2f} CPUs: measure again", False))
    if workload.against_torch is not None:
        if "torch" in report.ratios:
            ratio = report.ratios["torch"].median
            asked = f"{workload.against_torch:g}x the nn.EmbeddingBag loop"
            verdicts.append(Verdict(asked, f"{ratio:.2f}x", ratio >= workload.against_torch))
        return verdicts
    share = report.limit_share.median if report.limit_share else None
    if report.speedup is not None:
        instead = targets.of_limit_instead
        near_limit = share is not None and instead is not None and share >= instead
        measured = f"{report.speedup:.2f}x" + (f", {share:.1%}" if share is not None and instead is not None else "")
        asked = f"{targets.over_peers}x the faster peer" + (f" or {instead:.0%} of the limit" if instead else "")
        verdicts.append(Verdict(asked, measured, report.speedup >= targets.over_peers or near_limit))
    if workload.group == "large" and share is not None:
        asked = f"{targets.of_limit_large:.0%} of the limit"
        verdicts.append(Verdict(asked, f"{share:.1%}", share >= targets.of_limit_large))
    return verdicts


def judge_all(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport]) -> list[Verdict]:
    """The verdict on all workloads of a suite together; none if no peer took part."""
    speedups = batch_speedups(workloads, reports)
    if not speedups:
        return []
    mean, asked = geometric_mean(speedups), targets_of(workloads[0]).geometric_mean
    return [Verdict(f"geometric mean {asked}x the faster peer", f"{mean:.2f}x", mean >= asked)]


def batch_speedups(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport]) -> list[float]:
    """The speedups over the faster peer, for workloads in which a peer took part. Workloads of one sample are left out:
    they compare overheads, and their large ratios would raise the mean."""
    pairs = zip(workloads, reports, strict=True)
    return [r.speedup for w, r in pairs if w.group != "overhead" and r.speedup is not None]
