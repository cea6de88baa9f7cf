"""`embforge verify`: compares results of a backend with the reference's (equal bits) and torch's (within rounding)."""

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
from embforge.codegen.target import BACKENDS, target_named

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.spec import CollectionSpec
    from embforge.verify.lookups import VerifyReport, VerifyRow

COUNTED_WORKLOAD = "uniform,len=geo:20,batch=256"


@click.command(epilog=EXIT_CODES, short_help="Check SPEC's kernels against the reference and torch.")
@spec_argument
@click.option(
    "--on",
    type=click.Choice(list(BACKENDS)),
    default="cpu",
    show_default=True,
    help="Backend to check; simt executes the CUDA kernels on the CPU.",
)
@click.option("--quick", is_flag=True, help="Check the default plan only, not a set that covers pairs of fields.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of random tables, batches and schedules.",
)
@click.option("--arch", help="With --on simt: GPU generation of the kernels, sm_75 .. sm_120.  [default: sm_90]")
@click.option(
    "--train",
    "rules",
    multiple=True,
    metavar="RULE",
    help="Also train with this rule and compare rows and states: sgd, adam, adam+l2, ..., a JSON file of an "
    "optimizer's update.to_dict() (with numbers from its hyper_values, or 0.1), or none for sparse gradients. "
    "Repeatable.",
)
@click.option("--counters", is_flag=True, help="With --on simt: count memory sectors and active lanes per kernel.")
@click.option("--workload", help=f"With --counters: the batch to count.  [default: {COUNTED_WORKLOAD}]")
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON file to write results and facts about the machine into.  "
    "[default with --on cuda: embforge-verify-...-DATE.json]",
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

    Runs difficult batches (empty bags, long bags, bad ids, ...) with one thread and with several, for a set of plans in
    which any two choices of any two plan fields meet. With --quick or --param, it runs one plan.

    --on simt needs no GPU: the CUDA source runs on the CPU, thread by thread and in shuffled orders. Races, accesses
    out of bounds, reads of uninitialized memory and barriers that not all threads reach are failures.
    --on cuda writes a report file, also if kernels fail: please attach it to an issue in either case.
    """
    from embforge.backends import device_of
    from embforge.cli.report import report_data, report_name, verdict, why_not_writable, write_report
    from embforge.tuner.workload.workload import parse
    from embforge.verify.lookups import verify as run_checks
    from embforge.verify.remaps import remap_rows
    from embforge.verify.training import optimizer_named

    if not target_named(on).emulates and (arch or counters):
        raise click.UsageError(f"{'--arch' if arch else '--counters'} works with --on simt only", ctx)
    if workload is not None and not counters:
        raise click.UsageError("--workload names the batch that --counters counts; add --counters", ctx)
    workload = workload or COUNTED_WORKLOAD
    if counters:
        parse(workload)  # reports a mistake in it before the long work
    for rule in rules:
        optimizer_named(rule)
    if target_named(on).needs_gpu or report_path is not None:
        directory = report_path.parent if report_path is not None else Path()
        if (reason := why_not_writable(directory)) is not None:
            raise click.UsageError(
                f"--report: no file can be written to directory {directory} ({reason}); name a file elsewhere", ctx
            )
    began = datetime.now(UTC)
    params = params_of(on, overrides) if quick or overrides else None
    with stage_bar() as tell:
        report = run_checks(spec, on=on, arch=arch, params=params and [params], seed=seed, progress=tell)
        if report.passed:
            report = replace(report, rows=(*report.rows, *remap_rows(spec, on, report.arch, device_of(on), seed)))
        if rules and report.passed:
            report = replace(report, rows=(*report.rows, *trained(spec, on, rules, seed, tell)))
    if target_named(on).needs_gpu:
        report_path = report_path or Path(report_name(spec, report, began))
    if not as_json:
        print_checks(report)
    data: dict[str, Any] = {}
    if counters and report.passed:
        if report_path is not None:
            write_report(report_path, report_data(spec, report, began))  # already now, because counting takes long
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
    """Trains with each rule; returns one row of the report per rule."""
    from embforge.verify.training import training_rows

    return list(training_rows(spec, on, rules, seed=seed, progress=tell))


def count(
    spec: CollectionSpec, report: VerifyReport, *, workload: str, as_json: bool, **which: Any
) -> tuple[VerifyReport, dict[str, Any]]:
    """Runs the counted batch, prints the table unless `as_json`, and returns the report and the counters as data.

    A bug that shows only in the counted batch becomes one more row of the report, which failed.
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
    """Prints the table of checks, notes on it, and what went wrong."""
    screen = console()
    screen.print(check_table(report.rows))
    for line in notes_of(report):
        screen.print(line, soft_wrap=True, markup=False)
    print_failures(report.rows)


def print_failures(rows: Sequence[VerifyRow]) -> None:
    """Prints one paragraph per row that has details."""
    for row in rows:
        if row.detail:
            console().print(f"{row.check}: {row.detail}", style="red", soft_wrap=True, markup=False)


def check_table(rows: Sequence[VerifyRow]) -> Table:
    """One line per check."""
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
    """Notes below the table: how many plans ran, on which device, and whether some did not run."""
    plans = "1 plan" if report.plans == 1 else f"{report.plans} plans"
    left_out = f"; {report.left_out} more have the same code" if report.left_out else ""
    notes = [f"{plans} for {report.arch} on {report.on}{left_out}"]
    if report.device is not None:
        notes.append(", ".join(f"{label} {value}" for label, value in report.device.items() if value is not None))
    if any(row.not_run for row in report.rows):
        notes.append("A kernel has stopped the device for this process, so the remaining checks were not run.")
    return notes
