"""What a timed training step computes: the gradients it is fed, its rule's formula, and a check that it followed it.

Nobody is timed computing something else: before the clock starts, every contender makes two steps, and its new rows
are compared with its rule's formula in fp64 on gradients that torch's autograd takes through the reference lookup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.dtypes import FLOATS, TABLE_DTYPES
from embforge.codegen.layout import layout_of
from embforge.codegen.poolings import Shape
from embforge.codegen.spec import CollectionSpec
from embforge.launch.reference.forward import lookup
from embforge.number_formats import torch_dtype
from embforge.tuner.bench.update_limit import distinct_rows
from embforge.tuner.workload.workload import Batch, Ints

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
LR = 0.1
EPS = 1.0
ADAM_EPS = 0.03
"""Large, so that a rule which divides by |g| does not turn the rounding of a gradient near zero into another sign."""
BETAS = (0.9, 0.999)

TOLERANCE = {torch_dtype(name): max(2e-5, 2.08 * FLOATS[name].resolution) for name in TABLE_DTYPES}
"""How far a row may be from its formula, relative to the largest number and times the root of the row's occurrences:
some libraries round to the table's type after each. Two roundings of a row are allowed, be they stochastic. But for
formats of 8 bits, they are well below what a step moves a row by (about `LR`)."""

States = list[Tensor]
Formula = Callable[[Tensor, Tensor, States, int], Tensor]
"""From rows, their gradients, two states (changed in place) and the step's number to the new rows."""


@dataclass(frozen=True)
class Gradients:
    """What a step's outputs are fed: the same random numbers for everyone, exact in bf16."""

    joint: Tensor
    """`[B, output width]`: of all features that have columns there."""
    parts: tuple[Tensor, ...]
    """A tensor a feature."""


@dataclass(frozen=True, eq=False)
class Trainee:
    """A contender whose `run` is a whole training step on tables of its own."""

    name: str
    note: str
    formula: str
    """The rule it follows, of `FORMULAS`."""
    prepare: Callable[[Batch], Any]
    run: Callable[[Any], Any]
    rows: Callable[[int, Tensor], Tensor]
    """The present rows of a table by their numbers."""


class Checked(NamedTuple):
    """How far a contender's rows are from its formula, in its tolerance's measure, and whether that is rounding."""

    difference: float
    agrees: bool


def gradients_of(spec: CollectionSpec) -> Callable[[Batch], Gradients]:
    """A function from batches to their gradients, which depend on shapes alone and are made once a shape."""
    layout = layout_of(spec)

    @cache
    def numbers(rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows * 31 + columns)
        return torch.randn(rows, columns, generator=generator).bfloat16().float()

    def make(batch: Batch) -> Gradients:
        joint = numbers(batch.size, layout.output_width)
        parts = []
        for placed in layout.features:
            if placed.column is None:
                where = batch.feature(placed.index)
                parts.append(numbers(where.stop - where.start, placed.dim))
            else:
                parts.append(joint[:, placed.column : placed.column + placed.width])
        return Gradients(joint, tuple(parts))

    return make


def check(trainee: Trainee, spec: CollectionSpec, batches: Sequence[Batch]) -> Checked:
    """Lets the contender make a step a batch, and compares the rows that they touch with its formula's."""
    touched = [distinct_rows(spec, batch) for batch in batches]
    used = [torch.from_numpy(np.unique(np.concatenate(rows))) for rows in zip(*touched, strict=True)]
    start = [trainee.rows(index, rows) for index, rows in enumerate(used)]
    for batch in batches:
        trainee.run(trainee.prepare(batch))
    end = [trainee.rows(index, rows) for index, rows in enumerate(used)]
    expected = expected_rows(spec, trainee.formula, batches, used, [rows.double().cpu() for rows in start])
    occurrences = _occurrences(spec, batches, used)
    worst = Checked(0.0, True)
    for got, wanted, count in zip(end, expected, occurrences, strict=True):
        if not wanted.numel():
            continue
        error = (got.double().cpu() - wanted).abs() / count.sqrt()[:, None]
        difference = float(error.max() / wanted.abs().max().clamp(min=1e-30))
        agrees = difference <= TOLERANCE[got.dtype]  # a NaN does not
        worst = Checked(max(worst.difference, difference), worst.agrees and agrees)
    return worst


