"""The timing core, with a clock that only contenders move."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from embforge.codegen.tuned.hardware import parse_bytes
from embforge.tuner.measure.paired import MIN_ROUNDS, Measurement, Rotation, interleaved_rounds, measure
from embforge.tuner.measure.timers import (
    COLD_REPEATS,
    SAMPLE_SECONDS,
    CpuTimer,
    CudaTimer,
    cpu_cache_bytes,
    gpu_clocks,
)
from embforge.tuner.workload.workload import Batch

BATCHES = [Batch(1, np.array([n]), np.array([0, 1]), None) for n in range(5)]


@dataclass
class World:
    """A clock that only workers move, and a log of who worked when."""

    now: float = 0.0
    log: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Worker:
    name: str
    world: World
    seconds: float

    def prepare(self, batch: Batch) -> int:
        return int(batch.values[0])

    def run(self, prepared: Any) -> None:
        self.world.log.append((self.name, prepared))
        self.world.now += self.seconds


def timed(*durations: float, seconds: float = 1.0, seed: int = 0) -> tuple[Measurement, World]:
    world = World()
    workers = [Worker(f"w{index}", world, duration) for index, duration in enumerate(durations)]
    return measure(workers, BATCHES, seconds=seconds, seed=seed, clock=lambda: world.now), world


def test_medians_and_ratios_are_those_of_the_clock() -> None:
    taken, _ = timed(0.002, 0.006)
    assert taken.median("w0") == pytest.approx(0.002)
    ratio = taken.ratio("w1", "w0")
    assert ratio.median == pytest.approx(3.0)
    assert ratio.low <= ratio.median <= ratio.high


def test_several_contenders_are_summed_round_by_round() -> None:
    taken, _ = timed(0.002, 0.006, 0.001)
    assert taken.ratio(["w0", "w1"], "w2").median == pytest.approx(8.0)


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    taken, _ = timed(1e-5, 0.02)
    assert taken.repeats["w0"] * 1e-5 >= SAMPLE_SECONDS * 0.999
    assert taken.repeats["w1"] == 1
    assert taken.median("w0") == pytest.approx(1e-5)


def test_no_contender_runs_on_the_batch_used_just_before() -> None:
    _, world = timed(0.0004, 0.002, 0.003)
    batches = [batch for _, batch in world.log]
    assert all(a != b for a, b in itertools.pairwise(batches))
    assert set(batches) == set(range(len(BATCHES)))


def test_every_round_runs_all_contenders_in_changing_order() -> None:
    taken, world = timed(0.002, 0.003, 0.004)
    assert {len(samples) for samples in taken.samples.values()} == {taken.rounds}
    names = [name for name, _ in world.log][-3 * taken.rounds :]
    rounds = [tuple(names[start : start + 3]) for start in range(0, len(names), 3)]
    assert all(len(set(order)) == 3 for order in rounds)
    assert len(set(rounds)) > 1


def test_the_budget_bounds_the_rounds_but_not_below_the_least() -> None:
    assert timed(0.01, 0.01, seconds=0.0)[0].rounds == MIN_ROUNDS
    taken, world = timed(0.01, 0.01, seconds=1.0)
    assert taken.rounds == pytest.approx(50, abs=2)
    assert world.now < 1.2


def test_pairing_cancels_drift() -> None:
    slow = [1.0 + 0.1 * step for step in range(20)]
    taken = Measurement({"a": tuple(2 * s for s in slow), "b": tuple(slow)}, {"a": 1, "b": 1})
    ratio = taken.ratio("a", "b")
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_batch_cannot_rotate() -> None:
    with pytest.raises(ValueError, match="at least 2 batches"):
        measure([], BATCHES[:1], seconds=0)


def test_garbage_collection_is_restored_when_a_contender_fails() -> None:
    class Broken(Worker):
        def run(self, prepared: Any) -> None:
            assert not gc.isenabled()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure([Broken("b", World(), 0.0)], BATCHES, seconds=0)
    assert gc.isenabled()


def test_rotation_returns_to_the_first_batch() -> None:
    rotation = Rotation(3)
    assert [rotation.take(2), rotation.take(2), rotation.take(4)] == [[0, 1], [2, 0], [1, 2, 0, 1]]


def test_rounds_are_by_run_and_continue_where_the_last_ended() -> None:
    world = World()
    runs = [Worker(name, world, seconds).run for name, seconds in (("a", 0.25), ("b", 0.5))]
    prepared = [[("a", index) for index in range(3)], [("b", index) for index in range(3)]]
    timer, rotation, rng = CpuTimer(clock=lambda: world.now), Rotation(3), np.random.default_rng(0)
    taken = interleaved_rounds(runs, prepared, 4, rng, timer, [2, 1], rotation)
    taken += interleaved_rounds(runs, prepared, 2, rng, timer, [2, 1], rotation)
    assert taken == [(0.25, 0.5)] * 6
    assert all(name == turn[0] for name, turn in world.log)
    batches = [turn[1] for _, turn in world.log]
    assert batches == [index % 3 for index in range(18)]
    assert gc.isenabled()


def test_the_same_generator_gives_the_same_order() -> None:
    def order(seed: int) -> list[str]:
        world = World()
        runs = [Worker(name, world, 1.0).run for name in "abcd"]
        interleaved_rounds(
            runs, [[0, 1]] * 4, 5, np.random.default_rng(seed), CpuTimer(clock=lambda: world.now), [1] * 4
        )
        return [name for name, _ in world.log]

    assert order(1) == order(1) != order(2)


def test_a_cold_sample_empties_caches_before_each_call_and_times_calls_only() -> None:
    world = World()
    worker = Worker("call", world, 0.5)

    def empty() -> None:
        world.log.append(("empty", 0))
        world.now += 100.0

    timer = CpuTimer(empty_caches=empty, clock=lambda: world.now)
    assert timer.sample(worker.run, [7, 8], 3) == 0.5
    assert world.log == [("empty", 0), ("call", 7), ("empty", 0), ("call", 8), ("empty", 0), ("call", 7)]
    assert timer.repeats_for(Worker("call", world, 1e-6).run, [7, 8]) == COLD_REPEATS
    assert timer.repeats_for(worker.run, [7, 8]) == 1


def test_the_cold_timer_works_on_this_machine() -> None:
    timer, calls = CpuTimer.cold(), []
    assert timer.sample(calls.append, [1, 2], 2) >= 0
    assert calls == [1, 2]
    assert cpu_cache_bytes() >= 1 << 20
    assert set(timer.clocks()) == {"cpu"}


class Stream:
    """A device's timeline, in milliseconds: work takes its time there, events note when they are reached."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.waited_for = 0.0

    def work(self, name: str, milliseconds: float) -> None:
        self.log.append(name)
        self.now += milliseconds

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.waited_for = self.now

    def event(self) -> Any:
        stream = self

        class Event:
            def record(self) -> None:
                stream.log.append("record")
                self.at = stream.now

            def elapsed_time(self, end: Any) -> float:
                assert end.at <= stream.waited_for, "asked before the device got there"
                return float(end.at - self.at)

        return Event()


