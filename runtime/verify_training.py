"""Whether a backend trains a spec as the reference does: rows, states and weights' gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from embforge import optim
from embforge.codegen.errors import KernelBugError, RuleError
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.training import update_named
from embforge.training_run import Trained, training_run
from embforge.verify import VerifyRow

STEPS = 20
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


def optimizer_named(text: str) -> optim.Optimizer:
    """The optimizer that a rule's name with modifiers stands for, as `adam+l2`. `RuleError` names what is allowed."""
    name, *modifiers = text.lower().split("+")
    if update_named(text) is None or name not in CLASSES:
        raise RuleError(f"rule {text!r} has no run to verify; allowed: {', '.join(CLASSES)}, with modifiers")
    options = {key: value for modifier in modifiers for key, value in OPTIONS[modifier].items()}
    return CLASSES[name](lr=0.05, **options)


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
    for number, rule in enumerate(rules):
        progress("training", number, len(rules))
        optimizer = optimizer_named(rule)
        want = training_run(spec, optimizer, "reference", steps=steps, seed=seed)
        different: list[str] = []
        error = 0.0
        threads = (1, 2) if on == "cpu" else (1,)
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
    pairs = {name: (got.state[name], tensor) for name, tensor in want.state.items()}
    for step, (mine, theirs) in enumerate(zip(got.weight_gradients, want.weight_gradients, strict=True)):
        pairs[f"gradient of weights in step {step}"] = (mine, theirs)
    names = [name for name, (mine, theirs) in pairs.items() if not torch.equal(_bits(mine), _bits(theirs))]
    distances = [float((pairs[n][0].float() - pairs[n][1].float()).abs().max()) for n in names if pairs[n][0].numel()]
    return names, max(distances, default=0.0)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
