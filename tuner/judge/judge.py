"""Who says how fast a plan is. The study asks a judge and does not know whether it measures, replays or estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from embforge.codegen.plan import Plan
from embforge.tuner.judge.outcome import Outcome
from embforge.tuner.measure.quiet import Usage

Cache = Literal["warm", "cold"]
"""Warm: calls follow each other, on batches that rotate. Cold: the caches are emptied before each call."""


class Judge(Protocol):
    """Answers about built plans of one op, target and spec, on the workloads it was made with.

    No candidate can make a call raise: a crash, a hang or a wrong answer is an outcome. What raises is what concerns
    no candidate, such as a machine without memory for the tables.
    """

    @property
    def workloads(self) -> tuple[str, ...]:
        """Each workload's one-string description."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall time that its callers have waited so far, by phase: starting, verifying, timing."""

    @property
    def clocks(self) -> Mapping[str, int | None]:
        """Clock rates at the end of the last rounds, in MHz by name; empty before, None: nobody tells."""

    @property
    def others(self) -> Usage | None:
        """What other processes took of the CPUs during the last rounds; None: not known, or it does not matter."""

    def screen(self, plan: Plan) -> Outcome:
        """Verifies the plan against the reference, then times it in a few rounds paired with the anchor plan."""

    def rounds(
        self, plans: Sequence[Plan], workload: str, count: int, *, seed: int, cache: Cache = "warm"
    ) -> list[tuple[float, ...]] | dict[int, Outcome]:
        """`count` interleaved rounds, each in a shuffled order: seconds a call, `[round][plan]`.

        A plan may stand in the list twice. If a plan fails now, the outcome of that plan by its position instead.
        """

    def close(self) -> None:
        """Ends whatever the judge keeps running."""
