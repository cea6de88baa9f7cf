"""The functions of the emulated driver that no driver has, for processes that `build.run` started."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from emulated_driver.build import LIBRARY

DEFAULTS = {"arch": 90, "version": 13040, "memory": 1 << 30, "patience": 1, "seed": 0}
"""What `setting` may change: compute capability, CUDA's version, bytes per device, how often a query says "not ready"
before the work is done, and the schedule."""

Answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
_queued: list[Callable[[], None]] = []
"""Queued functions by number. They are kept for ever, because a graph may be replayed."""


@cache
def load() -> ctypes.CDLL:
    """The driver's library, loaded for all that look for it later."""
    library = ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
    library.emulated_refusal.restype = library.emulated_report.restype = ctypes.c_char_p
    library.emulated_refusal.argtypes = [ctypes.c_char_p]
    library.emulated_set.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    library.emulated_launches.restype = library.emulated_memory_used.restype = ctypes.c_uint64
    library.emulated_wrote.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.emulated_holds.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
    library.emulated_enqueue.argtypes = [ctypes.c_uint64, Answer, ctypes.c_uint64]
    return library


@contextmanager
def setting(**facts: int) -> Iterator[None]:
    """Other facts of the devices, see DEFAULTS, for a while."""
    _set(facts)
    try:
        yield
    finally:
        _set({name: DEFAULTS[name] for name in facts})


def _set(facts: dict[str, int]) -> None:
    for name, value in facts.items():
        if not load().emulated_set(name.encode(), value):
            raise KeyError(name)


def report() -> str:
    """What a kernel did wrong, in the executor's words; empty if none did."""
    text: bytes = load().emulated_report()
    return text.decode()


def finish() -> None:
    """Does all work that is pending on any device."""
    load().emulated_finish()


def restart() -> None:
    """Lets devices on which a kernel went wrong work again, as a new process finds them; pending work is forgotten."""
    load().emulated_restart()


def launches() -> int:
    """Kernel launches that the driver has accepted."""
    return int(load().emulated_launches())


def memory_used(device: int = 0) -> int:
    """Bytes of a device's memory that are allocated."""
    return int(load().emulated_memory_used(device))


def wrote(address: int, count: int) -> None:
    """Tells the driver that the host wrote to device memory, which only a stand-in for torch's kernels may do."""
    load().emulated_wrote(address, count)


def holds(device: int, address: int, count: int) -> bool:
    """Whether all of these bytes are memory of the device."""
    return bool(load().emulated_holds(device, address, count))


def enqueue(stream: int, work: Callable[[], None]) -> None:
    """Puts a function into a stream of the current device, in the place of a kernel of torch's."""
    _queued.append(work)
    error = load().emulated_enqueue(stream, _run, len(_queued) - 1)
    if error:
        raise RuntimeError(f"CUDA error: {error} from an operation of torch")


@Answer
def _run(number: int) -> bool:
    try:
        _queued[number]()
    except BaseException:
        traceback.print_exc()
        return False
    return True


def driver_call(name: str, *words: Any) -> Any:
    """A function of the real cuda.bindings.driver; its result, or `DriverError` with what it answered."""
    from cuda.bindings import driver

    error, *results = getattr(driver, name)(*words)
    if int(error) != 0:
        raise DriverError(name, error)
    return results[0] if len(results) == 1 else results


class DriverError(RuntimeError):
    """The error that torch would raise for an error of the driver."""

    def __init__(self, name: str, error: Any) -> None:
        super().__init__(f"CUDA error: {error.name} from {name}")
        self.error = error
