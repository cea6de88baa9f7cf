"""How a rank waits for an exchange on the CPU: for a while it asks, giving way to whoever wants to run, then it sleeps.

A collective of gloo ends in another thread, so whoever sleeps until then must be woken. With sleeping ranks, training
steps of small batches took 1.3 to 2.2 times as long (docs/architecture.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import current_thread, main_thread
from time import perf_counter

import torch.distributed as dist

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Where Linux says how much of its CPUs a container gets: microseconds (or "max") in a period of so many."""
SECONDS = 0.02
"""Of asking; a rank that is later than this is not worth a CPU."""
SHORT_BYTES = 2**22
"""What an exchange may send or bring if ranks share CPUs: in a longer one gloo's own threads need them."""


def wait(work: dist.Work, num_bytes: int, ranks_here: int) -> None:
    """Returns when a collective of CPU tensors is done, or raises what it raises.

    `ranks_here`: those that share this machine. Threads other than the main one sleep at once: they are there to leave
    the CPU to the work beside which they run.
    """
    give_way = _give_way()
    if (
        give_way is not None
        and current_thread() is main_thread()
        and (num_bytes <= SHORT_BYTES or ranks_here <= _num_cpus())
    ):
        done, end = work.is_completed, perf_counter() + SECONDS
        while not done() and perf_counter() < end:
            give_way()
    work.wait()


@cache
def _give_way() -> Callable[[], object] | None:
    """The system's `sched_yield`, without Python's lock so that other threads get that too; None: there is none."""
    return getattr(ctypes.CDLL(None), "sched_yield", None) if os.name == "posix" else None


@cache
def _num_cpus() -> int:
    """That this process may use, whoever limits it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):  # no container, or one of another kind
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
