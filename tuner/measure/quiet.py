"""How much of the machine other processes used during a measurement: a time taken while a compiler runs says little.

Thread pools suffer out of proportion when a core is taken away (torch's parallel loops wait for the slowest
thread), so a busy machine slows some contenders more than others, and pairing cannot repair that.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.1
"""The most CPUs that others may use, on average, during a measurement that counts as undisturbed."""
WINDOW = 0.5
"""The least seconds between two readings: the system counts CPU time in ticks of up to 10 ms per CPU."""

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Clocks:
    """Seconds of wall time, of CPU time of the whole machine and of this process, at one moment."""

    wall: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Clocks | None:
        """None where the system does not tell (not Linux)."""
        if not _STAT.exists():
            return None
        first_line = _STAT.read_text().splitlines()[0]  # `cpu`, then the sums over all CPUs
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, first_line.split()[1:])
        ticks = user + nice + system + irq + softirq + steal
        return cls(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


@dataclass(frozen=True)
class Usage:
    """CPU seconds that other processes and the hypervisor's other guests used in a period of time."""

    wall: float
    taken: float

    @property
    def cpus(self) -> float:
        """How many CPUs others used on average."""
        return max(0.0, self.taken / max(self.wall, 1e-9))

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.wall + other.wall, self.taken + other.taken)


def usage_since(start: Clocks | None) -> Usage | None:
    """What others used since `start`; None if the system does not report it."""
    end = Clocks.now()
    if start is None or end is None:
        return None
    return Usage(end.wall - start.wall, end.machine - start.machine - (end.own - start.own))


def others_since(start: Clocks | None) -> float | None:
    """How many CPUs others used on average since `start`; None if the system does not report it."""
    usage = usage_since(start)
    return None if usage is None else usage.cpus


def wait_until_quiet(seconds: float, window: float = WINDOW) -> bool:
    """Sleeps until others leave the machine alone for a while, at most `seconds`; returns whether they did."""
    deadline = time.monotonic() + seconds
    while True:
        start = Clocks.now()
        time.sleep(window)
        others = others_since(start)
        if others is None or others <= QUIET:
            return True
        if time.monotonic() >= deadline:
            return False
