"""Launches a CUDA plan's kernels by cuda.core on torch's current stream. A call never waits for the device.

What a kernel finds wrong with its input it writes to a few words of device memory. They are copied to the host behind
the kernels and looked at in the next call, or in `check()`, which waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.errors import ToolchainError
from embforge.codegen.plan import Plan
from embforge.codegen.signature import MISTAKES, STATUS_WORDS, arguments_of
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cuda_launch import (
    QUEUE_COUNTERS,
    ForwardLaunch,
    LaunchShape,
    launch_of,
    shape_of,
    status_size,
)
from embforge.codegen.targets.nvrtc import check_driver, cuda_core, installed_nvrtc
from embforge.inputs import Batch
from embforge.launch.metadata import Metadata

MOST_BLOCKS = 2**31 - 1
"""Of a grid; samples are counted in 32 bits by the kernels too."""


class Message(Protocol):
    """Words on their way from the device."""

    def arrived(self) -> bool:
        """Whether they are here, without waiting."""

    def words(self) -> list[int]:
        """The words, once arrived."""


class Gpu(Protocol):
    """The machine as a launch sees it. The default asks torch and the driver; tests and emulators give their own."""

    def driver_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver can serve."""

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes the device current for this thread."""

    def stream(self, device: torch.device) -> int:
        """The handle of the stream to launch on."""

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph, when nothing may be asked of the device."""

    def send(self, words: Tensor) -> Message:
        """Starts copying a small tensor to the host, behind all work on the stream."""

    def wait(self, device: torch.device) -> None:
        """Waits for all work on the device, whatever stream it is on."""


class TorchGpu:
    """The GPU that torch uses, and torch's current stream on it."""

    def driver_version(self) -> tuple[int, int]:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
        if int(error) != 0:
            raise ToolchainError(f"the CUDA driver does not answer ({error}); install or repair the NVIDIA driver")
        return version // 1000, version % 1000 // 10

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.cuda.device(device)

    def stream(self, device: torch.device) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def send(self, words: Tensor) -> Message:
        return _PinnedCopy(words)

    def wait(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)


class _PinnedCopy:
    """A copy to pinned memory and the event behind it."""

    def __init__(self, words: Tensor) -> None:
        self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        self._host.copy_(words, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())

    def words(self) -> list[int]:
        return list(self._host.tolist())


@dataclass
class _Watch:
    """The status words of the calls on one device with one bounds mode, and a copy of them under way."""

    status: Tensor
    message: Message | None = None