def expected_rows(
    spec: CollectionSpec, formula: str, batches: Sequence[Batch], used: Sequence[Tensor], start: Sequence[Tensor]
) -> list[Tensor]:
    """Rows `used` (sorted, all that the batches touch) of every table after a step a batch, in fp64."""
    # Padding ids are given as absent ones: neither takes part in a gradient, whatever the pooling.
    plain = replace(spec, features=tuple(replace(f, padding_idx=None) for f in spec.features))
    gradients = gradients_of(spec)
    rows = [r.clone() for r in start]
    states = [[torch.zeros_like(r), torch.zeros_like(r)] for r in rows]
    for step, batch in enumerate(batches, 1):
        leaves = [r.clone().requires_grad_() for r in rows]
        ids, touched = _compact(spec, batch, used)
        weights = None if batch.weights is None else torch.from_numpy(batch.weights).double()
        offsets = torch.from_numpy(batch.offsets).long()
        pooled, sequence = lookup(
            plain, ids, offsets, weights, leaves, bounds_check="zero", accumulate_dtype=torch.float64
        )
        fed = gradients(batch)
        flat = [p.flatten() for p, f in zip(fed.parts, spec.features, strict=True) if f.kind.shape is Shape.SEQUENCE]
        incoming = torch.cat([torch.empty(0), *flat]).double()
        ((pooled * fed.joint.double()).sum() + (sequence * incoming).sum()).backward()
        for table, leaf in enumerate(leaves):
            at = touched[table]
            if leaf.grad is None or not at.numel():
                continue
            state = [s[at] for s in states[table]]
            rows[table][at] = FORMULAS[formula](rows[table][at], leaf.grad[at], state, step)
            for kept, new in zip(states[table], state, strict=True):
                kept[at] = new
    return rows


def _compact(spec: CollectionSpec, batch: Batch, used: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Ids as positions in `used` (-1: padding), and the positions that occur, a table."""
    ids = torch.from_numpy(batch.values.astype(np.int64))
    seen: list[list[Tensor]] = [[] for _ in spec.tables]
    for placed in layout_of(spec).features:
        where = batch.feature(placed.index)
        positions = torch.searchsorted(used[placed.table_index], ids[where])
        if placed.feature.padding_idx is not None:
            positions[ids[where] == placed.feature.padding_idx] = -1
        ids[where] = positions
        seen[placed.table_index].append(positions[positions >= 0])
    return ids, [torch.cat(parts).unique() if parts else torch.empty(0, dtype=torch.int64) for parts in seen]


def _occurrences(spec: CollectionSpec, batches: Sequence[Batch], used: Sequence[Tensor]) -> list[Tensor]:
    """How often each used row occurs in all batches, at least 1."""
    counts = [torch.ones(rows.numel(), dtype=torch.float64) for rows in used]
    for batch in batches:
        for placed in layout_of(spec).features:
            found: Ints = batch.values[batch.feature(placed.index)].astype(np.int64)
            at = torch.searchsorted(used[placed.table_index], torch.from_numpy(found))
            counts[placed.table_index].index_add_(0, at, torch.ones(at.numel(), dtype=torch.float64))
    return counts


def _sgd(w: Tensor, g: Tensor, states: States, t: int) -> Tensor:
    return w - LR * g


def _adagrad(w: Tensor, g: Tensor, states: States, t: int) -> Tensor:
    states[0] += g * g
    return w - LR * g / (states[0].sqrt() + EPS)


def _rowwise_adagrad(w: Tensor, g: Tensor, states: States, t: int) -> Tensor:
    states[0] += (g * g).mean(1, keepdim=True)
    return w - LR * g / (states[0].sqrt() + EPS)


def _adam(w: Tensor, g: Tensor, states: States, t: int) -> Tensor:
    first, second = _moments(g, states)
    return w - LR * (first / (1 - BETAS[0] ** t)) / ((second / (1 - BETAS[1] ** t)).sqrt() + ADAM_EPS)


def _sparse_adam(w: Tensor, g: Tensor, states: States, t: int) -> Tensor:
    """As torch.optim.SparseAdam has it: eps is added before the second moment's bias is corrected."""
    first, second = _moments(g, states)
    return w - LR * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t) * first / (second.sqrt() + ADAM_EPS)


def _moments(g: Tensor, states: States) -> tuple[Tensor, Tensor]:
    states[0] += (1 - BETAS[0]) * (g - states[0])
    states[1] += (1 - BETAS[1]) * (g * g - states[1])
    return states[0], states[1]


FORMULAS: dict[str, Formula] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "sparse_adam": _sparse_adam,
}
