"""Trains on many ranks and on one, and compares."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from support.sharded.cases import (
    RULES,
    Trained,
    Training,
    joined,
    train_rank,
    train_unsharded,
)
from support.sharded.ranks import run_ranks
from torch import Tensor

UNIT = 2.0**-24
"""By which a rounded fp32 sum is off, relative to its largest term: what another order of terms changes."""


TOLERANCE = {
    "sgd": 40 * UNIT,
    "momentum": 40 * UNIT,
    "nesterov": 40 * UNIT,
    "rowwise_adagrad": 40 * UNIT,
    "rowwise_adam": 40 * UNIT,
    "lars": 40 * UNIT,
    "adagrad": 100 * UNIT,
    "adam": 100 * UNIT,
    "rmsprop": 100 * UNIT,
    "ftrl": 100 * UNIT,
    "lamb": 100 * UNIT,
}
"""By rule, what results, rows and states may differ after 20 steps, relative to the largest number of the tensor, where
sums have their terms in another order. A step's sums have few terms and add a unit or two; rules that scale a whole
row by one number carry that on as it is: 20 times two. Rules that divide an element by a number of its own make a
relative error of a small gradient as large as one of the largest: more than twice that."""


def train_all(rank: int, size: int, trainings: Sequence[Training], options: dict[str, Any]) -> bytes:
    """What the ranks trained, and a share of the truths. As bytes: tensors cannot leave a process that ends.
    By torch.save, because pickle alone does not read 8-bit floats back."""
    truths = {training.name: train_unsharded(training) for training in trainings[rank::size]}
    stream = io.BytesIO()
    torch.save(([train_rank(rank, size, training, **options) for training in trainings], truths), stream)
    return stream.getvalue()


def check(trainings: Sequence[Training], size: int, **options: Any) -> None:
    """Trains all on fresh ranks and on one, and compares."""
    of_each = run_ranks(size, train_all, trainings, options, timeout=1800.0)
    found = [torch.load(io.BytesIO(trained), weights_only=False) for trained in of_each]
    truths = {name: truth for _, of_rank in found for name, truth in of_rank.items()}
    for number, training in enumerate(trainings):
        of_ranks = [trained[number] for trained, _ in found]
        for other in of_ranks[1:]:
            assert all(torch.equal(other.rows[name], rows) for name, rows in of_ranks[0].rows.items())
        compare(training, size, joined(of_ranks), truths[training.name])


def compare(training: Training, size: int, found: Trained, wanted: Trained) -> None:
    """Bits where all sums keep their order, else numbers within the rule's tolerance."""
    for table in training.spec.tables:
        rule = base_rule(training, table.name)
        features = [feature.name for feature in training.features(table.name)]
        pairs = {
            f"result of {name}, step {step}": (one[name], other[name])
            for step, (one, other) in enumerate(zip(found.results, wanted.results, strict=True))
            for name in features
        }
        pairs["rows"] = found.rows[table.name], wanted.rows[table.name]
        assert found.states[table.name].keys() == wanted.states[table.name].keys()
        for name, state in wanted.states[table.name].items():
            pairs[f"state {name}"] = found.states[table.name][name], state
        exact = training.keeps_order(table.name, size)
        for what, (mine, true) in pairs.items():
            off = difference(mine, true)
            allowed = 0.0 if exact else TOLERANCE[rule]
            where = f"{training.name}, {size} ranks, {table.name} ({dict(training.kinds)[table.name]}), rule {rule}"
            assert off <= allowed, f"{where}: {what} is off by {off / UNIT:.1f} units; allowed: {allowed / UNIT:g}"


def base_rule(training: Training, table: str) -> str:
    """The rule of a table; of one that is not trained, whose results are sums nevertheless, the plainest."""
    found = training.rule(table)
    return next((name for name, optimizer in RULES.items() if type(optimizer) is type(found)), "sgd")


def difference(mine: Tensor, true: Tensor) -> float:
    """The largest, relative to the largest number; infinite where one is not a number."""
    assert mine.shape == true.shape and mine.dtype == true.dtype
    if torch.equal(mine, true):
        return 0.0
    off = (mine - true).abs().max() / true.abs().max()
    return float(torch.where(off.isfinite(), off, torch.inf))
