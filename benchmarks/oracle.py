"""`python -m benchmarks.oracle`: how near the tuner comes to the best point of a space that was measured whole.

`measure` measures every point of every case, for the table that is checked in. `tries` runs `embforge tune` as a user
does, from a good start and from poor ones, each time without any kernel or result of before, and compares what it
stored with the table's best and with the default in fresh interleaved rounds.
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
"""Of the oracle's best speed."""
LEAST_WORK = 0.7
"""Of the wall time: compiling and measuring."""
FINALISTS, FINAL_ROUNDS = 24, 60
CHECK_ROUNDS, CHECK_BLOCKS = 40, 3
PAGE = DOCS / "tuning.md"
BEGIN, END = "<!-- tries: written by make oracle -->", "<!-- end of tries -->"


@dataclass(frozen=True)
class TryResult:
    """What a try stored, and how fast that is in fresh rounds."""

    what: str
    stored: dict[str, Any]
    trials: int
    share: float | None
    """Speed of what modules use from then on, of the oracle's best; None: the oracle is of another machine."""
    leader_share: float | None
    """The same of the fastest that the search found, be it stored or not."""
    gain: tuple[float, float, float]
    """Times faster than the default: median and 95 % interval."""
    floor: float
    """How far apart two copies of it came out here."""
    work_share: float

    @property
    def problems(self) -> list[str]:
        """What a try must reach and did not."""
        found = []
        for what, share in (("stored", self.share), ("found", self.leader_share)):
            if share is not None and share < LEAST_SHARE:
                found.append(f"{what}: {share:.1%} of the oracle's best speed; asked: {LEAST_SHARE:.0%}")
        if self.gain[0] < 1 / (1 + self.floor):
            found.append(f"stored what is {self.gain[0]:.3f}x the default's speed, noise floor {self.floor:.1%}")
        if self.work_share < LEAST_WORK:
            found.append(f"{self.work_share:.0%} of the time measuring or compiling; asked: {LEAST_WORK:.0%}")
        return found


@click.group()
def main() -> None:
    """The tuner against spaces that were measured whole."""


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
@click.option("--only", type=int, multiple=True, help="Numbers of the tries to run, from 0; all by default.")
@click.option("--write", is_flag=True, help="Write the table into docs/tuning.md, and dated JSON.")
def tries(only: Sequence[int], write: bool) -> None:
    """Run the ten tries. Exits with 1 if any of them misses what is asked."""
    results = []
    for number in only or range(len(TRIES)):
        wait_until_quiet(60.0)
        results.append(run_try(TRIES[number]))
        click.echo(f"{results[-1]}: {'; '.join(results[-1].problems) or 'well'}")
    Console(width=None if sys.stdout.isatty() else 160).print(sheet(results).screen())
    if write:
        _write(results)
    sys.exit(any(result.problems for result in results))


def measured(case: Case, console: Console) -> Oracle:
    """Screens every point beside the default, then races the fastest."""
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
    """Tunes in a process of its own with nothing in any cache or store, then compares in fresh rounds."""
    case = CASES[attempt.case]
    words = ["tune", str(case.spec_file), "--budget", BUDGET, "--workload", case.workload, "--seed", str(attempt.seed)]
    words += [] if case.train is None else ["--train", case.train]
    words += [word for name, value in attempt.baseline.items() for word in ("--baseline", f"{name}={value}")]
    with tempfile.TemporaryDirectory(prefix="embforge-try-") as folder:
        fresh = {"EMBFORGE_CACHE_DIR": f"{folder}/cache", "EMBFORGE_TUNED_DIR": f"{folder}/tuned"}
        command = [str(Path(sys.executable).with_name("embforge")), *words, "--json"]
        done = subprocess.run(command, env=os.environ | fresh, stdout=subprocess.PIPE, text=True, check=True)
        told = json.loads(done.stdout)
        stored = [read_file(Path(path)) for path in told["stored"]]
    op = "forward" if case.train is None else "backward"
    used = [record.params for record in stored if isinstance(record, Record)]  # nothing stored: the default is used
    params = params_from("cpu", used[0] if used else told["default"], op)
    return compared(attempt, told, params, params_from("cpu", told["leader"], op))


def compared(attempt: Try, told: dict[str, Any], stored: Params, leader: Params) -> TryResult:
    """What was stored and the leader beside the oracle's best and the default, in blocks of interleaved rounds."""
    case = CASES[attempt.case]
    task, oracle = case.task(), read_oracle(case)
    known = Hardware(**oracle.facts["hardware"]) == task.hardware
    best = oracle.best if known else task.default
    plans = [task.plan(params) for params in (best, stored, stored, leader, task.default)]
    build_many(list(dict.fromkeys(plans)))
    rows: list[tuple[float, ...]] = []
    with _judge(task, seed=1000 + attempt.seed) as judge:
        for block in range(CHECK_BLOCKS):
            taken = judge.rounds(plans, case.workload, CHECK_ROUNDS, seed=block)
            assert isinstance(taken, list), taken
            rows += taken
    oracles, ours, copies, leaders, defaults = np.array(rows).T
    gain = gain_of(defaults, ours)
    return TryResult(
        what=str(attempt),
        stored={name: value for name, value in vars(stored).items() if value != told["default"][name]},
        trials=sum(told["outcomes"].values()),
        share=gain_of(oracles, ours).median if known else None,
        leader_share=gain_of(oracles, leaders).median if known else None,
        gain=(gain.median, gain.low, gain.high),
        floor=noise_floor(ours, copies),
        work_share=told["work_share"],
    )


def _judge(task: Task, seed: int = 0) -> BenchJudge:
    return BenchJudge(Setup(task.anchor.text, task.workloads, seed=seed, threads=task.hardware.sizes["cores"]))


def sheet(results: Sequence[TryResult]) -> Sheet:
    """A line per try."""
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
