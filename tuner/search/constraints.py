"""What a constraint is: data with a sentence for people. Those of a target stand in `constraints_cpu` and `_cuda`.

Two kinds remove a point. A `Constraint` refuses one that cannot work, or that gives something up for nothing. An `Idle`
field does nothing at some points: of those that differ in it alone and do the same work, one is kept.
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
    """What a space is for."""

    op: str
    """forward or backward."""
    target: str
    arch: str
    spec: CollectionSpec
    hardware: Hardware
    update: Update | None = None
    id_dtype: str = "int64"
    longest_bag: int | None = None
    """Most ids that a bag of the traffic holds; None: not known."""

    def plan(self, params: Params) -> Plan:
        """The plan of a point. A backward without an update is a reduction."""
        op = "reduce" if self.op == "backward" and self.update is None else self.op
        return Plan(op, self.target, self.arch, self.id_dtype, self.spec, params, self.update)


@dataclass(frozen=True)
class Constraint:
    """Refuses points. It is never asked about the default, which every space has."""

    name: str
    why: str
    """The reason, in words that go on from "removed: "."""
    refuses: Callable[[Any], bool]
    """Of a target's params."""


@dataclass(frozen=True)
class Idle:
    """A field and why it may have nothing to act on."""

    field: str
    why: str


@dataclass(frozen=True)
class Rules:
    """All that is known of a space before anything is rendered."""

    constraints: tuple[Constraint, ...]
    idle: tuple[Idle, ...]
    work: Callable[[Any], Hashable]
    """What a point's params make a kernel do: points of equal work differ in nothing that runs."""
