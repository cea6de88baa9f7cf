"""`templates/emulator/abi.h` in Python: loads images and launches their kernels. A test compares the structures with
the header."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from embforge.codegen.errors import ToolchainError
from embforge.launch.simt.counters import SINGLE, Traffic

ABI = 1
"""The value of SIMT_ABI in the images that this file can launch."""
COUNT = 1
"""The flag of a launch that counts memory instructions."""
DONE, BUG, IMPOSSIBLE = 0, 1, 2
"""The codes that a launch returns."""


class SimtRegion(ctypes.Structure):
    """A range of global memory that a launch may touch."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("defined", ctypes.c_void_p),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class SimtLaunch(ctypes.Structure):
    """One launch of one kernel."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(SimtRegion)),
        ("region_count", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class SimtPlace(ctypes.Structure):
    """A thread of a launch, and the instruction that it executes."""

    _fields_ = (
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("offset", ctypes.c_uint64),
    )


class SimtReport(ctypes.Structure):
    """The first bug that a launch found."""

    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 512),
        ("kernel", ctypes.c_char * 256),
        ("place", SimtPlace),
        ("other", SimtPlace),
        ("has_other", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class SimtTraffic(ctypes.Structure):
    """Counters of the loads or stores of one region, or of shared memory."""

    _fields_ = tuple((field.name, ctypes.c_uint64) for field in fields(Traffic))


class SimtCounters(ctypes.Structure):
    """Counters of one launch that belong to no region."""

    _fields_ = (
        ("shared_loads", SimtTraffic),
        ("shared_stores", SimtTraffic),
        *((name, ctypes.c_uint64) for name in SINGLE),
    )


class SimtKernelInfo(ctypes.Structure):
    """What an image says about one of its kernels."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("argument_count", ctypes.c_uint32),
        ("argument_bytes", ctypes.POINTER(ctypes.c_uint32)),
        ("static_shared", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Region:
    """Memory that kernels may access. `defined` is the address of an array that has for each byte of the region one
    byte, which says whether it has been written; or 0 if the whole region is defined."""

    name: str
    begin: int
    bytes: int
    defined: int = 0
    writable: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel of an image."""

    name: str
    argument_bytes: tuple[int, ...]
    static_shared: int
    max_threads: int


class Image:
    """A loaded image. Threads may share it: launches take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library: Any = ctypes.CDLL(str(path))
        for name, result, arguments in _PROTOTYPES:
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        if (version := self._library.simt_abi()) != ABI:
            raise ToolchainError(
                f"image {path} has interface {version}, but this embforge knows {ABI}; delete the image, so that it is "
                "made again"
            )
        self.arch: str = self._library.simt_arch().decode()
        self.kernels = {kernel.name: kernel for kernel in map(self._kernel, range(self._library.simt_kernel_count()))}
        self._lock = threading.Lock()

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        regions: Sequence[Region],
        *,
        shared: int = 0,
        seed: int = 0,
        count: bool = False,
    ) -> tuple[int, SimtReport, Counted | None]:
        """Launches a kernel. Returns the code of the launch, its report, and its counters if `count` is set and the
        launch completed.

        `arguments` are ctypes values, in the kernel's order.
        """
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        described = (SimtRegion * len(regions))(
            *(SimtRegion(r.name.encode(), r.begin, r.bytes, r.defined or None, r.writable) for r in regions)
        )
        launch = SimtLaunch(
            kernel=kernel.encode(),
            grid=grid,
            block=block,
            dynamic_shared=shared,
            flags=COUNT if count else 0,
            seed=seed,
            arguments=addresses,
            regions=described,
            region_count=len(regions),
        )
        report = SimtReport()
        with self._lock:
            status = self._library.simt_launch(ctypes.byref(launch), ctypes.byref(report))
            counted = self._counters(len(regions)) if count and status == DONE else None
        return status, report, counted

    def _counters(self, regions: int) -> Counted:
        counters, loads, stores = SimtCounters(), (SimtTraffic * regions)(), (SimtTraffic * regions)()
        self._library.simt_counters(ctypes.byref(counters), loads, stores)
        return Counted(counters, list(loads), list(stores))

    def _kernel(self, index: int) -> Kernel:
        info = self._library.simt_kernel(index).contents
        sizes = tuple(info.argument_bytes[: info.argument_count])
        return Kernel(info.name.decode(), sizes, info.static_shared, info.max_threads)


@dataclass(frozen=True)
class Counted:
    """The counters of one launch. `loads` and `stores` have one element for each region, in the order of the launch."""

    counters: SimtCounters
    loads: list[SimtTraffic]
    stores: list[SimtTraffic]


_PROTOTYPES: tuple[tuple[str, Any, list[Any]], ...] = (
    ("simt_launch", ctypes.c_int, [ctypes.POINTER(SimtLaunch), ctypes.POINTER(SimtReport)]),
    ("simt_counters", None, [ctypes.POINTER(SimtCounters), ctypes.POINTER(SimtTraffic), ctypes.POINTER(SimtTraffic)]),
    ("simt_kernel_count", ctypes.c_uint32, []),
    ("simt_kernel", ctypes.POINTER(SimtKernelInfo), [ctypes.c_uint32]),
    ("simt_arch", ctypes.c_char_p, []),
    ("simt_abi", ctypes.c_uint32, []),
)


def load_image(path: Path) -> Image:
    """Loads the image in a file. The same file always gives the same object, because its launches must take turns."""
    file = os.stat(path)
    with _LOADING:
        return _loaded(path.resolve(), file.st_dev, file.st_ino)


_LOADING = threading.Lock()


@cache
def _loaded(path: Path, device: int, inode: int) -> Image:
    return Image(path)
