"""The search: it takes points, builds them ahead, screens them one after the other, and records each outcome.

Trials are screened in the order in which they were taken, and each is chosen when a fixed number of trials before it
are finished: how long a compilation takes does not matter, so the same measurements lead to the same trials.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from embforge.codegen.build import Built
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.tuner.judge.judge import Judge
from embforge.tuner.judge.ledger import COMPILING, TIMING, VERIFYING, Ledger
from embforge.tuner.judge.outcome import CompileFailed, Invalid, Outcome, Timed
from embforge.tuner.study.sampler import Sampler
from embforge.tuner.study.storage import storage_errors
from embforge.tuner.study.trials import Held, Trials

LOOK_SECONDS = 0.5
"""How often the clock is checked while a compiler works."""

BuildResult = Built[Plan] | CompileFailed | Invalid


class Builds(Protocol):
    """Builds plans in the background."""

    def submit(self, plan: Plan) -> None: ...

    def done(self, timeout: float | None = None) -> tuple[Plan, BuildResult] | None: ...


@dataclass(frozen=True)
class Best:
    """The lowest score so far."""

    number: int
    params: Params
    score: float


@dataclass(frozen=True)
class Started:
    """An event: the study is open and the judge is ready."""

    study: str
    points: int
    """The number of points of the space."""
    known: int
    """How many trials had finished before."""
    best: Best | None


@dataclass(frozen=True)
class Building:
    """An event: a trial was taken, and its kernel is being compiled."""

    number: int
    params: Params


@dataclass(frozen=True)
class Screening:
    """An event: a trial's kernel is built, and it is being verified and timed."""

    number: int
    params: Params


@dataclass(frozen=True)
class Screened:
    """An event: a trial has finished."""

    number: int
    params: Params
    outcome: Outcome
    best: Best | None
    counts: Counter[str]
    """The number of outcomes by kind, over all finished trials of the study that this process knows."""


SearchEvent = Started | Building | Screening | Screened


@dataclass
class Standing:
    """The outcomes of the study so far, updated without reading them again."""

    counts: Counter[str] = field(default_factory=Counter)
    best: Best | None = None

    def add(self, number: int, params: Params, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        if isinstance(outcome, Timed) and (self.best is None or outcome.score < self.best.score):
            self.best = Best(number, params, outcome.score)


def standing_of(trials: Trials) -> Standing:
    """The tally of all trials in the storage."""
    standing = Standing()
    for number, (params, outcome) in trials.outcomes().items():
        standing.add(number, params, outcome)
    return standing


def search(
    trials: Trials,
    sampler: Sampler,
    plan_of: Callable[[Params], Plan],
    builder: Builds,
    judge: Judge,
    *,
    ahead: int,
    deadline: float = float("inf"),
    most: int | None = None,
    ledger: Ledger | None = None,
    progress: Callable[[SearchEvent], object] = lambda event: None,
) -> int:
    """Screens until `deadline` (of `time.monotonic`), `most` trials or the end of the space; returns their number.

    At most `ahead` trials are taken and being built at the same time. However the search ends, even by Ctrl-C, it gives
    back trials that it has not finished. `StorageError` if the storage becomes unavailable.
    """
    with storage_errors(f"study {trials.name}"):
        search = _Search(trials, plan_of, builder, judge, ledger or Ledger(), progress)
        finished = taken = 0
        progress(Started(trials.name, trials.points, search.standing.counts.total(), search.standing.best))
        try:
            while True:
                while len(search.queue) < ahead and taken != most and time.monotonic() < deadline:
                    if not search.take(sampler):
                        break
                    taken += 1
                if not search.queue or not search.wait_for_build(deadline):
                    return finished
                finished += search.screen()
        finally:
            search.give_back()


class _Search:
    """The trials that this process has taken, the oldest first."""

    def __init__(
        self,
        trials: Trials,
        plan_of: Callable[[Params], Plan],
        builder: Builds,
        judge: Judge,
        ledger: Ledger,
        progress: Callable[[SearchEvent], object],
    ) -> None:
        self._trials, self._plan_of, self._builder, self._judge = trials, plan_of, builder, judge
        self._ledger, self._progress = ledger, progress
        self.queue: deque[tuple[Held, Plan]] = deque()
        self._built: dict[str, BuildResult] = {}
        self._waited = 0.0
        self.standing = standing_of(trials)

    def take(self, sampler: Sampler) -> bool:
        held = self._trials.take(sampler)
        if held is None:
            return False
        plan = self._plan_of(held.params)
        self.queue.append((held, plan))
        self._builder.submit(plan)
        self._progress(Building(held.number, held.params))
        return True

    def wait_for_build(self, deadline: float) -> bool:
        """Whether the oldest trial's build came to an end before the deadline."""
        start = time.monotonic()
        with self._ledger.phase(COMPILING):
            while self.queue[0][1].uri not in self._built:
                if time.monotonic() >= deadline:
                    return False
                if (done := self._builder.done(LOOK_SECONDS)) is not None:
                    self._built[done[0].uri] = done[1]
        self._waited = time.monotonic() - start
        return time.monotonic() < deadline

    def screen(self) -> bool:
        """Finishes the oldest trial; False if another process has taken it over."""
        held, plan = self.queue[0]
        built = self._built[plan.uri]
        finished = False
        if self._trials.holds(held):
            outcome, seconds = self._outcome(held, plan, built)
            finished = self._trials.finish(held, outcome, seconds=seconds, build=_facts_of(built))
        self.queue.popleft()
        self.queue = deque((self._trials.renew(h), p) for h, p in self.queue)
        if finished:
            self.standing.add(held.number, held.params, outcome)
            event = Screened(held.number, held.params, outcome, self.standing.best, Counter(self.standing.counts))
            self._progress(event)
        return finished

    def give_back(self) -> None:
        with suppress(
            StorageInternalError, SQLAlchemyError
        ):  # the storage is unavailable; claims end with this process anyway
            for held, _ in self.queue:
                self._trials.give_back(held)
        self.queue.clear()

    def _outcome(self, held: Held, plan: Plan, built: BuildResult) -> tuple[Outcome, dict[str, float]]:
        seconds = {COMPILING: self._waited}
        if isinstance(built, CompileFailed | Invalid):
            return built, seconds
        self._progress(Screening(held.number, held.params))
        before, start = self._judge.seconds, time.monotonic()
        outcome = self._judge.screen(plan)
        elapsed = time.monotonic() - start
        spent = {phase: seconds - before[phase] for phase, seconds in self._judge.seconds.items() if phase != VERIFYING}
        spent[VERIFYING] = max(0.0, elapsed - sum(spent.values()))
        for phase, taken in spent.items():
            self._ledger.add(phase, taken)
        seconds |= {VERIFYING: spent[VERIFYING], TIMING: spent[TIMING]}
        return outcome, seconds


def _facts_of(built: BuildResult) -> dict[str, Any]:
    if not isinstance(built, Built):
        return {}
    with suppress(FileNotFoundError):  # the cache was emptied in the meantime
        size = Path(built.binary).stat().st_size
        return {"cached": built.cached, "binary_bytes": size, "resources": [dict(symbol) for symbol in built.resources]}
    return {"cached": built.cached}
