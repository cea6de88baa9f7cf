"""Positions in the report's drawings: axes, dots and bars, calculated from numbers. Their looks are set by the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embforge.tuner.judge.outcome import FAILURES

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis of ratios between two pixels: half the time is as far from 1 as twice the time."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel at which a value is drawn."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, most: int = 6) -> tuple[Tick, ...]:
        """About `most` round values within the axis; 1 is one of them if it is within."""
        if self.high / self.low > 4:  # equal steps would crowd at one end of a logarithmic axis
            exponents = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            values = [2.0**exponent for exponent in exponents]
            values = [value for value in values if math.log2(value) % math.ceil(len(values) / most) == 0]
        else:
            step = _round_step((self.high - self.low) / most)
            steps = range(math.ceil((self.low - 1) / step), math.floor((self.high - 1) / step) + 1)
            values = [1 + step * number for number in steps]
        return tuple(Tick(self.at(value), f"{value:.4g}×") for value in values)


def axis_of(values: Iterable[float], start: float, end: float) -> Axis:
    """An axis that shows all values and 1, with a little room at both ends."""
    logs = [0.0, *map(math.log, values)]
    room = max(0.04 * (max(logs) - min(logs)), 0.01)
    return Axis(math.exp(min(logs) - room), math.exp(max(logs) + room), start, end)


@dataclass(frozen=True)
class Dot:
    """A trial in a drawing."""

    x: float
    y: float
    number: int


@dataclass(frozen=True)
class Lane:
    """The failures of one kind, in a line of their own below the drawing, because they have no time."""

    kind: str
    y: float
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class History:
    """The drawing of all trials in their order: the time divided by the anchor's, or the lane of its failure."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    dots: tuple[Dot, ...]
    best: str
    """The SVG path of the best time so far."""
    lanes: tuple[Lane, ...]
    rows: tuple[Tick, ...]
    columns: tuple[Tick, ...]
    one: float
    """The height at which a time equals the anchor's."""


def history(trials: Sequence[tuple[int, str, float | None]]) -> History:
    """The drawing of trials `(number, kind, score)`, which are in the order of their numbers."""
    kinds = [kind for kind in FAILURES if any(kind == k for _, k, _ in trials)]
    width, top, bottom, right = 860.0, 12.0, 262.0, 844.0
    left = 108.0 if kinds else 52.0  # lanes have their names at the left
    height = bottom + 20.0 * len(kinds) + 34.0
    axis = axis_of([score for _, _, score in trials if score is not None], bottom, top)
    count = max((number for number, _, _ in trials), default=0)

    def across(number: int) -> float:
        return round(left + 8 + (right - left - 16) * (number / count if count else 0.5), 1)

    dots = tuple(Dot(across(n), axis.at(score), n) for n, _, score in trials if score is not None)
    lanes = []
    for index, kind in enumerate(kinds):
        y = bottom + 20.0 * index + 14.0
        lanes.append(Lane(kind, y, tuple(Dot(across(n), y, n) for n, k, _ in trials if k == kind)))
    step = max(1, int(_round_step(count / 8))) if count else 1
    columns = tuple(Tick(across(number), str(number)) for number in range(0, count + 1, step))
    return History(
        width,
        height,
        left,
        right,
        top,
        bottom,
        dots,
        _best_so_far(dots, right),
        tuple(lanes),
        axis.ticks(),
        columns,
        axis.at(1),
    )


def _best_so_far(dots: Sequence[Dot], right: float) -> str:
    """The SVG path along the best time so far. The pixel's number grows downwards, and faster is lower."""
    path, best = "", -math.inf
    for dot in dots:
        if not path:
            path = f"M{dot.x} {dot.y}"
        elif dot.y > best:
            path += f"H{dot.x}V{dot.y}"
        best = max(best, dot.y)
    return f"{path}H{right}" if path else ""


@dataclass(frozen=True)
class Column:
    """One choice of a parameter: all times of trials with it, their median and the best."""

    choice: str
    x: float
    dots: str
    """The SVG path of all dots: one stroke of length zero per trial."""
    count: int
    best: float
    median: float
    best_y: float
    median_y: float
    chosen: bool
    default: bool


@dataclass(frozen=True)
class Slice:
    """The drawing of times by the choices of one parameter. The other parameters of the trials vary."""

    field: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    columns: tuple[Column, ...]
    label_width: float
    rows: tuple[Tick, ...]
    one: float


def slice_of(
    field: str, scores: Mapping[str, Sequence[float]], all_scores: Sequence[float], chosen: str, default: str
) -> Slice:
    """The drawing of one parameter: scores by choice, on an axis that shows `all_scores` and is the same for all."""
    left, right, top, bottom = 44.0, 330.0, 10.0, 150.0
    axis = axis_of(all_scores, bottom, top)
    room = (right - left) / len(scores)
    columns = []
    for index, (choice, of_choice) in enumerate(scores.items()):
        x = round(left + room * (index + 0.5), 1)
        spread = min(room * 0.3, 16.0)
        # Golden-section steps spread dots of equal height evenly, and the same study always looks the same.
        dots = "".join(
            f"M{x + spread * (2 * ((n * 0.618034) % 1) - 1):.1f} {axis.at(score):.1f}h0"
            for n, score in enumerate(of_choice)
        )
        best, median = (min(of_choice), float(np.median(of_choice))) if of_choice else (1.0, 1.0)
        columns.append(
            Column(
                choice,
                x,
                dots,
                len(of_choice),
                best,
                median,
                axis.at(best),
                axis.at(median),
                choice == chosen,
                choice == default,
            )
        )
    label = min(room, 7.0 * max(map(len, scores)) + 12.0)
    return Slice(field, 340.0, 184.0, left, right, top, bottom, tuple(columns), label, axis.ticks(4), axis.at(1))


@dataclass(frozen=True)
class Interval:
    """The gain on one workload, with its confidence interval."""

    label: str
    x: float
    low: float
    high: float
    tip: str


@dataclass(frozen=True)
class Forest:
    """The drawing of gains with their intervals, one strip per workload, and the band in which a gain does not count.

    Positions are percents of the page's width, so that letters keep their size on a narrow page.
    """

    intervals: tuple[Interval, ...]
    ticks: tuple[Tick, ...]
    one: float
    band: tuple[float, float]


def forest(gains: Mapping[str, tuple[float, float, float]], floor: float) -> Forest:
    """The drawing of gains `(median, low, high)` by workload."""
    edges = [value for gain in gains.values() for value in gain]
    axis = axis_of([*edges, 1 + floor, 1 / (1 + floor)], 5.0, 95.0)
    intervals = tuple(
        Interval(label, axis.at(median), axis.at(low), axis.at(high), f"{median:.3f}× ({low:.3f} to {high:.3f})")
        for label, (median, low, high) in gains.items()
    )
    band = (axis.at(1 / (1 + floor)), axis.at(1 + floor))
    return Forest(intervals, axis.ticks(), axis.at(1), band)


def _round_step(step: float) -> float:
    """The smallest round number that is not less than `step`."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in STEPS if factor * power >= step * (1 - 1e-9))
