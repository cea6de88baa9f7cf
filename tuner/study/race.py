"""The finals: the best of the search against the default, in interleaved rounds, with a duplicate of each.

A short heat finds the leader, because times of different screenings cannot be compared well. Then new rounds are run,
so that the leader is not judged by the samples that made it the leader; a rival that is faster leads the next final.

Rounds are run in blocks. A block during which other processes used the CPUs is run again while time lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from embforge.codegen.errors import EmbforgeError
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.tuner.judge.judge import Cache, Judge
from embforge.tuner.judge.outcome import Outcome
from embforge.tuner.measure.quiet import QUIET, WINDOW, Usage
from embforge.tuner.measure.stats import Floats, wilcoxon
from embforge.tuner.study.decision import ALPHA, DEFAULT, DUPLICATES, LEADER, Decision, decide

FINALISTS = 6
HEAT_ROUNDS = 8
BLOCK_ROUNDS = 12
"""Rounds between two looks at the samples, with which the smallest possible p is 1/4096; or a multiple of it if rounds
are so short that a block would not last `WINDOW` seconds."""
MOST_ROUNDS = 480
UNKNOWN = Usage(WINDOW, 0.0)
"""The assumed CPU use of other processes where it is not known: no reason to wait, and none to doubt."""


class RaceError(EmbforgeError, RuntimeError):
    """The default itself failed in the finals, so nothing can be compared. The message has outcome and remedy."""


@dataclass(frozen=True)
class Racing:
    """An event: a block of rounds was run, and either counts or will be run again."""

    stage: str
    """heat or final."""
    rounds: int
    """Rounds of this stage so far."""
    gains: dict[Params, float]
    """Gains of the candidates over the default, medians over all workloads. Empty if the block does not count."""
    retaken: int = 0
    """How many blocks so far do not count, because others used the CPUs."""
    others: float = 0.0
    """CPUs that other processes used during this block."""


@dataclass(frozen=True)
class Race:
    """The result of the finals."""

    leader: Plan
    decision: Decision
    samples: dict[str, dict[str, tuple[float, ...]]]
    """Samples of the last final: `[workload][name][round]`; rivals are named by their plans' URIs."""
    failed: dict[str, Outcome] = field(default_factory=dict)
    """Candidates that failed in the finals, by URI."""
    clocks: dict[str, int | None] = field(default_factory=dict)
    """Clock rates at its end, in MHz by name."""
    others: float = 0.0
    """CPUs that other processes used during the rounds of `samples`, the most of any block; 0 also where that is not
    known. Above `QUIET` if there was no quiet block before the deadline."""
    retaken: int = 0
    """How many blocks were run again, because others used the CPUs."""


Rows = dict[str, list[tuple[float, ...]]]


@dataclass(frozen=True)
class _Block:
    """Rounds that were run without interruption."""

    rows: Rows
    others: float

    @property
    def count(self) -> int:
        return len(next(iter(self.rows.values())))


def race(
    judge: Judge,
    candidates: Sequence[Plan],
    default: Plan,
    *,
    deadline: float,
    seed: int = 0,
    cache: Cache = "warm",
    progress: Callable[[Racing], object] = lambda event: None,
) -> Race:
    """Races the candidates until the decision is settled or the deadline (of `time.monotonic`) has passed.

    At least a heat and one block are run. Only blocks count during which others used at most `QUIET` CPUs; if there is
    none before the deadline, the last one is kept as evidence and decides nothing. A candidate that fails is dropped;
    `RaceError` if the default fails. Without candidates the default races itself.
    """
    track = _Track(judge, default, seed, cache, [c for c in candidates if c != default], deadline, progress)
    while True:
        leader, rivals = track.heat()
        if (found := track.final(leader, rivals)) is not None:
            return found


