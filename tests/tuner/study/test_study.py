"""One search: what it tries in which order, what it gives back, whose trials it leaves alone, where its time went."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState, create_trial
from support import replay_judge
from support.replay_judge import NoBuilder, ReplayJudge
from support.strategies import examples
from support.tuner_replays import MEDIUM, SMALL, judge_of, plan_of, run, table_of

from embforge.codegen.build import Built
from embforge.codegen.params import CpuParams, Params
from embforge.codegen.plan import Plan
from embforge.tuner.judge import ledger
from embforge.tuner.judge.ledger import PHASES, WORK, Ledger, work_share
from embforge.tuner.judge.outcome import CompileFailed, Outcome, Timed, to_data
from embforge.tuner.search.space import Space, encode
from embforge.tuner.study import claims, study
from embforge.tuner.study.claims import LEASE_SECONDS, Claim
from embforge.tuner.study.sampler import Sampler, distributions, sampler_for
from embforge.tuner.study.storage import StorageError, open_storage
from embforge.tuner.study.study import BuildResult, Screened, Screening, SearchEvent, Started
from embforge.tuner.study.trials import Held, Trials

POINTS = len(SMALL.points)


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> BaseStorage:
    """One for all tests: it takes a while to make its tables."""
    return open_storage(str(tmp_path_factory.mktemp("studies") / "studies.sqlite3"))


@pytest.fixture(params=["memory", "sqlite", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, sqlite: BaseStorage) -> Iterator[BaseStorage]:
    """Without studies. Each kind has its own idea of who may change a trial's state."""
    kinds = {
        "memory": InMemoryStorage,
        "sqlite": lambda: sqlite,
        "journal": lambda: open_storage(f"journal://{tmp_path}/studies.log"),
    }
    storage = kinds[request.param]()
    yield storage
    for kept in storage.get_all_studies():
        storage.delete_study(kept._study_id)


def memory(space: Space = SMALL) -> Trials:
    return Trials(InMemoryStorage(), "study", space)


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sequence(trials: Trials) -> list[tuple[Params, Outcome]]:
    return [trials.outcomes()[number] for number in sorted(trials.outcomes())]


