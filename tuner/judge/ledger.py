"""Where a run's wall time went: every moment belongs to one phase, and what belongs to none is bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STARTING, COMPILING, VERIFYING, TIMING, RACING = "starting", "compiling", "verifying", "timing", "racing"
WAITING, BOOKKEEPING = "waiting", "bookkeeping"
PHASES = (STARTING, COMPILING, VERIFYING, TIMING, RACING, WAITING, BOOKKEEPING)
"""Waiting is for another tuner on this machine that times something."""
WORK = (COMPILING, VERIFYING, TIMING, RACING)
"""What a budget is given for."""


class Ledger:
    """Seconds by phase, since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._spent = dict.fromkeys(PHASES[:-1], 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this phase. Not to be nested."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Time that was measured elsewhere, in this process's waiting."""
        self._spent[name] += seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    @property
    def seconds(self) -> dict[str, float]:
        """By phase; together they are `elapsed`."""
        return self._spent | {BOOKKEEPING: max(0.0, self.elapsed - sum(self._spent.values()))}


def work_share(seconds: Mapping[str, float]) -> float:
    """The part of the time that went into compiling and measuring."""
    return sum(seconds.get(phase, 0.0) for phase in WORK) / max(sum(seconds.values()), 1e-9)
