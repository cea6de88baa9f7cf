"""What the kernels must reach, judged workload by workload. A miss is printed, never hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench.report import BenchReport
from embforge.tuner.measure.quiet import QUIET


@dataclass(frozen=True)
class Bars:
    """What a suite's workloads are held against."""

    over_peers: float
    """Times the faster peer's speed, on every workload."""
    of_limit_instead: float | None
    """A share of the limit that makes up for a missed `over_peers`."""
    of_limit_large: float
    """Share of the limit on tables far past the cache."""
    geometric_mean: float
    """Times the faster peer's speed, over all workloads."""


FORWARD = Bars(over_peers=1.2, of_limit_instead=0.9, of_limit_large=0.8, geometric_mean=1.5)
TRAINING = Bars(over_peers=1.5, of_limit_instead=None, of_limit_large=0.6, geometric_mean=2.5)


@dataclass(frozen=True)
class Verdict:
    """One criterion on one workload (or on all): what was asked, what was measured, whether it holds."""

    criterion: str
    measured: str
    passed: bool


def bars_of(workload: BenchWorkload) -> Bars:
    """A lookup's or a training step's."""
    return FORWARD if workload.train is None else TRAINING


def judge(workload: BenchWorkload, report: BenchReport) -> list[Verdict]:
    """The verdicts of one workload; criteria whose contenders did not run are left out."""
    bars = bars_of(workload)
    what = "outputs agree" if workload.train is None else "rows follow the rule"
    verdicts = [
        Verdict(what, f"{name} differs by {report.differences[name]:.1e}", False) for name in report.disagreeing
    ]
    if report.disturbed:
        asked = f"others use at most {QUIET:g} CPUs meanwhile"
        verdicts.append(Verdict(asked, f"{report.others:.2f} CPUs: measure again", False))
    if workload.against_torch is not None:
        if "torch" in report.ratios:
            ratio = report.ratios["torch"].median
            asked = f"{workload.against_torch:g}x the nn.EmbeddingBag loop"
            verdicts.append(Verdict(asked, f"{ratio:.2f}x", ratio >= workload.against_torch))
        return verdicts
    share = report.limit_share.median if report.limit_share else None
    if report.speedup is not None:
        instead = bars.of_limit_instead
        near_limit = share is not None and instead is not None and share >= instead
        measured = f"{report.speedup:.2f}x" + (f", {share:.1%}" if share is not None and instead is not None else "")
        asked = f"{bars.over_peers}x the faster peer" + (f" or {instead:.0%} of the limit" if instead else "")
        verdicts.append(Verdict(asked, measured, report.speedup >= bars.over_peers or near_limit))
    if workload.group == "large" and share is not None:
        asked = f"{bars.of_limit_large:.0%} of the limit"
        verdicts.append(Verdict(asked, f"{share:.1%}", share >= bars.of_limit_large))
    return verdicts


def judge_all(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport]) -> list[Verdict]:
    """The verdict over all workloads of a suite together."""
    speedups = batch_speedups(workloads, reports)
    if not speedups:
        return []
    mean, asked = geometric_mean(speedups), bars_of(workloads[0]).geometric_mean
    return [Verdict(f"geometric mean {asked}x the faster peer", f"{mean:.2f}x", mean >= asked)]


def batch_speedups(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport]) -> list[float]:
    """Speedups over the faster peer, where one took part; those of one sample would flatter and are left out."""
    pairs = zip(workloads, reports, strict=True)
    return [r.speedup for w, r in pairs if w.group != "overhead" and r.speedup is not None]
