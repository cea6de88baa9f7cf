"""`python -m benchmarks.run [SUITE]`: times its workloads, prints ratios and verdicts, writes JSON, page and plot."""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.criteria import Verdict, judge, judge_all
from benchmarks.headline import write_headline
from benchmarks.page import write_page
from benchmarks.suites import SUITES, Suite, run_workload
from benchmarks.workloads import BenchWorkload, read_workloads
from embforge.tuner.bench.report import LIMIT, OURS, BenchReport
from embforge.tuner.bench.peers import PEERS
from embforge.tuner.measure.quiet import wait_until_quiet

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
CONTENDERS = (OURS, *PEERS, LIMIT)
QUICK_SECONDS = 1.0
PATIENCE = 180.0
"""Seconds of a full run that may go into waiting for a quiet machine and measuring disturbed workloads again."""


@click.command()
@click.argument("suite", type=click.Choice(sorted(SUITES)), default="forward", callback=lambda c, p, name: SUITES[name])
@click.option("--only", multiple=True, metavar="TEXT", help="Workloads whose name contains TEXT (repeatable).")
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True, help="Who takes part.")
@click.option("--quick", is_flag=True, help=f"{QUICK_SECONDS:g} s a workload, no waiting.")
@click.option("--seconds", type=float, help="Measuring time a workload.")
@click.option("--list", "list_only", is_flag=True, help="Print the workloads and stop.")
@click.option(
    "--write/--no-write", default=None, help="Results, page and plot; by default after a full undisturbed run."
)
def main(
    suite: Suite,
    only: tuple[str, ...],
    contenders: str,
    quick: bool,
    seconds: float | None,
    list_only: bool,
    write: bool | None,
) -> None:
    """Times embforge's lookups or training steps on this CPU beside torch, FBGEMM and the machine's own limits."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    names = _contenders(contenders)
    workloads = [w for w in read_workloads(suite.workloads) if not only or any(text in w.name for text in only)]
    if not workloads:
        raise click.BadParameter(f"no workload's name contains {' or '.join(only)}; --list prints them")
    if list_only:
        for workload in workloads:
            console.print(f"{workload.group:9} {workload.name:46} {workload.load}", highlight=False)
        return
    budget = seconds if seconds is not None else QUICK_SECONDS if quick else suite.seconds
    console.print(f"{len(workloads)} workloads, {torch.get_num_threads()} threads, {', '.join(names)}")
    runner = Runner(names, budget, 0.0 if quick else PATIENCE, console)
    reports = [runner.measure(workload) for workload in workloads]
    verdicts = [judge(w, r) for w, r in zip(workloads, reports, strict=True)]
    overall = judge_all(workloads, reports)
    console.print(results_table(suite, workloads, reports, verdicts))
    print_misses(console, workloads, verdicts, overall)
    full = not only and not quick and set(names) == set(CONTENDERS)
    if write if write is not None else full:
        # A busy machine's times are kept beside the others, but they do not replace a page measured in peace.
        publish = bool(write) or not any(report.disturbed for report in reports)
        _write(suite, workloads, reports, verdicts, overall, console, publish=publish)
    if not all(v.passed for group in (*verdicts, overall) for v in group):
        sys.exit(1)


class Runner:
    """Measures workloads one after the other, with some patience for a busy machine."""

    def __init__(self, names: tuple[str, ...], seconds: float, patience: float, console: Console) -> None:
        self.names = names
        self.seconds = seconds
        self.patience = patience
        self.console = console

    def measure(self, workload: BenchWorkload) -> BenchReport:
        """The workload's least disturbed report, of as many attempts as patience allows."""
        self._wait(workload)
        attempts = [self._attempt(workload)]
        while attempts[-1].disturbed and self.patience > 0:
            start = time.monotonic()
            self._wait(workload)
            attempts.append(self._attempt(workload))
            self.patience -= time.monotonic() - start
        return min(attempts, key=lambda r: r.others or 0.0)

    def _wait(self, workload: BenchWorkload) -> None:
        if self.patience <= 0:
            return
        start = time.monotonic()
        with self.console.status(f"{workload.name}: waiting for a quiet machine"):
            wait_until_quiet(self.patience)
        self.patience -= time.monotonic() - start

    def _attempt(self, workload: BenchWorkload) -> BenchReport:
        gc.collect()  # the tables of the workload before
        with self.console.status(workload.name):
            report = run_workload(workload, self.names, self.seconds)
        self.console.print(_line(workload, report), highlight=False)
        return report


