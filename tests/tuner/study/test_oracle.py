"""The search against spaces that were measured whole (benchmarks/oracles): replayed here, run for real in the soak."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from support.replay_judge import NoBuilder, ReplayJudge

from benchmarks.oracle import run_try
from benchmarks.oracle_cases import CASES, TRIES, Case, Try, read_oracle
from embforge.codegen.params import Params, params_from
from embforge.codegen.tuned.record import Hardware
from embforge.tuner.judge.outcome import Timed
from embforge.tuner.search.space import settle, space_of
from embforge.tuner.study.race import FINALISTS, race
from embforge.tuner.study.sampler import sampler_for
from embforge.tuner.study.study import search
from embforge.tuner.study.task import Task
from embforge.tuner.study.trials import Trials

SCREENED = 60
"""About what three minutes allow on two slow cores."""
NOISE = 0.02


def task_there(case: Case, baseline: Mapping[str, Any]) -> Task:
    """The case's task on the machine that its table was measured on."""
    here, facts = case.task(), read_oracle(case).facts["hardware"]
    hardware = Hardware(**facts)
    arch = hardware.identity["simd"]
    space = space_of(here.op, "cpu", arch, here.spec, hardware, here.update)
    start = params_from("cpu", dict(baseline), here.op) if baseline else None
    return Task(here.spec, "cpu", arch, here.train, here.update, hardware, space, here.workloads, start)


def replayed(task: Task, table: Mapping[Params, float], seed: int) -> tuple[list[Params], Params, Params]:
    """The points that a search tries, what leads the finals and what ships."""
    anchor = settle(task.space, task.anchor.params)
    (workload,) = task.workloads
    judge = ReplayJudge({p: {workload: ratio} for p, ratio in table.items()}, anchor, noise=NOISE, seed=seed)
    trials = Trials(InMemoryStorage(), "replayed", task.space)
    sampler = sampler_for(task.space, [anchor], seed)
    search(trials, sampler, task.plan, NoBuilder(), judge, ahead=4, most=SCREENED)
    outcomes = [(o.score, p) for p, o in trials.outcomes().values() if isinstance(o, Timed)]
    best = [p for _, p in sorted(outcomes, key=lambda item: item[0])[:FINALISTS]]
    found = race(judge, [task.plan(p) for p in best], task.plan(task.default), deadline=math.inf, seed=seed)
    ships = found.leader.params if found.decision.ships else task.default
    return [p for p, _ in trials.outcomes().values()], found.leader.params, ships


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_table_holds_every_point_of_the_space(case: Case) -> None:
    oracle, task = read_oracle(case), task_there(case, {})
    assert set(oracle.ratios) == set(task.space.points)
    assert len(task.space.points) < 500
    assert oracle.ratios[oracle.best] <= oracle.ratios[task.default] == 1.0


@pytest.mark.parametrize("attempt", TRIES, ids=str)
def test_a_replayed_search_comes_near_the_best_from_any_start(attempt: Try) -> None:
    case = CASES[attempt.case]
    oracle, task = read_oracle(case), task_there(case, attempt.baseline)
    if attempt.baseline:  # a start that is worth the name is far from the best
        assert oracle.ratios[settle(task.space, task.anchor.params)] > 1.05 * oracle.ratios[oracle.best]
    tried, leader, ships = replayed(task, oracle.ratios, attempt.seed)
    assert len(tried) == len(set(tried)) == SCREENED
    assert oracle.ratios[leader] <= oracle.ratios[oracle.best] / 0.95
    assert oracle.ratios[ships] <= 1.0
    assert replayed(task, oracle.ratios, attempt.seed) == (tried, leader, ships)  # same measurements, same choice


@pytest.mark.soak
@pytest.mark.parametrize("attempt", TRIES, ids=str)
def test_three_minutes_come_near_the_best_and_never_store_what_is_slower(attempt: Try) -> None:
    result = run_try(attempt)
    assert not result.problems, result