class _Track:
    """The candidates that are still in the race, and the seeds of rounds."""

    def __init__(
        self,
        judge: Judge,
        default: Plan,
        seed: int,
        cache: Cache,
        candidates: list[Plan],
        deadline: float,
        progress: Callable[[Racing], object],
    ) -> None:
        self._judge, self._default, self._seed, self._cache = judge, default, seed, cache
        self._candidates, self._deadline, self._progress = candidates, deadline, progress
        self._failed: dict[str, Outcome] = {}
        self._retaken = 0

    def heat(self) -> tuple[Plan, list[Plan]]:
        """The fastest candidate, and those that it does not clearly beat."""
        while len(self._candidates) > 1:
            block = self._block("heat", [self._default, *self._candidates], HEAT_ROUNDS)
            if block is None:
                continue
            logs = np.mean([np.log(taken) for taken in block.rows.values()], axis=0)
            self._tell("heat", block.count, self._gains(self._candidates, logs[:, :1] - logs[:, 1:]), block.others)
            order = np.argsort(np.median(logs[:, 1:] - logs[:, :1], axis=0), kind="stable")
            first, *others = order.tolist()
            near = [i for i in others if wilcoxon(logs[:, 1 + first], logs[:, 1 + i]) >= ALPHA]
            return self._candidates[first], [self._candidates[i] for i in near]
        return (self._candidates or [self._default])[0], []

    def final(self, leader: Plan, rivals: list[Plan]) -> Race | None:
        """The result; None if a candidate failed, so that another one must lead."""
        plans = [self._default, leader, self._default, leader, *rivals]
        names = [DEFAULT, LEADER, DUPLICATES[DEFAULT], DUPLICATES[LEADER], *(plan.uri for plan in rivals)]
        taken: Rows = {workload: [] for workload in self._judge.workloads}
        rounds, others = 0, 0.0
        while True:
            block = self._block("final", plans, BLOCK_ROUNDS, rounds)
            if block is None:
                return None
            if block.others <= QUIET or not rounds:  # a disturbed one is the last, and adds nothing to quiet ones
                taken = {workload: rows + block.rows[workload] for workload, rows in taken.items()}
                rounds, others = rounds + block.count, max(others, block.others)
            samples = {w: dict(zip(names, zip(*rows, strict=True), strict=True)) for w, rows in taken.items()}
            decision = decide(samples, others)
            logs = np.mean([np.log(rows) for rows in taken.values()], axis=0)
            once = np.delete(logs, (0, 2, 3), axis=1)  # without the default and the duplicates
            self._tell("final", rounds, self._gains([leader, *rivals], logs[:, :1] - once), block.others)
            over = time.monotonic() >= self._deadline or rounds >= MOST_ROUNDS
            if decision.settled or over or leader == self._default:
                if leader == self._default and not decision.disturbed:
                    decision = replace(decision, ships=False, why="the default stays: nothing else could be raced")
                clocks = dict(self._judge.clocks)
                return Race(leader, decision, samples, self._failed, clocks, others, self._retaken)
            if decision.overtaken_by is not None:  # from now on it leads, judged by new rounds
                new = next(plan for plan in rivals if plan.uri == decision.overtaken_by)
                return self.final(new, [leader, *(plan for plan in rivals if plan != new)])

    def _block(self, stage: str, plans: list[Plan], count: int, before: int = 0) -> _Block | None:
        """A block during which others left the CPUs alone, or any once the deadline has passed.

        None if a candidate failed; it leaves the race then. `before`: rounds of the stage so far.
        """
        while True:
            block = self._rounds(plans, count)
            if block is None or block.others <= QUIET or time.monotonic() >= self._deadline:
                return block
            self._retaken += 1
            self._tell(stage, before, {}, block.others)

    def _rounds(self, plans: list[Plan], count: int) -> _Block | None:
        """Runs `count` rounds, and as many again until the CPU use of other processes during them is known."""
        rows: Rows = {workload: [] for workload in self._judge.workloads}
        usage = Usage(0.0, 0.0)
        while True:
            for workload in rows:
                self._seed += 1
                got = self._judge.rounds(plans, workload, count, seed=self._seed, cache=self._cache)
                if isinstance(got, dict):
                    self._drop({plans[position].uri: outcome for position, outcome in got.items()})
                    return None
                rows[workload] += got
                usage += self._judge.others or UNKNOWN
            if usage.wall >= WINDOW:
                return _Block(rows, usage.cpus)

    def _tell(self, stage: str, rounds: int, gains: dict[Params, float], others: float) -> None:
        self._progress(Racing(stage, rounds, gains, self._retaken, others))

    def _drop(self, failed: dict[str, Outcome]) -> None:
        if (uri := self._default.uri) in failed:
            raise RaceError(
                f"the default plan {uri} failed in the finals: {failed[uri]}; nothing was stored; check it by "
                "`embforge verify`"
            )
        self._failed |= failed
        self._candidates = [plan for plan in self._candidates if plan.uri not in failed]

    @staticmethod
    def _gains(plans: list[Plan], logs: Floats) -> dict[Params, float]:
        return dict(zip((plan.params for plan in plans), np.exp(np.median(logs, axis=0)).tolist(), strict=True))
