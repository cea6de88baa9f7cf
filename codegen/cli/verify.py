"""`embforge verify`: a backend's results beside the reference's, bit for bit, and torch's, within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embforge.codegen.cli.common import (
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
    from embforge.verify import VerifyReport

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
@click.option("--counters", is_flag=True, help="With --on simt: count what memory instructions cost, kernel by kernel.")
@click.option("--workload", default=COUNTED_WORKLOAD, show_default=True, help="The batch that --counters counts.")
@click.option(
    "--report",
    "report_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for results and facts about the machine.  [default with --on cuda: embforge-verify-....json]",
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
    counters: bool,
    workload: str,
    report_path: Path | None,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Check SPEC's kernels against the reference (equal bits) and torch.nn.EmbeddingBag (equal within rounding).

    Runs batches that look for trouble (empty bags, long ones, bad ids, ...) with one and with several threads, and
    plan fields in a set where any two choices of any two fields meet; --quick or --param run one set of fields.

    --on simt needs no GPU: the text that NVRTC compiles runs thread by thread under shuffled schedules, and races,
    accesses out of bounds, reads of what nobody wrote and barriers that not all threads reach are failures.
    --on cuda writes a report file: please attach it to an issue, whatever it says.
    """
    from embforge.codegen.cli.counters import NOTE, count_spec, counter_table
    from embforge.codegen.cli.report import report_data, report_name, verdict, write_report
    from embforge.tuner.workload import parse
    from embforge.verify import verify as run_checks

    if on != "simt" and (arch or counters):
        raise click.UsageError(f"{'--arch' if arch else '--counters'} works with --on simt only", ctx)
    if report_path is not None and not report_path.parent.is_dir():
        raise click.UsageError(f"--report {report_path}: there is no directory {report_path.parent}", ctx)
    if counters:
        parse(workload)  # a mistake in it shows before the long work
    params = params_of(on, overrides) if quick or overrides else None
    with stage_bar() as tell:
        report = run_checks(spec, on=on, arch=arch, params=params and [params], seed=seed, progress=tell)
    device = _device_facts() if on == "cuda" else None
    data = verdict(spec, report) | ({"device": device} if device else {})
    counted = None
    if counters:
        with waiting("counting"):
            counted = count_spec(spec, arch=arch, params=params, workload=workload, seed=seed)
        data["counters"] = counted | {"kernels": [kernel.to_json() for kernel in counted["kernels"]]}
    if on == "cuda" or report_path is not None:
        report_path = report_path or Path(report_name(spec, report))
        write_report(report_path, report_data(spec, report, device) | {"counters": data.get("counters")})
        data["report"] = str(report_path)
    if as_json:
        print_json(data)
    else:
        screen = console()
        screen.print(check_table(report.rows))
        for line in notes_of(report, device):
            screen.print(line, soft_wrap=True, markup=False)
        for row in report.rows:
            if not row.passed:
                screen.print(f"{row.check}: {row.detail}", style="red", soft_wrap=True, markup=False)
        if counted is not None:
            screen.print(counter_table(counted))
            screen.print(NOTE, soft_wrap=True, markup=False)
        if report_path is not None:
            screen.print(f"report: {report_path}", soft_wrap=True, markup=False)
    ctx.exit(OK if report.passed else CHECK_FAILED)


def check_table(rows: Sequence[Any]) -> Table:
    """A line a check."""
    from rich.table import Table

    table = Table("check")
    for heading in ("runs", "largest difference", "result"):
        table.add_column(heading, justify="right")
    for row in rows:
        verdict = "[green]passed[/]" if row.passed else "[red]FAILED[/]"
        table.add_row(row.check, str(row.cases), f"{row.max_abs_error:.2g}", verdict)
    return table


def notes_of(report: VerifyReport, device: dict[str, Any] | None) -> list[str]:
    """What the table does not say: how many plans ran, and on what."""
    plans = "1 plan" if report.plans == 1 else f"{report.plans} plans"
    left_out = f"; {report.left_out} more have the same code" if report.left_out else ""
    notes = [f"{plans} for {report.arch} on {report.on}{left_out}"]
    if device is not None:
        notes.append(", ".join(f"{label} {value}" for label, value in device.items() if value is not None))
    return notes


def _device_facts() -> dict[str, Any]:
    import torch

    from embforge.device import gpu_facts

    return gpu_facts(torch.device("cuda", torch.cuda.current_device()))
