"""One process of the sharded benchmark: makes both modules with the same tables, checks them, then times them in turn.

A round times every contender once, in alternating order, each between barriers; its time is the slowest rank's. The
right results are calculated first, by plain torch on whole tables, so that no contender gains by computing something
else.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sharded_cases import BATCHES, LEARNING_RATE, Case, Inputs
from benchmarks.sharded_torchrec import torchrec_contenders
from embforge.tuner.bench.report import OURS
from embforge.tuner.measure.paired import Measurement, Ratio
from embforge.tuner.measure.quiet import QUIET, Clocks, wait_until_quiet

TORCHREC = "torchrec"
PLANS = ("row_wise", "table_wise")
TOLERANCE = 5e-5
"""The largest difference of a result or a row that is allowed, relative to the largest number: sums may have another
order, and no more."""
SAMPLE_SECONDS = 0.1
"""A sample takes about this long and has at least one step: short steps are repeated."""
MAX_REPEATS = 16
WARM_UP = 3
TRIAL_ROUNDS = 5
MIN_ROUNDS = 9
MAX_ROUNDS = 200
ATTEMPTS = 3
TIMEOUT = timedelta(minutes=10)


class Contender(Protocol):
    """One module, as this rank sees it. Every method is called on all ranks together."""

    @property
    def name(self) -> str: ...

    @property
    def note(self) -> str: ...

    def load(self) -> None: ...

    def prepare(self, inputs: Inputs) -> Any: ...

    def step(self, prepared: Any) -> None: ...

    def checked_step(self, inputs: Inputs) -> Tensor: ...

    def shards(self, index: int) -> Iterator[tuple[int, Tensor]]: ...


@dataclass(frozen=True, eq=False)
class Ours:
    """Our sharded collection."""

    case: Case
    module: Any
    name: str = OURS
    note: str = ""

    def load(self) -> None:
        """Fills all tables with the case's rows."""
        tables = self.case.spec.tables
        self.module.load_full({table.name: self.case.full_table(index) for index, table in enumerate(tables)})

    def prepare(self, inputs: Inputs) -> Inputs:
        return inputs

    def step(self, prepared: Inputs) -> None:
        """Forward, backward and update."""
        self.module(prepared.values, prepared.offsets).backward(prepared.gradient)

    def checked_step(self, inputs: Inputs) -> Tensor:
        """A step that returns its result."""
        result: Tensor = self.module(inputs.values, inputs.offsets)
        result.backward(inputs.gradient)
        return result.detach()

    def shards(self, index: int) -> Iterator[tuple[int, Tensor]]:
        """The whole table, gathered from all ranks."""
        yield 0, self.module.full(self.case.spec.tables[index].name)


@dataclass(frozen=True)
class Task:
    """The work of the processes of one group."""

    ranks: int
    cases: tuple[Case, ...]
    plans: tuple[str, ...]
    names: tuple[str, ...]
    """The contenders."""
    seconds: float
    """Measuring time per case and plan."""
    patience: float
    """The most seconds to wait for a quiet machine before each measurement."""
    rendezvous: str


