"""`embforge verify`: a backend's results beside the reference's, bit for bit, and torch's, within rounding."""

from __future__ import annotations

from collections.abc import Sequence
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
)

if TYPE_CHECKING:
    from rich.table import Table

    from embforge.codegen.spec import CollectionSpec


@click.command(epilog=EXIT_CODES)
@spec_argument
@click.option(
    "--on", type=click.Choice(["cpu", "reference", "cuda"]), default="cpu", show_default=True, help="Backend to check."
)
@click.option("--quick", is_flag=True, help="Only the default plan fields, not a covering set of them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of tables and batches.")
@param_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context, spec: CollectionSpec, on: str, quick: bool, seed: int, overrides: Sequence[str], as_json: bool
) -> None:
    """Check SPEC's kernels against the reference (equal bits) and torch.nn.EmbeddingBag (equal within rounding).

    Runs batches that look for trouble (empty bags, long ones, bad ids, ...) with one and with several threads, and
    plan fields in a set where any two choices of any two fields meet; --quick or --param run one set of fields.
    """
    from embforge.verify import verify as run_checks

    params = [params_of(on, overrides)] if quick or overrides else None
    with stage_bar() as tell:
        rows = run_checks(spec, on=on, params=params, seed=seed, progress=tell)
    passed = all(row.passed for row in rows)
    if as_json:
        print_json({"spec": spec.name, "on": on, "passed": passed, "checks": [vars(row) for row in rows]})
    else:
        screen = console()
        screen.print(check_table(rows))
        for row in rows:
            if not row.passed:
                screen.print(f"{row.check}: {row.detail}", style="red", soft_wrap=True, markup=False)
    ctx.exit(OK if passed else CHECK_FAILED)


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
