"""How a rank waits for a collective: it polls for a while and yields the CPU, then sleeps; it always sees errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embforge.sharded.exchange import waiting
from embforge.sharded.exchange.waiting import SHORT_BYTES, wait


class Work:
    """A collective that is done after it was polled this many times; never if None."""

    def __init__(self, after: int | None, error: Exception | None = None) -> None:
        self.after, self.error = after, error
        self.asked, self.waited = 0, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.after is not None and self.asked > self.after

    def wait(self) -> None:
        self.waited += 1
        if self.error is not None:
            raise self.error


class Clock:
    """A clock that advances by `step` seconds each time it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that `wait` reads; it does not advance unless a test says otherwise."""
    made = Clock()
    monkeypatch.setattr(waiting, "perf_counter", made)
    return made


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_num_cpus", lambda: 8)


@pytest.mark.usefixtures("many_cpus")
def test_waiting_asks_until_the_collective_is_done() -> None:
    work = Work(after=100)
    wait(work, SHORT_BYTES + 1, ranks_here=8)
    assert (work.asked, work.waited) == (101, 1)


@pytest.mark.usefixtures("many_cpus")
def test_an_error_of_a_collective_is_raised() -> None:
    work = Work(after=3, error=RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait(work, 8, ranks_here=2)
    assert work.waited == 1


@pytest.mark.usefixtures("many_cpus")
def test_waiting_for_a_late_rank_sleeps(clock: Clock) -> None:
    clock.step = waiting.SECONDS / 10
    work = Work(after=None)
    wait(work, 8, ranks_here=2)
    assert 9 <= work.asked <= 11 and work.waited == 1


def test_ranks_that_share_cpus_sleep_through_long_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_num_cpus", lambda: 2)
    long, short = Work(after=3), Work(after=3)
    wait(long, SHORT_BYTES + 1, ranks_here=4)
    wait(short, SHORT_BYTES, ranks_here=4)
    assert (long.asked, long.waited) == (0, 1)
    assert (short.asked, short.waited) == (4, 1)


@pytest.mark.usefixtures("many_cpus")
def test_helping_threads_leave_the_cpu_to_the_main_one() -> None:
    work = Work(after=3)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait, work, 8, 2).result()
    assert (work.asked, work.waited) == (0, 1)


@pytest.mark.usefixtures("many_cpus")
def test_waiting_sleeps_where_it_cannot_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_yield_cpu", lambda: None)
    work = Work(after=3)
    wait(work, 8, ranks_here=2)
    assert (work.asked, work.waited) == (0, 1)


@pytest.mark.parametrize(
    ("quota", "most"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("what", 64)]
)
def test_a_containers_share_of_cpus_counts(
    quota: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(waiting, "CPU_QUOTA", tmp_path / "cpu.max")
    waiting.CPU_QUOTA.write_text(quota)
    assert waiting._num_cpus.__wrapped__() == most


def test_without_a_container_all_cpus_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    monkeypatch.setattr(waiting, "CPU_QUOTA", tmp_path / "nothing")
    assert waiting._num_cpus.__wrapped__() == 3
