"""Checks that a backend trains a spec as the reference does: rows, states and gradients of weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from embforge import optim
from embforge.codegen.errors import KernelBugError, RuleError
from embforge.codegen.plans import numbers_named, update_named
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.verify.lookups import VerifyRow
from embforge.verify.training_run import TrainingResult, bits_of, training_run

STEPS = 20
ANY_NUMBER = 0.1
"""The value of a rule's number for which neither a class nor a file has a value."""
CLASSES: dict[str, type[optim.Optimizer]] = {
    "sgd": optim.SGD,
    "momentum": optim.Momentum,
    "nesterov": optim.Nesterov,
    "adagrad": optim.Adagrad,
    "rowwise_adagrad": optim.RowwiseAdagrad,
    "adam": optim.Adam,
    "rowwise_adam": optim.RowwiseAdam,
    "rmsprop": optim.RMSProp,
    "ftrl": optim.Ftrl,
    "lamb": optim.LAMB,
    "lars": optim.LARS,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "l2": {"weight_decay": 0.01},
    "decoupled": {"weight_decay": 0.01, "decoupled": True},
    "clip": {"max_row_norm": 0.5},
    "nearest": {"rounding": "nearest"},
}
"""The arguments of an optimizer that give it a modifier of `update_named`, with numbers that change its results."""


def optimizer_named(text: str) -> optim.Optimizer | None:
    """The optimizer for a text that `update_named` reads; None for `none`. `RuleError` names what is allowed."""
    update = update_named(text)
    if update is None:
        return None
    if text.endswith(".json"):
        return _optimizer_of(update, text)
    name, *modifiers = text.lower().split("+")
    options = {key: value for modifier in modifiers for key, value in OPTIONS[modifier].items()}
    return CLASSES[name](lr=0.05, **options)


def _optimizer_of(update: Update, file: str) -> optim.Optimizer:
    """An optimizer for the update in a file, with the numbers in the file, or `ANY_NUMBER` where it has none."""
    in_file = numbers_named(file)
    if unknown := [name for name in in_file if name not in update.rule.hyper]:
        raise RuleError(f"{file}: hyper_values has {unknown[0]!r}; the rule's are {', '.join(update.rule.hyper)}")
    numbers = tuple((name, in_file.get(name, ANY_NUMBER)) for name in update.rule.hyper)
    definition = optim.CustomRule(update.rule, numbers, ())
    return optim.Custom(lr=0.05, rounding=update.rounding, definition=definition, numbers=numbers)


def training_rows(
    spec: CollectionSpec,
    on: str,
    rules: Sequence[str],
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Iterator[VerifyRow]:
    """One row of the report per rule: it compares a run on the backend, with one thread and with two, with a run on the
    reference."""
    spec = spec.by_rows()
    for number, rule in enumerate(rules):
        progress("training", number, len(rules))
        optimizer = optimizer_named(rule)
        want = training_run(spec, optimizer, "reference", steps=steps, seed=seed)
        different: list[str] = []
        error = 0.0
        threads = (1, 2) if target_named(on).split == "threads" else (1,)
        detail = ""
        try:
            for count in threads:
                got = training_run(spec, optimizer, on, steps=steps, seed=seed, threads=count)
                names, distance = _differences(got, want)
                different += [f"{name} ({count} threads)" for name in names]
                error = max(error, distance)
        except KernelBugError as bug:
            detail, error = str(bug), float("inf")
        if different:
            detail = f"other bits than the reference: {', '.join(different)}"
        yield VerifyRow(f"training by {rule}, {steps} steps", len(threads), error, not detail, detail=detail)
    progress("training", len(rules), len(rules))


def _differences(got: TrainingResult, want: TrainingResult) -> tuple[list[str], float]:
    """The names of the tensors that differ in a bit, and the largest difference."""
    actual, expected = got.state | got.gradients, want.state | want.gradients
    absent = torch.zeros(0, dtype=torch.float32, device="cpu")
    pairs = {name: (actual.get(name, absent), expected.get(name, absent)) for name in actual | expected}
    names = [name for name, (first, second) in pairs.items() if not torch.equal(bits_of(first), bits_of(second))]
    return names, max((_distance(*pairs[name]) for name in names), default=0.0)


def _distance(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape:
        return float("inf")
    return float((first.float() - second.float()).abs().max())
