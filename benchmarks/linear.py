"""Tests whether a training step costs the same per id from 10,000 to 10 million ids: `python -m benchmarks.linear`.

There is one table of ten million rows, with uniform ids in bags of 20. Steps of all sizes are timed in turn, round by
round, so that a machine that becomes slower or faster affects all sizes alike. Each size rotates through enough batches
to exceed the last-level cache.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import click
import numpy as np
from rich.console import Console

from benchmarks.criteria import Verdict
from benchmarks.output import DOCS, RESULTS, ROOT, Sheet, print_verdicts, replace_between
from benchmarks.page import PAGE, facts_line, target_lines
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.tuner.bench.report import last_level_cache_bytes, machine_facts
from embforge.tuner.bench.training import our_module
from embforge.tuner.bench.training_rules import RULES, gradients_of
from embforge.tuner.measure.paired import Rotation
from embforge.tuner.measure.quiet import QUIET, Clocks, others_since, wait_until_quiet
from embforge.tuner.workload.tensors import input_of
from embforge.tuner.workload.workload import Fixed, Workload, make_batch

LATEST = RESULTS / "latest-linear.json"
BEGIN, END = "<!-- linear cost: written by make bench -->", "<!-- end of linear cost -->"
ROWS, DIM, LENGTH = 10_000_000, 32, 20
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
ROUNDS = 7
SAMPLE_IDS = 1_000_000
"""A sample has about this many ids and at least one step: small steps are repeated."""
CACHES_TO_PASS = 2
LARGEST_EXPONENT = 1.1
"""The largest power of the ids as which the time may grow. 1 is linear; a comparison sort or a pass over the whole
table would show as another power."""
PATIENCE = 60.0


@dataclass(frozen=True)
class Cost:
    """The medians of one size, in seconds per step."""

    ids: int
    distinct: int
    step: float
    backward: float
    """The seconds of backward and update alone, in the same steps."""


@click.command()
@click.option("--rule", type=click.Choice(RULES), default="rowwise_adagrad", show_default=True, help="Update rule.")
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Ids per step, comma-separated.")
@click.option("--rows", default=ROWS, show_default=True, help="Rows of the table.")
@click.option("--write/--no-write", default=None, help="JSON and page; by default after an undisturbed full run.")
def main(rule: str, sizes: str, rows: int, write: bool | None) -> None:
    """Prints the cost of a training step per id for every size, and how the time grows."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    wanted = tuple(int(size) for size in sizes.split(","))
    full = wanted == SIZES and rows == ROWS
    if full:
        wait_until_quiet(PATIENCE)
    clocks = Clocks.now()
    costs = measure_costs(rule, rows, wanted)
    others = others_since(clocks)
    console.print(sheet(costs).screen(_title(rule, rows)))
    verdicts = judge(costs)
    if others is not None and others > QUIET:
        verdicts.append(Verdict(f"other processes use at most {QUIET:g} CPUs", f"{others:.2f} CPUs", False))
    print_verdicts(console, [("", verdict) for verdict in verdicts])
    undisturbed = others is None or others <= QUIET
    if write if write is not None else full and undisturbed:
        publish(costs, verdicts, rule, rows)
        console.print(f"wrote {LATEST.relative_to(ROOT)} and docs/{PAGE}")
    if not all(verdict.passed for verdict in verdicts):
        sys.exit(1)


