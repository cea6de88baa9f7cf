"""Searches whose judge reads times from a table instead of measuring, in this process and in others that are killed."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.replay_judge import Entry, NoBuilder, ReplayJudge

from embforge.codegen.params import CpuParams, Params
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.judge.outcome import Outcome, WrongAnswer
from embforge.tuner.search.space import Space
from embforge.tuner.study.sampler import sampler_for
from embforge.tuner.study.storage import open_storage
from embforge.tuner.study.study import Screening, SearchEvent, search
from embforge.tuner.study.trials import Trials

SPEC = CollectionSpec([TableSpec("t", 500, 16)], [FeatureSpec("f", "t")])
NAME = "study"
WAIT_SECONDS = 600.0
"""A child that sends no event for this long is taken to hang. A test that passes never waits this long."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(  # what children need is imported once
    [
        "embforge.tuner.study.study",
        "support.replay_judge",
        "alembic.command",
        "optuna.storages._rdb.models",
        "psycopg",
    ]
)


def space_with(**choices: tuple[Any, ...]) -> Space:
    """All combinations of these choices; every other field has its default alone."""
    every = {f.name: choices.get(f.name, (f.default,)) for f in fields(CpuParams)}
    points = tuple(CpuParams(*values) for values in product(*every.values()))
    assert CpuParams() in points
    return Space("forward", "cpu", "avx2", every, len(points), points, ())


SMALL = space_with(prefetch_bytes=(0, 1024, 4096, 16384), tile_vectors=(4, 8), rows_unrolled=(1, 2))
"""16 points."""
MEDIUM = space_with(prefetch_bytes=(0, 1024, 4096, 8192, 16384, 32768), tile_vectors=(4, 8), rows_unrolled=(1, 2))
"""24 points."""
LARGE = space_with(
    prefetch_bytes=(0, 1024, 4096, 8192, 16384, 32768),
    prefetch_level=(1, 2),
    tile_vectors=(2, 4, 8, 16),
    rows_unrolled=(1, 2, 4),
    stores=("cached", "streaming"),
)
"""288 points."""


def plan_of(params: Params) -> Plan:
    return Plan("forward", "cpu", "avx2", "int64", SPEC, params)


def table_of(space: Space) -> dict[Params, Entry]:
    """A table of arbitrary times that are always the same; some points fail."""

    def entry(params: Params) -> Entry:
        number = zlib.crc32(repr(params).encode())
        if number % 7 == 0 and params != space.default:
            return WrongAnswer(f"number {number} is not the reference's")
        return {"uniform,batch=64": 1e-4 * (1 + number % 1000 / 1000)}

    return {params: entry(params) for params in space.points}


def judge_of(space: Space, *, seed: int = 0, delay: float = 0.0) -> ReplayJudge:
    return ReplayJudge(table_of(space), space.default, seed=seed, delay=delay)


def trials_in(url: str, space: Space, name: str = NAME) -> Trials:
    return Trials(open_storage(url), name, space, uri_of=lambda params: plan_of(params).uri)


def run(trials: Trials, space: Space, *, ahead: int = 3, seed: int = 0, **options: Any) -> int:
    """Runs a search with a builder and a judge of its own, unless `options` has them."""
    builder, judge = options.pop("builder", None) or NoBuilder(), options.pop("judge", None) or judge_of(space)
    return search(trials, sampler_for(space, seed=seed), plan_of, builder, judge, ahead=ahead, **options)


class Child:
    """A real process that searches a study in a storage. It sends every event, and logs what it has measured."""

    def __init__(self, url: str, space: Space, log: Path, *, delay: float, ahead: int = 3, gated: bool = False) -> None:
        """With `gated`, the process waits for `go` before its first measurement."""
        self._events, childs_end = _processes.Pipe()
        arguments = (url, space, log, delay, ahead, gated, childs_end)
        self.process: BaseProcess = _processes.Process(target=_child, args=arguments)
        self.process.start()
        childs_end.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def event(self, name: str) -> int:
        """Waits for the next event of this name and returns the trial's number. `EOFError` if the child ends before."""
        while True:
            assert self._events.poll(WAIT_SECONDS), f"no {name} from child {self.pid}"
            received, number = self._events.recv()
            if received == name:
                return int(number)

    def go(self) -> None:
        self._events.send(None)

    def end(self) -> int:
        """Waits until the process has ended, and returns its exit code."""
        try:
            while True:
                self.event("never")
        except EOFError:
            self.process.join(WAIT_SECONDS)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join(WAIT_SECONDS)


