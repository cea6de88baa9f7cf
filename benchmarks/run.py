"""Times the workloads of a suite, prints ratios and verdicts, writes results: `python -m benchmarks.run [SUITE]`."""

from __future__ import annotations

import gc
import sys
import time

import click
import torch
from rich.console import Console

from benchmarks.criteria import Verdict, judge, judge_all
from benchmarks.headline import write_headline
from benchmarks.output import DOCS, ROOT, print_verdicts, write_record
from benchmarks.page import sheet, write_page
from benchmarks.suites import SUITES, Suite, run_workload
from benchmarks.workloads import BenchWorkload, read_workloads
from embforge.tuner.bench.peers import PEERS
from embforge.tuner.bench.report import LIMIT, OURS, BenchReport
from embforge.tuner.measure.quiet import wait_until_quiet

CONTENDERS = (OURS, *PEERS, LIMIT)
QUICK_SECONDS = 1.0
PATIENCE = 180.0
"""The most seconds that a full run spends on waiting for a quiet machine and on repeating disturbed measurements."""


@click.command()
@click.argument("suite", type=click.Choice(sorted(SUITES)), default="forward", callback=lambda c, p, name: SUITES[name])
@click.option("--only", multiple=True, metavar="TEXT", help="Run only workloads whose name contains TEXT (repeatable).")
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True, help="What is timed, comma-separated.")
@click.option("--quick", is_flag=True, help=f"{QUICK_SECONDS:g} s per workload, without waiting for a quiet machine.")
@click.option("--seconds", type=float, help="Measuring time per workload.")
@click.option("--list", "list_only", is_flag=True, help="Print the workloads and stop.")
@click.option(
    "--write/--no-write",
    default=None,
    help="Write results, page and plot. By default they are written after a full run, page and plot only if no "
    "workload was disturbed.",
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
    """Compares embforge's lookups or training steps on this CPU with torch, FBGEMM and the machine's limits."""
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
    console.print(sheet(workloads, reports, verdicts, suite).screen("Medians in µs"))
    missed = [(f"{w.name}: ", v) for w, of in zip(workloads, verdicts, strict=True) for v in of if not v.passed]
    print_verdicts(console, [*missed, *(("", verdict) for verdict in overall)])
    full = not only and not quick and set(names) == set(CONTENDERS)
    if write if write is not None else full:
        # Times of a busy machine are stored in a dated file, but do not replace a page from a quiet machine.
        publish = bool(write) or not any(report.disturbed for report in reports)
        _write(suite, workloads, reports, verdicts, overall, console, publish=publish)
    if not all(v.passed for group in (*verdicts, overall) for v in group):
        sys.exit(1)


class Runner:
    """Measures workloads in turn. On a busy machine it waits and repeats, for at most `patience` seconds in all."""

    def __init__(self, names: tuple[str, ...], seconds: float, patience: float, console: Console) -> None:
        self.names = names
        self.seconds = seconds
        self.patience = patience
        self.console = console

    def measure(self, workload: BenchWorkload) -> BenchReport:
        """The workload's report; if other processes disturb it, the least disturbed of several attempts."""
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
        gc.collect()  # frees the tables of the previous workload
        with self.console.status(workload.name):
            report = run_workload(workload, self.names, self.seconds)
        self.console.print(_line(workload, report), highlight=False)
        return report


def _contenders(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in CONTENDERS:
            raise click.BadParameter(f"contender {name!r} is not known; allowed: {', '.join(CONTENDERS)}")
    return names


def _line(workload: BenchWorkload, report: BenchReport) -> str:
    times = "  ".join(f"{t.name} {t.median:,.1f}" for t in report.timings)
    share = f"  {report.limit_share.median:.0%} of limit" if report.limit_share else ""
    disturbed = f"  [yellow]other processes used {report.others:.2f} CPUs[/]" if report.disturbed else ""
    return f"{workload.name:46} {times} µs{share}{disturbed}"


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
    record = {"suite": suite.name, "machine": reports[0].machine, "overall": [vars(v) for v in overall]}
    entries = [
        {"name": w.name, "group": w.group, "verdicts": [vars(v) for v in judged], **r.to_json()}
        for w, r, judged in zip(workloads, reports, verdicts, strict=True)
    ]
    write_record(suite.name, suite.latest, record, {"workloads": entries}, console, page=publish)
    if not publish:
        return
    page = write_page(DOCS, workloads, reports, verdicts, overall, suite)
    console.print(f"wrote {page.relative_to(ROOT)} and its plot")
    if suite.name == "forward":
        write_headline(record | {"workloads": entries})
        console.print("wrote the number of README.md and its chart")


if __name__ == "__main__":
    main()