class ShuffledBuilder(NoBuilder):
    """Compilations end in any order, some of them late."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def done(self, timeout: float | None = None) -> tuple[Plan, Built] | None:
        self._random.shuffle(self._plans)
        return None if self._random.random() < 0.4 else super().done(timeout)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_measurements_give_the_same_trials_however_fast_compilers_are(seed: int) -> None:
    found = []
    for builder in (NoBuilder(), NoBuilder(), ShuffledBuilder(1)):
        trials, last = memory(MEDIUM), []
        run(trials, MEDIUM, ahead=4, builder=builder, judge=judge_of(MEDIUM, seed=seed), progress=last.append)
        assert isinstance(last[-1], Screened)
        found.append((sequence(trials), last[-1].best))
    assert found == found[:1] * len(found)


def test_other_measurements_give_other_trials() -> None:
    """Shows that the test above can fail: the next trial depends on what was measured."""
    orders = []
    for seed in (0, 1):
        trials = memory(MEDIUM)
        run(trials, MEDIUM, judge=ReplayJudge(table_of(MEDIUM), MEDIUM.default, seed=seed, noise=0.5))
        orders.append([params for params, _ in sequence(trials)])
    assert orders[0] != orders[1] and Counter(orders[0]) == Counter(orders[1])


def test_the_best_trial_and_the_counts_include_earlier_searches(storage: BaseStorage) -> None:
    trials, events = Trials(storage, "study", SMALL), list[SearchEvent]()
    assert run(trials, SMALL, most=5) == 5
    assert run(Trials(storage, "study", SMALL), SMALL, progress=events.append) == POINTS - 5
    outcomes = trials.outcomes()
    first, last = events[0], events[-1]
    assert isinstance(first, Started) and isinstance(last, Screened) and last.best is not None
    assert (first.points, first.known) == (POINTS, 5)
    assert last.counts == Counter(outcome.kind for _, outcome in outcomes.values())
    assert last.counts.keys() == {"timed", "wrong-answer"}
    scores = {n: o.score for n, (_, o) in outcomes.items() if isinstance(o, Timed)}
    assert last.best.score == min(scores.values()) == scores[last.best.number]
    assert last.best.params == outcomes[last.best.number][0]


def test_a_space_without_a_free_point_is_not_an_error(storage: BaseStorage) -> None:
    assert run(Trials(storage, "study", SMALL), SMALL) == POINTS
    again = Trials(storage, "study", SMALL)
    assert run(again, SMALL) == 0
    assert len(again.outcomes()) == POINTS


@pytest.mark.parametrize("most", [0, 1, 7])
def test_a_search_runs_at_most_the_wanted_number_of_trials(most: int) -> None:
    trials = memory()
    assert run(trials, SMALL, most=most) == most == len(trials.study.trials)


def test_the_deadline_ends_a_search_and_gives_trials_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = memory()
    monkeypatch.setattr(study, "time", clock := Clock())
    assert run(trials, SMALL, deadline=clock.now) == 0
    assert trials.study.trials == []

    class Never(NoBuilder):
        def done(self, timeout: float | None = None) -> tuple[Plan, Built] | None:
            clock.sleep(timeout or 0.0)
            return None

    assert run(trials, SMALL, builder=Never(), deadline=clock.now + 10) == 0
    assert {trial.state for trial in trials.study.trials} == {TrialState.WAITING}


class Refusing(NoBuilder):
    """No plan compiles."""

    def done(self, timeout: float | None = None) -> tuple[Plan, BuildResult] | None:  # type: ignore[override]
        found = super().done(timeout)
        return None if found is None else (found[0], CompileFailed("g++ is on strike"))


def test_what_does_not_compile_costs_one_trial_and_no_measurement() -> None:
    trials = memory()
    assert run(trials, SMALL, builder=Refusing(), judge=Interrupting(at=1)) == POINTS
    assert {outcome for _, outcome in trials.outcomes().values()} == {CompileFailed("g++ is on strike")}
    assert all(trial.user_attrs["build"] == {} for trial in trials.study.trials)


def test_a_cache_that_is_emptied_meanwhile_does_not_end_a_search(tmp_path: Path) -> None:
    class Gone(NoBuilder):
        def done(self, timeout: float | None = None) -> tuple[Plan, Built] | None:
            found = super().done(timeout)
            return None if found is None else (found[0], replace(found[1], binary=tmp_path / "gone.so"))

    assert run(memory(), SMALL, builder=Gone()) == POINTS


class Interrupting(ReplayJudge):
    """Raises at a screening, as Ctrl-C does."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__(table_of(SMALL), SMALL.default)
        self._left, self._error = at, error

    def screen(self, plan: Plan) -> Outcome:
        self._left -= 1
        if not self._left:
            raise self._error
        return super().screen(plan)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_whatever_ends_a_search_gives_its_trials_back(storage: BaseStorage, error: type[BaseException]) -> None:
    trials = Trials(storage, "study", SMALL)
    with pytest.raises(error):
        run(trials, SMALL, ahead=4, judge=Interrupting(at=3, error=error))
    states = Counter(trial.state for trial in trials.study.trials)
    assert states[TrialState.WAITING] == 4 and states[TrialState.RUNNING] == 0 and states.total() == 6
    before = trials.outcomes()
    # A second search takes the trials that were given back at once, although the first process still lives.
    assert run(Trials(storage, "study", SMALL), SMALL) == POINTS - 2
    after = Trials(storage, "study", SMALL).outcomes()
    assert before.items() <= after.items() and len(after) == POINTS == len(trials.study.trials)


def test_a_storage_that_breaks_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    trials = Trials(open_storage(str(tmp_path / "studies.sqlite3")), "study", SMALL)

    def remove(event: SearchEvent) -> None:
        if isinstance(event, Screening) and event.number == 2:
            with trials.study._storage._backend.engine.begin() as connection:  # type: ignore[attr-defined]
                connection.exec_driver_sql("DROP TABLE trial_user_attributes")

    with pytest.raises(StorageError, match=r"study study: cannot be used: .*no such table.*name another by --storage"):
        run(trials, SMALL, progress=remove)


def put(storage: BaseStorage, trials: Trials, params: dict[str, Any], **about: Any) -> None:
    """A trial as another program may make one."""
    chosen = about.pop("distributions", None) or distributions(SMALL)
    storage.create_new_trial(trials._study_id, create_trial(params=params, distributions=dict(chosen), **about))