MOMENTS: dict[str, Callable[[Child], object]] = {
    "being measured": lambda child: child.event("Screening"),
    "just taken": lambda child: child.event("Building"),
    "just finished": lambda child: child.event("Screened"),
    "in the middle": lambda child: [child.event("Screened") for _ in range(3)],
    "in the middle and measuring": lambda child: [child.event("Screening") for _ in range(4)],
}
"""The moments at which tests kill a search; each function waits for its moment."""


def _child(url: str, space: Space, log: Path, delay: float, ahead: int, gated: bool, events: Connection) -> None:
    def tell(event: SearchEvent) -> None:
        nonlocal gated
        events.send((type(event).__name__, getattr(event, "number", -1)))
        if gated and isinstance(event, Screening):
            gated = False
            events.recv()

    trials = trials_in(url, space)
    run(trials, space, ahead=ahead, judge=LoggingJudge(space, log, delay), progress=tell)


class LoggingJudge(ReplayJudge):
    """Logs a line for every screening that has ended: the process and the plan."""

    def __init__(self, space: Space, log: Path, delay: float) -> None:
        super().__init__(table_of(space), space.default, delay=delay)
        self._log = log

    def screen(self, plan: Plan) -> Outcome:
        outcome = super().screen(plan)
        line = f"{os.getpid()} {plan.uri}\n".encode()
        file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line)  # one call, so that lines of several processes do not mix
        os.close(file)
        return outcome


def measured(log: Path) -> list[tuple[int, str]]:
    """The measurements that children have logged, as pairs of pid and URI."""
    if not log.exists():
        return []
    pairs = (line.split() for line in log.read_text().splitlines())
    return [(int(pid), uri) for pid, uri in pairs]


def finished_in(url: str, space: Space) -> dict[int, tuple[Params, Outcome]]:
    """The finished trials in a storage, read through a new connection."""
    return trials_in(url, space).outcomes()


def assert_complete(url: str, space: Space) -> dict[int, tuple[Params, Outcome]]:
    """Every point has exactly one finished trial, with the outcome of the table."""
    outcomes = finished_in(url, space)
    assert Counter(params for params, _ in outcomes.values()) == Counter(space.points)
    judge = judge_of(space)
    for params, outcome in outcomes.values():
        assert outcome == judge.screen(plan_of(params))
    return outcomes


def assert_shared(url: str, space: Space, log: Path, processes: int) -> None:
    """Several processes search one study: every point is measured once, and each of them measures some."""
    children = [Child(url, space, log, delay=0.02, ahead=2, gated=True) for _ in range(processes)]
    for child in children:
        child.event("Screening")  # each has its first point before any of them can take all points
    for child in children:
        child.go()
    assert [child.end() for child in children] == [0] * processes
    assert_complete(url, space)
    assert Counter(uri for _, uri in measured(log)) == Counter(plan_of(params).uri for params in space.points)
    assert {pid for pid, _ in measured(log)} == {child.pid for child in children}


def assert_survives(url: str, space: Space, log: Path, moments: Iterable[str] = MOMENTS) -> None:
    """A search is killed again and again, then left alone: nothing that was finished is lost or measured again."""
    before: dict[int, tuple[Params, Outcome]] = {}
    for moment in moments:
        known, seen = {plan_of(params).uri for params, _ in before.values()}, len(measured(log))
        child = Child(url, space, log, delay=0.03)
        MOMENTS[moment](child)
        child.kill()
        after = finished_in(url, space)
        assert before.items() <= after.items()
        assert not known & {uri for _, uri in measured(log)[seen:]}
        before = after
    assert 0 < len(before) < len(space.points)
    assert Child(url, space, log, delay=0.0).end() == 0
    assert before.items() <= assert_complete(url, space).items()
