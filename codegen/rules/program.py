"""The form of a checked rule: a list of steps, each of which names a value of the call, of a row or of an element.

Each name is assigned once (a second assignment makes a new name), so a step means the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from embforge.codegen.rules.rule import Rule


class Kind(IntEnum):
    """How often a value exists. An operation has the largest kind of its operands."""

    SCALAR = 0
    """Once per call: computed in fp64 from `lr`, `t`, hyper numbers and literals; rounded to fp32 where a row or an
    element uses it."""
    ROW = 1
    """Once per row, in fp32."""
    ELEMENT = 2
    """Once per element, in fp32."""


@dataclass(frozen=True)
class Number:
    """A literal."""

    value: float
    kind: Kind = Kind.SCALAR


@dataclass(frozen=True)
class Input:
    """A value that exists before the rule runs: `lr`, `t`, a hyper number, `g`, `w`, or an old state."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Reference:
    """The value of an earlier step."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Operation:
    """`+ - * /` (two operands; `-` also one), `sqrt`, `abs`, `min`, `max`, `power` (of a scalar, by `t`)."""

    operator: str
    operands: tuple[Node, ...]
    kind: Kind


@dataclass(frozen=True)
class Choice:
    """`yes` where `left relation right` is true, otherwise `no`. Both are computed."""

    relation: str
    left: Node
    right: Node
    yes: Node
    no: Node
    kind: Kind

    @property
    def operands(self) -> tuple[Node, ...]:
        return (self.left, self.right, self.yes, self.no)


Node = Number | Input | Reference | Operation | Choice
Fold = Literal["sum", "mean", "norm"]


@dataclass(frozen=True)
class Definition:
    """`name = value`. The kind may be larger than the value's: a new `w` is an element even if it is 0."""

    name: str
    value: Node
    kind: Kind


@dataclass(frozen=True)
class Reduction:
    """`name = fold(value)`: one number of a row, computed from its elements."""

    name: str
    fold: Fold
    value: Node
    text: str
    """The expression as the rule has it, for comments."""
    kind: Kind = Kind.ROW


Step = Definition | Reduction


@dataclass(frozen=True)
class Program:
    """A checked rule. `results` refer to the steps that hold the new `w` and the new states, in that order."""

    rule: Rule
    lines: tuple[str, ...]
    """The rule's statements in a uniform spelling."""
    steps: tuple[Step, ...]
    results: tuple[tuple[str, Reference], ...]

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        return tuple(step for step in self.steps if isinstance(step, Reduction))


def nodes_of(node: Node) -> Iterator[Node]:
    """The node and all below it, operands first."""
    if isinstance(node, Operation | Choice):
        for operand in node.operands:
            yield from nodes_of(operand)
    yield node
