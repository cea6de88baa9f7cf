"""Writes results into docs/benchmarks.md, between markers, and draws the plot that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.criteria import Verdict, batch_speedups
from benchmarks.output import Sheet, replace_between
from benchmarks.plot import draw
from benchmarks.suites import FORWARD, Suite
from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench.peers import PEERS
from embforge.tuner.bench.report import BenchReport
from embforge.tuner.measure.paired import Ratio

PAGE = "benchmarks.md"
FACTS = ("cpu", "threads", "last_level_cache", "system", "torch", "fbgemm", "embforge")
SPELLED = {"fbgemm": "FBGEMM", "limit": "limit"}


def write_page(
    docs: Path,
    workloads: Sequence[BenchWorkload],
    reports: Sequence[BenchReport],
    verdicts: Sequence[Sequence[Verdict]],
    overall: Sequence[Verdict],
    suite: Suite = FORWARD,
) -> Path:
    """Replaces the suite's results and targets in docs/benchmarks.md and draws its plot.

    `ValueError` without the markers.
    """
    page = docs / PAGE
    replace_between(page, suite.begin, suite.end, results_markdown(workloads, reports, verdicts, suite))
    named = [(f"{w.name}: ", v) for w, judged in zip(workloads, verdicts, strict=True) for v in judged]
    lines = target_lines([*(("", v) for v in overall), *(pair for pair in named if not pair[1].passed)])
    replace_between(page, suite.begin_targets, suite.end_targets, lines)
    draw(docs / suite.plot, workloads, reports, suite)
    return page


def facts_line(machine: dict[str, str]) -> str:
    """The line that says when, on which machine and with which versions it was measured."""
    return f"{machine['date']}; " + ", ".join(f"{key.replace('_', ' ')} {machine[key]}" for key in FACTS) + "."


def results_markdown(
    workloads: Sequence[BenchWorkload],
    reports: Sequence[BenchReport],
    verdicts: Sequence[Sequence[Verdict]],
    suite: Suite = FORWARD,
) -> str:
    """The suite's part of the page: a sentence that sums it up, the machine, the plot and how to read it, and a table
    of all workloads."""
    lines = [
        *summary_lines(workloads, reports, suite),
        facts_line(reports[0].machine),
        "",
        f"![Speed against torch and FBGEMM, and share of the {suite.limit}, by workload]({suite.plot})",
        "",
        *caption_lines(suite),
        "",
        f"Times in microseconds per {'step' if suite.name == 'training' else 'call'} (medians); ratios are medians of "
        "paired rounds with their 95 % interval.",
        "",
        sheet(workloads, reports, verdicts, suite, loads=True).markdown(),
    ]
    reasons = {f"{name}: {why}" for report in reports for name, why in report.skipped.items()}
    lines += [*(f"- Left out: {reason}." for reason in sorted(reasons)), ""] if reasons else []
    return "\n".join(lines)


def sheet(
    workloads: Sequence[BenchWorkload],
    reports: Sequence[BenchReport],
    verdicts: Sequence[Sequence[Verdict]],
    suite: Suite,
    *,
    loads: bool = False,
) -> Sheet:
    """The table of a suite: times in microseconds, the peers' times divided by ours, shares of the limits, and whether
    targets are reached."""
    training = suite.name == "training"
    names = [SPELLED.get(name, name) for name in suite.columns]
    shares = ["of the limit", *(["of both limits"] if training else [])]
    headings = ["workload", *(["load"] if loads else []), *names, "vs torch", "vs FBGEMM", *shares, "targets"]
    rows = []
    for workload, report, judged in zip(workloads, reports, verdicts, strict=True):
        load = [f"`{workload.load}`"] if loads else []
        times = [_time(report, name) for name in suite.columns]
        ratios = [_ratio(report, name) for name in PEERS]
        limit_shares = [report.limit_share, *([report.both_share] if training else [])]
        reached = word_for(all(v.passed for v in judged))
        rows.append([workload.name, *load, *times, *ratios, *map(_share, limit_shares), reached])
    return Sheet(headings, rows, words=1 + loads)


def summary_lines(workloads: Sequence[BenchWorkload], reports: Sequence[BenchReport], suite: Suite) -> list[str]:
    """The sentence that says how many times as fast as the faster peer we are, over all workloads with more than one
    sample; no lines if no peer took part."""
    speedups = batch_speedups(workloads, reports)
    if not speedups:
        return []
    mean = geometric_mean(speedups)
    what = "Training steps" if suite.name == "training" else "Lookups of whole batches"
    return [
        f"**{what} are {min(speedups):.1f} to {max(speedups):.1f} times as fast as with the faster of torch and "
        f"FBGEMM, {mean:.1f} times in the geometric mean over {len(speedups)} workloads.**",
        "",
    ]


def caption_lines(suite: Suite) -> list[str]:
    """The lines that explain the marks of the plot."""
    targets = suite.targets
    changed = "changed" if suite.name == "training" else "read"
    return [
        "*How to read it.* Left: a dot per peer, at how many times as fast as it embforge is; the stroke through a dot "
        "is the 95 % interval. The solid line is equal speed, the dashed one the target over the faster peer "
        f"({targets.over_peers:g}×). Right: the speed at which rows can be {changed} at all on this machine (the "
        f"{suite.limit}) is 100 %, the solid line; a bar is the share of it that embforge reaches, and the dashed line "
        f"the target for tables far past the cache ({targets.of_limit_large:.0%}).",
    ]


def target_lines(named: Sequence[tuple[str, Verdict]]) -> str:
    """One line per target: whether it is reached, the name of its workload if it has one, and what was measured."""
    words = {True: "target reached", False: "**target not reached**"}
    lines = [f"- {words[v.passed]}: {where}{v.criterion}; measured {v.measured}." for where, v in named]
    return "\n".join(lines) + "\n"


def word_for(passed: bool) -> str:
    """The page's words for targets that are reached or not."""
    return "reached" if passed else "**not reached**"


def _time(report: BenchReport, name: str) -> str:
    timing = report.timing(name)
    return f"{timing.median:,.1f}" if timing else "-"


def _ratio(report: BenchReport, name: str) -> str:
    ratio = report.ratios.get(name)
    if ratio is None:
        return "no such peer" if name in report.skipped else "-"
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _share(ratio: Ratio | None) -> str:
    return f"{ratio.median:.1%}" if ratio else "-"
