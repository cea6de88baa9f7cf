"""The finals: the best of the search against the default, in interleaved rounds, beside a duplicate of each.

A short heat finds the leader, for times of a screening compare badly. Then rounds are taken anew, so that the leader
is not judged by the samples that made it the leader; a rival that proves faster leads the next final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from embforge.codegen.errors import EmbforgeError
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.tuner.decision import ALPHA, DEFAULT, DUPLICATES, LEADER, Decision, decide
from embforge.tuner.judge import Cache, Judge
from embforge.tuner.outcome import Outcome
from embforge.tuner.stats import Floats, wilcoxon

FINALISTS = 6
HEAT_ROUNDS = 8
BLOCK_ROUNDS = 12
"""Between two looks at the samples; with so many the smallest possible p is 1/4096."""
MOST_ROUNDS = 480


class RaceError(EmbforgeError, RuntimeError):
    """The default itself failed in the finals: nothing can be compared. Names the outcome and what to do."""


@dataclass(frozen=True)
class Racing:
    """A block of rounds was run."""

    stage: str
    """heat or final."""
    rounds: int
    """Of this stage so far."""
    gains: dict[Params, float]
    """Of each candidate over the default: median, over all workloads."""


@dataclass(frozen=True)
class Race:
    """What the finals found."""

    leader: Plan
    decision: Decision
    samples: dict[str, dict[str, tuple[float, ...]]]
    """Of the last final: `[workload][name][round]`; rivals are named by their plans' URIs."""
    failed: dict[str, Outcome] = field(default_factory=dict)
    """Candidates that failed in the finals, by URI."""
    clocks: dict[str, int | None] = field(default_factory=dict)
    """Clock rates at its end, in MHz by name."""
    others: float = 0.0
    """CPUs that other processes used at most during a block of rounds; 0 also where the system does not tell."""


Rows = dict[str, list[tuple[float, ...]]]


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

    At least a heat and one block are run. A candidate that fails is dropped; `RaceError` if the default fails.
    Without candidates the default races itself.
    """
    track = _Track(judge, default, seed, cache, [c for c in candidates if c != default])
    while True:
        leader, rivals = track.heat(progress)
        if (found := track.final(leader, rivals, deadline, progress)) is not None:
            return found


class _Track:
    """Who is still in the race, and the seeds of its rounds."""

    def __init__(self, judge: Judge, default: Plan, seed: int, cache: Cache, candidates: list[Plan]) -> None:
        self._judge, self._default, self._seed, self._cache = judge, default, seed, cache
        self._candidates = candidates
        self._failed: dict[str, Outcome] = {}
        self._disturbed = 0.0

    def heat(self, progress: Callable[[Racing], object]) -> tuple[Plan, list[Plan]]:
        """The fastest, and those that it does not beat beyond doubt."""
        while len(self._candidates) > 1:
            rows = self._rounds([self._default, *self._candidates], HEAT_ROUNDS)
            if rows is None:
                continue
            logs = np.mean([np.log(taken) for taken in rows.values()], axis=0)
            progress(Racing("heat", HEAT_ROUNDS, self._gains(self._candidates, logs[:, :1] - logs[:, 1:])))
            order = np.argsort(np.median(logs[:, 1:] - logs[:, :1], axis=0), kind="stable")
            first, *others = order.tolist()
            near = [i for i in others if wilcoxon(logs[:, 1 + first], logs[:, 1 + i]) >= ALPHA]
            return self._candidates[first], [self._candidates[i] for i in near]
        return (self._candidates or [self._default])[0], []

    def final(
        self, leader: Plan, rivals: list[Plan], deadline: float, progress: Callable[[Racing], object]
    ) -> Race | None:
        """None if a candidate failed: somebody else must lead."""
        plans = [self._default, leader, self._default, leader, *rivals]
        names = [DEFAULT, LEADER, DUPLICATES[DEFAULT], DUPLICATES[LEADER], *(plan.uri for plan in rivals)]
        taken: Rows = {workload: [] for workload in self._judge.workloads}
        while True:
            block = self._rounds(plans, BLOCK_ROUNDS)
            if block is None:
                return None
            for workload, rows in block.items():
                taken[workload] += rows
            samples = {w: dict(zip(names, zip(*rows, strict=True), strict=True)) for w, rows in taken.items()}
            decision = decide(samples)
            logs = np.mean([np.log(rows) for rows in taken.values()], axis=0)
            once = np.delete(logs, (0, 2, 3), axis=1)  # without the default and the duplicates
            progress(Racing("final", decision.rounds, self._gains([leader, *rivals], logs[:, :1] - once)))
            over = time.monotonic() >= deadline or decision.rounds >= MOST_ROUNDS
            if decision.settled or over or leader == self._default:
                if leader == self._default:
                    decision = replace(decision, ships=False, why="the default stays: nothing else could be raced")
                return Race(leader, decision, samples, self._failed, dict(self._judge.clocks), self._disturbed)
            if decision.overtaken_by is not None:  # it leads from here on, by rounds of its own
                new = next(plan for plan in rivals if plan.uri == decision.overtaken_by)
                rivals = [leader, *(plan for plan in rivals if plan != new)]
                return self.final(new, rivals, deadline, progress)

    def _rounds(self, plans: list[Plan], count: int) -> Rows | None:
        """None, and who failed is out, if anybody did."""
        rows: Rows = {}
        for workload in self._judge.workloads:
            self._seed += 1
            got = self._judge.rounds(plans, workload, count, seed=self._seed, cache=self._cache)
            if isinstance(got, dict):
                self._drop({plans[position].uri: outcome for position, outcome in got.items()})
                return None
            rows[workload] = got
            self._disturbed = max(self._disturbed, self._judge.others or 0.0)
        return rows

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
