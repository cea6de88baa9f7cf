"""The two suites of the benchmark, lookups and training steps, and all that differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import criteria, workloads
from benchmarks.criteria import Targets
from benchmarks.workloads import BenchWorkload
from embforge.tuner.bench.forward import bench_spec
from embforge.tuner.bench.peers import PEERS
from embforge.tuner.bench.report import GATHER_LIMIT, LIMIT, OURS, BenchReport
from embforge.tuner.bench.training import bench_training


@dataclass(frozen=True)
class Suite:
    """A file of workloads, their targets, and where the results are written."""

    name: str
    workloads: Path
    targets: Targets
    seconds: float
    """Measuring time per workload."""
    columns: tuple[str, ...]
    """The contenders whose times are shown."""
    limit: str
    """The name of the limit."""
    begin: str
    """The line of docs/benchmarks.md after which the results are written; the line `end` follows them."""
    end: str
    begin_targets: str
    """The line after which the suite's targets are written; the line `end_targets` follows them."""
    end_targets: str
    plot: str
    latest: str
    """The file in `benchmarks/results` with the results that the page shows."""


FORWARD = Suite(
    name="forward",
    workloads=workloads.FORWARD,
    targets=criteria.FORWARD,
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
    targets=criteria.TRAINING,
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
    """Times one workload with the contenders in `names`."""
    against = [name for name in names if name in PEERS]
    ours, limit = OURS in names, LIMIT in names and workload.group != "overhead"  # one sample reads hardly any rows
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
