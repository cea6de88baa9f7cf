"""The data of a report, read from a study's storage alone, so that a report can be made of any study at any time."""

from __future__ import annotations

import shlex
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from embforge.codegen.params import params_type
from embforge.codegen.tuned.record import Gain, Hardware
from embforge.tuner.judge.outcome import KINDS
from embforge.tuner.search.space import Removed
from embforge.tuner.study.decision import DEFAULT, LEADER, Decision, Samples, decide

if TYPE_CHECKING:
    from optuna import Study

IMPORTANCE_TRIALS = 30
"""With fewer timed trials than this, importances are not shown: the fastest tenth would be one or two trials."""


@dataclass(frozen=True)
class Trial:
    """One candidate and its outcome."""

    number: int
    params: Mapping[str, Any]
    kind: str
    score: float | None
    """The time divided by the anchor's; None if it was not timed."""
    why: str
    """The reason of a failure; empty if there was none."""
    seconds: Mapping[str, float]
    """Seconds by phase: compiling (only what the study waited for), verifying, timing."""
    build: Mapping[str, Any]
    """`binary_bytes`, and `resources`: the compiler's figures for each kernel symbol."""


@dataclass(frozen=True)
class Comparison:
    """The default and the best candidate on one workload: medians of the finals' paired rounds."""

    workload: str
    default_seconds: float
    best_seconds: float
    gain: Gain


@dataclass(frozen=True)
class Finals:
    """What the finals decided, and the times that decided it."""

    decision: Decision
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    title: str
    study: str
    created: str
    target: str
    hardware: Hardware
    clocks: Mapping[str, int | None]
    """MHz by name, at the end of the finals."""
    workloads: tuple[str, ...]
    cache: str
    versions: Mapping[str, str]
    spec_toml: str
    command: str
    anchor: str
    """The name of the plan whose time all times are divided by: "the default" or "the baseline"."""
    fields: Mapping[str, tuple[Any, ...]]
    size: int
    points: int
    removed: tuple[Removed, ...]
    docs: Mapping[str, str]
    """A description of each field."""
    default: Mapping[str, Any]
    best: Mapping[str, Any] | None
    """The params that the study decided for; None before the finals."""
    leader: Mapping[str, Any] | None
    """The fastest candidate of the finals, whether the study decided for it or not; None before the finals."""
    trials: tuple[Trial, ...]
    finals: Finals | None
    importances: Mapping[str, float]
    """Shares that sum to 1; empty if there are too few trials."""
    ledger: Mapping[str, float]
    """Wall-clock seconds by what they were spent on; empty if unknown."""
    notes: tuple[str, ...]


def report_of(study: Study) -> Report:
    """The report on a study, from all that its storage holds."""
    about = study.user_attrs
    finals, space = about.get("finals"), about["space"]
    default, anchor = about["default"], about["anchor"]
    decided, best, leader = None, None, None
    if finals is not None:
        decided = finals_of(_samples(finals["samples"]), finals.get("others", 0.0))
        if not decided.decision.disturbed:  # if disturbed, it decides nothing, whatever an earlier version stored
            # The race knew more than the samples say.
            stored = replace(decided.decision, ships=finals["ships"], why=finals["why"])
            decided = replace(decided, decision=stored)
        leader = finals["leader"]
        best = leader if decided.decision.ships else default
    name = tomllib.loads(about["spec"]).get("name") or "collection"
    what = about["op"] if about["rule"] is None else f"{about['op']} ({about['rule']})"
    return Report(
        title=f"{name}: {what} on {about['target']} {about['arch']}",
        study=study.study_name,
        created=_date(about.get("finals_at")),
        target=about["target"],
        hardware=Hardware(**about["hardware"]),
        clocks={} if finals is None else finals["clocks"],
        workloads=tuple(about["workloads"]),
        cache=about["cache"],
        versions=about["versions"],
        spec_toml=about["spec"],
        command=_command(name, about),
        anchor="the default" if anchor == default else "the baseline",
        fields={field: tuple(choices) for field, choices in space["fields"].items()},
        size=space["size"],
        points=space["points"],
        removed=tuple(Removed(**removed) for removed in space["removed"]),
        docs={field.name: field.metadata["doc"] for field in fields(params_type(about["target"], about["op"]))},
        default=default,
        best=best,
        leader=leader,
        trials=trials_of(study),
        finals=decided,
        importances=importances_of(study),
        ledger=about.get("ledger", {}),
        notes=tuple(about.get("notes", ())),
    )


def finals_of(samples: Samples, others: float = 0.0) -> Finals:
    """The decision, made again from the samples of the finals and from the CPUs that other processes used, with the
    medians by workload."""
    decision = decide(samples, others)
    comparisons = (
        Comparison(
            workload, float(np.median(times[DEFAULT])), float(np.median(times[LEADER])), decision.gains[workload]
        )
        for workload, times in samples.items()
    )
    return Finals(decision, tuple(comparisons))


def _samples(data: Mapping[str, Mapping[str, Sequence[float]]]) -> Samples:
    return {workload: {name: tuple(times) for name, times in by.items()} for workload, by in data.items()}


def _date(text: str | None) -> str:
    return "no finals yet" if text is None else f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC"


def _command(name: str, about: Mapping[str, Any]) -> str:
    """The command that runs the study again, if the spec is in a file of its name."""
    words = ["embforge", "tune", f"{name}.toml", "--on", about["target"]]
    if about["train"] is not None:
        words += ["--train", about["train"]]
    for workload in about["workloads"]:
        words += ["--workload", workload]
    if about["anchor"] != about["default"]:
        changed = {field: value for field, value in about["anchor"].items() if value != about["default"][field]}
        for field, value in changed.items():
            words += ["--baseline", f"{field}={','.join(map(str, value)) if isinstance(value, list) else value}"]
    for option, key, usual in (("cache", "cache", "warm"), ("ids", "id_dtype", "int64")):
        if about[key] != usual:
            words += [f"--{option}", about[key]]
    return shlex.join(words)


def trials_of(study: Study) -> tuple[Trial, ...]:
    """All trials with an outcome of this tuner, by number: not duplicates, and no trials of other programs."""
    from optuna.trial import TrialState

    trials = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
        outcome = trial.user_attrs.get("outcome", {})
        if outcome.get("kind") in KINDS:
            trials.append(
                Trial(
                    number=trial.number,
                    params=trial.user_attrs["params"],
                    kind=outcome["kind"],
                    score=trial.value,
                    why=outcome.get("why", ""),
                    seconds=trial.user_attrs.get("seconds", {}),
                    build=trial.user_attrs.get("build", {}),
                )
            )
    return tuple(trials)


def importances_of(study: Study) -> dict[str, float]:
    """Each parameter's share of the importance, by Optuna's PED-ANOVA, the largest first; empty with too few trials."""
    from optuna.importance import get_param_importances
    from optuna.trial import TrialState

    timed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(timed) < IMPORTANCE_TRIALS:
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shares = get_param_importances(study)
    return {} if caught else shares  # Optuna warns if its shares are only guesses
