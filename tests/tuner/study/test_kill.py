"""Searches in separate processes: killed at any moment they lose and repeat nothing, and several share their work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from optuna.trial import TrialState
from support.tuner_replays import (
    LARGE,
    SMALL,
    Child,
    assert_complete,
    assert_shared,
    assert_survives,
    finished_in,
    measured,
    plan_of,
    trials_in,
)

URLS = ("studies.sqlite3", "journal://studies.log")
LOG = Path("log")

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs Linux")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def absolute(url: str) -> str:
    """The URL with an absolute path, because children run in a different directory."""
    scheme, separator, file = url.rpartition("://")
    return f"{scheme}{separator}{Path(file).absolute()}"


def test_a_killed_search_continues_where_it_was() -> None:
    assert_survives(absolute(URLS[0]), SMALL, LOG.absolute())


def test_a_killed_search_continues_in_a_journal() -> None:
    """Killed while it measures: one that is killed while it writes leaves a lock that others break after 30 seconds."""
    assert_survives(absolute(URLS[1]), SMALL, LOG.absolute(), ["in the middle and measuring"])


def test_unfinished_trials_of_the_dead_are_taken_over() -> None:
    url = absolute(URLS[0])
    child = Child(url, SMALL, LOG.absolute(), delay=30, ahead=5)
    child.event("Screening")
    held = trials_in(url, SMALL).study.trials
    assert [trial.state for trial in held] == [TrialState.RUNNING] * 5
    # While it lives, another one works on all else and leaves these alone.
    assert Child(url, SMALL, LOG.absolute(), delay=0).end() == 0
    assert len(finished_in(url, SMALL)) == len(SMALL.points) - 5
    child.kill()
    assert Child(url, SMALL, LOG.absolute(), delay=0).end() == 0
    assert assert_complete(url, SMALL).keys() == set(range(len(SMALL.points)))  # the same trials and no others
    after = trials_in(url, SMALL).study.trials[:5]
    assert [trial.params for trial in after] == [trial.params for trial in held]


@pytest.mark.parametrize("url", URLS)
def test_ctrl_c_gives_trials_back(url: str) -> None:
    url = absolute(url)
    child = Child(url, SMALL, LOG.absolute(), delay=30, ahead=4)
    child.event("Screening")
    os.kill(child.pid, signal.SIGINT)
    assert child.end() != 0
    states = Counter(trial.state for trial in trials_in(url, SMALL).study.trials)
    assert states == {TrialState.WAITING: 4}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("url", URLS)
def test_processes_share_a_study(url: str, processes: int) -> None:
    assert_shared(absolute(url), SMALL, LOG.absolute(), processes)


@pytest.mark.soak
@pytest.mark.parametrize("url", URLS)
def test_kills_at_random_moments_while_others_work(url: str) -> None:
    """Three processes, one of which is killed at any moment, until every point was tried."""
    url, log = absolute(url), LOG.absolute()
    random.seed(1)
    children: list[Child] = []
    known: set[str] = set()
    deadline = time.monotonic() + 300
    while len(known) < len(LARGE.points) and time.monotonic() < deadline:
        while len(children) < 3:
            children.append(Child(url, LARGE, log, delay=0.05, ahead=2))
        time.sleep(random.uniform(0.05, 1.0))
        children.pop(random.randrange(3)).kill()
        now = {plan_of(params).uri for params, _ in finished_in(url, LARGE).values()}
        assert known <= now
        known = now
    for child in children:
        child.end()
    assert_complete(url, LARGE)
    # A kill between a measurement's end and its writing costs that measurement, and nothing else.
    assert all(uri in known for _, uri in measured(log))
