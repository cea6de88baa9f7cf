"""The interface that says how fast a plan is. A study does not know whether its judge measures or replays."""

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

    No candidate can make a call raise: a crash, a hang or a wrong answer is an outcome. Only problems that concern no
    single candidate raise, such as a machine without memory for the tables.
    """

    @property
    def workloads(self) -> tuple[str, ...]:
        """The description of each workload, as one string."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of wall time that callers have waited so far, by phase: starting, verifying, timing."""

    @property
    def clocks(self) -> Mapping[str, int | None]:
        """Clock rates at the end of the last rounds, in MHz by name; empty before the first, None if not known."""

    @property
    def others(self) -> Usage | None:
        """How much CPU time other processes used during the last rounds; None if it is not known or does not matter."""

    def screen(self, plan: Plan) -> Outcome:
        """Verifies the plan against the reference, then times it in a few rounds paired with the anchor plan."""

    def rounds(
        self, plans: Sequence[Plan], workload: str, count: int, *, seed: int, cache: Cache = "warm"
    ) -> list[tuple[float, ...]] | dict[int, Outcome]:
        """Times `count` interleaved rounds, each in a shuffled order; returns seconds per call, `[round][plan]`.

        A plan may be in the list twice. If a plan fails, the result is that plan's outcome by its position instead.
        """

    def close(self) -> None:
        """Ends whatever the judge keeps running."""
