"""What each process of the sharded benchmark does: both modules on the same tables, checked, then timed in turn.

A round times every contender once, in alternating order, each between barriers; its time is the slowest rank's. What a
contender must give is worked out by plain torch on whole tables first, so that nobody is timed who does other work.
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
"""Largest difference of a result or a row, relative to the largest number: sums in another order, no more."""
SAMPLE_SECONDS = 0.1
"""A sample is so long or one step: small steps are repeated."""
MAX_REPEATS = 16
WARM_UP = 3
TRIAL_ROUNDS = 5
MIN_ROUNDS = 9
MAX_ROUNDS = 200
ATTEMPTS = 3
TIMEOUT = timedelta(minutes=10)


class Contender(Protocol):
    """One module on this rank. Every method is called on all ranks together."""

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
        """Fills all tables as the case says."""
        tables = self.case.spec.tables
        self.module.load_full({table.name: self.case.full_table(index) for index, table in enumerate(tables)})

    def prepare(self, inputs: Inputs) -> Inputs:
        return inputs

    def step(self, prepared: Inputs) -> None:
        """Forward, backward and update."""
        self.module(prepared.values, prepared.offsets).backward(prepared.gradient)

    def checked_step(self, inputs: Inputs) -> Tensor:
        """A step that hands back its result."""
        result: Tensor = self.module(inputs.values, inputs.offsets)
        result.backward(inputs.gradient)
        return result.detach()

    def shards(self, index: int) -> Iterator[tuple[int, Tensor]]:
        """The whole table, gathered from all ranks."""
        yield 0, self.module.full(self.case.spec.tables[index].name)


@dataclass(frozen=True)
class Task:
    """What the processes of one group are to do."""

    ranks: int
    cases: tuple[Case, ...]
    plans: tuple[str, ...]
    names: tuple[str, ...]
    """The contenders."""
    seconds: float
    """Measuring time a case and plan."""
    patience: float
    """Seconds of waiting for a quiet machine, before each measurement."""
    rendezvous: str


@dataclass(frozen=True)
class Outcome:
    """One case under one plan on so many ranks. Times are milliseconds a step, of the slowest rank."""

    ranks: int
    case: str
    plan: str
    medians: dict[str, float]
    ratio: Ratio | None
    """TorchRec's time over ours, paired by round."""
    differences: dict[str, float]
    """Largest difference from plain torch, of results and of rows after a step, relative to the largest number."""
    notes: dict[str, str]
    repeats: int
    others: float | None
    """CPUs that others used on average meanwhile."""
    samples: dict[str, tuple[float, ...]] = field(repr=False)

    @property
    def disturbed(self) -> bool:
        return self.others is not None and self.others > QUIET

    @property
    def disagreeing(self) -> list[str]:
        """Contenders that do other work than was asked for."""
        return [name for name, difference in self.differences.items() if not difference <= TOLERANCE]

    def to_json(self) -> dict[str, Any]:
        """Plain data, all samples included."""
        return {**asdict(self), "disturbed": self.disturbed}


def run_rank(rank: int, task: Task, report: Callable[[Outcome], None]) -> None:
    """One process of a group; rank 0 reports every outcome as it comes."""
    torch.set_num_threads(1)
    # TorchRec's own calls of torch, once a process each: not the reader's concern.
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
    taken = Measurement(samples, dict.fromkeys(samples, repeats))
    return Outcome(
        ranks=task.ranks,
        case=case.name,
        plan=plan,
        medians={name: taken.median(name) * 1e3 for name in samples},
        ratio=taken.ratio(TORCHREC, OURS) if len(samples) == 2 else None,
        differences=differences,
        notes={contender.name: contender.note for contender in contenders},
        repeats=repeats,
        others=_others(clocks),
        samples={name: tuple(round(s * 1e3, 4) for s in of) for name, of in samples.items()},
    )