def test_events_time_the_call_and_not_the_flush() -> None:
    stream = Stream()
    clocks: dict[str, int | None] = {"sm": 1410, "memory": 1215}
    cold = CudaTimer(stream.event, stream.synchronize, lambda: stream.work("flush", 50.0), lambda: clocks)
    assert cold.sample(lambda turn: stream.work(turn, 2.0), ["x", "y"], 2) == pytest.approx(0.002)
    one = ["flush", "record", "x", "record"]
    assert stream.log == ["synchronize", *one, "flush", "record", "y", "record", "synchronize"]
    assert cold.clocks() == clocks
    assert cold.repeats_for(lambda turn: stream.work(turn, 0.01), ["x", "y"]) == COLD_REPEATS

    stream.log.clear()
    warm = CudaTimer(stream.event, stream.synchronize, None, dict)
    assert warm.sample(lambda turn: stream.work(turn, 2.0), ["x", "y"], 3) == pytest.approx(0.002)
    assert stream.log == ["synchronize", "record", "x", "y", "x", "record", "synchronize"]
    assert warm.repeats_for(lambda turn: stream.work(turn, 0.0625), ["x", "y"]) == pytest.approx(16, abs=1)


def test_clocks_without_a_gpu_are_not_known() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is present")
    assert gpu_clocks(0) == {"sm": None, "memory": None}


def test_cache_sizes_are_read_as_linux_writes_them() -> None:
    assert [parse_bytes(text) for text in ("48K\n", "32M", "1G", "512")] == [48 << 10, 32 << 20, 1 << 30, 512]
