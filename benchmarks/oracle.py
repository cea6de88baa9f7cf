"""Compares the tuner's choice with the best point of a space of which every point was measured: `python -m
benchmarks.oracle`.

`measure` measures every point of every case and writes the tables that are checked in. `tries` runs `embforge tune` as
a user does, from a good start and from poor ones, each time without kernels and results of earlier runs. It compares
what the run stored with the table's best point and with the default in new interleaved rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from benchmarks.oracle_cases import CASES, TRIES, Case, Oracle, Try, read_oracle, write_oracle
from benchmarks.output import DOCS, RESULTS, Sheet, replace_between
from embforge.codegen.build import build_many
from embforge.codegen.params import Params, params_from
from embforge.codegen.tuned.record import Hardware, Record
from embforge.codegen.tuned.stores import read_file
from embforge.tuner.judge.bench_judge import BenchJudge
from embforge.tuner.judge.messages import Setup
from embforge.tuner.judge.outcome import Timed
from embforge.tuner.measure.quiet import wait_until_quiet
from embforge.tuner.measure.stats import noise_floor
from embforge.tuner.study.decision import gain_of
from embforge.tuner.study.task import Task

BUDGET = "3m"
LEAST_SHARE = 0.95
"""The share of the oracle's best speed that a try must reach."""
LEAST_WORK = 0.7
"""The share of the wall-clock time that a try must spend on compiling and measuring."""
FINALISTS, FINAL_ROUNDS = 24, 60
CHECK_ROUNDS, CHECK_BLOCKS = 40, 3
PAGE = DOCS / "tuning.md"
BEGIN, END = "<!-- tries: written by make oracle -->", "<!-- end of tries -->"


@dataclass(frozen=True)
class TryResult:
    """What a try stored, and how fast that is in new rounds."""

    what: str
    stored: dict[str, Any]
    """The stored fields that differ from the default's."""
    trials: int
    share: float | None
    """The share of the oracle's best speed that modules have after the try; None if the oracle was measured on other
    hardware."""
    leader_share: float | None
    """The same for the fastest point that the search found, whether it was stored or not."""
    gain: tuple[float, float, float]
    """How many times as fast as the default: median and 95 % interval."""
    floor: float
    """The noise floor of these rounds, from two copies of what was stored."""
    work_share: float
    """The share of the wall-clock time that was spent on compiling and measuring."""

    @property
    def problems(self) -> list[str]:
        """The targets that the try missed, in words; empty if it reached all."""
        problems = []
        for what, share in (("stored", self.share), ("found", self.leader_share)):
            if share is not None and share < LEAST_SHARE:
                problems.append(f"{what}: {share:.1%} of the oracle's best speed; target: {LEAST_SHARE:.0%}")
        if self.gain[0] < 1 / (1 + self.floor):
            problems.append(f"stored: {self.gain[0]:.3f}x the default's speed, with a noise floor of {self.floor:.1%}")
        if self.work_share < LEAST_WORK:
            problems.append(f"{self.work_share:.0%} of the time measuring or compiling; target: {LEAST_WORK:.0%}")
        return problems


@click.group()
def main() -> None:
    """Compares the tuner with spaces of which every point was measured."""


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(CASES)))
def measure(names: Sequence[str]) -> None:
    """Measure every point of the cases (all of them by default) and write their tables."""
    console = Console()
    for name in names or CASES:
        wait_until_quiet(60.0)
        case = CASES[name]
        oracle = measured(case, console)
        write_oracle(case, oracle)
        console.print(f"{name}: {len(oracle.ratios)} points, best {oracle.ratios[oracle.best]:.3f}: {oracle.best}")


@main.command()
@click.option("--only", type=int, multiple=True, help="Run only the try of this number, from 0 (repeatable).")
@click.option("--write", is_flag=True, help="Write the table into docs/tuning.md, and the results as dated JSON.")
def tries(only: Sequence[int], write: bool) -> None:
    """Run the ten tries. The exit code is 1 if any of them misses a target."""
    results = []
    for number in only or range(len(TRIES)):
        wait_until_quiet(60.0)
        results.append(run_try(TRIES[number]))
        click.echo(f"{results[-1]}: {'; '.join(results[-1].problems) or 'reached all targets'}")
    Console(width=None if sys.stdout.isatty() else 160).print(sheet(results).screen())
    if write:
        _write(results)
    sys.exit(any(result.problems for result in results))


