"""The two suites of the benchmark: lookups and training steps. What differs between them stands here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import criteria, workloads
from benchmarks.criteria import Bars
from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench.forward import bench_spec
from embforge.tuner.bench.peers import PEERS
from embforge.tuner.bench.report import GATHER_LIMIT, LIMIT, OURS, BenchReport
from embforge.tuner.bench.training import bench_training


@dataclass(frozen=True)
class Suite:
    """A file of workloads, what they are held against, and where the results go."""

    name: str
    workloads: Path
    bars: Bars
    seconds: float
    """Measuring time a workload."""
    columns: tuple[str, ...]
    """Whose times are shown."""
    limit: str
    """What the limit is called."""
    begin: str
    """The line of docs/benchmarks.md behind which the results go, up to `end`."""
    end: str
    begin_targets: str
    """The same for the targets of the suite, which stand further down."""
    end_targets: str
    plot: str
    latest: str
    """The result file that the page was made from."""


FORWARD = Suite(
    name="forward",
    workloads=workloads.FORWARD,
    bars=criteria.FORWARD,
    seconds=12.0,
    columns=(OURS, *PEERS, LIMIT),
    limit="gather limit",
    begin="<!-- results: written by make bench -->",
    end="<!-- end of results -->",
    begin_targets="<!-- targets: written by make bench -->",
    end_targets="<!-- end of targets -->",
    plot="benchmarks.svg",
    latest="latest.json",
)
TRAINING = Suite(
    name="training",
    workloads=workloads.TRAINING,
    bars=criteria.TRAINING,
    seconds=10.0,
    columns=(OURS, *PEERS, LIMIT, GATHER_LIMIT),
    limit="update limit",
    begin="<!-- training results: written by make bench -->",
    end="<!-- end of training results -->",
    begin_targets="<!-- training targets: written by make bench -->",
    end_targets="<!-- end of training targets -->",
    plot="training.svg",
    latest="latest-training.json",
)
SUITES = {suite.name: suite for suite in (FORWARD, TRAINING)}


def run_workload(workload: BenchWorkload, names: tuple[str, ...], seconds: float) -> BenchReport:
    """One workload timed with the contenders in `names`."""
    against = [name for name in names if name in PEERS]
    ours, limit = OURS in names, LIMIT in names and workload.group != "overhead"  # one sample has no rows to speak of
    if workload.train is not None:
        return bench_training(
            workload.spec,
            workload.train,
            against=against,
            workload=workload.load,
            seconds=seconds,
            ours=ours,
            limit=limit,
        )
    return bench_spec(workload.spec, against=against, workload=workload.load, seconds=seconds, ours=ours, limit=limit)
