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
"""The rounding error of an fp32 sum, relative to its largest term: a different order of terms changes this much."""


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
"""By rule: how much results, rows and states may differ after 20 steps, relative to the tensor's largest number, if
sums have their terms in a different order. A step's sums have few terms and add one or two units. Rules that scale a
whole row by one number do not change this relative error: 20 times two. Rules that divide each element by a number of
its own make the relative error of a small gradient as important as that of the largest: more than twice as much."""


def train_all(rank: int, size: int, trainings: Sequence[Training], options: dict[str, Any]) -> bytes:
    """Trains on a rank, and also its share of the unsharded truths. Returns both as bytes, because tensors cannot leave
    a process that ends, written by torch.save, because pickle alone does not read 8-bit floats back."""
    truths = {training.name: train_unsharded(training) for training in trainings[rank::size]}
    stream = io.BytesIO()
    torch.save(([train_rank(rank, size, training, **options) for training in trainings], truths), stream)
    return stream.getvalue()


def check(trainings: Sequence[Training], size: int, **options: Any) -> None:
    """Trains all on new ranks and on one process, and compares."""
    of_each = run_ranks(size, train_all, trainings, options, timeout=1800.0)
    found = [torch.load(io.BytesIO(trained), weights_only=False) for trained in of_each]
    truths = {name: truth for _, of_rank in found for name, truth in of_rank.items()}
    for number, training in enumerate(trainings):
        of_ranks = [trained[number] for trained, _ in found]
        for other in of_ranks[1:]:
            assert all(torch.equal(other.rows[name], rows) for name, rows in of_ranks[0].rows.items())
        compare(training, size, joined(of_ranks), truths[training.name])


def compare(training: Training, size: int, found: Trained, wanted: Trained) -> None:
    """Compares bits if all sums keep their order, otherwise numbers within the rule's tolerance."""
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
    """The name of a table's rule; "sgd" for a table that is not trained, because its results are sums too."""
    found = training.rule(table)
    return next((name for name, optimizer in RULES.items() if type(optimizer) is type(found)), "sgd")


def difference(mine: Tensor, true: Tensor) -> float:
    """The largest difference relative to the largest number; infinite if it is NaN."""
    assert mine.shape == true.shape and mine.dtype == true.dtype
    if torch.equal(mine, true):
        return 0.0
    off = (mine - true).abs().max() / true.abs().max()
    return float(torch.where(off.isfinite(), off, torch.inf))
