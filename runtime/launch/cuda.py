"""Launches a CUDA plan's kernels by cuda.core on torch's current stream. A call never waits for the device.

What a kernel finds wrong with its input it writes to a few words of device memory. They are copied to the host behind
the kernels and looked at in the next call, or in `check()`, which waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy
import torch
from torch import Tensor

from embforge.codegen.errors import ToolchainError
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda_launch import ForwardLaunch, KernelLaunch, shape_of, status_size
from embforge.codegen.targets.nvrtc import check_driver, cuda_core, installed_nvrtc
from embforge.inputs import Batch
from embforge.launch.cuda_errors import driver_error, mistake
from embforge.launch.forward_call import Value, forward_call
from embforge.launch.metadata import FIRST_CALL, Metadata


def driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver can serve. `ToolchainError` without a driver."""
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if int(error) != 0:
        raise ToolchainError(f"the CUDA driver does not answer ({error}); install or repair the NVIDIA driver")
    return version // 1000, version % 1000 // 10


class _Message:
    """Words on their way from the device: a copy to pinned memory behind the current stream's work, and its event."""

    def __init__(self, words: Tensor) -> None:
        self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        self._host.copy_(words, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        """Whether they are here, without waiting."""
        return bool(self._event.query())

    def words(self) -> list[int]:
        """The words, once arrived."""
        return list(self._host.tolist())


@dataclass
class _Watch:
    """The status words of the calls on one device with one bounds mode, and a copy of them under way.

    Threads share it. Who holds the lock launches and sends, or receives and wipes: so no copy of words that are about
    to be wiped is sent, and no kernel is launched whose words would be wiped unread.
    """

    status: Tensor
    lock: Lock = field(default_factory=Lock)
    _message: _Message | None = None

    def send(self) -> None:
        """Starts a copy behind the current stream's work, unless one is under way: else a busy GPU never tells."""
        if self._message is None:
            self._message = _Message(self.status)

    def received(self) -> list[int] | None:
        """The words of a copy, if one has arrived."""
        if self._message is None or not self._message.arrived():
            return None
        words, self._message = self._message.words(), None
        return words

    def wipe(self) -> None:
        """A clean slate for the next call. Waits for the device, the current one: no kernel may write to it now."""
        torch.cuda.synchronize(self.status.device)
        self.status.zero_()
        torch.cuda.current_stream(self.status.device).synchronize()
        self._message = None  # old news


class CudaForward:
    """One plan's loaded forward kernels.

    `ToolchainError` if the NVRTC installed here makes kernels that the driver cannot load. Where none is installed the
    kernels were made elsewhere, and the driver judges them itself.
    """

    def __init__(self, plan: Plan, cubin: bytes) -> None:
        core = cuda_core()
        self.plan = plan
        compiler = installed_nvrtc()
        if compiler is not None:
            check_driver(driver_version(), compiler)
        self._core = core
        self._shape = shape_of(plan)
        self._code = core.ObjectCode.from_cubin(cubin, name=plan.uri)
        self._kernels: dict[tuple[torch.device, str], Any] = {}
        self._watches: dict[tuple[torch.device, str], _Watch] = {}

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the flat rows of `none` features if the spec has any.

        Raises what an earlier call left behind, as `check` does, if its news have arrived; ValueError for a batch that
        no launch can hold; `LaunchError` if the driver refuses a kernel; RuntimeError in a graph capture if a first
        call has not prepared what it needs.
        """
        device = batch.values.device
        call = forward_call(self.plan, self._shape, metadata, batch, sequence_elements)
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()  # when nothing may be asked of the device
            if capturing and not self._is_ready(device, bounds_check, call.work):
                raise RuntimeError(FIRST_CALL)
            watch = self._watch(device, bounds_check)
            with watch.lock:
                words = None if capturing else watch.received()
                if words is not None:
                    self._settle(watch, words, bounds_check)
                self._launch(device, call.work, [_packed(value) for value in call.arguments(watch.status)])
                if not capturing:
                    watch.send()
        return call.pooled, call.sequence

    def check(self) -> None:
        """Waits for the device and raises the first error of earlier calls, if there is one.

        ValueError for bad offsets and for too long `concat` bags, IndexError for a bad id where bounds are checked.
        """
        for (device, bounds_check), watch in list(self._watches.items()):
            with torch.cuda.device(device), watch.lock:
                torch.cuda.synchronize(device)
                self._settle(watch, watch.status.tolist(), bounds_check)

    def _launch(self, device: torch.device, work: ForwardLaunch, arguments: list[Any]) -> None:
        if not work.kernels:
            return
        self._core.Device(device.index).set_current()
        stream = self._core.Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
        for kernel in work.kernels:
            try:
                config = self._core.LaunchConfig(grid=kernel.grid, block=kernel.block, shmem_size=kernel.shared)
                self._core.launch(stream, config, self._kernel(device, kernel), *arguments)
            except Exception as error:  # cuda.core's CUDAError is not public; anything else is told by its own message
                if type(error).__name__ != "CUDAError":
                    raise
                raise driver_error(str(error), self.plan, kernel, device) from error

    def _is_ready(self, device: torch.device, bounds_check: str, work: ForwardLaunch) -> bool:
        """Whether a launch needs nothing new: no memory that outlives it, no kernel to load."""
        ready = all((device, kernel.symbol) in self._kernels for kernel in work.kernels)
        return ready and (device, bounds_check) in self._watches

    def _kernel(self, device: torch.device, kernel: KernelLaunch) -> Any:
        """The kernel, ready to be launched on the current device, which is `device`."""
        key = (device, kernel.symbol)
        if key not in self._kernels:
            found = self._code.get_kernel(kernel.symbol)
            if kernel.opts_in:
                self._opt_in(found, kernel, device)
            self._kernels[key] = found
        return self._kernels[key]

    def _opt_in(self, found: Any, kernel: KernelLaunch, device: torch.device) -> None:
        """Asks the driver for the shared memory of a kernel's blocks on the current device, which is `device`."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ordinal = self._core.Device().device_id
        (error,) = driver.cuKernelSetAttribute(attribute, kernel.shared, found.handle, ordinal)
        if int(error) != 0:
            raise driver_error(f"{error.name}: from cuKernelSetAttribute", self.plan, kernel, device)

    def _watch(self, device: torch.device, bounds_check: str) -> _Watch:
        key = (device, bounds_check)
        if key not in self._watches:
            status = torch.zeros(status_size(), dtype=torch.int64, device=device)
            torch.cuda.current_stream(device).synchronize()  # calls on other streams must find the zeros, too
            self._watches.setdefault(key, _Watch(status))  # another thread's may be there by now, and in use
        return self._watches[key]

    def _settle(self, watch: _Watch, words: list[int], bounds_check: str) -> None:
        """Raises the mistake that the words tell of, once."""
        error = mistake(self.plan.spec, words, bounds_check)
        if error is not None:
            watch.wipe()
            raise error


def _packed(value: Value) -> Any:
    """An argument as cuda.core passes it: an address as an int, a number as numpy's int64."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else numpy.int64(value)
