"""Puts results into docs/benchmarks.md, between markers, with the plot beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.criteria import Verdict
from benchmarks.plot import draw
from benchmarks.suites import FORWARD, Suite
from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench_report import BenchReport
from embforge.tuner.measure import Ratio
from embforge.tuner.peers import PEERS

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
    """Replaces the suite's results in docs/benchmarks.md and draws its plot. `ValueError` without the markers."""
    page = docs / PAGE
    replace_between(page, suite.begin, suite.end, results_markdown(workloads, reports, verdicts, overall, suite))
    draw(docs / suite.plot, workloads, reports, suite)
    return page


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Puts `text` between two lines of a page. `ValueError` if they are not there."""
    old = page.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{page} has lost its markers {begin} and {end}; put them around the results")
    head, rest = old.split(begin, 1)
    tail = rest.split(end, 1)[1]
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def facts_line(machine: dict[str, str]) -> str:
    """When and where it was measured."""
    return f"{machine['date']}; " + ", ".join(f"{key.replace('_', ' ')} {machine[key]}" for key in FACTS) + "."


def results_markdown(
    workloads: Sequence[BenchWorkload],
    reports: Sequence[BenchReport],
    verdicts: Sequence[Sequence[Verdict]],
    overall: Sequence[Verdict],
    suite: Suite = FORWARD,
) -> str:
    """The machine, the plot, a table of all workloads and every criterion that was missed."""
    training = suite.name == "training"
    names = [SPELLED.get(name, name) for name in suite.columns]
    shares = ["of the limit", *(["of both limits"] if training else [])]
    headings = ["workload", "load", *names, "vs torch", "vs FBGEMM", *shares, "verdict"]
    numbers = len(headings) - 3
    lines = [
        facts_line(reports[0].machine),
        "",
        f"![Speed against torch and FBGEMM, and share of the {suite.limit}, by workload]({suite.plot})",
        "",
        f"Times in microseconds a {'step' if training else 'call'} (medians); ratios are medians of paired rounds with "
        "their 95 % interval.",
        "",
        f"| {' | '.join(headings)} |",
        "|---|---|" + "--:|" * numbers + "---|",
    ]
    for workload, report, judged in zip(workloads, reports, verdicts, strict=True):
        times = [_time(report, name) for name in suite.columns]
        ratios = [_ratio(report, name) for name in PEERS]
        of = [report.limit_share, *([report.both_share] if training else [])]
        passed = "pass" if all(v.passed for v in judged) else "**miss**"
        cells = [workload.name, f"`{workload.load}`", *times, *ratios, *map(_share, of), passed]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {_word(v)}: {v.criterion}; measured {v.measured}." for v in overall)]
    for workload, judged in zip(workloads, verdicts, strict=True):
        lines += [f"- **miss**: {workload.name}: {v.criterion}; measured {v.measured}." for v in judged if not v.passed]
    reasons = {f"{name}: {why}" for report in reports for name, why in report.skipped.items()}
    lines += [f"- Left out: {reason}." for reason in sorted(reasons)]
    return "\n".join(lines) + "\n"


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


def _word(verdict: Verdict) -> str:
    return "pass" if verdict.passed else "**miss**"