POINT = encode(CpuParams())
OTHERS = {
    **distributions(SMALL),
    "tile_vectors": type(distributions(SMALL)["tile_vectors"])([2, 8]),
}
FOREIGN: dict[str, Callable[[BaseStorage, Trials], object]] = {
    "nothing": lambda s, t: storage_trial(s, t),
    "complete": lambda s, t: put(s, t, dict(POINT), value=1.0),
    "failed": lambda s, t: put(s, t, dict(POINT), state=TrialState.FAIL),
    "running": lambda s, t: put(s, t, dict(POINT), state=TrialState.RUNNING),
    "waiting": lambda s, t: put(s, t, dict(POINT), state=TrialState.WAITING),
    "enqueued": lambda s, t: t.study.enqueue_trial(dict(POINT)),
    "another outcome": lambda s, t: put(s, t, dict(POINT), value=1.0, user_attrs={"outcome": "good"}),
    "newer outcome": lambda s, t: put(
        s, t, dict(POINT), value=1.0, user_attrs={"outcome": {"kind": "new"}, "claim": Claim.mine().to_data()}
    ),
    "other choices": lambda s, t: put(s, t, dict(POINT) | {"tile_vectors": 2}, value=1.0, distributions=OTHERS),
}


def storage_trial(storage: BaseStorage, trials: Trials) -> int:
    return storage.create_new_trial(trials._study_id)


@pytest.mark.parametrize("kind", FOREIGN)
def test_trials_of_other_programs_are_left_alone(kind: str) -> None:
    storage = InMemoryStorage()
    trials = Trials(storage, "study", SMALL)
    FOREIGN[kind](storage, trials)
    before = trials.study.trials
    assert run(trials, SMALL) == POINTS
    assert Counter(params for params, _ in trials.outcomes().values()) == Counter(SMALL.points)
    assert trials.study.trials[:1] == before and len(trials.study.trials) == POINTS + 1


def test_facts_are_kept_with_the_study(storage: BaseStorage) -> None:
    Trials(storage, "study", SMALL, about={"a": 1, "b": [2]})
    again = Trials(storage, "study", SMALL, about={"a": 3})
    assert again.study.user_attrs == {"a": 3, "b": [2]}


def taken(trials: Trials, sampler: Sampler | None = None) -> Held:
    held = trials.take(sampler or sampler_for(SMALL))
    assert held is not None
    return held


def rewrite_claim(trials: Trials, held: Held, **changes: Any) -> None:
    data = held.claim.to_data() | changes
    trials._storage.set_trial_user_attr(held.id, "claim", data)


def ended_pid() -> tuple[int, str | None]:
    """A process that was, and when it began."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = claims._start_of(process.pid)
    process.communicate()
    return process.pid, started


def test_a_dead_process_has_lost_its_trial(storage: BaseStorage) -> None:
    first, second = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    held = taken(first)
    pid, started = ended_pid()
    rewrite_claim(first, held, pid=pid, started=started)
    over = taken(second)
    assert (over.number, over.params, over.taken_over) == (held.number, held.params, True)


def test_what_was_measured_before_its_process_died_is_not_measured_again(storage: BaseStorage) -> None:
    first, second = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    held, outcome = taken(first), judge_of(SMALL).screen(plan_of(SMALL.points[0]))
    storage.set_trial_user_attr(held.id, "outcome", to_data(outcome))  # killed before the state was written
    pid, started = ended_pid()
    rewrite_claim(first, held, pid=pid, started=started)
    assert taken(second).number != held.number
    assert second.outcomes()[held.number] == (held.params, outcome)


def test_a_living_process_keeps_its_trial(storage: BaseStorage) -> None:
    first, second = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    held = taken(first)
    assert taken(second).number != held.number
    assert first.holds(held)


def test_a_claim_ends_with_its_process_or_its_lease() -> None:
    mine = Claim.mine()
    assert not mine.has_ended
    assert replace(mine, started="1").has_ended  # the pid was used again
    assert not replace(mine, pid=1, started=claims._start_of(1)).has_ended  # a living process of another user
    pid, started = ended_pid()
    assert replace(mine, pid=pid, started=started).has_ended
    assert not replace(
        mine, pid=pid, started=started, host="another"
    ).has_ended  # on another machine nothing is known of it
    assert replace(mine, host="another", until=time.time() - 1).has_ended
    assert replace(mine, until=time.time() - 1).has_ended
    assert Claim.from_data(dict(mine.to_data())) == mine
    assert not any(Claim.from_data(data) for data in (None, 1, "claim", {}, {"id": 1}, mine.to_data() | {"new": 1}))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_zombie_has_lost_its_claims() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim = replace(Claim.mine(), pid=process.pid, started=claims._start_of(process.pid))
    assert not claim.has_ended
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert claim.has_ended  # its parent has not waited for it, so its pid still exists
    process.communicate()


def test_a_process_that_the_system_hides_counts_as_living(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid hides processes of others. That a signal is not permitted shows that one exists."""

    def refused(pid: int, number: int) -> None:
        assert number == 0
        raise PermissionError

    claim = Claim.mine()
    monkeypatch.setattr(claims, "_start_of", lambda pid: None)
    monkeypatch.setattr(os, "kill", refused)
    assert not claim.has_ended