def measured(case: Case, console: Console) -> Oracle:
    """Measures every point next to the default, and then the fastest ones again in more rounds."""
    task = case.task()
    plans = [task.plan(params) for params in task.space.points]
    with console.status(f"{case.name}: compiling {len(plans)} kernels"):
        build_many(plans)
    with _judge(task) as judge, console.status("") as status:
        ratios: dict[Params, float] = {}
        for number, plan in enumerate(plans):
            status.update(f"{case.name}: {number} of {len(plans)} points")
            outcome = judge.screen(plan)
            if not isinstance(outcome, Timed):
                raise RuntimeError(f"{plan.uri}: {outcome}; an oracle must have no failures")
            ratios[plan.params] = outcome.score
        fastest = sorted(ratios, key=lambda params: ratios[params])[:FINALISTS]
        status.update(f"{case.name}: finals")
        rows = judge.rounds([task.plan(p) for p in (task.default, *fastest)], case.workload, FINAL_ROUNDS, seed=1)
        assert isinstance(rows, list), rows
    times = np.array(rows)
    finals = np.median(times[:, 1:] / times[:, :1], axis=0)
    ratios |= dict(zip(fastest, finals.tolist(), strict=True)) | {task.default: 1.0}
    facts = {
        "case": asdict(case),
        "hardware": asdict(task.hardware),
        "versions": task.versions(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "default_seconds": float(np.median(times[:, 0])),
        "rounds": {"screening": "5 to 24", "finals": FINAL_ROUNDS, "finalists": FINALISTS},
    }
    return Oracle(ratios, fastest[int(finals.argmin())], facts)


def run_try(attempt: Try) -> TryResult:
    """Tunes in a process of its own with an empty cache and an empty store, then compares in new rounds."""
    case = CASES[attempt.case]
    words = ["tune", str(case.spec_file), "--budget", BUDGET, "--workload", case.workload, "--seed", str(attempt.seed)]
    words += [] if case.train is None else ["--train", case.train]
    words += [word for name, value in attempt.baseline.items() for word in ("--baseline", f"{name}={value}")]
    with tempfile.TemporaryDirectory(prefix="embforge-try-") as folder:
        empty = {"EMBFORGE_CACHE_DIR": f"{folder}/cache", "EMBFORGE_TUNED_DIR": f"{folder}/tuned"}
        command = [str(Path(sys.executable).with_name("embforge")), *words, "--json"]
        done = subprocess.run(command, env=os.environ | empty, stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout)
        stored = [read_file(Path(path)) for path in answer["stored"]]
    op = "forward" if case.train is None else "backward"
    # If nothing was stored, modules use the default.
    used = [record.params for record in stored if isinstance(record, Record)]
    params = params_from("cpu", used[0] if used else answer["default"], op)
    return compared(attempt, answer, params, params_from("cpu", answer["leader"], op))


def compared(attempt: Try, answer: dict[str, Any], stored: Params, leader: Params) -> TryResult:
    """Compares the stored params and the search's leader with the oracle's best and the default, in blocks of
    interleaved rounds. `answer` is the JSON that `embforge tune` printed."""
    case = CASES[attempt.case]
    task, oracle = case.task(), read_oracle(case)
    known = Hardware(**oracle.facts["hardware"]) == task.hardware
    best = oracle.best if known else task.default
    plans = [task.plan(params) for params in (best, stored, stored, leader, task.default)]
    build_many(list(dict.fromkeys(plans)))
    rows: list[tuple[float, ...]] = []
    with _judge(task, seed=1000 + attempt.seed) as judge:
        for block in range(CHECK_BLOCKS):
            of_block = judge.rounds(plans, case.workload, CHECK_ROUNDS, seed=block)
            assert isinstance(of_block, list), of_block
            rows += of_block
    oracles, ours, copies, leaders, defaults = np.array(rows).T
    gain = gain_of(defaults, ours)
    return TryResult(
        what=str(attempt),
        stored={name: value for name, value in vars(stored).items() if value != answer["default"][name]},
        trials=sum(answer["outcomes"].values()),
        share=gain_of(oracles, ours).median if known else None,
        leader_share=gain_of(oracles, leaders).median if known else None,
        gain=(gain.median, gain.low, gain.high),
        floor=noise_floor(ours, copies),
        work_share=answer["work_share"],
    )


def _judge(task: Task, seed: int = 0) -> BenchJudge:
    return BenchJudge(Setup(task.anchor.text, task.workloads, seed=seed, threads=task.hardware.sizes["cores"]))


def sheet(results: Sequence[TryResult]) -> Sheet:
    """The table with one line per try."""
    return Sheet(HEADINGS, [_cells(result) for result in results], words=2)


HEADINGS = ("try", "stored", "trials", "of the best: stored", "found", "times the default", "noise", "at work")


def _cells(result: TryResult) -> list[str]:
    gain = "{:.3f} ({:.3f} to {:.3f})".format(*result.gain)
    stored = " ".join(f"{name}={value}" for name, value in result.stored.items()) or "the default"
    shares = ["-" if share is None else f"{share:.1%}" for share in (result.share, result.leader_share)]
    return [result.what, stored, str(result.trials), *shares, gain, f"{result.floor:.1%}", f"{result.work_share:.0%}"]


def _write(results: Sequence[TryResult]) -> None:
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    data = {"measured": now.isoformat(timespec="seconds"), "tries": [asdict(result) for result in results]}
    (RESULTS / f"tries-{now:%Y-%m-%d}.json").write_text(json.dumps(data, indent=1) + "\n")
    replace_between(PAGE, BEGIN, END, sheet(results).markdown())


if __name__ == "__main__":
    main()
