"""The timing core, with a clock that only contenders move."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from embforge.tuner.measure import MIN_ROUNDS, SAMPLE_SECONDS, Measurement, Rotation, measure
from embforge.tuner.workload import Batch

BATCHES = [Batch(1, np.array([n]), np.array([0, 1]), None) for n in range(5)]


@dataclass
class World:
    """Time that stands still unless someone works, and the order in which they worked."""

    now: float = 0.0
    log: list[tuple[str, int]] = field(default_factory=list)


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


def test_every_round_runs_everyone_in_changing_order() -> None:
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


def test_rotation_wraps() -> None:
    rotation = Rotation(3)
    assert [rotation.take(2), rotation.take(2), rotation.take(4)] == [[0, 1], [2, 0], [1, 2, 0, 1]]
