"""Constraints of a search space, as data with a sentence each. Those of targets are in `constraints_cpu` and `_cuda`.

There are two kinds. A `Constraint` refuses points that cannot work, or that give something up without gaining anything.
An `Idle` field has no effect at some points: of points that differ only in it and do the same work, one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.record import Hardware


@dataclass(frozen=True)
class Context:
    """The task of a space: what its points are plans for."""

    op: str
    """forward or backward."""
    target: str
    arch: str
    spec: CollectionSpec
    hardware: Hardware
    update: Update | None = None
    id_dtype: str = "int64"
    longest_bag: int | None = None
    """The most ids that a bag of the traffic has; None: not known."""

    def plan(self, params: Params) -> Plan:
        """The plan of a point. For a backward without an update it is a reduction."""
        op = "reduce" if self.op == "backward" and self.update is None else self.op
        return Plan(op, self.target, self.arch, self.id_dtype, self.spec, params, self.update)


@dataclass(frozen=True)
class Constraint:
    """Refuses points. It is not applied to the default, which every space has."""

    name: str
    why: str
    """The reason, in words that follow "removed: "."""
    refuses: Callable[[Any], bool]
    """Whether it refuses a target's params."""


@dataclass(frozen=True)
class Idle:
    """A field, and the reason why it may have no effect."""

    field: str
    why: str


@dataclass(frozen=True)
class Rules:
    """Everything that is known about a space before anything is rendered."""

    constraints: tuple[Constraint, ...]
    idle: tuple[Idle, ...]
    work: Callable[[Any], Hashable]
    """A key for the work that a point makes a kernel do: points with equal keys run the same code."""
