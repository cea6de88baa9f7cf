"""The definition of update rules in plain torch operations. The generated code is tested against its bits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.program import Choice, Definition, Kind, Node, Number, Operation, Reduction
from embforge.codegen.rules.rule import HYPER, Update
from embforge.codegen.semantics import ROW_LANES
from embforge.launch.reference.forward import ieee_sqrt

Value = np.float64 | Tensor
"""A scalar in fp64, a row's numbers [n, 1] or elements [n, D]."""


def apply_rule(
    update: Update,
    hyper: Sequence[float],
    t: int,
    g: Tensor,
    w: Tensor,
    states: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the new rows and the new states of n rows. `g` (gradients) and `w` (weights) are [n, D]; a state is
    [n, D], or [n] if it has one number per row. `t` is the number of the step.

    `hyper` has the numbers that a kernel gets: those of `HYPER`, then the rule's own. With float32 every operation is
    IEEE and rounded, as in the generated code; with float64 the same formulas are computed without that rounding.
    """
    return Evaluation(update, hyper, t, g, w, states, dtype).results()


def row_sum(x: Tensor) -> Tensor:
    """Adds up each row, [n, D] -> [n]: in `ROW_LANES` interleaved sums, which are then added by halves."""
    rows, dim = x.shape
    depth = -(-dim // ROW_LANES)
    padded = torch.nn.functional.pad(x, (0, depth * ROW_LANES - dim)).view(rows, depth, ROW_LANES)
    lanes = torch.zeros((rows, ROW_LANES), dtype=x.dtype, device=x.device)
    for step in range(depth):
        lanes = lanes + padded[:, step]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


class Evaluation:
    """One evaluation of a rule: runs the steps of its program in order and keeps their values by name."""

    def __init__(
        self,
        update: Update,
        hyper: Sequence[float],
        t: int,
        g: Tensor,
        w: Tensor,
        states: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.program = program_of(update.rule)
        self.dtype = dtype
        self.t = t
        self.shapes = {Kind.ROW: (g.shape[0], 1), Kind.ELEMENT: tuple(g.shape)}
        self.device = g.device
        numbers = zip((*HYPER, *update.rule.hyper), hyper, strict=True)
        self.values: dict[str, Value] = {name: np.float64(number) for name, number in numbers}
        self.values |= {"t": np.float64(t), "g": g.to(dtype), "w": w.to(dtype)}
        for state in update.rule.states:
            old = states[state.name].to(dtype)
            self.values[state.name] = old if state.extent == "element" else old[:, None]

    def results(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs the program. Returns the new rows and the new states by name."""
        with np.errstate(all="ignore"):  # IEEE defines the result of a division by zero
            for step in self.program.steps:
                if isinstance(step, Reduction):
                    self.values[step.name] = self.reduced(step)
                else:
                    self.define(step)
        results = {name: self.tensor(self.values[result.name]) for name, result in self.program.results}
        rows = {state.name for state in self.program.rule.states if state.extent == "row"}
        new = {name: (value[:, 0] if name in rows else value).contiguous() for name, value in results.items()}
        return new.pop("w"), new

    def define(self, step: Definition) -> None:
        """Evaluates a step and keeps its value under its name."""
        value = self.value(step.value)
        if step.kind != Kind.SCALAR:
            value = self.tensor(value).expand(self.shapes[step.kind])
        self.values[step.name] = value

    def reduced(self, step: Reduction) -> Tensor:
        """The value of a reduction over rows: a sum, mean or norm."""
        x = self.tensor(self.value(step.value))
        total = row_sum(x * x if step.fold == "norm" else x)[:, None]
        if step.fold == "mean":
            return total / torch.full((1, 1), float(x.shape[1]), dtype=self.dtype, device=self.device)
        return ieee_sqrt(total) if step.fold == "norm" else total

    def tensor(self, value: Value) -> Tensor:
        """The value as a tensor; a scalar is rounded to the dtype here. Tensors are never combined with Python numbers,
        because torch may divide by those in its own way."""
        if isinstance(value, Tensor):
            return value
        return torch.full((1, 1), float(value), dtype=torch.float64, device=self.device).to(self.dtype)

    def value(self, node: Node) -> Value:
        """The value of an expression."""
        if isinstance(node, Number):
            return np.float64(node.value)
        if not isinstance(node, Operation | Choice):
            return self.values[node.name]
        operands = [self.value(operand) for operand in node.operands]
        if node.kind == Kind.SCALAR:
            return self.scalar(node, [np.float64(operand) for operand in operands])
        tensors = [self.tensor(operand) for operand in operands]
        if isinstance(node, Choice):
            left, right, yes, no = tensors
            return torch.where(_RELATIONS[node.relation](left, right), yes, no)
        computed: Tensor = _computed(node.operator, tensors)
        return computed

    def scalar(self, node: Operation | Choice, operands: list[np.float64]) -> np.float64:
        """The value of an operation on scalars."""
        if isinstance(node, Choice):
            left, right, yes, no = operands
            return yes if _RELATIONS[node.relation](left, right) else no
        if node.operator == "power":
            return power(operands[0], self.t)
        return np.float64(_computed(node.operator, operands))


def power(base: np.float64, exponent: int) -> np.float64:
    """The power by squaring, from the lowest bit of the exponent: the same roundings as in the generated code. It is 1
    for an exponent of 0 or less."""
    result = np.float64(1.0)
    while exponent > 0:
        if exponent & 1:
            result = result * base
        base, exponent = base * base, exponent >> 1
    return result


_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def _computed(name: str, operands: Sequence[Any]) -> Any:
    """One operation on tensors, or on scalars."""
    first = operands[0]
    if name == "abs":
        return abs(first)
    if name == "sqrt":
        return ieee_sqrt(first) if isinstance(first, Tensor) else np.sqrt(first)
    if len(operands) == 1:
        return -first
    second = operands[1]
    if name in _OPERATORS:
        return _OPERATORS[name](first, second)
    takes_first = first < second if name == "min" else first > second
    if isinstance(first, Tensor):
        return torch.where(takes_first, first, second)
    return first if takes_first else second
