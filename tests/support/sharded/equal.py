"""Any number of ranks train as one does: every kind of plan, pooling and rule, against the unsharded collection."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.sharded.ranks import run_ranks
from support.sharded.cases import (
    KINDS,
    RULES,
    VARIANTS,
    Trained,
    Training,
    by_table,
    every_kind,
    joined,
    one_kind,
    train_rank,
    train_unsharded,
)
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

ON_RANKS = {
    size: [every_kind(rule) for number, rule in enumerate(RULES) if number % 4 + 1 == size] for size in (1, 2, 3, 4)
}
"""All rules; each with another number of ranks than its neighbours. `make soak` trains all on all."""
for _number, _kind in enumerate(KINDS):
    ON_RANKS[2 + _number % 3].append(replace(one_kind(_kind), steps=5))
for _size in (2, 3):
    ON_RANKS[_size].append(by_table())


def test_any_two_choices_meet() -> None:
    """Of kind, pooling with or without weights, rule."""
    met: set[Any] = set()
    for rule in RULES:
        training = every_kind(rule)
        for feature in training.spec.features:
            choices = (dict(training.kinds)[feature.table], (feature.pooling, feature.weighted), rule)
            met |= {(choices[i], choices[j]) for i, j in ((0, 1), (0, 2), (1, 2))}
    assert met == {*product(KINDS, VARIANTS), *product(KINDS, RULES), *product(VARIANTS, RULES)}


def train_all(rank: int, size: int, trainings: Sequence[Training], options: dict[str, Any]) -> bytes:
    """What the ranks trained, and a share of the truths. As bytes: tensors cannot leave a process that ends."""
    truths = {training.name: train_unsharded(training) for training in trainings[rank::size]}
    return pickle.dumps(([train_rank(rank, size, training, **options) for training in trainings], truths))


def check(trainings: Sequence[Training], size: int, **options: Any) -> None:
    """Trains all on fresh ranks and on one, and compares."""
    found = [pickle.loads(trained) for trained in run_ranks(size, train_all, trainings, options, timeout=1800.0)]
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


@pytest.mark.parametrize("size", ON_RANKS)
def test_ranks_train_as_one(size: int) -> None:
    check(ON_RANKS[size], size)


def test_compiled_kernels_train_as_one() -> None:
    """The kernels of the CPU on two ranks: rows one by one and pooled, by a rule that needs whole rows."""
    kinds = (("t0", "modulo"), ("t1", "column_wise"))
    check([replace(one_kind("modulo", "rowwise_adagrad"), kinds=kinds)], 2, backend="cpu")


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "lamb"])
def test_columns_on_unequal_numbers_of_ranks_train_as_one(rule: str) -> None:
    """A grid of two pieces on three ranks: one lies on two of them, the other on one, and the rules need whole rows."""
    check([one_kind("grid", rule)], 3)


@pytest.mark.soak
@pytest.mark.parametrize("size", ON_RANKS)
def test_every_rule_on_any_number_of_ranks(size: int) -> None:
    check([*map(every_kind, RULES), *map(one_kind, KINDS)], size)


@pytest.mark.soak
@pytest.mark.parametrize("size", ON_RANKS)
def test_compiled_kernels_train_all_as_one(size: int) -> None:
    check(ON_RANKS[size], size, backend="cpu")


@pytest.mark.soak
def test_emulated_gpus_train_as_one() -> None:
    """The CUDA kernels, run by the emulator, exchanging with gloo."""
    kinds = (("t0", "modulo"), ("t1", "column_wise"))
    check([replace(one_kind("modulo"), kinds=kinds, steps=3)], 2, backend="simt")
