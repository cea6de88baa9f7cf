"""Samplers try every allowed point at most once, in an order that the history decides, and find good ones early."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.replay_judge import NoBuilder, ReplayJudge
from support.spaces import SPECS, made
from support.strategies import examples

from embforge.codegen.machine import host_isa
from embforge.codegen.params import CpuParams, Params
from embforge.codegen.plan import Plan
from embforge.tuner.judge.outcome import CompileFailed, Timed
from embforge.tuner.search.space import ENUMERATE_BELOW, Space, decode, encode
from embforge.tuner.study.sampler import Enumeration, Guided, Sampler, Tried, distributions, sampler_for

WORKLOAD = "uniform,batch=2048"


@cache
def small() -> Space:
    """51 points."""
    return made("cuda", "usual", "adam")


@cache
def large() -> Space:
    """A few thousand points."""
    return made("cuda")


def score_of(params: Params) -> float:
    """A made-up time over the default's: a number a choice, and one for three fields together."""

    def number(text: str) -> float:
        return zlib.crc32(text.encode()) % 1000 / 1000

    values = encode(params)
    together = number("".join(str(values[name]) for name in list(values)[:3]))
    return math.exp(0.1 * sum(number(f"{name}{value}") for name, value in values.items()) + 0.2 * together)


def run(
    sampler: Sampler, most: int, score: Callable[[Params], float | None] = score_of, start: Sequence[Tried] = ()
) -> list[Tried]:
    """The trials of a search by one process."""
    tried = list(start)
    while len(tried) < most and (params := sampler.propose(tried)) is not None:
        tried.append(Tried(len(tried), params, score(params)))
    return tried


def points_of(tried: Sequence[Tried]) -> list[Params]:
    return [trial.params for trial in tried]


@pytest.mark.parametrize("score", [score_of, lambda params: None, lambda params: 1.0])
def test_a_small_space_is_exhausted(score: Callable[[Params], float | None]) -> None:
    """Whatever comes of the trials; then there is nothing more, and that is no error."""
    sampler = sampler_for(small())
    assert isinstance(sampler, Enumeration)
    tried = run(sampler, 10_000, score)
    assert len(tried) == len(set(points_of(tried))) == len(small().points) < ENUMERATE_BELOW
    assert set(points_of(tried)) == set(small().points)
    assert sampler.propose(tried) is None


def test_a_large_space_is_guided_to_its_end() -> None:
    """Guessing ends without an error too, and never proposes what is not allowed."""
    whole = large()
    part = replace(whole, points=(whole.default, *whole.points[: ENUMERATE_BELOW + 20]))
    part = replace(part, points=tuple(dict.fromkeys(part.points)))
    sampler = sampler_for(part)
    assert isinstance(sampler, Guided)
    known = [Tried(n, p, score_of(p)) for n, p in enumerate(part.points[30:])]
    tried = run(sampler, 10_000, start=known)
    assert len(tried) == len(part.points) and set(points_of(tried)) == set(part.points)
    assert sampler.propose(tried) is None


@pytest.mark.parametrize("which", [small, large])
def test_seeds_come_first(which: Callable[[], Space]) -> None:
    space = which()
    first, second = space.points[-1], space.points[-2]
    forbidden = next(iter(space.stands_for))
    assert space.default not in (first, second)
    tried = run(sampler_for(space, [first, forbidden, second, first]), 4)
    assert points_of(tried)[:2] == [first, second]


@given(st.data(), st.sampled_from([small, large]))
@examples(15)
def test_what_is_proposed_is_free_allowed_and_decided_by_the_history(
    data: st.DataObject, which: Callable[[], Space]
) -> None:
    """Any history, also with points that this space does not have: those of an older one in the same study."""
    space, seed = which(), data.draw(st.sampled_from([0, 1, 4295, 2**32, -1]))
    removed = list(space.stands_for)[:5]
    points = data.draw(st.lists(st.sampled_from((*space.points, *removed)), unique=True, min_size=20, max_size=40))
    states = st.sampled_from(["timed", "failed", "pending"])
    tried = []
    for number, params in enumerate(points):
        state = data.draw(states)
        score = score_of(params) if state == "timed" else None
        tried.append(Tried(number, params, score, pending=state == "pending"))
    found = sampler_for(space, seed=seed).propose(tried)
    assert found in space.points and found not in points
    assert sampler_for(space, seed=seed).propose(tried) == found


