"""The trials of a study in its storage: taken by one process each, finished once, never lost.

A trial's user attributes, for readers of a storage (a report, optuna-dashboard):

    params     plain data of the point            uri      of its plan
    claim      who works on it (`claims.Claim`)   outcome  `outcome.to_data`, all samples; for a duplicate, its kind
    seconds    by phase: compiling (waited for), verifying, timing
    build      cached, binary_bytes, resources (figures per symbol of the binary)

A trial is RUNNING under a claim, WAITING if its owner stopped, COMPLETE with its score or FAIL with its outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from embforge.codegen.params import Params
from embforge.tuner.judge.outcome import KINDS, Outcome, Timed, from_data, to_data
from embforge.tuner.search.space import Space, decode, encode
from embforge.tuner.study.claims import Claim
from embforge.tuner.study.sampler import Sampler, Tried, distributions
from embforge.tuner.study.storage import storage_errors

DUPLICATE = "duplicate"
"""The kind of a trial whose point another process took at the same moment. Such trials do not count."""


@dataclass(frozen=True)
class Held:
    """A trial that this process works on."""

    id: int
    number: int
    params: Params
    claim: Claim
    taken_over: bool = False
    """Whether it was taken over from a process that stopped or died; another process may have taken it over as well."""


class Trials:
    """All trials of one study. Opens the study or creates it; `about` is stored with it, for readers."""

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        space: Space,
        *,
        about: Mapping[str, Any] | None = None,
        uri_of: Callable[[Params], str] = lambda params: "",
    ) -> None:
        self.name = name
        with storage_errors(f"study {name}"):
            self.study = optuna.create_study(
                storage=storage, study_name=name, direction="minimize", load_if_exists=True
            )
        # optuna's own keeps what it read of finished trials, so that each is read once; it has no public name.
        self._storage = self.study._storage  # noqa: SLF001
        self._study_id = self._storage.get_study_id_from_name(name)
        self._space, self._uri_of = space, uri_of
        self._distributions = distributions(space)
        self._finished: dict[int, Tried | None] = {}
        self._latest: list[FrozenTrial] = []
        self.tell_about(about or {})

    @property
    def points(self) -> int:
        """The points of the space."""
        return len(self._space.points)

    def tell_about(self, about: Mapping[str, Any]) -> None:
        """Stores facts with the study; existing ones are replaced."""
        known = self.study.user_attrs
        for key, value in about.items():
            if key not in known or known[key] != value:
                self.study.set_user_attr(key, value)

    def outcomes(self) -> dict[int, tuple[Params, Outcome]]:
        """The outcomes of all finished trials, by number."""
        by_number = {}
        for trial in self._read():
            tried = self._tried(trial)
            if tried is not None and trial.state.is_finished():
                by_number[trial.number] = (tried.params, from_data(trial.user_attrs["outcome"]))
        return by_number

    def take(self, sampler: Sampler) -> Held | None:
        """A trial to work on: one that another process left, or a new one. None if every point is taken."""
        fresh = not self._latest
        trials = self._latest or self._read()  # what was read after the last trial was made is new enough
        while True:
            if (left := self._take_left(trials)) is not None:
                return left
            params = sampler.propose([tried for t in trials if (tried := self._tried(t)) is not None])
            if params is None and fresh:
                return None
            if params is not None and (made := self._make(params)) is not None:
                return made
            trials, fresh = self._read(), True

    def holds(self, held: Held) -> bool:
        """Whether this process has the trial: if two take it over at the same time, the last one has it."""
        if not held.taken_over and time.time() < held.claim.until:
            return True  # no process takes a trial from a living one
        trial = self._storage.get_trial(held.id)
        claim = _claim_of(trial)
        return trial.state == TrialState.RUNNING and claim is not None and claim.id == held.claim.id

    def renew(self, held: Held) -> Held:
        """The trial, with its claim renewed if that is old."""
        if not held.claim.is_old or not self.holds(held):
            return held
        claim = held.claim.renewed()
        try:
            self._storage.set_trial_user_attr(held.id, "claim", claim.to_data())
        except UpdateFinishedTrialError:  # from a machine whose clock is ahead of this one's
            return held
        return replace(held, claim=claim)

    def finish(self, held: Held, outcome: Outcome, **attributes: Any) -> bool:
        """Writes the outcome of a trial, with further attributes. False if another process has it now."""
        if not self.holds(held):
            return False
        score = outcome.score if isinstance(outcome, Timed) else None
        try:
            for key, value in {**attributes, "outcome": to_data(outcome)}.items():
                self._storage.set_trial_user_attr(held.id, key, value)
            if score is None:
                self._storage.set_trial_state_values(held.id, TrialState.FAIL)
            else:
                self._storage.set_trial_state_values(held.id, TrialState.COMPLETE, [score])
        except UpdateFinishedTrialError:
            return False
        self._finished[held.number] = Tried(held.number, held.params, score)
        return True

    def give_back(self, held: Held) -> None:
        """Leaves a trial unchanged, for the next process."""
        if self.holds(held):
            with suppress(UpdateFinishedTrialError):
                ended = replace(held.claim, until=0.0)  # if a process dies while taking it, others can still take it
                self._storage.set_trial_user_attr(held.id, "claim", ended.to_data())
                self._storage.set_trial_state_values(held.id, TrialState.WAITING)

    def _read(self) -> list[FrozenTrial]:
        self._latest = self._storage.get_all_trials(self._study_id, deepcopy=False)
        return self._latest

    def _tried(self, trial: FrozenTrial) -> Tried | None:
        """None for a duplicate, and for a trial that another program made."""
        if trial.number not in self._finished:
            decoded = self._decoded(trial)
            if not trial.state.is_finished():
                return decoded
            self._finished[trial.number] = decoded
        return self._finished[trial.number]

    def _decoded(self, trial: FrozenTrial) -> Tried | None:
        done, outcome = trial.state.is_finished(), trial.user_attrs.get("outcome")
        ours = _claim_of(trial) is not None and trial.distributions == self._distributions
        if not ours or (done and (not isinstance(outcome, dict) or outcome.get("kind") not in KINDS)):
            return None
        return Tried(trial.number, decode(self._space, trial.params), trial.value if done else None, pending=not done)

    def _take_left(self, trials: list[FrozenTrial]) -> Held | None:
        """A trial that waits, or whose owner has ended."""
        for trial in trials:
            if (tried := self._tried(trial)) is None or not tried.pending or not _is_left(trial):
                continue
            now = self._storage.get_trial(trial._trial_id)
            with suppress(UpdateFinishedTrialError):
                if now.state.is_finished() or not _is_left(now):
                    continue
                if now.state == TrialState.RUNNING:
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
                if self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                    held = Held(trial._trial_id, trial.number, tried.params, Claim.mine(), taken_over=True)
                    self._storage.set_trial_user_attr(held.id, "claim", held.claim.to_data())
                    if self._gives_way(held, self._read()):
                        continue
                    if now.user_attrs.get("outcome", {}).get("kind") not in KINDS:
                        return held
                    # Its owner died between the last two writes: it was measured, so it is only finished.
                    self.finish(held, from_data(now.user_attrs["outcome"]))
        return None

    def _make(self, params: Params) -> Held | None:
        """Makes a trial in one step, so that no trial is without its point and its owner. None if it is a duplicate."""
        claim = Claim.mine()
        about = {"claim": claim.to_data(), "params": asdict(params), "uri": self._uri_of(params)}
        template = create_trial(
            state=TrialState.RUNNING,
            params=dict(encode(params)),
            distributions=dict(self._distributions),
            user_attrs=about,
        )
        id = self._storage.create_new_trial(self._study_id, template)
        trials = self._read()
        held = Held(id, next(t.number for t in trials if t._trial_id == id), params, claim)
        return None if self._gives_way(held, trials) else held

    def _gives_way(self, held: Held, trials: list[FrozenTrial]) -> bool:
        """Ends a trial whose point an earlier one has.

        Numbers are assigned one after the other: of two equal trials made at the same time, the later sees the earlier.
        """
        earlier = (self._tried(trial) for trial in trials if trial.number < held.number)
        if not any(tried is not None and tried.params == held.params for tried in earlier):
            return False
        self._storage.set_trial_user_attr(held.id, "outcome", {"kind": DUPLICATE})
        self._storage.set_trial_state_values(held.id, TrialState.FAIL)
        return True


def _is_left(trial: FrozenTrial) -> bool:
    claim = _claim_of(trial)
    return trial.state == TrialState.WAITING or (claim is not None and claim.has_ended)


def _claim_of(trial: FrozenTrial) -> Claim | None:
    return Claim.from_data(trial.user_attrs.get("claim"))