def _ours(case: Case, plan: str) -> Ours:
    import embforge as ef
    from embforge.codegen.sharding.kinds import TableWise

    spec = case.spec
    ranks = case.ranks_of_tables(dist.get_world_size())
    placed = (
        ef.sharded.ShardPlan.row_wise(spec)
        if plan == "row_wise"
        else ef.sharded.ShardPlan({t.name: TableWise(rank) for t, rank in zip(spec.tables, ranks, strict=True)})
    )
    return Ours(case, ef.sharded.ShardedEmbeddingCollection(spec, placed, optimizer=ef.optim.SGD(lr=LEARNING_RATE)))


@torch.no_grad()
def _difference(case: Case, contender: Contender, inputs: Inputs) -> float:
    """Loads the tables, does a step, and compares with plain torch: the largest relative difference on any rank."""
    contender.load()
    with torch.enable_grad():
        result = contender.checked_step(inputs)
    found = [_apart(result, case.expected_outputs(inputs))]
    everyone = [case.inputs(rank, 0) for rank in range(dist.get_world_size())]
    for index in range(len(case.spec.tables)):
        expected = case.expected_rows(index, everyone)
        found += [_apart(rows, expected[first : first + len(rows)]) for first, rows in contender.shards(index)]
    return float(_slowest([max(found)])[0])


def _apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest number; not a number counts as infinitely far."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    apart = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return apart if math.isfinite(apart) else math.inf


def _fastest(ways: Sequence[Contender], batches: Sequence[Inputs]) -> Contender:
    """The way with the least median time in a few rounds; the same on all ranks."""
    taken = _all_rounds(ways, batches, 1, WARM_UP + TRIAL_ROUNDS)[WARM_UP:]
    medians = taken.median(dim=0).values.tolist()
    return ways[medians.index(min(medians))]


def _plan_rounds(contenders: Sequence[Contender], batches: Sequence[Inputs], seconds: float) -> tuple[int, int]:
    """Steps a sample and rounds, the same for all contenders and on all ranks. Warms up, too."""
    guess = _all_rounds(contenders, batches, 1, WARM_UP)[-1].tolist()
    repeats = min(MAX_REPEATS, max(1, math.ceil(SAMPLE_SECONDS / max(guess))))
    return repeats, min(MAX_ROUNDS, max(MIN_ROUNDS, round(seconds / (sum(guess) * repeats))))


def _rounds(
    contenders: Sequence[Contender], batches: Sequence[Inputs], repeats: int, rounds: int
) -> dict[str, tuple[float, ...]]:
    taken = _all_rounds(contenders, batches, repeats, rounds)
    return {contender.name: tuple(taken[:, index].tolist()) for index, contender in enumerate(contenders)}


def _all_rounds(contenders: Sequence[Contender], batches: Sequence[Inputs], repeats: int, rounds: int) -> Tensor:
    """Seconds a step of the slowest rank, `[rounds, contenders]`."""
    own = torch.zeros(rounds, len(contenders), dtype=torch.float64)
    turn = 0
    gc.collect()
    gc.freeze()  # so that the collections between samples have little to look through
    gc.disable()
    try:
        for number in range(rounds):
            order = range(len(contenders))
            for index in order if number % 2 == 0 else reversed(order):
                contender = contenders[index]
                prepared = [contender.prepare(batches[(turn + step) % len(batches)]) for step in range(repeats)]
                turn += repeats + 1  # nobody begins where the one before ended
                gc.collect()
                dist.barrier()
                start = time.perf_counter()
                for one in prepared:
                    contender.step(one)
                own[number, index] = (time.perf_counter() - start) / repeats
                dist.barrier()
    finally:
        gc.enable()
        gc.unfreeze()
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own


def _slowest(numbers: Sequence[float]) -> Tensor:
    """The largest of all ranks."""
    found = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


def _others(start: Clocks | None) -> float | None:
    """CPUs that no rank of ours used since `start`, the same on all ranks."""
    end = Clocks.now()
    if start is None or end is None:
        return None
    own = torch.tensor([end.own - start.own], dtype=torch.float64)
    dist.all_reduce(own)
    others = (end.machine - start.machine - float(own)) / max(end.wall - start.wall, 1e-9)
    return float(_slowest([max(0.0, others)])[0])
