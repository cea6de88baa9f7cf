"""What a timed training step computes: its incoming gradients, its rule's formula, and a check of its results.

No contender may gain by computing something else: before the clock starts, each makes two steps, and its new rows are
compared with its rule's formula in fp64, on gradients that torch's autograd takes through the reference lookup.
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
"""Large: Adam divides by about |g|, and with a small eps the rounding of a gradient near zero could flip the sign of a
whole step."""
BETAS = (0.9, 0.999)

TOLERANCE = {torch_dtype(name): max(2e-5, 2.08 * FLOATS[name].resolution) for name in TABLE_DTYPES}
"""How far a row may be from its formula, relative to the largest number. It is multiplied by the root of the row's
occurrences, because some libraries round to the table's type after each. Two roundings of a row are allowed, stochastic
or not. Except for 8-bit formats they are much smaller than a step's change of a row (about `LR`)."""

States = list[Tensor]
Formula = Callable[[Tensor, Tensor, States, int], Tensor]
"""Returns the new rows; takes rows, their gradients, two states (changed in place) and the number of the step."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step's outputs: the same random numbers for every contender, exact in bf16."""

    joint: Tensor
    """`[B, output width]`: the gradient of the pooled output, which holds all features that are no sequences."""
    by_feature: tuple[Tensor, ...]
    """One gradient per feature, in the spec's order."""


@dataclass(frozen=True, eq=False)
class Trainee:
    """A contender whose `run` is a whole training step on its own tables."""

    name: str
    note: str
    formula: str
    """The key in `FORMULAS` of the formula that it follows."""
    prepare: Callable[[Batch], Any]
    run: Callable[[Any], Any]
    rows: Callable[[int, Tensor], Tensor]
    """Returns rows as they are now; takes the index of the table and the numbers of the rows."""


class Checked(NamedTuple):
    """How far a contender's rows are from its formula (in the measure of `TOLERANCE`), and whether that is rounding."""

    difference: float
    agrees: bool


def gradients_of(spec: CollectionSpec) -> Callable[[Batch], Gradients]:
    """A function that returns a batch's gradients. They depend on shapes alone and are made once per shape."""
    layout = layout_of(spec)

    @cache
    def numbers(rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows * 31 + columns)
        return torch.randn(rows, columns, generator=generator).bfloat16().float()

    def make(batch: Batch) -> Gradients:
        joint = numbers(batch.size, layout.output_width)
        by_feature = []
        for feature in layout.features:
            if feature.column is None:
                where = batch.feature(feature.index)
                by_feature.append(numbers(where.stop - where.start, feature.dim))
            else:
                by_feature.append(joint[:, feature.column : feature.column + feature.width])
        return Gradients(joint, tuple(by_feature))

    return make


def check(trainee: Trainee, spec: CollectionSpec, batches: Sequence[Batch]) -> Checked:
    """Lets the contender make one step per batch, and compares the rows of these batches with its formula's rows."""
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
        agrees = difference <= TOLERANCE[got.dtype]  # false for NaN
        worst = Checked(max(worst.difference, difference), worst.agrees and agrees)
    return worst


def expected_rows(
    spec: CollectionSpec, formula: str, batches: Sequence[Batch], used: Sequence[Tensor], start: Sequence[Tensor]
) -> list[Tensor]:
    """The rows of every table after one step per batch by a formula, in fp64.

    `used` holds each table's sorted row numbers, at least those in the batches; `start` holds these rows' first values.
    """
    # Padding ids are passed as absent ids (-1): neither takes part in a gradient, whatever the pooling.
    plain = replace(spec, features=tuple(replace(f, padding_idx=None) for f in spec.features))
    make_gradients = gradients_of(spec)
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
        gradients = make_gradients(batch)
        by_feature = zip(gradients.by_feature, spec.features, strict=True)
        flat = [g.flatten() for g, feature in by_feature if feature.kind.shape is Shape.SEQUENCE]
        of_sequences = torch.cat([torch.empty(0), *flat]).double()
        ((pooled * gradients.joint.double()).sum() + (sequence * of_sequences).sum()).backward()
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
    """The batch's ids as positions in `used` (-1 for padding), and for each table the positions that occur."""
    ids = torch.from_numpy(batch.values.astype(np.int64))
    seen: list[list[Tensor]] = [[] for _ in spec.tables]
    for feature in layout_of(spec).features:
        where = batch.feature(feature.index)
        positions = torch.searchsorted(used[feature.table_index], ids[where])
        if feature.feature.padding_idx is not None:
            positions[ids[where] == feature.feature.padding_idx] = -1
        ids[where] = positions
        seen[feature.table_index].append(positions[positions >= 0])
    return ids, [torch.cat(of_table).unique() if of_table else torch.empty(0, dtype=torch.int64) for of_table in seen]


def _occurrences(spec: CollectionSpec, batches: Sequence[Batch], used: Sequence[Tensor]) -> list[Tensor]:
    """For each table: how often each used row occurs in all batches together, at least 1."""
    counts = [torch.ones(rows.numel(), dtype=torch.float64) for rows in used]
    for batch in batches:
        for feature in layout_of(spec).features:
            ids: Ints = batch.values[batch.feature(feature.index)].astype(np.int64)
            at = torch.searchsorted(used[feature.table_index], torch.from_numpy(ids))
            counts[feature.table_index].index_add_(0, at, torch.ones(at.numel(), dtype=torch.float64))
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
    """Adam as torch.optim.SparseAdam computes it: eps is added before the second moment's bias is corrected."""
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
