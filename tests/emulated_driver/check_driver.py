"""The emulated driver itself, through the real cuda.core and cuda.bindings: does it behave as a driver does?"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cuda import core
from cuda.bindings import driver

from embforge.codegen.targets.simt.toolchain import compile_image
from emulated_driver import control, torch_cuda
from emulated_driver.build import SIGNS
from emulated_driver.cases import untouched
from emulated_driver.control import DriverError, driver_call

TEXT = """
// ==== primitives
// ==== end of primitives
extern "C" __global__ void add(int* out, int value) { out[blockIdx.x * blockDim.x + threadIdx.x] += value; }
extern "C" __global__ void scale(int* out, int value) { out[blockIdx.x * blockDim.x + threadIdx.x] *= value; }
extern "C" __global__ void __launch_bounds__(64) narrow(int* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void misaligned(char* out) { *reinterpret_cast<int*>(out + 1) = 1; }
extern "C" __global__ void divided(int* out) {
    if (threadIdx.x == 0) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
extern "C" __global__ void stage(int* out, int words) {
    int* shared = &dynamic_shared<int>();
    for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = shared[words - 1];
}
"""
WORDS = 64


@cache
def code(arch: str = "sm_90") -> bytes:
    return compile_image(TEXT, "check_driver.cu", arch)


@pytest.fixture
def device() -> core.Device:
    device = core.Device(0)
    device.set_current()
    return device


@pytest.fixture
def kernels(device: core.Device) -> Any:
    return core.ObjectCode.from_cubin(code())


@pytest.fixture
def memory(device: core.Device) -> int:
    """WORDS zeros on the device."""
    address = int(driver_call("cuMemAlloc", 4 * WORDS))
    zeros = numpy.zeros(WORDS, numpy.int32)
    driver_call("cuMemcpyHtoD", address, zeros.ctypes.data, zeros.nbytes)
    return address


def read(address: int) -> numpy.ndarray[Any, Any]:
    """The memory as it is now, read without the driver and so without waiting for any work."""
    return numpy.ctypeslib.as_array((ctypes.c_int * WORDS).from_address(address)).copy()


def launch(stream: Any, kernels: Any, name: str, *arguments: Any, threads: int = WORDS, shared: int = 0) -> None:
    config = core.LaunchConfig(grid=1, block=threads, shmem_size=shared)
    core.launch(stream, config, kernels.get_kernel(name), *arguments)


def refused(error: str, name: str, *words: Any) -> None:
    with pytest.raises(DriverError, match=error):
        driver_call(name, *words)


# ---- Order


def test_work_waits_in_its_stream_and_keeps_its_order(device: core.Device, kernels: Any, memory: int) -> None:
    first, second = device.create_stream(), device.create_stream()
    launch(first, kernels, "add", memory, numpy.int32(3))
    launch(first, kernels, "scale", memory, numpy.int32(5))
    assert not read(memory).any()
    second.sync()
    assert not read(memory).any()
    first.sync()
    assert (read(memory) == 15).all()


def test_an_event_is_not_ready_at_first(device: core.Device, kernels: Any, memory: int) -> None:
    stream = device.create_stream()
    launch(stream, kernels, "add", memory, numpy.int32(1))
    event = stream.record()
    launch(stream, kernels, "add", memory, numpy.int32(1))
    with control.setting(patience=2):
        assert [event.is_done for _ in range(4)] == [False, False, True, True]
    assert (read(memory) == 1).all()


def test_a_stream_waits_for_an_event_of_another(device: core.Device, kernels: Any, memory: int) -> None:
    first, second = device.create_stream(), device.create_stream()
    launch(first, kernels, "add", memory, numpy.int32(3))
    second.wait(first)
    launch(second, kernels, "scale", memory, numpy.int32(5))
    second.sync()
    assert (read(memory) == 15).all()


def test_the_legacy_stream_takes_turns_with_blocking_streams_only(
    device: core.Device, kernels: Any, memory: int
) -> None:
    legacy = core.LEGACY_DEFAULT_STREAM
    blocking = device.create_stream(options=core.StreamOptions(nonblocking=False))
    free = device.create_stream()
    launch(blocking, kernels, "add", memory, numpy.int32(3))
    launch(free, kernels, "add", memory, numpy.int32(100))
    launch(legacy, kernels, "scale", memory, numpy.int32(5))
    launch(blocking, kernels, "add", memory, numpy.int32(1))
    blocking.sync()
    assert (read(memory) == 16).all()
    driver_call("cuCtxSynchronize")
    assert (read(memory) == 116).all()


def test_arguments_are_those_of_the_launch(device: core.Device, kernels: Any, memory: int) -> None:
    stream, value = device.create_stream(), ctypes.c_int32(7)
    launch(stream, kernels, "add", memory, value)
    value.value = 9
    stream.sync()
    assert (read(memory) == 7).all()


def test_a_destroyed_streams_work_is_still_done(device: core.Device, kernels: Any, memory: int) -> None:
    stream = device.create_stream()
    launch(stream, kernels, "add", memory, numpy.int32(3))
    stream.close()
    driver_call("cuCtxSynchronize")
    assert (read(memory) == 3).all()


def test_a_captured_stream_does_nothing_before_its_graph_is_launched(
    device: core.Device, kernels: Any, memory: int
) -> None:
    stream = device.create_stream()
    driver_call("cuStreamBeginCapture", stream.handle, 0)
    launch(stream, kernels, "add", memory, numpy.int32(3))
    graph = driver_call("cuGraphInstantiate", driver_call("cuStreamEndCapture", stream.handle), 0)
    stream.sync()
    assert not read(memory).any()
    for _ in range(2):
        driver_call("cuGraphLaunch", graph, stream.handle)
    stream.sync()
    assert (read(memory) == 6).all()


def test_what_a_capture_does_not_allow_breaks_it(device: core.Device) -> None:
    stream = device.create_stream()
    for name, words in (("cuStreamSynchronize", (stream.handle,)), ("cuCtxSynchronize", ()), ("cuMemAlloc", (8,))):
        driver_call("cuStreamBeginCapture", stream.handle, 0)
        refused("STREAM_CAPTURE_UNSUPPORTED", name, *words)
        refused("STREAM_CAPTURE_INVALIDATED", "cuStreamEndCapture", stream.handle)


# ---- Memory


def test_copies_to_and_from_pageable_memory_do_not_overtake(device: core.Device, kernels: Any, memory: int) -> None:
    stream, host = device.create_stream(), numpy.full(WORDS, 2, numpy.int32)
    driver_call("cuMemcpyHtoDAsync", memory, host.ctypes.data, host.nbytes, stream.handle)
    host[:] = 9  # it was read at once
    launch(stream, kernels, "scale", memory, numpy.int32(5))
    driver_call("cuMemcpyDtoHAsync", host.ctypes.data, memory, host.nbytes, stream.handle)
    assert (host == 10).all()  # it was waited for


def test_copies_to_pinned_memory_wait_in_the_stream(device: core.Device, kernels: Any, memory: int) -> None:
    stream, pinned = device.create_stream(), int(driver_call("cuMemAllocHost", 4 * WORDS))
    launch(stream, kernels, "add", memory, numpy.int32(3))
    driver_call("cuMemcpyDtoHAsync", pinned, memory, 4 * WORDS, stream.handle)
    assert not (read(pinned) == 3).any()
    stream.sync()
    assert (read(pinned) == 3).all()


def test_memory_of_a_device_is_limited(device: core.Device, memory: int) -> None:
    with control.setting(memory=control.memory_used() + 1000):
        held = driver_call("cuMemAlloc", 600)
        refused("OUT_OF_MEMORY", "cuMemAlloc", 600)
        driver_call("cuMemFree", held)
        driver_call("cuMemFree", driver_call("cuMemAlloc", 600))
    refused("INVALID_VALUE", "cuMemFree", held)
    refused("INVALID_VALUE", "cuMemcpyDtoH", numpy.zeros(99).ctypes.data, memory, 4 * WORDS + 1)


def test_memory_given_back_in_a_stream_lives_until_then(device: core.Device, kernels: Any) -> None:
    stream = device.create_stream()
    address = driver_call("cuMemAllocAsync", 4 * WORDS, stream.handle)
    driver_call("cuMemsetD32Async", address, 1, WORDS, stream.handle)
    launch(stream, kernels, "add", int(address), numpy.int32(3))
    driver_call("cuMemFreeAsync", address, stream.handle)
    stream.sync()
    launch(stream, kernels, "add", int(address), numpy.int32(3))
    refused("ILLEGAL_ADDRESS", "cuStreamSynchronize", stream.handle)
    control.restart()


# ---- Kernels


def test_a_kernel_reports_the_resources_that_it_takes(device: core.Device, kernels: Any) -> None:
    add, narrow = kernels.get_kernel("add"), kernels.get_kernel("narrow")
    assert [(info.offset, info.size) for info in add.arguments_info] == [(0, 8), (8, 4)]
    assert narrow.attributes.max_threads_per_block == 64
    assert add.attributes.max_threads_per_block == 1024
    assert add.attributes.max_dynamic_shared_size_bytes == 48 * 1024
    assert add.occupancy.max_active_blocks_per_multiprocessor(256, 0) == 8
    assert add.occupancy.max_active_blocks_per_multiprocessor(256, 100 * 1024) == 2


def test_shared_memory_past_48_kb_must_be_asked_for(device: core.Device, kernels: Any, memory: int) -> None:
    words, stage = 20000, kernels.get_kernel("stage")
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        launch(device.default_stream, kernels, "stage", memory, numpy.int32(words), shared=4 * words)
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    refused("INVALID_VALUE", "cuKernelSetAttribute", most, 228 * 1024, stage.handle, 0)
    driver_call("cuKernelSetAttribute", most, 4 * words, stage.handle, 0)
    launch(device.default_stream, kernels, "stage", memory, numpy.int32(words), shared=4 * words)
    driver_call("cuCtxSynchronize")
    assert read(memory)[0] == words - 1


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((1, 1, 1, 1025, 1, 1), "INVALID_VALUE"),
        ((1, 1, 1, 1, 1, 65), "INVALID_VALUE"),
        ((1, 1, 1, 0, 1, 1), "INVALID_VALUE"),
        ((0, 1, 1, 64, 1, 1), "INVALID_VALUE"),
        ((1, 65536, 1, 64, 1, 1), "INVALID_VALUE"),
        ((1, 1, 1, 128, 1, 1), "LAUNCH_OUT_OF_RESOURCES"),
    ],
)
def test_launches_that_no_device_takes(
    device: core.Device, kernels: Any, memory: int, shape: tuple[int, ...], error: str
) -> None:
    function = int(kernels.get_kernel("narrow").handle)
    refused(error, "cuLaunchKernel", function, *shape, 0, 0, ((memory,), (ctypes.c_void_p,)), 0)


def test_code_is_judged_when_it_is_loaded(device: core.Device, kernels: Any) -> None:
    with pytest.raises(Exception, match="CUDA_ERROR_NOT_FOUND"):
        kernels.get_kernel("nobody")
    for arch, fits in ((90, True), (91, True), (80, False), (100, False), (120, False)):
        with control.setting(arch=arch):
            other = core.ObjectCode.from_cubin(code())
            if fits:
                other.get_kernel("add")
                continue
            with pytest.raises(Exception, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
                other.get_kernel("add")


def test_the_same_code_may_be_loaded_twice(device: core.Device, memory: int) -> None:
    stream = device.create_stream()
    for _ in range(3):
        kernels = core.ObjectCode.from_cubin(code())
        launch(stream, kernels, "add", memory, numpy.int32(3))
        del kernels  # what is launched stays
    stream.sync()
    assert (read(memory) == 9).all()


# ---- Mistakes


def test_unknown_handles_are_refused(device: core.Device, kernels: Any, memory: int) -> None:
    refused("INVALID_HANDLE", "cuStreamSynchronize", 0x5EED)
    refused("INVALID_HANDLE", "cuEventQuery", 0x5EED)
    refused("INVALID_HANDLE", "cuLibraryGetKernel", 0x5EED, b"add")
    refused("INVALID_HANDLE", "cuLaunchKernel", 0x5EED, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    refused("INVALID_CONTEXT", "cuCtxSetCurrent", 0x5EED)
    refused("INVALID_DEVICE", "cuDeviceGet", 2)


def test_a_thread_without_a_context_gets_nothing(device: core.Device, memory: int) -> None:
    driver_call("cuCtxPopCurrent")
    refused("INVALID_CONTEXT", "cuMemAlloc", 8)
    refused("INVALID_CONTEXT", "cuStreamCreate", 0)


def test_devices_do_not_reach_each_others_memory_or_streams(device: core.Device, kernels: Any, memory: int) -> None:
    stream = device.create_stream()
    core.Device(1).set_current()
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_HANDLE"):
        launch(stream, kernels, "add", memory, numpy.int32(3))
    launch(core.Device(1).create_stream(), kernels, "add", memory, numpy.int32(3))
    refused("ILLEGAL_ADDRESS", "cuCtxSynchronize")
    device.set_current()
    driver_call("cuCtxSynchronize")  # the other one is not spoilt
    control.restart()


@pytest.mark.parametrize(
    ("name", "address", "error", "said"),
    [
        ("add", 1 << 20, "ILLEGAL_ADDRESS", "out-of-bounds"),
        ("add", -(1 << 45), "ILLEGAL_ADDRESS", "out-of-bounds"),
        ("misaligned", 0, "MISALIGNED_ADDRESS", "misaligned"),
        ("divided", 0, "LAUNCH_FAILED", "divergent-barrier"),
    ],
)
def test_a_kernel_with_a_bug_fails_the_next_wait_and_every_later_call(
    device: core.Device, kernels: Any, memory: int, name: str, address: int, error: str, said: str
) -> None:
    stream, more = device.create_stream(), (numpy.int32(3),) if name == "add" else ()
    launch(stream, kernels, name, memory + address, *more)
    assert control.report() == ""
    refused(error, "cuStreamSynchronize", stream.handle)
    refused(error, "cuMemAlloc", 8)
    refused(error, "cuStreamCreate", 0)
    assert said in control.report()
    assert f" in {name}, block (0, 0, 0), thread (" in control.report()
    control.restart()


def test_kernels_cannot_use_host_memory(device: core.Device, kernels: Any) -> None:
    host = numpy.zeros(WORDS, numpy.int32)
    launch(device.default_stream, kernels, "add", host.ctypes.data, numpy.int32(3))
    refused("ILLEGAL_ADDRESS", "cuCtxSynchronize")
    control.restart()


def test_a_read_of_memory_that_was_never_written_is_a_bug(device: core.Device, kernels: Any) -> None:
    address = int(driver_call("cuMemAlloc", 4 * WORDS))
    launch(device.default_stream, kernels, "add", address, numpy.int32(3))
    refused("LAUNCH_FAILED", "cuCtxSynchronize")
    assert "uninitialised" in control.report()
    control.restart()


# ---- Never by accident


@pytest.mark.parametrize("sign", SIGNS)
def test_it_refuses_where_a_real_driver_is(tmp_path: Path, sign: str) -> None:
    assert control.load().emulated_refusal(bytes(tmp_path)) is None
    file = tmp_path / sign.removeprefix("/")
    file.parent.mkdir(parents=True)
    file.touch()
    assert f"{sign} exists".encode() in control.load().emulated_refusal(bytes(tmp_path))


def test_missing_entry_points_are_refused() -> None:
    with pytest.raises(Exception, match="cuEventElapsedTime"):
        driver.cuEventElapsedTime(0, 0)  # no caller gets a time that was not measured


# ---- torch's operations


def test_a_sort_waits_for_its_turn_in_the_stream() -> None:
    keys = torch.tensor([3, 1, 2], device="cuda")
    found, order = (torch.empty(3, dtype=torch.int64, device="cuda") for _ in range(2))
    torch.sort(keys, stable=True, out=(found, order))
    assert untouched(found)
    keys.copy_(torch.tensor([5, 9, 7], device="cuda"))  # queued after the sort
    assert found.tolist() == [1, 2, 3]
    assert order.tolist() == [1, 2, 0]


def test_an_operation_on_memory_that_is_gone_spoils_the_device(capfd: pytest.CaptureFixture[str]) -> None:
    sums = torch.empty(4, dtype=torch.int32, device="cuda")
    with torch_cuda.side_stream() as other:
        heads = torch.ones(4, dtype=torch.int32, device="cuda")
    torch.cumsum(heads, 0, dtype=torch.int32, out=sums)
    del heads  # its own stream does not use it any more
    torch.empty(1, device="cuda")
    with torch.cuda.device(0):
        other.synchronize()
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            torch.cuda.synchronize()
    assert "are not there" in capfd.readouterr().err
    control.restart()