class CudaForward:
    """One plan's loaded forward kernels.

    `ToolchainError` if the NVRTC installed here makes kernels that the driver cannot load. Where none is installed the
    kernels were made elsewhere, and the driver judges them itself.
    """

    def __init__(self, plan: Plan, cubin: bytes, gpu: Gpu | None = None) -> None:
        core = cuda_core()
        self.plan = plan
        self._gpu: Gpu = gpu or TorchGpu()
        compiler = installed_nvrtc()
        if compiler is not None:
            check_driver(self._gpu.driver_version(), compiler)
        self._core = core
        self._shape = shape_of(plan)
        self._code = core.ObjectCode.from_cubin(cubin, name=plan.uri)
        self._kernels: dict[str, Any] = {}
        self._arguments = arguments_of("cuda")
        self._output_dtype: torch.dtype = getattr(torch, DTYPES[plan.spec.output_dtype].torch_name)
        self._watches: dict[tuple[torch.device, str], _Watch] = {}

    def __call__(
        self, metadata: Metadata, tables: Sequence[Tensor], batch: Batch, sequence_elements: int, bounds_check: str
    ) -> tuple[Tensor, Tensor | None]:
        """Pooled output, and the flat rows of `none` features if the spec has any.

        Raises what an earlier call left behind, as `check` does, if its news have arrived; ValueError for a batch that
        no launch can hold; RuntimeError in a graph capture if a first call has not prepared what it needs.
        """
        values, offsets, weights, size, _ = batch
        device, plan = values.device, self.plan
        pooled = torch.empty(size, plan.layout.output_width, dtype=self._output_dtype, device=device)
        sequence = None
        if plan.layout.sequence_features:
            sequence = torch.empty(sequence_elements, dtype=self._output_dtype, device=device)
        if size == 0 and values.numel():
            raise ValueError(f"offsets: values has {values.numel()} ids, offsets has no bag for them; both must agree")
        work = _launch_of(self._shape, size, values.numel())
        with self._gpu.on(device):
            capturing = self._gpu.capturing()
            if capturing and not self._is_ready(device, bounds_check, work):
                raise RuntimeError(
                    "the first call with this device, bounds_check and kind of batch loads kernels, which a graph "
                    "capture does not allow; call the module once before capturing"
                )
            watch = self._watch(device, bounds_check)
            if watch.message is not None and not capturing and watch.message.arrived():
                self._settle(watch, watch.message.words(), bounds_check)
            queue = torch.empty(work.queue_words, dtype=torch.int64, device=device)
            queue[:QUEUE_COUNTERS].zero_()
            scratch = torch.empty(work.scratch_floats, dtype=torch.float32, device=device)
            given: dict[str, Any] = {
                "metadata": metadata.words,
                "values": values,
                "offsets": offsets,
                "weights": weights,
                "pooled": pooled,
                "sequence": sequence,
                "batch": size,
                "num_values": values.numel(),
                "sequence_size": sequence_elements,
                "status": watch.status,
                "scratch": scratch,
                "queue": queue,
            }
            self._launch(device, work, [_packed(given[argument.name]) for argument in self._arguments])
            if not capturing and watch.message is None:  # one under way is waited for, or a busy GPU never tells
                watch.message = self._gpu.send(watch.status)
        return pooled, sequence

    def check(self) -> None:
        """Waits for the device and raises the first error of earlier calls, if there is one.

        ValueError for bad offsets and for too long `concat` bags, IndexError for a bad id where bounds are checked.
        """
        for (device, bounds_check), watch in list(self._watches.items()):
            with self._gpu.on(device):
                self._gpu.wait(device)
                self._settle(watch, watch.status.tolist(), bounds_check)

    def _launch(self, device: torch.device, work: ForwardLaunch, arguments: list[Any]) -> None:
        if not work.kernels:
            return
        if device.type == "cuda":
            self._core.Device(device.index).set_current()
        stream = self._core.Stream.from_handle(self._gpu.stream(device))
        for kernel in work.kernels:
            config = self._core.LaunchConfig(grid=kernel.grid, block=kernel.block, shmem_size=0)
            self._core.launch(stream, config, self._kernel(kernel.symbol), *arguments)

    def _is_ready(self, device: torch.device, bounds_check: str, work: ForwardLaunch) -> bool:
        """Whether a launch needs nothing new: no memory that outlives it, no kernel to load."""
        return (device, bounds_check) in self._watches and all(k.symbol in self._kernels for k in work.kernels)

    def _kernel(self, symbol: str) -> Any:
        if symbol not in self._kernels:
            self._kernels[symbol] = self._code.get_kernel(symbol)
        return self._kernels[symbol]

    def _watch(self, device: torch.device, bounds_check: str) -> _Watch:
        key = (device, bounds_check)
        if key not in self._watches:
            self._watches[key] = _Watch(torch.zeros(status_size(), dtype=torch.int64, device=device))
        return self._watches[key]

    def _settle(self, watch: _Watch, words: list[int], bounds_check: str) -> None:
        """Raises the mistake that the words tell of, once: the next call starts with a clean slate."""
        watch.message = None
        if not any(words):
            return
        watch.status.zero_()
        records = dict(zip(MISTAKES, _records(words), strict=True))
        for kind in ("BAD_OFFSET", "LONG_CONCAT", "BAD_ID"):
            if records[kind]["claimed"] and (kind != "BAD_ID" or bounds_check == "error"):
                raise ERRORS[kind](self.plan.spec, records[kind])


def _launch_of(shape: LaunchShape, batch: int, num_values: int) -> ForwardLaunch:
    work = launch_of(shape, batch, num_values)
    blocks = max((kernel.grid for kernel in work.kernels), default=0)
    if batch > MOST_BLOCKS or blocks > MOST_BLOCKS:
        raise ValueError(
            f"offsets, values: {batch} samples with {num_values} ids need {blocks} blocks; allowed: {MOST_BLOCKS} "
            "samples and blocks; split the batch"
        )
    return work


def _packed(value: Tensor | int | None) -> Any:
    """An argument as cuda.core passes it: an address as an int, a number as numpy's int64."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else numpy.int64(value)


def _records(words: list[int]) -> list[dict[str, int]]:
    length = len(STATUS_WORDS)
    return [dict(zip(STATUS_WORDS, words[i : i + length], strict=True)) for i in range(0, len(words), length)]


def _bad_id(spec: CollectionSpec, record: dict[str, int]) -> Exception:
    feature = spec.features[record["feature"]]
    table = spec.table(feature.table)
    return IndexError(
        f"feature {feature.name!r}: id {record['value']} of sample {record['sample']}, position {record['position']} "
        f"is not a row of table {table.name!r}; allowed: 0 to {table.num_embeddings - 1} ({table.num_embeddings} rows)"
    )


def _bad_offset(spec: CollectionSpec, record: dict[str, int]) -> Exception:
    feature = spec.features[record["feature"]]
    return ValueError(
        f"offsets: offsets[{record['position']}] is {record['value']} (the end of sample {record['sample']} of feature "
        f"{feature.name!r}), which does not fit its neighbours; offsets must start at 0, never fall and end at the "
        "number of ids"
    )


def _long_concat(spec: CollectionSpec, record: dict[str, int]) -> Exception:
    feature = spec.features[record["feature"]]
    return ValueError(
        f"feature {feature.name!r}: the bag of sample {record['sample']} has {record['value']} ids, "
        f"hotness={feature.hotness} allows {feature.hotness}; raise hotness or cut the bag"
    )


ERRORS: dict[str, Callable[[CollectionSpec, dict[str, int]], Exception]] = {
    "BAD_ID": _bad_id,
    "BAD_OFFSET": _bad_offset,
    "LONG_CONCAT": _long_concat,
}
"""What the host says for each kind of mistake."""
