"""`embforge bench`: times a spec's lookup or training step and compares it with the libraries that people use today."""

from __future__ import annotations

from collections.abc import Sequence
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
    waiting,
)
from embforge.codegen.target import TUNED

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.spec import CollectionSpec


@click.command(epilog=EXIT_CODES, short_help="Compare the speed of SPEC's kernels with other libraries.")
@spec_argument
@click.option("--on", type=click.Choice(TUNED), default="cpu", show_default=True, help="Where the kernels run.")
@click.option(
    "--against",
    default="torch,fbgemm",
    show_default=True,
    help='Libraries to compare with, separated by commas; "" for none.',
)
@click.option(
    "--workload",
    default="uniform",
    show_default=True,
    help="How ids, bag lengths and batch sizes are drawn, e.g. zipf:1.05,len=geo:20,batch=2048.",
)
@click.option(
    "--train", metavar="RULE", help="Time training steps with RULE, not lookups: sgd, adagrad, rowwise_adagrad, adam."
)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="How long to measure.")
@param_option
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    spec: CollectionSpec,
    on: str,
    against: str,
    workload: str,
    train: str | None,
    seconds: float,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Time SPEC's lookup, interleaved with other libraries and with the machine's gather limit; compare the outputs.

    With --train, time whole training steps (forward, backward, update). The limit is then the time to read and write
    every changed row once, and new rows are compared with the rule's formula.

    Exits with 1 if results differ by more than rounding. Ratios are shown only if no other process used the machine
    at the same time; --json says so under "disturbed".
    """
    from embforge.codegen.reading.suggestions import did_you_mean
    from embforge.tuner.bench.forward import bench_spec
    from embforge.tuner.bench.peers import PEERS
    from embforge.tuner.bench.training import bench_training
    from embforge.tuner.bench.training_rules import RULES

    spec = spec.by_rows()  # what is timed begins with rows
    peers = [name.strip() for name in against.split(",") if name.strip()]
    for name in peers:
        if name not in PEERS:
            hint = did_you_mean(name, PEERS)
            raise click.UsageError(f"--against {name!r} is not known{hint}; allowed: {', '.join(PEERS)}", ctx)
    if train is not None and train not in RULES:
        hint = did_you_mean(train, RULES)
        raise click.UsageError(f"--train {train!r} is not known{hint}; allowed: {', '.join(RULES)}", ctx)
    if train is not None and overrides:
        raise click.UsageError("--param sets fields of a lookup's plan; leave it out with --train", ctx)
    params = params_of(on, overrides) if overrides else None
    with waiting(f"timing {spec.name} for about {seconds:g} s"):
        if train is None:
            report = bench_spec(spec, on=on, against=peers, workload=workload, seconds=seconds, params=params)
        else:
            report = bench_training(spec, train, on=on, against=peers, workload=workload, seconds=seconds)
    if as_json:
        print_json(report.to_json())
    else:
        screen = console()
        screen.print(timing_table(report))
        for note in notes_of(report):
            screen.print(note, soft_wrap=True, markup=False)
    ctx.exit(CHECK_FAILED if report.disagreeing else OK)


def timing_table(report: Any) -> Table:
    """One line per library: median, spread, and its time divided by ours (left out if others used the machine)."""
    from rich.table import Table

    what = f"training steps ({report.train})" if report.train else "lookups"
    title = f"{report.spec} on {report.on}: {what}, {report.workload}, {report.ids:,} ids per batch"
    table = Table("", title=title, title_justify="left")
    for heading in ("median", "20 % .. 80 %", "time / ours"):
        table.add_column(heading, justify="right")
    limit = "changed rows, once" if report.train else "the machine's gather limit"
    names = {"limit": f"limit ({limit})", "gather limit": "gather limit (all rows read)"}
    for timing in report.timings:
        ratio = report.ratios.get(timing.name) or (report.limit_share if timing.name == "limit" else None)
        table.add_row(
            names.get(timing.name, timing.name),
            f"{timing.median:,.0f} µs",
            f"{timing.low:,.0f} .. {timing.high:,.0f} µs",
            f"{ratio.median:.2f}" if ratio and not report.disturbed else "",
        )
    return table


def notes_of(report: Any) -> list[str]:
    """Notes below the table: whether the times are valid, which libraries were left out, and whose outputs differ."""
    notes = []
    if report.disturbed:
        notes.append(
            f"other processes used {report.others:.1f} CPUs at the same time. That slows parallel loops out of "
            "proportion, and some libraries more than others, so these times cannot be compared: run it again on a "
            "quiet machine"
        )
    elif report.both_share is not None:
        notes.append(f"gather limit and limit together / ours: {report.both_share.median:.2f}")
    if report.train:  # libraries may compute different things: torch has no row-wise Adagrad
        notes += [f"{timing.name}: {timing.note}" for timing in report.timings]
    notes += [f"{name} did not take part: {why}" for name, why in report.skipped.items()]
    than = "the rule's formula" if report.train else "ours"
    what = "new rows" if report.train else "outputs"
    notes += [f"{name}: {what} differ from {than} by {report.differences[name]:.2g}" for name in report.disagreeing]
    return notes