def test_a_process_that_was_there_and_one_that_comes_later_guess_the_same() -> None:
    """Trials that end while others are under way, failures among them, are followed as if they were read at once."""
    space = large()
    there = sampler_for(space, [space.default])
    tried: list[Tried] = []
    for number in range(40):
        params = there.propose(tried)
        assert params is not None
        assert sampler_for(space, [space.default]).propose(tried) == params
        tried.append(Tried(number, params, pending=True))
        if number >= 3:  # three are built while one is measured
            done = tried[number - 3]
            tried[number - 3] = replace(done, pending=False, score=None if number % 5 == 0 else score_of(done.params))


def test_other_seeds_guess_otherwise() -> None:
    found = {tuple(points_of(run(sampler_for(large(), seed=seed), 40))) for seed in (0, 1, 2**31, 2**40)}
    assert len(found) > 1


@pytest.mark.parametrize("seed", [0, 1])
def test_a_good_point_of_a_large_space_is_found_in_a_tenth_of_it(seed: int) -> None:
    space = large()
    scores = sorted(map(score_of, space.points))
    assert len(scores) > 2000
    tried = run(sampler_for(space, [space.default], seed), 150)
    best = min(trial.score for trial in tried if trial.score is not None)
    assert best <= scores[len(scores) // 500]
    assert score_of(space.default) > scores[len(scores) // 10]  # it was not there to begin with


def test_failures_are_kept_away_from() -> None:
    """Half of the choices of one field never work: few of the guesses go there."""
    space = large()

    def score(params: Params) -> float | None:
        return None if encode(params)["block"] == 128 else score_of(params)

    guessed = run(sampler_for(space), 80, score)[30:]
    assert sum(trial.score is None for trial in guessed) < len(guessed) / 6


def test_optuna_knows_every_choice_as_it_is_kept() -> None:
    for space in (small(), large()):
        known = distributions(space)
        assert {name: len(d.choices) for name, d in known.items()} == {n: len(c) for n, c in space.fields.items()}
        for params in space.points[::500]:
            trial = optuna.trial.create_trial(value=1.0, params=dict(encode(params)), distributions=dict(known))
            assert decode(space, trial.params) == params


def plan_of(params: Params) -> Plan:
    return Plan("forward", "cpu", host_isa(), "int64", SPECS["usual"], params)


def test_a_replayed_search_is_the_same_every_time() -> None:
    """From a table, with noise and failures: screenings and rounds depend on seed and question, not on their order."""
    points = (CpuParams(), *made("cpu").points[:40])
    broken = points[-1]
    table = {p: {WORKLOAD: score_of(p)} for p in points} | {broken: CompileFailed("no")}
    judges = [ReplayJudge(table, CpuParams(), seed=seed) for seed in (1, 1, 2)]
    assert all(judge.workloads == (WORKLOAD,) for judge in judges)
    plans = [plan_of(p) for p in points]
    answers = [[judge.screen(plan) for plan in plans] for judge in judges]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][:5] == [judges[0].screen(plan) for plan in plans[:5]]
    assert answers[0][-1] == CompileFailed("no")
    for params, answer in zip(points[:-1], answers[0], strict=False):
        assert isinstance(answer, Timed)
        assert answer.score == pytest.approx(score_of(params) / score_of(CpuParams()), rel=0.05)
    rounds = [judge.rounds(plans[:3], WORKLOAD, 50, seed=7) for judge in judges]
    assert rounds[0] == rounds[1] != rounds[2] and isinstance(rounds[0], list) and len(rounds[0]) == 50
    assert judges[0].rounds([plans[0], plans[-1]], WORKLOAD, 5, seed=7) == {1: CompileFailed("no")}
    with pytest.raises(ValueError, match="fails in the table"):
        ReplayJudge(table, broken)


def test_a_builder_of_nothing_gives_plans_back_in_order() -> None:
    builder, plans = NoBuilder(), [plan_of(p) for p in made("cpu").points[:3]]
    for plan in plans:
        builder.submit(plan)
    found = [builder.done() for _ in range(4)]
    assert [done[0] for done in found if done is not None] == plans and found[3] is None
