"""Paired, interleaved timing: every round runs all contenders in a new order, each on batches that rotate.

The machine drifts (clock, other programs, page cache), so times taken minutes apart cannot be compared; times of the
same round can. No contender starts on a batch that the one before it has just loaded into the cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from embforge.tuner.measure.timers import WARM_UP_CALLS, CpuTimer, Run, Timer
from embforge.tuner.workload.workload import Batch

MIN_ROUNDS = 7
MAX_ROUNDS = 400
RESAMPLES = 1000


class Contender(Protocol):
    """A function that can be timed. `prepare` is not timed; `run` is, and may be called with any prepared batch."""

    @property
    def name(self) -> str: ...

    def prepare(self, batch: Batch) -> Any: ...

    def run(self, prepared: Any) -> Any: ...


@dataclass(frozen=True)
class Ratio:
    """The time of one contender divided by another's: the median over rounds with a 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """All samples, in seconds per call: `samples[name][round]`."""

    samples: Mapping[str, tuple[float, ...]]
    repeats: Mapping[str, int]
    """For each contender, the number of calls of which a sample is the mean."""

    @property
    def rounds(self) -> int:
        return min(map(len, self.samples.values()))

    def median(self, name: str) -> float:
        """The median of the samples, in seconds per call."""
        return float(np.median(self.samples[name]))

    def spread(self, name: str) -> tuple[float, float]:
        """The 20 % and 80 % quantiles of the samples."""
        low, high = np.quantile(self.samples[name], (0.2, 0.8))
        return float(low), float(high)

    def ratio(self, slower: str | Sequence[str], faster: str) -> Ratio:
        """The time of `slower` (the sum, if several) divided by that of `faster`, paired by round."""
        names = [slower] if isinstance(slower, str) else slower
        paired = np.sum([self.samples[name] for name in names], axis=0) / np.asarray(self.samples[faster])
        rng = np.random.default_rng(0)
        medians = np.median(rng.choice(paired, (RESAMPLES, paired.size)), axis=1)
        low, high = np.quantile(medians, (0.025, 0.975))
        return Ratio(float(np.median(paired)), float(low), float(high))


def measure(
    contenders: Sequence[Contender],
    batches: Sequence[Batch],
    *,
    seconds: float,
    seed: int = 0,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Times the contenders for about `seconds` in all, at least `MIN_ROUNDS` rounds.

    `synchronize` waits for a device, once per sample. At least 2 batches are needed, so that they can rotate.
    """
    if len(batches) < 2:
        raise ValueError(f"measure needs at least 2 batches to rotate, got {len(batches)}; 4 or more are usual")
    timer = CpuTimer(clock=clock, synchronize=synchronize)
    names, runs = [c.name for c in contenders], [c.run for c in contenders]
    prepared = [[c.prepare(batch) for batch in batches] for c in contenders]
    rotation = Rotation(len(batches))
    gc.collect()
    with _no_garbage_collection():
        repeats = repeats_of(runs, prepared, timer, rotation)
        rng = np.random.default_rng(seed)
        rounds: list[tuple[float, ...]] = []
        deadline = clock() + seconds
        while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and clock() < deadline):
            rounds.append(_round(runs, prepared, rng, timer, repeats, rotation))
    samples = dict(zip(names, zip(*rounds, strict=True), strict=True))
    return Measurement(samples, dict(zip(names, repeats, strict=True)))


def interleaved_rounds(
    runs: Sequence[Run],
    prepared: Sequence[Sequence[Any]],
    count: int,
    rng: np.random.Generator,
    timer: Timer,
    repeats: Sequence[int],
    rotation: Rotation | None = None,
) -> list[tuple[float, ...]]:
    """Times `count` rounds of all `runs`, each in a new order; returns seconds per call, `[round][run]`.

    `prepared[run]` has a run's arguments for each batch, in the same order of batches for all runs. A `rotation` that
    is passed in continues where the previous rounds ended.
    """
    rotation = rotation or Rotation(len(prepared[0]))
    with _no_garbage_collection():
        return [_round(runs, prepared, rng, timer, repeats, rotation) for _ in range(count)]


def repeats_of(
    runs: Sequence[Run], prepared: Sequence[Sequence[Any]], timer: Timer, rotation: Rotation | None = None
) -> list[int]:
    """Warms up all runs; returns how many calls a sample of each needs."""
    rotation = rotation or Rotation(len(prepared[0]))
    counts = []
    for run, own in zip(runs, prepared, strict=True):
        counts.append(timer.repeats_for(run, [own[index] for index in rotation.take(WARM_UP_CALLS)]))
    return counts


def _round(
    runs: Sequence[Run],
    prepared: Sequence[Sequence[Any]],
    rng: np.random.Generator,
    timer: Timer,
    repeats: Sequence[int],
    rotation: Rotation,
) -> tuple[float, ...]:
    taken = [0.0] * len(runs)
    for index in rng.permutation(len(runs)):
        turns = [prepared[index][turn] for turn in rotation.take(repeats[index])]
        taken[index] = timer.sample(runs[index], turns, repeats[index])
    return tuple(taken)


class Rotation:
    """Gives batch indices in turn, to all contenders together, so that none begins where the previous one ended."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def take(self, turns: int) -> list[int]:
        """The next `turns` indices."""
        taken = [(self._next + turn) % self._count for turn in range(turns)]
        self._next = (self._next + turns) % self._count
        return taken


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switches garbage collection off, because its time does not belong to the contender that it interrupts."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