def test_claims_of_other_machines_last_unless_renewed(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    held = taken(there)
    rewrite_claim(there, held, host="another")
    begun, now = time.time(), [0.0]
    monkeypatch.setattr(claims.time, "time", lambda: begun + now[0])
    assert there.renew(held) is held  # young: nothing is written
    now[0] = LEASE_SECONDS - 1
    assert taken(here).number != held.number
    renewed = there.renew(held)
    rewrite_claim(there, renewed, host="another")
    now[0] = 2 * LEASE_SECONDS - 2
    assert here.study.trials[held.number].state == TrialState.RUNNING and there.holds(renewed)
    assert {taken(here).number for _ in range(2)} & {held.number} == set()
    now[0] = 2 * LEASE_SECONDS
    assert taken(here).number == held.number
    assert not there.holds(renewed) and not there.finish(renewed, judge_of(SMALL).screen(plan_of(held.params)))


def test_a_process_whose_clock_is_ahead_may_finish_a_trial_first(storage: BaseStorage) -> None:
    """Another process takes over a trial that this one holds; this one notices at the end and continues."""
    ours, theirs = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    held = taken(ours)
    rewrite_claim(ours, held, until=0.0)
    over = taken(theirs)
    outcome = judge_of(SMALL).screen(plan_of(held.params))
    assert over.number == held.number and theirs.finish(over, outcome)
    old = replace(held, claim=replace(held.claim, until=time.time() + 1))
    assert ours.renew(old) == old
    ours.give_back(held)
    assert not ours.finish(held, CompileFailed("too late"))
    assert theirs.outcomes() == {held.number: (held.params, outcome)}


def test_of_two_processes_that_take_a_trial_over_the_last_holds_it(storage: BaseStorage) -> None:
    first, second = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    left = taken(Trials(storage, "study", SMALL))
    rewrite_claim(first, left, until=0.0)
    one = taken(first)
    rewrite_claim(first, one, until=0.0)  # as the second saw it before the first had written its claim
    two = taken(second)
    assert one.number == two.number == left.number
    assert not first.holds(one) and second.holds(two)
    outcome = judge_of(SMALL).screen(plan_of(left.params))
    assert not first.finish(one, CompileFailed("not mine"))
    first.give_back(one)
    assert second.finish(two, outcome)
    assert first.outcomes() == {left.number: (left.params, outcome)}


def test_the_later_of_two_equal_trials_gives_way(storage: BaseStorage) -> None:
    """Both processes decide by the same history, before either has written."""
    first, second = Trials(storage, "study", SMALL), Trials(storage, "study", SMALL)
    first._read()
    second._read()

    class Stubborn:
        """First proposes a point that is taken, as a process that has not read it yet; then as the real sampler."""

        def __init__(self) -> None:
            self.asked = 0

        def propose(self, tried: Any) -> Params | None:
            self.asked += 1
            return SMALL.default if self.asked == 1 else sampler_for(SMALL).propose(tried)

    one, two = taken(first, Stubborn()), taken(second, Stubborn())
    assert one.params == SMALL.default != two.params
    states = [(trial.state, trial.user_attrs.get("outcome")) for trial in first.study.trials]
    assert states[one.number][0] == states[two.number][0] == TrialState.RUNNING
    assert states[1:2] == [(TrialState.FAIL, {"kind": "duplicate"})]
    assert first.outcomes() == {}
    # A process died before its trial gave way: the process that takes the trial over gives way instead.
    duplicate = first._storage.create_new_trial(
        first._study_id,
        create_trial(
            state=TrialState.RUNNING,
            params=dict(encode(SMALL.default)),
            distributions=dict(distributions(SMALL)),
            user_attrs={"claim": asdict(replace(Claim.mine(), until=0.0)), "params": {}, "uri": ""},
        ),
    )
    third = Trials(storage, "study", SMALL)
    assert taken(third).params not in (one.params, two.params)
    assert third._storage.get_trial(duplicate).state == TrialState.FAIL


def test_a_trial_that_is_lost_and_taken_again_does_not_hang() -> None:
    """Its plan is built twice while something slow is waited for; one of the results is enough for both."""
    trials = memory()
    slow = 2

    class Slow(NoBuilder):
        """One plan is built only when there is nothing else to build."""

        def done(self, timeout: float | None = None) -> tuple[Plan, Built] | None:
            late = trials.study.trials[slow].user_attrs["params"]
            self._plans.sort(key=lambda plan: asdict(plan.params) == late)
            return super().done(timeout)

    def lose(event: SearchEvent) -> None:
        if isinstance(event, Screening) and event.number == 0:
            trials._storage.set_trial_state_values(trials.study.trials[3]._trial_id, TrialState.WAITING)

    end = time.monotonic() + 600
    assert run(trials, SMALL, ahead=4, builder=Slow(), progress=lose, deadline=end) == POINTS
    assert len(trials.study.trials) == POINTS and time.monotonic() < end


SECONDS = st.floats(0, 1e4)


@examples(100)
@given(st.lists(st.tuples(st.sampled_from([*PHASES[:-1], None]), SECONDS)), SECONDS)
def test_phases_sum_to_what_has_elapsed(spans: list[tuple[str | None, float]], rest: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "time", clock := Clock())
        book = Ledger()
        for name, seconds in spans:
            if name is None:
                clock.sleep(seconds)
            else:
                with book.phase(name):
                    clock.sleep(seconds)
        clock.sleep(rest)
        found = book.seconds
        assert found.keys() == set(PHASES)
        assert sum(found.values()) == pytest.approx(book.elapsed)
        for phase in PHASES[:-1]:
            assert found[phase] == pytest.approx(sum(s for name, s in spans if name == phase), abs=1e-6)
        work = sum(s for name, s in spans if name in WORK)
        assert work_share(found) == pytest.approx(work / max(book.elapsed, 1e-9), abs=1e-6)


def test_a_phase_counts_also_if_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "time", clock := Clock())
    book = Ledger()
    with pytest.raises(KeyError), book.phase("racing"):
        clock.sleep(2)
        raise KeyError
    assert book.seconds["racing"] == 2


