"""What the forward kernels must reach, judged workload by workload. A miss is printed, never hidden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench import BenchReport
from embforge.tuner.quiet import QUIET

OVER_PEERS = 1.2
OF_LIMIT_INSTEAD = 0.9
OF_LIMIT_LARGE = 0.8
GEOMETRIC_MEAN = 1.5


@dataclass(frozen=True)
class Verdict:
    """One criterion on one workload (or on all): what was asked, what was measured, whether it holds."""

    criterion: str
    measured: str
    passed: bool


def judge(workload: BenchWorkload, report: BenchReport) -> list[Verdict]:
    """The verdicts of one workload; criteria whose contenders did not run are left out."""
    verdicts = [
        Verdict("outputs agree", f"{name} differs by {report.differences[name]:.1e}", False)
        for name in report.disagreeing
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
        near_limit = share is not None and share >= OF_LIMIT_INSTEAD
        measured = f"{report.speedup:.2f}x" + (f", {share:.1%}" if share is not None else "")
        asked = f"{OVER_PEERS}x the faster peer or {OF_LIMIT_INSTEAD:.0%} of the limit"
        verdicts.append(Verdict(asked, measured, report.speedup >= OVER_PEERS or near_limit))
    if workload.group == "large" and share is not None:
        verdicts.append(Verdict(f"{OF_LIMIT_LARGE:.0%} of the limit", f"{share:.1%}", share >= OF_LIMIT_LARGE))
    return verdicts


def judge_all(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport]) -> list[Verdict]:
    """The verdict over all forward workloads together; the overhead ones would flatter it and are left out."""
    mean = geometric_mean(workloads, reports)
    if mean is None:
        return []
    return [Verdict(f"geometric mean {GEOMETRIC_MEAN}x the faster peer", f"{mean:.2f}x", mean >= GEOMETRIC_MEAN)]


def geometric_mean(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport]) -> float | None:
    """Of the speedups over the faster peer, `overhead` left out; None without any."""
    pairs = zip(workloads, reports, strict=True)
    speedups = [r.speedup for w, r in pairs if w.group != "overhead" and r.speedup is not None]
    return math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None
