"""An account of a run's wall time: every moment belongs to one phase, and to bookkeeping if to no other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STARTING, COMPILING, VERIFYING, TIMING, RACING = "starting", "compiling", "verifying", "timing", "racing"
WAITING, BOOKKEEPING = "waiting", "bookkeeping"
PHASES = (STARTING, COMPILING, VERIFYING, TIMING, RACING, WAITING, BOOKKEEPING)
"""The phases. "Waiting" is the time for which another tuner on this machine times something."""
WORK = (COMPILING, VERIFYING, TIMING, RACING)
"""The phases for which a budget is spent."""


class Ledger:
    """Counts seconds by phase, from the moment at which it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._spent = dict.fromkeys(PHASES[:-1], 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block for this phase. It cannot be nested."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds time that was measured elsewhere, while this process waited."""
        self._spent[name] += seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase; their sum is `elapsed`."""
        return self._spent | {BOOKKEEPING: max(0.0, self.elapsed - sum(self._spent.values()))}


def work_share(seconds: Mapping[str, float]) -> float:
    """The share of the time that was spent on compiling and measuring."""
    return sum(seconds.get(phase, 0.0) for phase in WORK) / max(sum(seconds.values()), 1e-9)