def results_table(
    suite: Suite, workloads: list[BenchWorkload], reports: list[BenchReport], verdicts: list[list[Verdict]]
) -> Table:
    """Times in microseconds, ratios over the peers, shares of the limits, verdict."""
    shares = ["of limit", *(["of both"] if suite.name == "training" else [])]
    table = Table("workload", *(f"{name} µs" for name in suite.columns), "vs torch", "vs fbgemm", *shares, "verdict")
    for column in table.columns[1:]:
        column.justify = "right"
    for workload, report, judged in zip(workloads, reports, verdicts, strict=True):
        passed = all(v.passed for v in judged)
        verdict = "[dim]-" if not judged else "[green]pass" if passed else "[red]FAIL"
        of = [report.limit_share, report.both_share]
        table.add_row(
            workload.name + (" [yellow](disturbed)" if report.disturbed else ""),
            *(_microseconds(report, name) for name in suite.columns),
            *(_ratio(report, name) for name in PEERS),
            *(f"{share.median:.1%}" if share else "-" for share in of[: len(shares)]),
            verdict,
        )
    return table


def print_misses(
    console: Console, workloads: list[BenchWorkload], verdicts: list[list[Verdict]], overall: list[Verdict]
) -> None:
    """Every criterion that does not hold, and the verdicts over all workloads."""
    for workload, judged in zip(workloads, verdicts, strict=True):
        for verdict in judged:
            if not verdict.passed:
                console.print(f"[red]FAIL[/] {workload.name}: asked {verdict.criterion}, measured {verdict.measured}")
    for verdict in overall:
        word = "[green]pass[/]" if verdict.passed else "[red]FAIL[/]"
        console.print(f"{word} {verdict.criterion}: {verdict.measured}")


def _contenders(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in CONTENDERS:
            raise click.BadParameter(f"contender {name!r} is not known; allowed: {', '.join(CONTENDERS)}")
    return names


def _line(workload: BenchWorkload, report: BenchReport) -> str:
    times = "  ".join(f"{t.name} {t.median:,.1f}" for t in report.timings)
    share = f"  {report.limit_share.median:.0%} of limit" if report.limit_share else ""
    disturbed = f"  [yellow]others used {report.others:.2f} CPUs[/]" if report.disturbed else ""
    return f"{workload.name:46} {times} µs{share}{disturbed}"


def _microseconds(report: BenchReport, name: str) -> str:
    timing = report.timing(name)
    return f"{timing.median:,.1f}" if timing else "-"


def _ratio(report: BenchReport, name: str) -> str:
    ratio = report.ratios.get(name)
    if ratio is None:
        return "no such peer" if name in report.skipped else "-"
    return f"{ratio.median:.2f}x"


def _write(
    suite: Suite,
    workloads: list[BenchWorkload],
    reports: list[BenchReport],
    verdicts: list[list[Verdict]],
    overall: list[Verdict],
    console: Console,
    *,
    publish: bool,
) -> None:
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "suite": suite.name,
        "machine": reports[0].machine,
        "overall": [vars(v) for v in overall],
        "workloads": [
            {"name": w.name, "group": w.group, "verdicts": [vars(v) for v in judged], **r.to_json()}
            for w, r, judged in zip(workloads, reports, verdicts, strict=True)
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    dated = RESULTS / f"{datetime.now(UTC):%Y-%m-%d-%H%M}-{suite.name}.json"
    dated.write_text(_json(record), encoding="utf-8")
    console.print(f"wrote {dated.relative_to(ROOT)}")
    if not publish:
        console.print(
            f"[yellow]others used the machine: {suite.latest} and the page stay as they were[/] (--write replaces)"
        )
        return
    (RESULTS / suite.latest).write_text(_json(record), encoding="utf-8")
    page = write_page(ROOT / "docs", workloads, reports, verdicts, overall, suite)
    console.print(f"wrote {suite.latest} beside it, {page.relative_to(ROOT)} and its plot")
    if suite.name == "forward":
        write_headline(record)
        console.print("wrote the number of README.md and its chart")


def _json(record: dict[str, Any]) -> str:
    """A line a workload: readable in a diff, and the samples do not take a line each."""
    head = {key: value for key, value in record.items() if key != "workloads"}
    lines = ",\n".join(json.dumps(entry) for entry in record["workloads"])
    return json.dumps(head, indent=1)[:-2] + f',\n "workloads": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    main()
