"""The kernels of a plan on CUDA devices, by cuda.core: loaded on first use, launched on torch's current stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from embforge.codegen.errors import ToolchainError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.launch import KernelLaunch
from embforge.codegen.targets.cuda.nvrtc import check_driver, cuda_core, installed_nvrtc
from embforge.codegen.targets.cuda.packages import cuda_module
from embforge.launch.cuda.errors import driver_error, mistake
from embforge.launch.cuda.watch import Watch
from embforge.launch.gpu.forward_call import Value
from embforge.launch.metadata import FIRST_CALL


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports. Raises `ToolchainError` if there is no driver."""
    error, version = cuda_module("cuda.bindings.driver").cuDriverGetVersion()
    if int(error) != 0:
        raise ToolchainError(f"the CUDA driver does not answer ({error}); install or repair the NVIDIA driver")
    return version // 1000, version % 1000 // 10


@dataclass(frozen=True)
class Turn:
    """The right of one call to launch kernels of a plan: meanwhile no other thread launches them or wipes their status
    words."""

    watch: Watch
    capturing: bool

    def report(self) -> None:
        """Sends the status words to the host after the kernels that were launched so far. Does nothing in a graph
        capture: the host would not read a copy that was captured."""
        if not self.capturing:
            self.watch.send()


class CudaLibrary:
    """The loaded kernels of a plan.

    Raises `ToolchainError` if the installed NVRTC makes kernels that the driver cannot load. If no NVRTC is installed,
    the kernels were made on another machine, and the driver checks them when it loads them.
    """

    def __init__(self, plan: KernelPlan, cubin: bytes) -> None:
        core = cuda_core()
        self._kernel_plan = plan
        compiler = installed_nvrtc()
        if compiler is not None:
            check_driver(driver_version(), compiler)
        self._core = core
        self._code = core.ObjectCode.from_cubin(cubin, name=plan.uri)
        self._kernels: dict[tuple[torch.device, str], Any] = {}

    def _launch(self, device: torch.device, kernels: Sequence[KernelLaunch], values: Sequence[Value]) -> None:
        """Launches all kernels with the same arguments. Raises `LaunchError` if the driver refuses one."""
        if not kernels:
            return
        self._core.Device(device.index).set_current()
        stream = self._core.Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
        arguments = [_packed(value) for value in values]
        for kernel in kernels:
            try:
                config = self._core.LaunchConfig(grid=kernel.grid, block=kernel.block, shmem_size=kernel.shared)
                self._core.launch(stream, config, self._kernel(device, kernel), *arguments)
            except Exception as error:  # cuda.core's CUDAError is not public; other errors are raised unchanged
                if type(error).__name__ != "CUDAError":
                    raise
                raise driver_error(str(error), self._kernel_plan, kernel, device) from error

    def _has_loaded(self, device: torch.device, kernels: Sequence[KernelLaunch]) -> bool:
        return all((device, kernel.symbol) in self._kernels for kernel in kernels)

    def _kernel(self, device: torch.device, kernel: KernelLaunch) -> Any:
        """The loaded kernel, ready to be launched on `device`, which must be the current device."""
        key = (device, kernel.symbol)
        if key not in self._kernels:
            loaded = self._code.get_kernel(kernel.symbol)
            if kernel.opts_in:
                self._opt_in(loaded, kernel, device)
            self._kernels[key] = loaded
        return self._kernels[key]

    def _opt_in(self, loaded: Any, kernel: KernelLaunch, device: torch.device) -> None:
        """Asks the driver for the shared memory of a kernel's blocks on `device`, which must be the current device."""
        driver = cuda_module("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ordinal = self._core.Device().device_id
        (error,) = driver.cuKernelSetAttribute(attribute, kernel.shared, loaded.handle, ordinal)
        if int(error) != 0:
            raise driver_error(f"{error.name}: from cuKernelSetAttribute", self._kernel_plan, kernel, device)


class CudaKernels(CudaLibrary):
    """The loaded kernels of a collection's plan, and the mistakes that they found in batches."""

    NOTE = ""
    """A note that is added to the error of an earlier call when a later call raises it."""

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        super().__init__(plan, cubin)
        self.plan = plan
        self._watches: dict[tuple[torch.device, str], Watch] = {}

    def check(self) -> None:
        """Waits for the device and raises the first error of earlier calls, if there is one.

        It is a ValueError for bad offsets and for a `concat` bag that is too long, and an IndexError for a bad id if
        `bounds_check` is "error".
        """
        for (device, bounds_check), watch in list(self._watches.items()):
            with torch.cuda.device(device), watch.lock:
                torch.cuda.synchronize(device)
                self._settle(watch, watch.status.tolist(), bounds_check)

    @contextmanager
    def _turn(self, device: torch.device, bounds_check: str, kernels: Sequence[KernelLaunch]) -> Iterator[Turn]:
        """Gives the caller the right to launch kernels on a device, which is the current device meanwhile.

        Raises the error of an earlier call, as `check` does, if the words of that call have arrived on the host, and
        RuntimeError in a graph capture if no earlier call has prepared what this call needs.
        """
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()  # then the device must not be asked for anything
            if capturing and not self._is_ready(device, bounds_check, kernels):
                raise RuntimeError(FIRST_CALL)
            watch = self._watch(device, bounds_check)
            with watch.lock:
                words = None if capturing else watch.received()
                if words is not None:
                    self._settle(watch, words, bounds_check, self.NOTE)
                yield Turn(watch, capturing)

    def _is_ready(self, device: torch.device, bounds_check: str, kernels: Sequence[KernelLaunch]) -> bool:
        """Whether a launch finds everything prepared: memory that outlives it, and loaded kernels."""
        return self._has_loaded(device, kernels) and (device, bounds_check) in self._watches

    def _watch(self, device: torch.device, bounds_check: str) -> Watch:
        key = (device, bounds_check)
        if key not in self._watches:
            self._watches.setdefault(key, Watch.on(device))  # another thread may have made one, and use it
        return self._watches[key]

    def _settle(self, watch: Watch, words: list[int], bounds_check: str, note: str = "") -> None:
        """Raises the mistake that the words report, and wipes them, so that it is raised once."""
        error = mistake(self.plan, words, bounds_check)
        if error is not None:
            watch.wipe()
            if note:
                error.add_note(note)
            raise error


def _packed(value: Value) -> Any:
    """An argument in the type that cuda.core expects: an address as an int, a number as numpy's int64."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else numpy.int64(value)
