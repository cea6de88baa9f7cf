"""Compares sharded training steps with TorchRec's, over gloo: `python -m benchmarks.sharded`.

It starts the processes itself, with one thread each. A step is lookup, exchange, backward and fused SGD of one batch
per rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.criteria import Verdict
from benchmarks.output import DOCS, Sheet, print_verdicts, replace_between, write_record
from benchmarks.page import PAGE, facts_line, target_lines, word_for
from benchmarks.sharded_cases import Case, read_cases
from benchmarks.sharded_ranks import PLANS, TOLERANCE, TORCHREC, Outcome, Task, run_rank
from embforge.codegen.machine import package_version
from embforge.tuner.bench.report import OURS, machine_facts
from embforge.tuner.measure.quiet import QUIET

LATEST = "latest-sharded.json"
BEGIN, END = "<!-- sharded results: written by make bench -->", "<!-- end of sharded results -->"
CONTENDERS = (OURS, TORCHREC)
RANKS = (2, 4)
FASTER = 1.5
"""How many times as fast as TorchRec a step must be."""
PROCESS = {
    "OMP_NUM_THREADS": "1",
    # By default glibc returns large buffers to the system and gets them back, page by page, at every step. TorchRec
    # then takes up to twice as long. A careful user would change that, so freed memory stays with the process, for both
    # contenders.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""The environment of the ranks."""
SECONDS, QUICK_SECONDS = 10.0, 1.5
PATIENCE = 20.0


