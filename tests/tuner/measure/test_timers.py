"""Timers: what is timed and what is not, on clocks and devices that only the calls move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embforge.tuner.measure import timers
from embforge.tuner.measure.timers import COLD_REPEATS, SAMPLE_SECONDS, TIMES_TO_EMPTY, CpuTimer, CudaTimer, gpu_clocks

L2_BYTES = 1 << 20


class Gpu:
    """A device on which work is done at once and adds to a clock of milliseconds; writing to its memory adds 40."""

    def __init__(self) -> None:
        self.now, self.reached = 0.0, 0.0
        self.buffers: list[torch.Tensor] = []
        self._seen: dict[int, int] = {}

    def work(self, milliseconds: float) -> None:
        self._notice_writes()
        self.now += milliseconds

    def writes(self) -> int:
        """How often all its buffers were rewritten."""
        return sum(buffer._version for buffer in self.buffers)

    def zeros(self, count: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        self.buffers.append(torch.empty(count, dtype=dtype).fill_(0))
        self._seen[len(self.buffers) - 1] = self.buffers[-1]._version
        return self.buffers[-1]

    def synchronize(self, device: torch.device) -> None:
        self._notice_writes()
        self.reached = self.now

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        gpu = self

        class Event:
            def record(self) -> None:
                gpu._notice_writes()
                self.at = gpu.now

            def elapsed_time(self, end: Any) -> float:
                assert end.at <= gpu.reached, "asked before the device got there"
                return float(end.at - self.at)

        return Event()

    def _notice_writes(self) -> None:
        for index, buffer in enumerate(self.buffers):
            self.now += 40.0 * (buffer._version - self._seen[index])
            self._seen[index] = buffer._version


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=L2_BYTES))
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch, "zeros", gpu.zeros)
    return gpu


def test_a_buffer_past_the_l2_is_written_before_every_cold_call_and_not_timed(gpu: Gpu) -> None:
    timer = CudaTimer.of("cuda", cold=True)
    [buffer] = gpu.buffers
    assert buffer.nbytes == TIMES_TO_EMPTY * L2_BYTES > L2_BYTES
    written: list[int] = []
    start = gpu.writes()

    def call(turn: float) -> None:
        written.append(gpu.writes() - start)
        gpu.work(turn)

    assert timer.sample(call, [1.0, 3.0], 4) == pytest.approx(2e-3)
    assert written == [1, 2, 3, 4]
    assert timer.repeats_for(lambda _: gpu.work(1e-3), [0]) == COLD_REPEATS
    assert timer.repeats_for(lambda _: gpu.work(5.0), [0]) == 1


def test_a_warm_sample_writes_no_buffer(gpu: Gpu) -> None:
    timer = CudaTimer.of("cuda", cold=False)
    assert gpu.buffers == []
    assert timer.sample(gpu.work, [1.0, 3.0], 4) == pytest.approx(2e-3)
    assert timer.repeats_for(lambda _: gpu.work(0.125), [0]) * 0.125e-3 == pytest.approx(SAMPLE_SECONDS, rel=0.2)


def test_earlier_work_of_the_device_is_no_part_of_a_sample(gpu: Gpu) -> None:
    timer = CudaTimer.of("cuda", cold=False)
    gpu.work(1000.0)
    assert timer.sample(gpu.work, [2.0], 1) == pytest.approx(2e-3)


def test_a_devices_clocks_are_recorded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    rates = {"sm": 1410, "memory": 1215}

    class Device:
        def __init__(self, index: int) -> None:
            assert index == 1

        def to_system_device(self) -> Device:
            return self

        def get_clock(self, name: str) -> Any:
            return SimpleNamespace(get_current_mhz=lambda: rates[name])

    monkeypatch.setattr(core, "Device", Device)
    assert CudaTimer.of("cuda:1", cold=False).clocks() == rates

    def refuse(self: Device) -> Device:
        raise RuntimeError("NVML: not supported")

    monkeypatch.setattr(Device, "to_system_device", refuse)
    assert gpu_clocks(1) == {"sm": None, "memory": None}


def test_the_names_of_clocks_are_those_of_the_library() -> None:
    device = pytest.importorskip("cuda.core.system._device", reason="cuda.core is not installed")
    assert {"sm", "memory"} <= {str(kind.value) for kind in device.ClockType}
    assert callable(device.ClockInfo.get_current_mhz)


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=7), st.integers(1, 30), st.booleans())
def test_a_cpu_sample_is_the_mean_of_its_calls_alone(costs: list[float], repeats: int, cold: bool) -> None:
    now, emptied, calls = 0.0, 0, 0

    def empty() -> None:
        nonlocal now, emptied
        now, emptied = now + 1000.0, emptied + 1

    def call(cost: float) -> None:
        nonlocal now, calls
        now, calls = now + cost, calls + 1
        assert emptied == (calls if cold else 0)

    timer = CpuTimer(empty_caches=empty if cold else None, clock=lambda: now)
    expected = sum(costs[turn % len(costs)] for turn in range(repeats)) / repeats
    assert timer.sample(call, costs, repeats) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert calls == repeats


@given(st.floats(1e-7, 0.1))
def test_a_warm_sample_is_long_enough_and_no_longer_than_it_must_be(cost: float) -> None:
    now = 0.0

    def call(_: object) -> None:
        nonlocal now
        now += cost

    repeats = CpuTimer(clock=lambda: now).repeats_for(call, [0, 1])
    assert repeats * cost >= SAMPLE_SECONDS * 0.99
    assert repeats == 1 or (repeats - 1) * cost < SAMPLE_SECONDS * 1.01


def test_a_device_that_calls_do_not_wait_for_is_waited_for_once_a_sample() -> None:
    waits: list[int] = []
    calls: list[int] = []
    timer = CpuTimer(synchronize=lambda: waits.append(len(calls)))
    timer.sample(calls.append, [1, 2], 4)
    assert waits == [0, 4]


def test_this_machines_caches_are_emptied_by_a_buffer_larger_than_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    zeros = torch.zeros
    monkeypatch.setattr(timers, "cpu_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(torch, "zeros", lambda *size, **more: made.append(zeros(*size, **more)) or made[-1])
    timer = CpuTimer.cold()
    [buffer] = made
    assert buffer.nbytes == TIMES_TO_EMPTY << 20
    timer.sample(lambda _: None, [0], 3)
    assert buffer.unique().tolist() == [3]  # every byte of it was written three times
    [mhz] = timer.clocks().values()
    assert mhz is None or mhz > 0
