"""Puts results into docs/benchmarks.md, between markers, with the plot beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.criteria import Verdict
from benchmarks.plot import draw
from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench import LIMIT, OURS, BenchReport
from embforge.tuner.measure import Ratio

PAGE, PLOT = "benchmarks.md", "benchmarks.svg"
BEGIN, END = "<!-- results: written by make bench -->", "<!-- end of results -->"
FACTS = ("cpu", "threads", "last_level_cache", "system", "torch", "fbgemm", "embforge")


def write_page(
    docs: Path,
    workloads: Sequence[BenchWorkload],
    reports: Sequence[BenchReport],
    verdicts: Sequence[Sequence[Verdict]],
    overall: Sequence[Verdict],
) -> Path:
    """Replaces the results in docs/benchmarks.md and draws docs/benchmarks.svg. `ValueError` without the markers."""
    page = docs / PAGE
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has lost its markers {BEGIN} and {END}; put them around the results")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    results = results_markdown(workloads, reports, verdicts, overall)
    page.write_text(f"{head}{BEGIN}\n\n{results}\n{END}{tail}", encoding="utf-8")
    draw(docs / PLOT, workloads, reports)
    return page


def results_markdown(
    workloads: Sequence[BenchWorkload],
    reports: Sequence[BenchReport],
    verdicts: Sequence[Sequence[Verdict]],
    overall: Sequence[Verdict],
) -> str:
    """The machine, the plot, a table of all workloads and every criterion that was missed."""
    machine = reports[0].machine
    facts = ", ".join(f"{key.replace('_', ' ')} {machine[key]}" for key in FACTS)
    lines = [
        f"{machine['date']}; {facts}.",
        "",
        f"![Speed against torch and FBGEMM, and share of the gather limit, by workload]({PLOT})",
        "",
        "Times in microseconds a call (medians); ratios are medians of paired rounds with their 95 % interval.",
        "",
        "| workload | load | embforge | torch | FBGEMM | limit | vs torch | vs FBGEMM | of the limit | verdict |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for workload, report, judged in zip(workloads, reports, verdicts, strict=True):
        times = [_time(report, name) for name in (OURS, "torch", "fbgemm", LIMIT)]
        ratios = [_ratio(report.ratios.get(name)) for name in ("torch", "fbgemm")]
        share = f"{report.limit_share.median:.1%}" if report.limit_share else "-"
        passed = "pass" if all(v.passed for v in judged) else "**miss**"
        cells = [workload.name, f"`{workload.load}`", *times, *ratios, share, passed]
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


def _ratio(ratio: Ratio | None) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "-"


def _word(verdict: Verdict) -> str:
    return "pass" if verdict.passed else "**miss**"
