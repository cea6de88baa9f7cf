"""The decision whether the leader of the finals replaces the default. It depends on the samples alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from embforge.codegen.tuned.record import NOISE_LIMIT, Gain
from embforge.tuner.measure.quiet import QUIET
from embforge.tuner.measure.stats import Floats, bootstrap_ratio, noise_floor, wilcoxon

ALPHA = 0.01
"""A difference counts as real if its p-value is below this."""
STOP_ALPHA = 0.001
"""The same for stopping early. It is stricter, because it is tested often."""
WORTHLESS = 0.005
"""A smaller difference between two finalists is not worth more time."""

DEFAULT, LEADER = "default", "leader"
DUPLICATES = {LEADER: "duplicate", DEFAULT: "default's duplicate"}
"""Second copies of the same kernels, loaded from files of their own."""
NO_RIVALS = {DEFAULT, LEADER, *DUPLICATES.values()}
LEAST_FLOOR = 0.005
"""The least noise floor: two copies show one pair of addresses in memory, and other addresses may differ more."""

Samples = Mapping[str, Mapping[str, tuple[float, ...]]]
"""Seconds per call, `[workload][name][round]`; names are `default`, `leader`, their `DUPLICATES` and any rivals."""


@dataclass(frozen=True)
class Decision:
    """The result of the finals."""

    ships: bool
    """Whether the leader replaces the default."""
    why: str
    settled: bool
    """Whether more rounds would be wasted."""
    gain: Gain
    """How many times as fast as the default the leader is, over all workloads (geometric mean)."""
    gains: dict[str, Gain]
    """The same for each workload."""
    noise_floor: float
    """The noise, as a share: how much two copies of the leader or of the default may differ."""
    noise_floors: dict[str, float]
    p: float
    """The p-value of the leader being no faster than the default (Wilcoxon, one-sided)."""
    rivals: dict[str, float]
    """The same for the leader and each rival."""
    overtaken_by: str | None
    """A rival that is faster than the leader by more than noise and chance."""
    rounds: int
    disturbed: str = ""
    """Why the samples cannot be trusted, whatever they show; empty if they can."""


def decide(samples: Samples, others: float = 0.0) -> Decision:
    """The decision after these rounds, during which other processes used `others` CPUs on average.

    Nothing ships if others used more than `QUIET` CPUs, or if the noise floor of any workload is above `NOISE_LIMIT`.
    Otherwise the leader ships if it is faster than the default by more than the noise floor, with p below `ALPHA`, and
    on no workload slower than the default by more than that workload's noise floor.
    """
    joint = _joint(samples)
    default, leader = joint[DEFAULT], joint[LEADER]
    gain, floor = gain_of(default, leader), floor_of(joint)
    gains = {w: gain_of(times[DEFAULT], times[LEADER]) for w, times in samples.items()}
    floors = {w: floor_of(times) for w, times in samples.items()}
    p = wilcoxon(np.log(leader), np.log(default))
    slower = [w for w in samples if gains[w].median < 1 / (1 + floors[w])]
    rivals = {name: times for name, times in joint.items() if name not in NO_RIVALS}
    chances = {name: wilcoxon(np.log(leader), np.log(times)) for name, times in rivals.items()}
    overtaken_by = _overtaken_by(leader, rivals, floor)
    disturbed = _disturbed(max(floor, *floors.values()), others)
    beats = gain.median > 1 + floor and p < ALPHA
    return Decision(
        ships=beats and not slower and not disturbed,
        why=_why(gain, floor, p, slower, gains, disturbed),
        settled=not disturbed
        and _settled_with_default(gain, floor, p)
        and overtaken_by is None
        and all(p < ALPHA or _at_most_alike(leader, rivals[name], floor) for name, p in chances.items()),
        gain=gain,
        gains=gains,
        noise_floor=floor,
        noise_floors=floors,
        p=p,
        rivals=chances,
        overtaken_by=overtaken_by,
        rounds=leader.size,
        disturbed=disturbed,
    )


def floor_of(times: Mapping[str, Floats | tuple[float, ...]]) -> float:
    """The noise between two copies: of the leader or of the default, whichever is more."""
    pairs = ((times[name], times[copy]) for name, copy in DUPLICATES.items())
    return max(LEAST_FLOOR, *(noise_floor(first, second) for first, second in pairs))


def gain_of(slower: Floats | tuple[float, ...], faster: Floats | tuple[float, ...]) -> Gain:
    """How many times as fast `faster` is, paired by round."""
    ratio = bootstrap_ratio(slower, faster)
    return Gain(ratio.median, ratio.low, ratio.high)


def _joint(samples: Samples) -> dict[str, Floats]:
    """For each name, one time per round: the geometric mean over workloads."""
    names = next(iter(samples.values())).keys()
    return {name: np.exp(np.mean([np.log(times[name]) for times in samples.values()], axis=0)) for name in names}


def _settled_with_default(gain: Gain, floor: float, p: float) -> bool:
    """Whether the leader clearly ships, or cannot gain anything. A wide noise floor settles nothing, because more
    rounds make it narrower."""
    return (p < STOP_ALPHA and gain.low > 1 + floor) or gain.high < 1 + min(floor, WORTHLESS)


def _at_most_alike(leader: Floats, rival: Floats, floor: float) -> bool:
    return gain_of(leader, rival).high < 1 + max(floor, WORTHLESS)


def _overtaken_by(leader: Floats, rivals: Mapping[str, Floats], floor: float) -> str | None:
    ahead = {name: gain_of(leader, times).median for name, times in rivals.items()}
    faster = [
        name
        for name, median in ahead.items()
        if median > 1 + max(floor, WORTHLESS) and wilcoxon(np.log(rivals[name]), np.log(leader)) < ALPHA
    ]
    return max(faster, key=lambda name: ahead[name], default=None)


def _disturbed(floor: float, others: float) -> str:
    if others > QUIET:
        return f"other processes used {others:.2f} CPUs during the finals, where {QUIET:g} are allowed"
    return f"the noise floor of {floor:.1%} is above {NOISE_LIMIT:.0%}" if floor > NOISE_LIMIT else ""


def _why(gain: Gain, floor: float, p: float, slower: list[str], gains: Mapping[str, Gain], disturbed: str) -> str:
    gained = f"{gain.median:.3f}x the default (95 %: {gain.low:.3f} to {gain.high:.3f})"
    if disturbed:
        return f"the default stays: {disturbed}, so the finals say nothing; tune again on a quieter machine"
    if gain.median <= 1 + floor:
        return f"the default stays: the best candidate is {gained}, which is not above the noise floor of {floor:.1%}"
    if p >= ALPHA:
        return f"the default stays: the best candidate is {gained}, but by chance with p={p:.2g} (allowed: {ALPHA:g})"
    if slower:
        worst = min(slower, key=lambda w: gains[w].median)
        return f"the default stays: the best candidate is {gained}, but {gains[worst].median:.3f}x on {worst}"
    return f"{gained}, above the noise floor of {floor:.1%}, p={p:.2g}"
