"""The outcomes of a candidate, as types: a time, or one of five expected failures, which are not exceptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Paired:
    """Samples of one workload, in seconds per call, of the candidate and of the anchor, taken in the same rounds."""

    candidate: tuple[float, ...]
    anchor: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The candidate's time divided by the anchor's; below 1 the candidate is faster."""
        return float(np.median(np.asarray(self.candidate) / np.asarray(self.anchor)))


@dataclass(frozen=True)
class Timed:
    """The candidate was verified against the reference, then timed."""

    kind: ClassVar[str] = "timed"
    workloads: Mapping[str, Paired]

    @property
    def score(self) -> float:
        """The geometric mean of the workloads' ratios, which the search minimises."""
        return math.exp(sum(math.log(paired.ratio) for paired in self.workloads.values()) / len(self.workloads))


@dataclass(frozen=True)
class _Failure:
    why: str
    """A sentence that says what went wrong: the constraint, the first line of a log, or the place."""


@dataclass(frozen=True)
class Invalid(_Failure):
    """A resource check refused the built kernel: it spills, or too few of its blocks fit."""

    kind: ClassVar[str] = "invalid"


@dataclass(frozen=True)
class CompileFailed(_Failure):
    """The compiler refused the source, or never came back."""

    kind: ClassVar[str] = "compile-failed"


@dataclass(frozen=True)
class LaunchFailed(_Failure):
    """The kernel crashed, or its call raised."""

    kind: ClassVar[str] = "launch-failed"


@dataclass(frozen=True)
class WrongAnswer(_Failure):
    """The kernel's bits are not the reference's."""

    kind: ClassVar[str] = "wrong-answer"


@dataclass(frozen=True)
class TimedOut(_Failure):
    """The kernel did not come back in time."""

    kind: ClassVar[str] = "timed-out"


Failure = Invalid | CompileFailed | LaunchFailed | WrongAnswer | TimedOut
Outcome = Timed | Failure

FAILURES: dict[str, type[Failure]] = {c.kind: c for c in (Invalid, CompileFailed, LaunchFailed, WrongAnswer, TimedOut)}
KINDS = (Timed.kind, *FAILURES)
"""All kinds of outcomes, in the order in which reports list them."""


def to_data(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data, all samples included."""
    return {"kind": outcome.kind} | asdict(outcome)


def from_data(data: Mapping[str, Any]) -> Outcome:
    """The outcome of which `to_data` returned this data; `KeyError` for a kind that is not known."""
    if data["kind"] == Timed.kind:
        pairs = {name: Paired(tuple(p["candidate"]), tuple(p["anchor"])) for name, p in data["workloads"].items()}
        return Timed(pairs)
    return FAILURES[data["kind"]](data["why"])
