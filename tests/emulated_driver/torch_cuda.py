"""The functions of `torch.cuda` that the package uses, on the emulated driver.

The names, arguments and results are torch's; they call stream, event and memory functions of the driver.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

from emulated_driver.control import DriverError, driver_call

_streams: dict[int, list[int]] = {}
"""Handles of the current stream of each device, the innermost last; 0, the legacy default stream, without any."""
_kept: list[Any] = []
"""Memory that a captured graph uses: it lives on, as torch keeps a graph's pool."""
_given_back: list[tuple[int, int, int]] = []
"""Memory that is not used any more, to be given back when no capture is under way."""
_giving_back = Lock()


def indexed(device: torch.device) -> torch.device:
    """The device with its number: "cuda" alone is the first."""
    return device if device.index is not None else torch.device("cuda", 0)


def is_available() -> bool:
    return True


def get_device_capability(device: Any = None) -> tuple[int, int]:
    from cuda.bindings import driver

    kinds = driver.CUdevice_attribute
    names = (kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    major, minor = (driver_call("cuDeviceGetAttribute", name, _index(device)) for name in names)
    return int(major), int(minor)


def get_device_properties(device: Any = None) -> Any:
    major, minor = get_device_capability(device)
    name = driver_call("cuDeviceGetName", 64, _index(device)).split(b"\0")[0].decode()
    memory = int(driver_call("cuDeviceTotalMem", _index(device)))
    return SimpleNamespace(name=name, major=major, minor=minor, total_memory=memory, multi_processor_count=2)


def current_device() -> int:
    return _current_index()


@contextmanager
def device(wanted: Any) -> Iterator[None]:
    """Makes the device current, and what was current before again."""
    driver_call("cuCtxPushCurrent", _context(_index(wanted)))
    try:
        yield
    finally:
        driver_call("cuCtxPopCurrent")


def synchronize(wanted: Any = None) -> None:
    with device(wanted):
        driver_call("cuCtxSynchronize")


class Stream:
    """A stream by its handle."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def synchronize(self) -> None:
        driver_call("cuStreamSynchronize", self.cuda_stream)


def current_stream(wanted: Any = None) -> Stream:
    used = _streams.get(_index(wanted))
    return Stream(used[-1] if used else 0)


@contextmanager
def side_stream(wanted: Any = None) -> Iterator[Stream]:
    """A new stream, current on its device for a while. As torch's, it neither waits for the default stream nor ends."""
    index = _index(wanted)
    with device(index):
        handle = int(driver_call("cuStreamCreate", 1))
    _streams.setdefault(index, []).append(handle)
    try:
        yield Stream(handle)
    finally:
        _streams[index].pop()


def synchronise_stream(wanted: Any) -> None:
    with device(wanted):
        current_stream(wanted).synchronize()


def is_current_stream_capturing() -> bool:
    with device(None):
        return int(driver_call("cuStreamIsCapturing", current_stream().cuda_stream)) != 0


class Event:
    """torch.cuda.Event: recorded on the current stream of the current device."""

    def __init__(self) -> None:
        self._handle: Any = None

    def record(self) -> None:
        if self._handle is None:
            self._handle = driver_call("cuEventCreate", 0)
        driver_call("cuEventRecord", self._handle, current_stream(_current_index()).cuda_stream)

    def query(self) -> bool:
        try:
            driver_call("cuEventQuery", self._handle)
        except DriverError as error:
            if error.error.name != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True


class Graph:
    """What was captured of the current stream, to be replayed on any."""

    def __init__(self, wanted: Any) -> None:
        self._index = _index(wanted)
        self._executable: Any = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        handle = current_stream(self._index).cuda_stream
        with device(self._index):
            driver_call("cuStreamBeginCapture", handle, 0)
            try:
                yield
            finally:
                graph = driver_call("cuStreamEndCapture", handle)
            self._executable = driver_call("cuGraphInstantiate", graph, 0)

    def replay(self) -> None:
        with device(self._index):
            driver_call("cuGraphLaunch", self._executable, current_stream(self._index).cuda_stream)


def allocated(wanted: torch.device, count: int) -> Any:
    """Allocates bytes on a device. They are given back in the order of its current stream once no object uses them."""
    index = _index(wanted)
    stream = current_stream(index).cuda_stream
    with device(index):
        _give_back()
        try:
            address = int(driver_call("cuMemAllocAsync", count, stream))
        except DriverError as error:
            if error.error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} bytes") from error
        memory = _array(address, count)
        if is_current_stream_capturing():
            _kept.append(memory)
    weakref.finalize(memory, _given_back.append, (index, address, stream)).atexit = False
    return memory


def pinned(count: int) -> Any:
    """Allocates pinned bytes on the host, which devices can copy to and from."""
    with device(_current_index()):
        address = int(driver_call("cuMemAllocHost", max(count, 1)))
    return _array(address, count)  # small, and few: never given back


def empty_cache() -> None:
    """Frees all memory that no object uses."""
    _give_back()
    for index in list(_contexts):
        synchronize(index)


def _give_back() -> None:
    with _giving_back:
        for index, address, stream in list(_given_back):
            with device(index):
                if int(driver_call("cuStreamIsCapturing", stream)) == 0:
                    driver_call("cuMemFreeAsync", address, stream)
                    _given_back.remove((index, address, stream))


def _array(address: int, count: int) -> Any:
    return (ctypes.c_uint8 * count).from_address(address)


def _index(wanted: Any) -> int:
    if wanted is None:
        return _current_index()
    if isinstance(wanted, int):
        return wanted
    return torch.device(wanted).index or 0


def _current_index() -> int:
    try:
        return int(driver_call("cuCtxGetDevice"))
    except DriverError:  # no context yet: torch takes the first device
        return 0


def _context(index: int) -> Any:
    if index not in _contexts:
        _contexts[index] = driver_call("cuDevicePrimaryCtxRetain", index)
    return _contexts[index]


_contexts: dict[int, Any] = {}
