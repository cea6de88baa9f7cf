"""`embforge verify`: a backend's results beside the reference's, bit for bit, and torch's, within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embforge.cli.common import (
    CHECK_FAILED,
    EXIT_CODES,
    OK,
    console,
    json_option,
    param_option,
    params_of,
    print_json,
    spec_argument,
    stage_bar,
    waiting,
)

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.spec import CollectionSpec
    from embforge.verify.lookups import VerifyReport, VerifyRow

COUNTED_WORKLOAD = "uniform,len=geo:20,batch=256"


@click.command(epilog=EXIT_CODES)
@spec_argument
@click.option(
    "--on",
    type=click.Choice(["cpu", "simt", "cuda", "reference"]),
    default="cpu",
    show_default=True,
    help="Backend to check; simt executes the CUDA kernels on the CPU.",
)
@click.option("--quick", is_flag=True, help="Only the default plan fields, not a covering set of them.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of tables, batches, schedules.")
@click.option("--arch", help="With --on simt: the GPU whose kernels run, sm_75 .. sm_120.  [default: sm_90]")
@click.option(
    "--train",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Train by this rule, too, and compare rows and states: sgd, adam, adam+l2, ..., a JSON file of an "
    "optimizer's update.to_dict() (numbers from its hyper_values, or 0.1), or none: sparse gradients. May be repeated.",
)
@click.option("--counters", is_flag=True, help="With --on simt: count what memory instructions cost, kernel by kernel.")
@click.option("--workload", help=f"The batch that --counters counts.  [default: {COUNTED_WORKLOAD}]")
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for results and facts about the machine.  [default with --on cuda: embforge-verify-...-DATE.json]",
)
@param_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    spec: CollectionSpec,
    on: str,
    quick: bool,
    seed: int,
    arch: str | None,
    rules: Sequence[str],
    counters: bool,
    workload: str | None,
    report_path: Path | None,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Check SPEC's kernels against the reference (equal bits) and torch.nn.EmbeddingBag (equal within rounding).

    Runs batches that look for trouble (empty bags, long ones, bad ids, ...) with one and with several threads, and
    plan fields in a set where any two choices of any two fields meet; --quick or --param run one set of fields.

    --on simt needs no GPU: the text that NVRTC compiles runs thread by thread under shuffled schedules, and races,
    accesses out of bounds, reads of what nobody wrote and barriers that not all threads reach are failures.
    --on cuda writes a report file, also if kernels fail: please attach it to an issue, whatever it says.
    """
    from embforge.cli.report import report_data, report_name, verdict, why_not_writable, write_report
    from embforge.tuner.workload.workload import parse
    from embforge.verify.lookups import verify as run_checks
    from embforge.verify.training import optimizer_named

    if on != "simt" and (arch or counters):
        raise click.UsageError(f"{'--arch' if arch else '--counters'} works with --on simt only", ctx)
    if workload is not None and not counters:
        raise click.UsageError("--workload says what --counters counts, and works with it only", ctx)
    workload = workload or COUNTED_WORKLOAD
    if counters:
        parse(workload)  # a mistake in it shows before the long work
    for rule in rules:
        optimizer_named(rule)
    if on == "cuda" or report_path is not None:
        directory = report_path.parent if report_path is not None else Path()
        if (reason := why_not_writable(directory)) is not None:
            raise click.UsageError(
                f"--report: no file can be written to directory {directory} ({reason}); give a file elsewhere", ctx
            )
    began = datetime.now(UTC)
    params = params_of(on, overrides) if quick or overrides else None
    with stage_bar() as tell:
        report = run_checks(spec, on=on, arch=arch, params=params and [params], seed=seed, progress=tell)
        if rules and report.passed:
            report = replace(report, rows=(*report.rows, *trained(spec, on, rules, seed, tell)))
    if on == "cuda":
        report_path = report_path or Path(report_name(spec, report, began))
    if not as_json:
        print_checks(report)
    data: dict[str, Any] = {}
    if counters and report.passed:
        if report_path is not None:
            write_report(report_path, report_data(spec, report, began))  # counting is long
        report, data = count(spec, report, arch=arch, params=params, workload=workload, seed=seed, as_json=as_json)
    elif counters and not as_json:
        console().print("Not counted, because a check failed.")
    if as_json:
        facts = {"device": report.device} if report.device else {}
        print_json(verdict(spec, report) | facts | data | ({"report": str(report_path)} if report_path else {}))
    if report_path is not None:
        write_report(report_path, report_data(spec, report, began) | data)
        if not as_json:
            console().print(f"report: {report_path}", soft_wrap=True, markup=False)
    ctx.exit(OK if report.passed else CHECK_FAILED)


def trained(spec: CollectionSpec, on: str, rules: Sequence[str], seed: int, tell: Any) -> Sequence[VerifyRow]:
    """A row for each rule."""
    from embforge.verify.training import training_rows

    return list(training_rows(spec, on, rules, seed=seed, progress=tell))


def count(
    spec: CollectionSpec, report: VerifyReport, *, workload: str, as_json: bool, **which: Any
) -> tuple[VerifyReport, dict[str, Any]]:
    """Counts, prints the table unless it will be JSON, and returns what a document has of it.

    A bug that shows only in the counted batch is one more row of the report, which did not pass.
    """
    from embforge.cli.display.counters import NOTE, count_spec, counter_table
    from embforge.codegen.errors import KernelBugError
    from embforge.verify.lookups import VerifyRow

    try:
        with waiting("counting"):
            counted = count_spec(spec, workload=workload, **which)
    except KernelBugError as bug:
        row = VerifyRow(f"counted batch: {workload}", 1, float("inf"), passed=False, detail=str(bug))
        if not as_json:
            print_failures([row])
        return replace(report, rows=(*report.rows, row)), {}
    if not as_json:
        console().print(counter_table(counted))
        console().print(NOTE, soft_wrap=True, markup=False)
    return report, {"counters": counted | {"kernels": [kernel.to_json() for kernel in counted["kernels"]]}}


def print_checks(report: VerifyReport) -> None:
    """The table, what it does not say, and what went wrong."""
    screen = console()
    screen.print(check_table(report.rows))
    for line in notes_of(report):
        screen.print(line, soft_wrap=True, markup=False)
    print_failures(report.rows)


def print_failures(rows: Sequence[VerifyRow]) -> None:
    """A paragraph for each row that has something to tell."""
    for row in rows:
        if row.detail:
            console().print(f"{row.check}: {row.detail}", style="red", soft_wrap=True, markup=False)


def check_table(rows: Sequence[VerifyRow]) -> Table:
    """A line a check."""
    from rich.table import Table

    table = Table("check")
    for heading in ("runs", "largest difference", "result"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.check, str(row.cases), f"{row.max_abs_error:.2g}", _result(row))
    return table


def _result(row: VerifyRow) -> str:
    if not row.cases:
        return "[red]not run[/]"
    result = "[green]passed[/]" if row.passed else "[red]FAILED[/]"
    return f"{result}, {row.not_run} not run" if row.not_run else result


def notes_of(report: VerifyReport) -> list[str]:
    """What the table does not say: how many plans ran, on what, and why not all did."""
    plans = "1 plan" if report.plans == 1 else f"{report.plans} plans"
    left_out = f"; {report.left_out} more have the same code" if report.left_out else ""
    notes = [f"{plans} for {report.arch} on {report.on}{left_out}"]
    if report.device is not None:
        notes.append(", ".join(f"{label} {value}" for label, value in report.device.items() if value is not None))
    if any(row.not_run for row in report.rows):
        notes.append("A kernel has stopped the device for this process: what would have come next was not run.")
    return notes
