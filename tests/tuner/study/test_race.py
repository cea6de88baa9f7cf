"""The finals ship what is faster beyond noise and nothing else, by samples alone: the same samples, the same choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replay_judge import Entry, ReplayJudge

from embforge.codegen.params import CpuParams, Params
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.judge.judge import Cache
from embforge.tuner.judge.outcome import (
    CompileFailed,
    Failure,
    Invalid,
    LaunchFailed,
    Outcome,
    Paired,
    Timed,
    TimedOut,
    WrongAnswer,
    from_data,
    to_data,
)
from embforge.tuner.measure.quiet import QUIET, WINDOW, Clocks, Usage, others_since
from embforge.tuner.study import race as race_module
from embforge.tuner.study.decision import ALPHA, DEFAULT, DUPLICATES, LEADER, LEAST_FLOOR, NOISE_LIMIT, decide
from embforge.tuner.study.race import BLOCK_ROUNDS, HEAT_ROUNDS, Race, RaceError, Racing, race

SPEC = CollectionSpec([TableSpec("t", 200, 8)], [FeatureSpec("f", "t")], name="tiny")
ALL = [CpuParams(prefetch_bytes=size) for size in (16384, 0, 1024, 4096, 8192)]
DEFAULT_PARAMS, *CANDIDATES = ALL
FOREVER = float("inf")
ENDED = 0.0


def plan_of(params: Params) -> Plan:
    return Plan("forward", "cpu", "avx2", "int64", SPEC, params)


def table_of(*entries: float | Failure) -> dict[Params, Entry]:
    """Milliseconds of the default, then of the candidates."""
    return {
        params: {"w": entry * 1e-3} if isinstance(entry, float) else entry
        for params, entry in zip(ALL, entries, strict=False)
    }


def raced(
    table: Mapping[Params, Entry], *, noise: float = 0.01, seed: int = 0, deadline: float = FOREVER, **more: object
) -> Race:
    judge = ReplayJudge(table, DEFAULT_PARAMS, noise=noise, seed=seed)
    candidates = [plan_of(params) for params in table if params != DEFAULT_PARAMS]
    return race(judge, candidates, plan_of(DEFAULT_PARAMS), deadline=deadline, seed=seed, **more)  # type: ignore[arg-type]


# ---- What ships ---------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_five_percent_under_one_percent_of_noise_are_found(seed: int, place: int) -> None:
    times = [1.0] * 5
    times[1 + place] = 1 / 1.05
    found = raced(table_of(*times), seed=seed)
    assert found.decision.ships
    assert found.leader.params == CANDIDATES[place]
    assert found.decision.settled
    assert found.decision.gain.low <= found.decision.gain.median <= found.decision.gain.high
    assert found.decision.gain.median == pytest.approx(1.05, abs=0.02)


class DriftingJudge(ReplayJudge):
    """A machine whose speed wanders, in jumps and slowly, also within a round; and some samples are disturbed."""

    def _noisy(self, rng: np.random.Generator, rounds: int, plans: int) -> np.ndarray:
        drift = np.cumsum(rng.normal(0, 0.004, rounds * plans)).reshape(rounds, plans)
        jumps = np.cumsum(rng.choice([0, 0, 0, 0.1, -0.1], rounds))[:, None]
        own = rng.normal(0, self._noise, (rounds, plans))
        disturbed = np.where(rng.random((rounds, plans)) < 0.05, rng.exponential(0.3, (rounds, plans)), 0)
        order = np.argsort(rng.random((rounds, plans)), axis=1)  # each round in a shuffled order
        return np.exp(np.take_along_axis(drift, order, axis=1) + jumps + own + disturbed)


def test_equal_candidates_hardly_ever_replace_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "MOST_ROUNDS", 3 * BLOCK_ROUNDS)
    shipped = 0
    for seed in range(300):
        judge = DriftingJudge(table_of(*[1.0] * 4), DEFAULT_PARAMS, seed=seed)
        candidates = [plan_of(params) for params in CANDIDATES[:3]]
        deadline = ENDED if seed % 3 else FOREVER
        shipped += race(judge, candidates, plan_of(DEFAULT_PARAMS), deadline=deadline, seed=seed).decision.ships
    assert shipped < 9


@pytest.mark.soak
def test_equal_candidates_hardly_ever_replace_the_default_however_long_one_looks() -> None:
    shipped = sum(raced(table_of(*[1.0] * 5), seed=seed).decision.ships for seed in range(300))
    assert shipped < 9


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1.01, 2.0), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.003, 0.01, 0.05]),
    st.integers(0, 10**6),
)
def test_what_is_slower_than_the_default_never_ships(slower: list[float], noise: float, seed: int) -> None:
    found = raced(table_of(1.0, *slower), noise=noise, seed=seed, deadline=ENDED)
    assert not found.decision.ships
    assert found.decision.why.startswith("the default stays: ")


def test_a_gain_below_the_noise_floor_does_not_ship() -> None:
    rng = np.random.default_rng(0)
    default, leader = 1.02 * np.exp(rng.normal(0, 1e-4, 40)), np.exp(rng.normal(0, 1e-4, 40))
    duplicate = 1.03 * leader  # the same kernel, elsewhere in memory
    copies = {DUPLICATES[LEADER]: tuple(duplicate), DUPLICATES[DEFAULT]: tuple(default)}
    samples = {"w": {DEFAULT: tuple(default), LEADER: tuple(leader)} | copies}
    decision = decide(samples)
    assert not decision.ships
    assert decision.p < ALPHA
    assert decision.noise_floor == pytest.approx(0.03, abs=0.001)
    assert "not above the noise floor of 3.0%" in decision.why
    samples["w"][DUPLICATES[LEADER]] = tuple(leader)
    assert decide(samples).ships and decide(samples).noise_floor == LEAST_FLOOR
    samples["w"][DUPLICATES[DEFAULT]] = tuple(1.03 * default)  # the default's copies tell as much
    assert not decide(samples).ships


def test_a_workload_that_gets_slower_keeps_the_default() -> None:
    table: dict[Params, Entry] = {
        DEFAULT_PARAMS: {"small": 1e-3, "large": 1e-3},
        CANDIDATES[0]: {"small": 0.7e-3, "large": 1.1e-3},
    }
    decision = raced(table).decision
    assert decision.gain.median > 1.1
    assert not decision.ships
    assert decision.why.endswith(f"but {decision.gains['large'].median:.3f}x on large")
    assert set(decision.noise_floors) == {"small", "large"}
    table[CANDIDATES[0]] = {"small": 0.7e-3, "large": 1e-3}
    assert raced(table).decision.ships


# ---- How it gets there --------------------------------------------------------------------------------------------


def test_the_same_seed_and_samples_give_the_same_race() -> None:
    times = (1.0, 0.99, 0.98, 0.985, 1.01)
    assert raced(table_of(*times), seed=3) == raced(table_of(*times), seed=3)
    assert raced(table_of(*times), seed=3) != raced(table_of(*times), seed=4)


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(12, 40))
def test_a_decision_depends_on_samples_alone(random: object, rounds: int) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    names = [DEFAULT, LEADER, *DUPLICATES.values(), "rival"]
    samples = {w: {n: tuple(rng.lognormal(0, 0.05, rounds)) for n in names} for w in ("a", "b")}
    other_order = {w: dict(reversed(samples[w].items())) for w in ("b", "a")}
    first, second = decide(samples), decide(other_order)
    assert (first.ships, first.p, first.gain, first.noise_floor) == (
        second.ships,
        second.p,
        second.gain,
        second.noise_floor,
    )
    scaled = {w: {n: tuple(1000 * t for t in times) for n, times in of.items()} for w, of in samples.items()}
    assert decide(scaled).ships == first.ships
    assert first.rounds == rounds


def test_without_candidates_the_default_races_itself_and_stays() -> None:
    found = raced(table_of(1.0), deadline=ENDED)
    assert found.leader.params == DEFAULT_PARAMS
    assert not found.decision.ships and "nothing else could be raced" in found.decision.why


def test_the_default_is_no_candidate() -> None:
    judge = ReplayJudge(table_of(1.0, 0.9), DEFAULT_PARAMS)
    default = plan_of(DEFAULT_PARAMS)
    found = race(judge, [default, plan_of(CANDIDATES[0])], default, deadline=ENDED)
    assert set(found.samples["w"]) == {DEFAULT, LEADER, *DUPLICATES.values()}
    assert found.leader.params == CANDIDATES[0]


def test_a_deadline_that_has_passed_leaves_a_heat_and_a_block() -> None:
    events: list[Racing] = []
    found = raced(table_of(1.0, 1.0, 1.0), noise=0.05, deadline=ENDED, progress=events.append)
    assert [(event.stage, event.rounds) for event in events] == [("heat", HEAT_ROUNDS), ("final", BLOCK_ROUNDS)]
    assert set(events[0].gains) == set(CANDIDATES[:2])
    assert found.decision.rounds == BLOCK_ROUNDS
    assert all(len(times) == BLOCK_ROUNDS for times in found.samples["w"].values())


def test_rounds_end_even_if_nothing_is_ever_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "MOST_ROUNDS", 36)
    monkeypatch.setattr(race_module, "decide", lambda *given: replace(decide(*given), settled=False, overtaken_by=None))
    assert raced(table_of(1.0, 0.5)).decision.rounds == 36


class ScriptedJudge(ReplayJudge):
    """Takes times from another table after the heat, and notes the calls."""

    def __init__(self, heat: Mapping[Params, Entry], later: Mapping[Params, Entry]) -> None:
        super().__init__(heat, DEFAULT_PARAMS, noise=0.005)
        self._later = later
        self.asked: list[tuple[list[Params], int, int, Cache]] = []

    def rounds(
        self, plans: Sequence[Plan], workload: str, count: int, *, seed: int, cache: Cache = "warm"
    ) -> list[tuple[float, ...]] | dict[int, Outcome]:
        self.asked.append(([plan.params for plan in plans], count, seed, cache))
        if count != HEAT_ROUNDS:
            self._table = self._later
        return super().rounds(plans, workload, count, seed=seed, cache=cache)


def run(judge: ScriptedJudge, candidates: int, deadline: float = FOREVER) -> Race:
    plans = [plan_of(params) for params in CANDIDATES[:candidates]]
    return race(judge, plans, plan_of(DEFAULT_PARAMS), deadline=deadline, seed=10, cache="cold")


def test_a_rival_that_overtakes_leads_by_rounds_of_its_own() -> None:
    judge = ScriptedJudge(table_of(1.0, 0.899, 0.9), table_of(1.0, 0.9, 0.8))
    found = run(judge, 2)
    first, second = CANDIDATES[:2]
    assert found.leader.params == second
    assert found.decision.ships
    assert found.decision.gain.median == pytest.approx(1 / 0.8, rel=0.01)
    finals = [asked for asked, count, _, _ in judge.asked if count == BLOCK_ROUNDS]
    assert finals[0] == [DEFAULT_PARAMS, first, DEFAULT_PARAMS, first, second]
    assert finals[-1] == [DEFAULT_PARAMS, second, DEFAULT_PARAMS, second, first]
    assert found.decision.rounds == BLOCK_ROUNDS * finals.count(finals[-1])


def test_every_block_has_a_seed_of_its_own_and_the_caches_mode() -> None:
    judge = ScriptedJudge(table_of(1.0, 1.0, 1.0), table_of(1.0, 1.0, 1.0))
    run(judge, 2)
    seeds = [seed for _, _, seed, _ in judge.asked]
    assert seeds == list(range(11, 11 + len(seeds)))
    assert {cache for _, _, _, cache in judge.asked} == {"cold"}


@pytest.mark.parametrize("failure", [LaunchFailed("SIGSEGV"), TimedOut("not done"), WrongAnswer("bits")])
def test_a_candidate_that_fails_in_the_finals_is_dropped(failure: Failure) -> None:
    judge = ScriptedJudge(table_of(1.0, 0.8, 0.9), table_of(1.0, failure, 0.9))
    found = run(judge, 2)
    assert found.failed == {plan_of(CANDIDATES[0]).uri: failure}
    assert found.leader.params == CANDIDATES[1]
    assert found.decision.ships


def test_a_candidate_that_fails_in_the_heat_is_dropped() -> None:
    found = raced(table_of(1.0, Invalid("spills"), 0.9, 0.95))
    assert list(found.failed) == [plan_of(CANDIDATES[0]).uri]
    assert found.leader.params == CANDIDATES[1]


def test_if_all_candidates_fail_the_default_stays() -> None:
    found = raced(table_of(1.0, LaunchFailed("a"), LaunchFailed("b")), deadline=ENDED)
    assert len(found.failed) == 2
    assert found.leader.params == DEFAULT_PARAMS
    assert not found.decision.ships and "nothing else could be raced" in found.decision.why


def test_a_default_that_fails_ends_the_race_with_a_remedy() -> None:
    judge = ScriptedJudge(table_of(1.0, 0.9, 0.8), table_of(TimedOut("not done within 10 s"), 0.9, 0.8))
    with pytest.raises(
        RaceError, match=r"default plan .* failed in the finals: .*10 s.*; check it by `embforge verify`"
    ):
        run(judge, 2)


def test_a_candidate_beaten_in_the_heat_does_not_run_in_the_final() -> None:
    judge = ScriptedJudge(table_of(1.0, 0.5, 0.9), table_of(1.0, 0.5, 0.9))
    found = run(judge, 2)
    assert found.decision.rivals == {}
    assert set(found.samples["w"]) == {DEFAULT, LEADER, *DUPLICATES.values()}


# ---- Outcomes -----------------------------------------------------------------------------------------------------

WHY = st.text(max_size=30)
TIMES = st.lists(st.floats(1e-9, 10), min_size=1, max_size=5).map(tuple)
PAIRS = st.builds(lambda times: Paired(times, times[::-1]), TIMES)
OUTCOMES = st.one_of(
    st.builds(Timed, st.dictionaries(st.text(max_size=9), PAIRS, min_size=1, max_size=3)),
    *(st.builds(kind, WHY) for kind in (Invalid, CompileFailed, LaunchFailed, WrongAnswer, TimedOut)),
)


@given(OUTCOMES)
def test_outcomes_survive_as_plain_data(outcome: Outcome) -> None:
    import json

    assert from_data(json.loads(json.dumps(to_data(outcome)))) == outcome


def test_scores_are_geometric_means_of_median_ratios() -> None:
    half, double = Paired((1.0, 9.0, 1.0), (2.0, 2.0, 2.0)), Paired((4.0,), (2.0,))
    assert half.ratio == 0.5
    assert Timed({"a": half, "b": double}).score == pytest.approx(1.0)
    with pytest.raises(KeyError, match="nonsense"):
        from_data({"kind": "nonsense"})


def test_a_wide_noise_floor_settles_nothing() -> None:
    rng = np.random.default_rng(1)
    noisy = {name: tuple(rng.lognormal(0, 0.5, 12)) for name in (DEFAULT, LEADER, *DUPLICATES.values())}
    decision = decide({"w": noisy})
    assert decision.noise_floor > 0.1 and decision.gain.high < 1 + 10 * decision.noise_floor
    assert not decision.settled and not decision.ships


def test_a_noise_floor_above_the_limit_decides_nothing() -> None:
    """Copies of one kernel that differ by a factor of two say that the machine was busy, however large the gain is."""
    times = {DEFAULT: 56e-3, LEADER: 1e-3, DUPLICATES[DEFAULT]: 56e-3, DUPLICATES[LEADER]: 2e-3}
    found = decide({"w": {name: (seconds,) * 24 for name, seconds in times.items()}})
    assert found.noise_floor > NOISE_LIMIT and not found.ships and not found.settled
    assert "the noise floor of 100.0% is above 25%" in found.why and "quieter machine" in found.why


def test_a_noise_floor_above_the_limit_on_one_workload_decides_nothing() -> None:
    """A record carries the noise floor of its own workload, so every one of them must be good."""
    steady = {DEFAULT: 2e-3, LEADER: 1e-3, DUPLICATES[DEFAULT]: 2e-3, DUPLICATES[LEADER]: 1e-3}
    noisy = steady | {DUPLICATES[LEADER]: 1.4e-3}
    times = {"good": steady, "bad": noisy}
    found = decide({w: {name: (s,) * 24 for name, s in of.items()} for w, of in times.items()})
    assert found.noise_floor < NOISE_LIMIT < found.noise_floors["bad"]
    assert found.disturbed == "the noise floor of 40.0% is above 25%" and not found.ships and not found.settled


# ---- A busy machine -----------------------------------------------------------------------------------------------


class BusyJudge(ReplayJudge):
    """A judge on a machine on which others use `cpus[i]` CPUs during block i, and the last number after that."""

    def __init__(self, cpus: Sequence[float], *times: float, wall: float = 2 * WINDOW, noise: float = 0.002) -> None:
        super().__init__(table_of(*times), DEFAULT_PARAMS, noise=noise)
        self._cpus, self._wall, self.blocks = cpus, wall, 0

    @property
    def others(self) -> Usage:
        cpus = self._cpus[min(self.blocks, len(self._cpus)) - 1]
        return Usage(self._wall, cpus * self._wall)

    def rounds(
        self, plans: Sequence[Plan], workload: str, count: int, *, seed: int, cache: Cache = "warm"
    ) -> list[tuple[float, ...]] | dict[int, Outcome]:
        self.blocks += 1
        rows = super().rounds(plans, workload, count, seed=seed, cache=cache)
        if self.others.cpus <= QUIET or isinstance(rows, dict):
            return rows
        return [tuple(56 * seconds if place == 0 else seconds for place, seconds in enumerate(row)) for row in rows]


def busy_race(judge: ReplayJudge, deadline: float, events: list[Racing] | None = None) -> Race:
    tell = (lambda event: None) if events is None else events.append
    return race(judge, [plan_of(CANDIDATES[0])], plan_of(DEFAULT_PARAMS), deadline=deadline, progress=tell)


def test_disturbed_blocks_are_taken_again_and_do_not_count() -> None:
    events: list[Racing] = []
    judge = BusyJudge([1.3, 0.4, 0.0], 1.0, 0.9)
    found = busy_race(judge, FOREVER, events)
    assert found.decision.ships and not found.decision.disturbed and found.retaken == 2 and found.others == 0.0
    assert found.decision.gain.median == pytest.approx(1 / 0.9, rel=0.01)  # not 56 times that
    assert found.decision.rounds == BLOCK_ROUNDS * (judge.blocks - 2)
    assert [(e.rounds, e.retaken, e.others, bool(e.gains)) for e in events[:3]] == [
        (0, 1, 1.3, False),
        (0, 2, 0.4, False),
        (BLOCK_ROUNDS, 2, 0.0, True),
    ]


def test_a_heat_that_is_disturbed_is_taken_again() -> None:
    judge = BusyJudge([1.3, 0.0], 1.0, 0.9, 0.8)
    found = race(judge, [plan_of(p) for p in CANDIDATES[:2]], plan_of(DEFAULT_PARAMS), deadline=FOREVER)
    assert found.retaken == 1 and found.leader.params == CANDIDATES[1] and found.decision.ships


def test_without_a_quiet_block_before_the_deadline_nothing_is_decided() -> None:
    found = busy_race(BusyJudge([1.3], 1.0, 0.9), ENDED)
    assert found.others == 1.3 and found.decision.rounds == BLOCK_ROUNDS
    assert found.decision.disturbed == "other processes used 1.30 CPUs during the finals, where 0.1 are allowed"
    assert not found.decision.ships and not found.decision.settled
    assert found.decision.why == (
        f"the default stays: {found.decision.disturbed}, so the finals say nothing; tune again on a quieter machine"
    )


def test_the_last_block_is_left_out_if_only_others_before_were_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = BusyJudge([0.0, 1.3], 1.0, 0.98, noise=0.03)
    monkeypatch.setattr(race_module, "time", Clock(lambda: float(judge.blocks)))
    found = busy_race(judge, deadline=2.0)
    assert judge.blocks == 2 and found.decision.rounds == BLOCK_ROUNDS and found.others == 0.0
    assert not found.decision.disturbed


def test_short_blocks_are_added_until_the_systems_clock_ticks_suffice() -> None:
    judge = BusyJudge([0.0], 1.0, 0.9, wall=WINDOW / 3)
    found = busy_race(judge, ENDED)
    assert judge.blocks == 3 and found.decision.rounds == 3 * BLOCK_ROUNDS


def test_every_block_counts_if_the_system_does_not_report_other_processes() -> None:
    found = busy_race(ReplayJudge(table_of(1.0, 0.9), DEFAULT_PARAMS), ENDED)
    assert found.decision.rounds == BLOCK_ROUNDS and found.retaken == 0 and not found.decision.disturbed


class Clock:
    """Stands in for the module `time`; the clock is a function."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.monotonic = now


def test_cpus_of_others_are_the_machines_time_without_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clocks, "now", lambda: Clocks(wall=12.0, machine=105.0, own=8.0))
    assert others_since(Clocks(wall=10.0, machine=101.0, own=7.0)) == pytest.approx(1.5)
    assert others_since(Clocks(wall=10.0, machine=104.5, own=7.0)) == 0.0  # ticks are coarser than our own clock
    assert others_since(None) is None