def test_a_search_keeps_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the judge says it spent is not counted twice, and a trial's own seconds are the ledger's."""
    clock = Clock()
    for module in (ledger, study, replay_judge):
        monkeypatch.setattr(module, "time", clock)

    class Slow(NoBuilder):
        def done(self, timeout: float | None = None) -> tuple[Plan, Built] | None:
            clock.sleep(2)
            return super().done(timeout)

    class Checking(ReplayJudge):
        def screen(self, plan: Plan) -> Outcome:
            clock.sleep(3)
            return super().screen(plan)

    trials, book = memory(), Ledger()
    judge = Checking(table_of(SMALL), SMALL.default, delay=5)
    run(trials, SMALL, builder=Slow(), judge=judge, ledger=book, progress=lambda event: clock.sleep(0.5))
    found = book.seconds
    assert (found["compiling"], found["verifying"], found["timing"]) == (2 * POINTS, 3 * POINTS, 5 * POINTS)
    assert found["bookkeeping"] == 0.5 * (1 + 3 * POINTS) and sum(found.values()) == book.elapsed
    for trial in trials.study.trials:
        assert trial.user_attrs["seconds"] == {"compiling": 2, "verifying": 3, "timing": 5}


def test_events_come_in_order() -> None:
    events: list[SearchEvent] = []
    run(memory(), SMALL, ahead=3, progress=events.append)
    assert isinstance(events[0], Started)
    names = [(type(event).__name__, event.number) for event in events if not isinstance(event, Started)]
    for number in range(POINTS):
        places = [names.index((name, number)) for name in ("Building", "Screening", "Screened")]
        assert all(a < b for a, b in pairwise(places))
    assert [n for name, n in names if name == "Screened"] == list(range(POINTS))
