"""The choice of the next point: never one that is taken or not allowed, and always the same for the same history.

First come the seeds (points that are expected to be good) and the default, then points in which all pairs of choices
meet, then proposals: of an additive model, until no point is left, in small spaces; of Optuna's TPE in large ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from embforge.codegen.params import Params
from embforge.tuner.search.space import ENUMERATE_BELOW, Space, covering_points, decode, encode
from embforge.tuner.study.storage import quiet_optuna

PAIR_WEIGHT = 0.3
"""The weight of pairs of choices in the model, relative to single choices."""
RIDGE = 0.05
"""How much of a score counts as noise."""
COVERED_FIRST = 16
"""How many points of the covering set TPE starts from; the whole set would cost a large part of the budget."""


@dataclass(frozen=True)
class Tried:
    """A point that has a trial."""

    number: int
    params: Params
    score: float | None = None
    """The logarithm of its time divided by the anchor's; None if it failed or is not known yet."""
    pending: bool = False


class Sampler(Protocol):
    """Chooses points from the history alone."""

    def propose(self, tried: Sequence[Tried]) -> Params | None:
        """The next point after these trials (by number); None if every allowed point is taken."""


def sampler_for(space: Space, seeds: Sequence[Params] = (), seed: int = 0) -> Sampler:
    """Enumerates spaces of fewer than `ENUMERATE_BELOW` points; uses TPE for others. `seeds` come first; those that are
    not allowed are left out.

    `seed` is the seed of TPE: any whole number.
    """
    return Enumeration(space, seeds) if len(space.points) < ENUMERATE_BELOW else Guided(space, seeds, seed)


def distributions(space: Space) -> dict[str, CategoricalDistribution]:
    """The fields as Optuna's distributions, with the same choices in every trial of a study."""
    one_each = (type(space.default)(**{name: choice}) for name, choices in space.fields.items() for choice in choices)
    plain = iter(encode(params) for params in one_each)
    return {name: CategoricalDistribution([next(plain)[name] for _ in space.fields[name]]) for name in space.fields}


class Enumeration:
    """Tries all points, the most promising first."""

    def __init__(self, space: Space, seeds: Sequence[Params] = ()) -> None:
        self._points = _Points(space)
        self._first = self._points.allowed((*seeds, *covering_points(space)))

    def propose(self, tried: Sequence[Tried]) -> Params | None:
        taken = {t.params for t in tried}
        if (first := next((p for p in self._first if p not in taken), None)) is not None:
            return first
        free = self._points.free(tried)
        return self._points.best_guess(free, tried) if free.size else None


class Guided:
    """Uses TPE over the fields as categories. Proposals are moved to the nearest point that is allowed and free."""

    def __init__(self, space: Space, seeds: Sequence[Params] = (), seed: int = 0) -> None:
        self._space, self._seed = space, seed
        self._points = _Points(space)
        self._first = self._points.allowed((*seeds, *covering_points(space)[:COVERED_FIRST]))
        self._distributions = distributions(space)
        # A copy of the study in memory: asking must not write, and failures mean something to TPE only if it sees them.
        quiet_optuna()
        self._mirror = optuna.create_study(storage=optuna.storages.InMemoryStorage())
        self._mirrored: dict[int, int] = {}
        self._pending: set[int] = set()

    def propose(self, tried: Sequence[Tried]) -> Params | None:
        taken = {t.params for t in tried}
        if (first := next((p for p in self._first if p not in taken), None)) is not None:
            return first
        free = self._points.free(tried)
        if not free.size:
            return None
        self._follow(tried)
        # A new generator each time: what is proposed depends on the history, not on what this process did before.
        number = zlib.crc32(f"{self._seed},{len(tried)}".encode())  # numpy takes seeds of 32 bits
        self._mirror.sampler = _Tpe(self._distributions, number)
        asked = self._mirror.ask(dict(self._distributions))
        self._mirror.tell(asked, state=TrialState.FAIL)  # TPE does not see failed trials
        wanted = self._points.codes_of(decode(self._space, asked.params))
        alike = (self._points.codes[free] == wanted).sum(1)
        return self._points.best_guess(free[alike == alike.max()], tried)

    def _follow(self, tried: Sequence[Tried]) -> None:
        for trial in tried:
            if trial.number not in self._mirrored:
                self._mirrored[trial.number] = len(self._mirror.get_trials(deepcopy=False))
                self._mirror.add_trial(self._copy(trial))
            elif trial.number in self._pending and not trial.pending:
                number = self._mirrored[trial.number]
                if trial.score is None:
                    self._mirror.tell(number, state=TrialState.PRUNED)
                else:
                    self._mirror.tell(number, trial.score)
            (self._pending.add if trial.pending else self._pending.discard)(trial.number)

    def _copy(self, trial: Tried) -> FrozenTrial:
        """TPE gets a failed trial as a pruned one, which is worse than any time; it ignores failed ones."""
        state = TrialState.RUNNING if trial.pending else TrialState.PRUNED
        return create_trial(
            state=state if trial.score is None else TrialState.COMPLETE,
            value=trial.score,
            params=dict(encode(trial.params)),
            distributions=dict(self._distributions),
        )


class _Tpe(TPESampler):
    """Knows the fields, which Optuna finds out from all trials each time: at a thousand, most of a proposal's cost."""

    def __init__(self, fields: Mapping[str, CategoricalDistribution], seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=1)
        self._fields = fields

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._fields)


class _Points:
    """A space's points as rows of choice numbers."""

    def __init__(self, space: Space) -> None:
        self.points = space.points
        self.index = {point: i for i, point in enumerate(space.points)}
        self._places = [(name, {choice: i for i, choice in enumerate(c)}) for name, c in space.fields.items()]
        self.codes = np.array([self.codes_of(point) for point in space.points], np.int16)

    def codes_of(self, params: Params) -> NDArray[np.int16]:
        return np.array([places[getattr(params, name)] for name, places in self._places], np.int16)

    def allowed(self, points: Iterable[Params]) -> list[Params]:
        """The points that the space has."""
        return [point for point in points if point in self.index]

    def free(self, tried: Sequence[Tried]) -> NDArray[np.intp]:
        """Numbers of the points that no trial holds."""
        left = np.ones(len(self.points), bool)
        left[[self.index[t.params] for t in tried if t.params in self.index]] = False
        return np.flatnonzero(left)

    def best_guess(self, among: NDArray[np.intp], tried: Sequence[Tried]) -> Params:
        """The point with the lowest expected score among these; the first if several have it."""
        known = [t for t in tried if not t.pending]
        scores = [t.score for t in known if t.score is not None]
        if among.size == 1 or not scores:
            return self.points[int(among[0])]
        values = np.log(
            [max(scores) if t.score is None else t.score for t in known]
        )  # a failure counts as the worst score
        codes = np.array([self.codes_of(t.params) for t in known])
        gram = _kernel(codes, codes) + RIDGE * np.eye(len(known))
        weights = np.linalg.solve(gram, values - values.mean())
        return self.points[int(among[(_kernel(self.codes[among], codes) @ weights).argmin()])]


def _kernel(a: NDArray[np.int16], b: NDArray[np.int16]) -> NDArray[np.float64]:
    """Ridge regression on a weight a choice and a weight a pair of choices, without writing the weights out."""
    alike = (a[:, None, :] == b[None, :, :]).sum(2).astype(np.float64)
    kernel: NDArray[np.float64] = (alike + PAIR_WEIGHT * alike * (alike - 1) / 2) / a.shape[1]
    return kernel
