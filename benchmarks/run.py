"""`python -m benchmarks.run`: times the forward workloads, prints ratios and verdicts, writes JSON, page and plot."""

from __future__ import annotations

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
from benchmarks.page import write_page
from benchmarks.workloads import BenchWorkload, read_workloads
from embforge.tuner.bench import LIMIT, OURS, BenchReport, bench_spec
from embforge.tuner.peers import PEERS
from embforge.tuner.quiet import wait_until_quiet

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
CONTENDERS = (OURS, *PEERS, LIMIT)
SECONDS, QUICK_SECONDS = 12.0, 1.0
PATIENCE = 180.0
"""Seconds of a full run that may go into waiting for a quiet machine and measuring disturbed workloads again."""


@click.command()
@click.option("--only", multiple=True, metavar="TEXT", help="Workloads whose name contains TEXT (repeatable).")
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True, help="Who takes part.")
@click.option("--quick", is_flag=True, help=f"{QUICK_SECONDS:g} s a workload instead of {SECONDS:g}, no waiting.")
@click.option("--seconds", type=float, help="Measuring time a workload.")
@click.option("--list", "list_only", is_flag=True, help="Print the workloads and stop.")
@click.option(
    "--write/--no-write", default=None, help="Results, page and plot; by default after a full undisturbed run."
)
def main(
    only: tuple[str, ...], contenders: str, quick: bool, seconds: float | None, list_only: bool, write: bool | None
) -> None:
    """Times embforge's forward kernels on this CPU beside torch, FBGEMM and the machine's gather limit."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    names = _contenders(contenders)
    workloads = [w for w in read_workloads() if not only or any(text in w.name for text in only)]
    if not workloads:
        raise click.BadParameter(f"no workload's name contains {' or '.join(only)}; --list prints them")
    if list_only:
        for workload in workloads:
            console.print(f"{workload.group:9} {workload.name:34} {workload.load}", highlight=False)
        return
    budget = seconds if seconds is not None else QUICK_SECONDS if quick else SECONDS
    console.print(f"{len(workloads)} workloads, {torch.get_num_threads()} threads, {', '.join(names)}")
    runner = Runner(names, budget, 0.0 if quick else PATIENCE, console)
    reports = [runner.measure(workload) for workload in workloads]
    verdicts = [judge(w, r) for w, r in zip(workloads, reports, strict=True)]
    overall = judge_all(workloads, reports)
    console.print(results_table(workloads, reports, verdicts))
    print_misses(console, workloads, verdicts, overall)
    full = not only and not quick and set(names) == set(CONTENDERS)
    if write if write is not None else full:
        # A busy machine's times are kept beside the others, but they do not replace a page measured in peace.
        publish = bool(write) or not any(report.disturbed for report in reports)
        _write(workloads, reports, verdicts, overall, console, publish=publish)
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
        with self.console.status(workload.name):
            report = bench_spec(
                workload.spec,
                against=[name for name in self.names if name in PEERS],
                workload=workload.load,
                seconds=self.seconds,
                ours=OURS in self.names,
                limit=LIMIT in self.names and workload.group != "overhead",  # no rows to speak of
            )
        self.console.print(_line(workload, report), highlight=False)
        return report


def results_table(workloads: list[BenchWorkload], reports: list[BenchReport], verdicts: list[list[Verdict]]) -> Table:
    """Times in microseconds, ratios over the peers, share of the limit, verdict."""
    table = Table("workload", *(f"{name} µs" for name in CONTENDERS), "vs torch", "vs fbgemm", "of limit", "verdict")
    for column in table.columns[1:]:
        column.justify = "right"
    for workload, report, judged in zip(workloads, reports, verdicts, strict=True):
        passed = all(v.passed for v in judged)
        verdict = "[dim]-" if not judged else "[green]pass" if passed else "[red]FAIL"
        table.add_row(
            workload.name + (" [yellow](disturbed)" if report.disturbed else ""),
            *(_microseconds(report, name) for name in CONTENDERS),
            *(_ratio(report, name) for name in PEERS),
            f"{report.limit_share.median:.1%}" if report.limit_share else "-",
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
    return f"{workload.name:34} {times} µs{share}{disturbed}"


def _microseconds(report: BenchReport, name: str) -> str:
    timing = report.timing(name)
    return f"{timing.median:,.1f}" if timing else "-"


def _ratio(report: BenchReport, name: str) -> str:
    ratio = report.ratios.get(name)
    return f"{ratio.median:.2f}x" if ratio else "-"


def _write(
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
        "machine": reports[0].machine,
        "overall": [vars(v) for v in overall],
        "workloads": [
            {"name": w.name, "group": w.group, "verdicts": [vars(v) for v in judged], **r.to_json()}
            for w, r, judged in zip(workloads, reports, verdicts, strict=True)
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    dated = RESULTS / f"{datetime.now(UTC):%Y-%m-%d-%H%M}.json"
    dated.write_text(_json(record), encoding="utf-8")
    console.print(f"wrote {dated.relative_to(ROOT)}")
    if not publish:
        console.print(
            "[yellow]others used the machine: latest.json and the page stay as they were[/] (--write replaces)"
        )
        return
    (RESULTS / "latest.json").write_text(_json(record), encoding="utf-8")
    page = write_page(ROOT / "docs", workloads, reports, verdicts, overall)
    console.print(f"wrote latest.json beside it, {page.relative_to(ROOT)} and its plot")


def _json(record: dict[str, Any]) -> str:
    """A line a workload: readable in a diff, and the samples do not take a line each."""
    head = {key: value for key, value in record.items() if key != "workloads"}
    lines = ",\n".join(json.dumps(entry) for entry in record["workloads"])
    return json.dumps(head, indent=1)[:-2] + f',\n "workloads": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    main()
