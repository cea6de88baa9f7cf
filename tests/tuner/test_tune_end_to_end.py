"""Real `embforge tune` commands: killed in the middle they lose, repeat and leave nothing; two at once share the work;
candidates that crash, hang or compute wrongly cost a trial each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner
from optuna.trial import FrozenTrial, TrialState
from support.tuner_doctor import CRASH, HANG, WRONG, Doctor

from embforge.cli.main import main
from embforge.codegen.spec import CollectionSpec
from embforge.tuner.judge.outcome import KINDS
from embforge.tuner.study.task import task_of

SPEC = """
name = "small"
[[table]]
name = "t"
num_embeddings = 3000
embedding_dim = 8
[[feature]]
name = "f"
table = "t"
"""
WORKLOAD = "uniform,len=fixed:4,batch=32"
STORAGE = "studies.sqlite3"
WAIT_SECONDS = 600.0
"""Seconds after which a wait fails. A test that passes waits much less."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec in a folder of its own, with a user's store that is empty."""
    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    Path("spec.toml").write_text(SPEC)


def command(*words: str) -> subprocess.Popen[str]:
    """`embforge tune` in a process of its own."""
    program = [str(Path(sys.executable).with_name("embforge")), "tune", "spec.toml"]
    options = ["--workload", WORKLOAD, "--storage", STORAGE, *words]
    return subprocess.Popen([*program, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What the command printed to stdout and to stderr."""
    out, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, said
    return out, said


def document_of(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The document of a command with --json, and what it printed to stderr."""
    out, said = result_of(process)
    data: dict[str, Any] = json.loads(out)
    return data, said


def trials_of(study: str) -> dict[int, FrozenTrial]:
    """What any reader of the storage finds, by number; duplicates, which never ran, are left out."""
    found = optuna.load_study(study_name=study, storage=f"sqlite:///{STORAGE}").trials
    return {t.number: t for t in found if t.user_attrs.get("outcome", {}).get("kind") in {*KINDS, None}}


def finished(trials: dict[int, FrozenTrial]) -> dict[int, tuple[Any, ...]]:
    """All that is known of the trials that have ended."""
    ended = {n: t for n, t in trials.items() if t.state.is_finished()}
    return {n: (t.state, t.params, t.values, t.user_attrs, t.datetime_complete) for n, t in ended.items()}


def points(trials: dict[int, FrozenTrial]) -> set[str]:
    return {json.dumps(trial.params, sort_keys=True) for trial in trials.values()}


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def processes_with(text: str) -> dict[int, str]:
    """Living processes whose environment has the text: a command, its helpers, their compilers."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and text.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return found


@pytest.mark.usefixtures("quiet_machine")
def test_kill_9_loses_repeats_and_leaves_nothing(fresh_cache: Path) -> None:
    """With a fresh cache, so that compilers are at work when it happens."""
    process = command("--budget", "10m")
    assert process.stderr is not None
    study = process.stderr.readline().partition("study ")[2].partition(":")[0]
    wait_until(lambda: len(finished(trials_of(study))) >= 2, "no two trials")
    mark = f"EMBFORGE_CACHE_DIR={fresh_cache}"
    assert len(processes_with(mark)) >= 3  # the command, who judges, who compiles
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not processes_with(mark), "processes survive the command's death")

    killed = trials_of(study)
    before, left = finished(killed), {n: t.params for n, t in killed.items() if not t.state.is_finished()}
    assert len(before) >= 2
    assert len(left) >= 2
    words = ["spec.toml", "--workload", WORKLOAD, "--storage", STORAGE, "--trials", "2", "--json"]
    again = json.loads(CliRunner().invoke(main, ["tune", *words], catch_exceptions=False).stdout)
    now = trials_of(study)
    after = finished(now)
    assert again["study"] == study
    assert again["finished"] == 2
    assert {n: after[n] for n in before} == before
    # Two of the unfinished were taken over; a third may have been measured, and only been waiting for its last word.
    assert 2 <= len(after) - len(before) <= 3
    assert after.keys() - before.keys() <= left.keys()
    assert now.keys() == killed.keys()
    assert {n: now[n].params for n in left} == left
    assert len(points(now)) == len(now)
    assert sum(again["outcomes"].values()) == len(after)


@pytest.mark.soak
def test_two_commands_share_a_study() -> None:
    both = [command("--trials", "3", "--json") for _ in range(2)]
    results = [document_of(process)[0] for process in both]
    assert results[0]["study"] == results[1]["study"]
    assert [result["finished"] for result in results] == [3, 3]
    trials = trials_of(results[0]["study"])
    assert [trial.state for trial in trials.values()] == [TrialState.COMPLETE] * 6
    assert len(points(trials)) == 6
    owners = [trial.user_attrs["claim"]["pid"] for trial in trials.values()]
    assert sorted(map(owners.count, {process.pid for process in both})) == [3, 3]


@pytest.mark.soak
def test_candidates_that_crash_hang_or_are_wrong_cost_a_trial_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the whole space, so that all three are met."""
    task = task_of(CollectionSpec.from_toml("spec.toml"), workloads=[WORKLOAD])
    usual = os.environ["EMBFORGE_CACHE_DIR"]
    monkeypatch.setenv("EMBFORGE_CACHE_DIR", str(tmp_path / "cache"))
    doctor = Doctor(usual, task.plan(task.default))
    victims = [params for params in task.space.points if params != task.default][:3]
    faults = {
        "launch-failed": (CRASH, "", "SIGSEGV while verifying"),
        "timed-out": (HANG, "", "not done within"),
        "wrong-answer": ("", WRONG, ""),
    }
    for params, (before, after, _) in zip(victims, faults.values(), strict=True):
        doctor.spoil(task.plan(params), before, after)
    every = len(task.space.points)
    found, said = document_of(command("--trials", str(every), "--store", "none", "--json"))
    assert found["finished"] == every
    assert {k: n for k, n in found["outcomes"].items() if n} == {"timed": every - 3} | dict.fromkeys(faults, 1)
    failures = {failure["outcome"]: failure for failure in found["failures"]}
    assert len(found["failures"]) == 3
    shown, _ = result_of(command("--trials", "0"))
    for params, (kind, (_, _, why)) in zip(victims, faults.items(), strict=True):
        failure = failures[kind]
        assert failure["params"] == vars(params)
        assert why in failure["why"]
        first = failure["why"].splitlines()[0]
        assert f"trial {failure['trial']}: {kind} (" in said
        assert first in said
        assert any(
            line.startswith(f"  trial {failure['trial']}, {kind} (") and first in line for line in shown.splitlines()
        )
    assert f"{every - 3} timed, 1 launch-failed, 1 wrong-answer, 1 timed-out" in shown
    assert found["decision"]["rounds"] > 0
    assert found["decision"]["why"]