@dataclass(frozen=True)
class Outcome:
    """The result of one case under one plan on `ranks` ranks. Times are milliseconds per step of the slowest rank."""

    ranks: int
    case: str
    plan: str
    medians: dict[str, float]
    ratio: Ratio | None
    """TorchRec's time divided by ours, paired by round; None unless both were timed."""
    differences: dict[str, float]
    """By contender: the largest difference from plain torch, in results and in rows after a step, relative to the
    largest number."""
    notes: dict[str, str]
    repeats: int
    others: float | None
    """CPUs that other processes used on average during the measurement; None if the system does not report it."""
    samples: dict[str, tuple[float, ...]] = field(repr=False)

    @property
    def disturbed(self) -> bool:
        """Whether other processes used so much of the machine that the times cannot be trusted."""
        return self.others is not None and self.others > QUIET

    @property
    def disagreeing(self) -> list[str]:
        """The contenders whose results or rows differ from plain torch's by more than `TOLERANCE`."""
        return [name for name, difference in self.differences.items() if not difference <= TOLERANCE]

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data that `json` can write, with all samples."""
        return {**asdict(self), "disturbed": self.disturbed}


def run_rank(rank: int, task: Task, report: Callable[[Outcome], None]) -> None:
    """Runs one process of a group. Rank 0 calls `report` with every outcome."""
    torch.set_num_threads(1)
    # Warnings about TorchRec's own calls of torch, one per process.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.ranks, timeout=TIMEOUT)
    for case in task.cases:
        for plan in task.plans:
            outcome = _measure(task, case, plan)
            if rank == 0:
                report(outcome)
    dist.destroy_process_group()


def _measure(task: Task, case: Case, plan: str) -> Outcome:
    batches = [case.inputs(dist.get_rank(), turn) for turn in range(BATCHES)]
    contenders: list[Contender] = [_ours(case, plan)] if OURS in task.names else []
    differences = {contender.name: _difference(case, contender, batches[0]) for contender in contenders}
    if TORCHREC in task.names:
        ways: list[Contender] = list(torchrec_contenders(case, plan))
        differences[TORCHREC] = max(_difference(case, way, batches[0]) for way in ways)
        contenders.append(_fastest(ways, batches))
    attempts = [_attempt(task, case, plan, contenders, batches, differences)]
    while attempts[-1].disturbed and task.patience > 0 and len(attempts) < ATTEMPTS:
        attempts.append(_attempt(task, case, plan, contenders, batches, differences))
    return min(attempts, key=lambda outcome: outcome.others or 0.0)


def _attempt(
    task: Task,
    case: Case,
    plan: str,
    contenders: Sequence[Contender],
    batches: Sequence[Inputs],
    differences: dict[str, float],
) -> Outcome:
    if dist.get_rank() == 0 and task.patience > 0:
        wait_until_quiet(task.patience)
    dist.barrier()
    clocks = Clocks.now()
    repeats, rounds = _plan_rounds(contenders, batches, task.seconds)
    samples = _rounds(contenders, batches, repeats, rounds)
    measurement = Measurement(samples, dict.fromkeys(samples, repeats))
    return Outcome(
        ranks=task.ranks,
        case=case.name,
        plan=plan,
        medians={name: measurement.median(name) * 1e3 for name in samples},
        ratio=measurement.ratio(TORCHREC, OURS) if len(samples) == 2 else None,
        differences=differences,
        notes={contender.name: contender.note for contender in contenders},
        repeats=repeats,
        others=_others(clocks),
        samples={name: tuple(round(s * 1e3, 4) for s in seconds) for name, seconds in samples.items()},
    )


def _ours(case: Case, plan: str) -> Ours:
    import embforge as ef
    from embforge.codegen.sharding.kinds import TableWise

    spec = case.spec
    ranks = case.ranks_of_tables(dist.get_world_size())
    shard_plan = (
        ef.sharded.ShardPlan.row_wise(spec)
        if plan == "row_wise"
        else ef.sharded.ShardPlan({t.name: TableWise(rank) for t, rank in zip(spec.tables, ranks, strict=True)})
    )
    return Ours(case, ef.sharded.ShardedEmbeddingCollection(spec, shard_plan, optimizer=ef.optim.SGD(lr=LEARNING_RATE)))


@torch.no_grad()
def _difference(case: Case, contender: Contender, inputs: Inputs) -> float:
    """Loads the tables, makes a step, and compares with plain torch. Returns the largest relative difference on any
    rank."""
    contender.load()
    with torch.enable_grad():
        result = contender.checked_step(inputs)
    differences = [_relative_difference(result, case.expected_outputs(inputs))]
    of_ranks = [case.inputs(rank, 0) for rank in range(dist.get_world_size())]
    for index in range(len(case.spec.tables)):
        expected = case.expected_rows(index, of_ranks)
        for first, rows in contender.shards(index):
            differences.append(_relative_difference(rows, expected[first : first + len(rows)]))
    return float(_largest_of_ranks([max(differences)])[0])


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest number; infinite for NaN, infinities and other shapes."""
    if actual.shape != expected.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    difference = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return difference if math.isfinite(difference) else math.inf


def _fastest(ways: Sequence[Contender], batches: Sequence[Inputs]) -> Contender:
    """The way of calling with the least median time in a few rounds; all ranks agree on it."""
    seconds = _all_rounds(ways, batches, 1, WARM_UP + TRIAL_ROUNDS)[WARM_UP:]
    medians = seconds.median(dim=0).values.tolist()
    return ways[medians.index(min(medians))]


def _plan_rounds(contenders: Sequence[Contender], batches: Sequence[Inputs], seconds: float) -> tuple[int, int]:
    """How many steps a sample has and how many rounds there are, the same for all contenders and on all ranks. It also
    warms up."""
    estimates = _all_rounds(contenders, batches, 1, WARM_UP)[-1].tolist()
    repeats = min(MAX_REPEATS, max(1, math.ceil(SAMPLE_SECONDS / max(estimates))))
    return repeats, min(MAX_ROUNDS, max(MIN_ROUNDS, round(seconds / (sum(estimates) * repeats))))


def _rounds(
    contenders: Sequence[Contender], batches: Sequence[Inputs], repeats: int, rounds: int
) -> dict[str, tuple[float, ...]]:
    seconds = _all_rounds(contenders, batches, repeats, rounds)
    return {contender.name: tuple(seconds[:, index].tolist()) for index, contender in enumerate(contenders)}


def _all_rounds(contenders: Sequence[Contender], batches: Sequence[Inputs], repeats: int, rounds: int) -> Tensor:
    """Seconds per step of the slowest rank, `[rounds, contenders]`."""
    own = torch.zeros(rounds, len(contenders), dtype=torch.float64)
    turn = 0
    gc.collect()
    gc.freeze()  # so that garbage collections between samples have few objects to visit
    gc.disable()
    try:
        for number in range(rounds):
            order = range(len(contenders))
            for index in order if number % 2 == 0 else reversed(order):
                contender = contenders[index]
                prepared = [contender.prepare(batches[(turn + step) % len(batches)]) for step in range(repeats)]
                turn += repeats + 1  # no contender starts with the batch that the previous one ended with
                gc.collect()
                dist.barrier()
                start = time.perf_counter()
                for step_inputs in prepared:
                    contender.step(step_inputs)
                own[number, index] = (time.perf_counter() - start) / repeats
                dist.barrier()
    finally:
        gc.enable()
        gc.unfreeze()
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own


def _largest_of_ranks(numbers: Sequence[float]) -> Tensor:
    """Each number's maximum over all ranks."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def _others(start: Clocks | None) -> float | None:
    """CPUs that processes other than our ranks used on average since `start`; all ranks agree on it."""
    end = Clocks.now()
    if start is None or end is None:
        return None
    own = torch.tensor([end.own - start.own], dtype=torch.float64)
    dist.all_reduce(own)
    others = (end.machine - start.machine - float(own)) / max(end.wall - start.wall, 1e-9)
    return float(_largest_of_ranks([max(0.0, others)])[0])