def measure_costs(rule: str, rows: int, sizes: tuple[int, ...], rounds: int = ROUNDS) -> list[Cost]:
    """Times our training steps of every size; every round has steps of all sizes."""
    spec = CollectionSpec((TableSpec("table", rows, DIM),), (FeatureSpec("feature", "table"),), name="linear")
    module = our_module(spec, rule)
    steps = [_Steps(module, size) for size in sizes]
    for step in steps:
        step.sample()  # the first call compiles, loads pages and starts threads
    samples_by_size: list[list[tuple[float, float]]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, samples in zip(steps, samples_by_size, strict=True):
            samples.append(step.sample())
    return [
        Cost(step.ids, step.distinct, *(statistics.median(column) for column in zip(*samples, strict=True)))
        for step, samples in zip(steps, samples_by_size, strict=True)
    ]


class _Steps:
    """Training steps of one size that rotate through batches."""

    def __init__(self, module: EmbeddingCollection, size: int) -> None:
        self.module = module
        load = Workload(lengths=Fixed(LENGTH), batch=max(1, size // LENGTH))
        self.ids = load.batch * LENGTH
        count = math.ceil(CACHES_TO_PASS * last_level_cache_bytes() / (self.ids * DIM * 4))
        batches = [make_batch(module.spec, load, seed) for seed in range(min(max(count, 2), 64))]
        self.batches = [input_of(batch)[:2] for batch in batches]
        self.distinct = int(np.unique(batches[0].values).size)
        self.gradient = gradients_of(module.spec)(batches[0]).joint
        self.rotation = Rotation(len(batches))

    def sample(self) -> tuple[float, float]:
        """The mean seconds of a step, and of its backward."""
        whole = backward = 0.0
        turns = self.rotation.take(max(1, SAMPLE_IDS // self.ids))
        for turn in turns:
            values, offsets = self.batches[turn]
            start = time.perf_counter()
            out = self.module(values, offsets)
            middle = time.perf_counter()
            out.backward(self.gradient)
            end = time.perf_counter()
            whole += end - start
            backward += end - middle
        return whole / len(turns), backward / len(turns)


def exponent(costs: list[Cost]) -> float:
    """The power of the ids as which the time of a step grows: the slope of a line through the logarithms."""
    x, y = np.log([cost.ids for cost in costs]), np.log([cost.step for cost in costs])
    return float(np.polyfit(x, y, 1)[0])


def judge(costs: list[Cost]) -> list[Verdict]:
    """The verdict on whether the cost is linear; none for a single size."""
    if len(costs) < 2:
        return []
    power = exponent(costs)
    asked = f"time grows at most as ids^{LARGEST_EXPONENT:g}"
    return [Verdict(asked, f"ids^{power:.2f}", power <= LARGEST_EXPONENT)]


def publish(costs: list[Cost], verdicts: list[Verdict], rule: str, rows: int) -> None:
    """Writes the result file and the results in docs/benchmarks.md."""
    machine = machine_facts()
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "table": {"rows": rows, "dim": DIM},
        "rule": rule,
        "costs": [asdict(cost) for cost in costs],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    RESULTS.mkdir(exist_ok=True)
    LATEST.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    replace_between(DOCS / PAGE, BEGIN, END, costs_markdown(costs, verdicts, rule, rows, machine))


def costs_markdown(costs: list[Cost], verdicts: list[Verdict], rule: str, rows: int, machine: dict[str, str]) -> str:
    """The results as the page shows them: the machine, the table and targets."""
    lines = [facts_line(machine), "", f"{_title(rule, rows)}.", "", sheet(costs).markdown()]
    return "\n".join([*lines, target_lines([("", v) for v in verdicts])])


def sheet(costs: list[Cost]) -> Sheet:
    """The table with one line per size."""
    return Sheet(HEADINGS, [_cells(cost) for cost in costs], words=0)


HEADINGS = ("ids", "distinct rows", "step ms", "step ns per id", "backward ms", "backward ns per id")


def _title(rule: str, rows: int) -> str:
    return f"One table of {rows:,} rows, D {DIM} fp32, {rule}, uniform ids in bags of {LENGTH}"


def _cells(cost: Cost) -> list[str]:
    times = [cell for t in (cost.step, cost.backward) for cell in (f"{t * 1e3:,.2f}", f"{t / cost.ids * 1e9:,.1f}")]
    return [f"{cost.ids:,}", f"{cost.distinct:,}", *times]


if __name__ == "__main__":
    main()
