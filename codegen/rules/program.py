"""What a checked rule is: a list of steps, each of which gives a name to a number, a row's number or an element's.

Names are given once (a second assignment makes a new name), so a step means the same wherever it is computed.
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
    """Once a call: made of `lr`, `t`, hyper numbers and literals, in fp64; rounded to fp32 where it meets others."""
    ROW = 1
    """Once a row, fp32."""
    ELEMENT = 2
    """Once an element, fp32."""


@dataclass(frozen=True)
class Number:
    """A literal."""

    value: float
    kind: Kind = Kind.SCALAR


@dataclass(frozen=True)
class Input:
    """What the rule is given: `lr`, `t`, a hyper number, `g`, `w`, or a state as it was."""

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
    """`yes` where `left relation right`, else `no`. Both are computed."""

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
    """`name = fold(value)`: the row's number from its elements."""

    name: str
    fold: Fold
    value: Node
    text: str
    """As the rule has it."""
    kind: Kind = Kind.ROW


Step = Definition | Reduction


@dataclass(frozen=True)
class Program:
    """A rule that was checked. `results` are the steps that hold the new `w` and the new states, in that order."""

    rule: Rule
    lines: tuple[str, ...]
    """The rule's statements, spelled uniformly."""
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
