"""A judge that answers from a table, so that a search takes seconds instead of minutes and always gives the same.

The table comes from an oracle, which measured the time of every point on every workload once. A seed adds noise.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embforge.codegen.build import Built
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.tuner.judge.judge import Cache
from embforge.tuner.judge.ledger import STARTING, TIMING, VERIFYING
from embforge.tuner.judge.outcome import Failure, Outcome, Paired, Timed
from embforge.tuner.measure.quiet import Usage

Entry = Mapping[str, float] | Failure
"""Seconds per call by workload, or the failure."""


class ReplayJudge:
    """Answers from a table. The same seed, plan and question always give the same answer."""

    def __init__(
        self,
        table: Mapping[Params, Entry],
        anchor: Params,
        *,
        noise: float = 0.01,
        seed: int = 0,
        rounds: int = 8,
        delay: float = 0.0,
    ) -> None:
        """`noise` is a share of each time; a screening samples `rounds` rounds and lasts `delay` seconds."""
        times = table[anchor]
        if not isinstance(times, Mapping):
            raise ValueError(f"the anchor {anchor} fails in the table: {times}; choose one that was timed")
        self._table, self._times = table, times
        self._noise, self._seed, self._count, self._delay = noise, seed, rounds, delay
        self._spent = {STARTING: 0.0, VERIFYING: 0.0, TIMING: 0.0}

    @property
    def workloads(self) -> tuple[str, ...]:
        return tuple(self._times)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, by phase."""
        return dict(self._spent)

    @property
    def clocks(self) -> dict[str, int | None]:
        return {}

    @property
    def others(self) -> Usage | None:
        return None

    def screen(self, plan: Plan) -> Outcome:
        start = time.monotonic()
        time.sleep(self._delay)
        self._spent[TIMING] += time.monotonic() - start
        entry = self._table[plan.params]
        if not isinstance(entry, Mapping):
            return entry
        rng = np.random.default_rng([self._seed, zlib.crc32(repr(plan.params).encode())])
        pairs = {}
        for workload in self.workloads:
            both = np.array([entry[workload], self._times[workload]]) * self._noisy(rng, self._count, 2)
            pairs[workload] = Paired(tuple(both[:, 0].tolist()), tuple(both[:, 1].tolist()))
        return Timed(pairs)

    def rounds(
        self, plans: Sequence[Plan], workload: str, count: int, *, seed: int, cache: Cache = "warm"
    ) -> list[tuple[float, ...]] | dict[int, Outcome]:
        entries = [self._table[plan.params] for plan in plans]
        failed: dict[int, Outcome] = {i: e for i, e in enumerate(entries) if not isinstance(e, Mapping)}
        if failed:
            return failed
        times = np.array([entry[workload] for entry in entries if isinstance(entry, Mapping)])
        rng = np.random.default_rng([self._seed, seed, zlib.crc32(workload.encode())])
        return [tuple(row) for row in (times * self._noisy(rng, count, len(plans))).tolist()]

    def close(self) -> None:
        pass

    def _noisy(self, rng: np.random.Generator, rounds: int, plans: int) -> NDArray[np.float64]:
        """Factors of noise: a drift that all plans of a round share, times noise of each."""
        return np.exp(rng.normal(0, self._noise, (rounds, 1)) + rng.normal(0, self._noise, (rounds, plans)))


class NoBuilder:
    """A builder for which every plan is built already."""

    def __init__(self) -> None:
        self._plans: list[Plan] = []

    def submit(self, plan: Plan) -> None:
        self._plans.append(plan)

    def done(self, timeout: float | None = None) -> tuple[Plan, Built[Plan]] | None:
        if not self._plans:
            return None
        plan = self._plans.pop(0)
        nothing = Path(os.devnull)
        return plan, Built(plan, nothing, nothing, [], cached=True)