@click.command()
@click.option("--only", type=click.Choice(CONTENDERS), help="Time one contender alone.")
@click.option(
    "--case", "wanted", multiple=True, metavar="TEXT", help="Run only cases whose name contains TEXT (repeatable)."
)
@click.option(
    "--plan", "plans", multiple=True, type=click.Choice(PLANS), default=PLANS, help="Shard plans (repeatable)."
)
@click.option(
    "--ranks", multiple=True, type=click.IntRange(1), default=RANKS, show_default=True, help="Ranks (repeatable)."
)
@click.option(
    "--quick", is_flag=True, help=f"{QUICK_SECONDS:g} s per case and plan, without waiting for a quiet machine."
)
@click.option("--seconds", type=float, help="Measuring time per case and plan.")
@click.option(
    "--write/--no-write",
    default=None,
    help="Write JSON and page. By default they are written after a full run, the page only if no case was disturbed.",
)
def main(
    only: str | None,
    wanted: tuple[str, ...],
    plans: tuple[str, ...],
    ranks: tuple[int, ...],
    quick: bool,
    seconds: float | None,
    write: bool | None,
) -> None:
    """Times sharded training steps of embforge and TorchRec in the same processes, and prints ratios and verdicts."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    cases = [case for case in read_cases() if not wanted or any(text in case.name for text in wanted)]
    if not cases:
        raise click.BadParameter(f"no case's name contains {' or '.join(wanted)}")
    budget = seconds if seconds is not None else QUICK_SECONDS if quick else SECONDS
    names = CONTENDERS if only is None else (only,)
    outcomes: list[Outcome] = []
    for count in ranks:
        outcomes += run_group(count, cases, plans, names, budget, 0.0 if quick else PATIENCE)
    console.print(sheet(outcomes).screen())
    verdicts = judge(outcomes)
    print_verdicts(console, [("", verdict) for verdict in verdicts if not verdict.passed])
    full = not (wanted or quick or only) and set(plans) == set(PLANS) and set(ranks) == set(RANKS)
    if write if write is not None else full:
        publish(outcomes, verdicts, cases, console, page=bool(write) or not any(o.disturbed for o in outcomes))
    if not all(verdict.passed for verdict in verdicts):
        sys.exit(1)


def run_group(
    ranks: int, cases: Sequence[Case], plans: Sequence[str], names: Sequence[str], seconds: float, patience: float
) -> list[Outcome]:
    """Runs all cases under all plans in one group of new processes, and prints one line for each. If a rank fails, all
    end."""
    os.environ.update(PROCESS)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        outcomes = manager.list()
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        task = Task(ranks, tuple(cases), tuple(plans), tuple(names), seconds, patience, rendezvous)
        spawn(_process, (task, outcomes), nprocs=ranks)
        return list(outcomes)


def _process(rank: int, task: Task, outcomes: list[Outcome]) -> None:
    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(_line(outcome), flush=True)

    run_rank(rank, task, report)


def judge(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """The verdicts on all outcomes. There is one on the ratio only if both contenders ran."""
    verdicts = []
    for outcome in outcomes:
        where = f"{outcome.case}, {_plan(outcome)}, {outcome.ranks} ranks"
        for name in outcome.disagreeing:
            measured = f"{name} differs by {outcome.differences[name]:.1e}"
            verdicts.append(Verdict(f"{where}: results and rows within {TOLERANCE:g} of plain torch", measured, False))
        if outcome.disturbed:
            asked = f"{where}: other processes use at most {QUIET:g} CPUs"
            verdicts.append(Verdict(asked, f"{outcome.others:.2f} CPUs: measure again", False))
        if outcome.ratio is not None:
            measured = f"{outcome.ratio.median:.2f}x"
            verdicts.append(Verdict(f"{where}: {FASTER:g}x TorchRec", measured, outcome.ratio.median >= FASTER))
    return verdicts


HEADINGS = ("case", "plan", "ranks", "embforge ms", "TorchRec ms", "vs TorchRec", "targets")


def sheet(outcomes: Sequence[Outcome]) -> Sheet:
    """The table with one line per case, plan and number of ranks."""
    return Sheet(HEADINGS, [_cells(outcome) for outcome in outcomes], words=2)


def publish(
    outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], cases: Sequence[Case], console: Console, *, page: bool
) -> None:
    """Writes the dated result file, and with `page` also the latest one and the results in docs/benchmarks.md."""
    machine = {**machine_facts(), "threads": "1 per rank", "torchrec": package_version("torchrec") or "not installed"}
    record = {}
    entries = [outcome.to_json() for outcome in outcomes]
    write_record("sharded", LATEST, record, {"outcomes": entries}, console, page=page)
    if page:
        replace_between(DOCS / PAGE, BEGIN, END, results_markdown(outcomes, verdicts, cases, machine))
        console.print(f"wrote docs/{PAGE}")


def results_markdown(
    outcomes: Sequence[Outcome], verdicts: Sequence[Verdict], cases: Sequence[Case], machine: dict[str, str]
) -> str:
    """The results as the page shows them: the machine, the sizes of the cases, the table, and every target that is not
    reached."""
    sizes = "; ".join(f"{case.name}: {case.table_bytes / 1e6:,.0f} MB of rows" for case in cases)
    more = int(machine["cpus"]) < max(outcome.ranks for outcome in outcomes)
    lines = [
        facts_line(machine)[:-1] + f", torchrec {machine['torchrec']}.",
        "",
        "Milliseconds per step of the slowest rank (medians): lookup, exchange, backward and fused SGD of one batch "
        "per rank, over gloo on this machine alone; ratios are medians of paired rounds with their 95 % interval. B is "
        f"the batch of a rank. {sizes}."
        + (f" Ranks beyond {machine['cpus']} share the machine's {machine['cpus']} CPUs." if more else ""),
        "",
        sheet(outcomes).markdown(),
    ]
    return "\n".join([*lines, target_lines([("", v) for v in verdicts if not v.passed])])


def _line(outcome: Outcome) -> str:
    times = "  ".join(f"{name} {ms:,.2f} ms" for name, ms in outcome.medians.items())
    ratio = f"  {_ratio(outcome)}" if outcome.ratio else ""
    differs = ", ".join(f"{name} {value:.0e}" for name, value in outcome.differences.items())
    others = f"; other processes used {outcome.others:.2f} CPUs" if outcome.disturbed else ""
    notes = ", ".join(filter(None, outcome.notes.values()))
    where = f"{outcome.ranks} ranks  {outcome.case:40} {_plan(outcome):10}"
    return f"{where}  {times}{ratio}  (differs by {differs}; {notes}{others})"


def _cells(outcome: Outcome) -> list[str]:
    times = [f"{outcome.medians[name]:,.2f}" if name in outcome.medians else "-" for name in CONTENDERS]
    verdicts = judge([outcome])
    verdict = word_for(all(v.passed for v in verdicts)) if verdicts else "-"
    return [outcome.case, _plan(outcome), str(outcome.ranks), *times, _ratio(outcome), verdict]


def _ratio(outcome: Outcome) -> str:
    ratio = outcome.ratio
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "-"


def _plan(outcome: Outcome) -> str:
    return outcome.plan.replace("_", "-")


if __name__ == "__main__":
    main()
