"""Whether a backend trains a spec as the reference does: rows, states and weights' gradients, bit for bit."""

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
from embforge.verify.training_run import Trained, bits_of, training_run

STEPS = 20
ANY_NUMBER = 0.1
"""For numbers of a rule of which nothing is known."""
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
"""Numbers that make a modifier of a rule's name show."""


def optimizer_named(text: str) -> optim.Optimizer | None:
    """The optimizer that a text names as `update_named` says; None for `none`. `RuleError` names what is allowed."""
    update = update_named(text)
    if update is None:
        return None
    if text.endswith(".json"):
        return _optimizer_of(update, text)
    name, *modifiers = text.lower().split("+")
    options = {key: value for modifier in modifiers for key, value in OPTIONS[modifier].items()}
    return CLASSES[name](lr=0.05, **options)


def _optimizer_of(update: Update, file: str) -> optim.Optimizer:
    """A rule that is known only as such: with the file's numbers, or any."""
    given = numbers_named(file)
    if unknown := [name for name in given if name not in update.rule.hyper]:
        raise RuleError(f"{file}: hyper_values has {unknown[0]!r}; the rule's are {', '.join(update.rule.hyper)}")
    numbers = tuple((name, given.get(name, ANY_NUMBER)) for name in update.rule.hyper)
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
    """A row a rule: the same run on the backend, with one thread and with two, and on the reference."""
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
                found, distance = _differences(got, want)
                different += [f"{name} ({count} threads)" for name in found]
                error = max(error, distance)
        except KernelBugError as bug:
            detail, error = str(bug), float("inf")
        if different:
            detail = f"other bits than the reference: {', '.join(different)}"
        yield VerifyRow(f"training by {rule}, {steps} steps", len(threads), error, not detail, detail=detail)
    progress("training", len(rules), len(rules))


def _differences(got: Trained, want: Trained) -> tuple[list[str], float]:
    found, wanted = got.state | got.gradients, want.state | want.gradients
    absent = torch.zeros(0, dtype=torch.float32, device="cpu")
    pairs = {name: (found.get(name, absent), wanted.get(name, absent)) for name in found | wanted}
    names = [name for name, (mine, theirs) in pairs.items() if not torch.equal(bits_of(mine), bits_of(theirs))]
    return names, max((_distance(*pairs[name]) for name in names), default=0.0)


def _distance(mine: Tensor, theirs: Tensor) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    return float((mine.float() - theirs.float()).abs().max())
