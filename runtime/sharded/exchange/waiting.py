"""How a rank waits for an exchange on the CPU: it polls for a while, yielding the CPU to other threads, then it sleeps.

A collective of gloo ends in another thread, so a rank that sleeps must be woken up. With sleeping ranks, training steps
of small batches took 1.3 to 2.2 times as long (docs/architecture.md).
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
"""The file in which Linux says how much CPU time a container gets: microseconds (or "max") per period, and the period
in microseconds."""
SECONDS = 0.02
"""How long a rank polls. Waiting longer than this is not worth a CPU."""
SHORT_BYTES = 2**22
"""The most bytes of an exchange for which ranks poll if they share CPUs: in a longer one, gloo's threads need these."""


def wait(work: dist.Work, num_bytes: int, ranks_here: int) -> None:
    """Returns when a collective of CPU tensors is done, or raises what it raises.

    `ranks_here` is the number of ranks that share this machine. Threads other than the main one sleep at once, because
    they run in the background of other work, which should have the CPU.
    """
    yield_cpu = _yield_cpu()
    if (
        yield_cpu is not None
        and current_thread() is main_thread()
        and (num_bytes <= SHORT_BYTES or ranks_here <= _num_cpus())
    ):
        done, end = work.is_completed, perf_counter() + SECONDS
        while not done() and perf_counter() < end:
            yield_cpu()
    work.wait()


@cache
def _yield_cpu() -> Callable[[], object] | None:
    """The system's `sched_yield`; None if there is none. It is called without Python's lock, so that other Python
    threads can run too."""
    return getattr(ctypes.CDLL(None), "sched_yield", None) if os.name == "posix" else None


@cache
def _num_cpus() -> int:
    """The number of CPUs that this process may use: the smaller of its affinity and its container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):  # not in a container, or in one that limits CPUs in another way
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
