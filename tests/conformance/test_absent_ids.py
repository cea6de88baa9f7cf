"""A padding id that is no row is absent, as every id that is no row is with `bounds_check="zero"`."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from conformance.backends import collection, device_of, every_backend
from conformance.training import differing, snapshot
from torch import Tensor

from embforge import optim
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection

ROWS = 9
PADDING = (-1, ROWS, -1, 2**40, -7)
"""Ids that are no rows."""
SPEC = CollectionSpec(
    [TableSpec("t", ROWS, 8)],
    [
        *(
            FeatureSpec(kind.name, "t", kind.name, kind.name in ("mean", "none"), 4, padding)
            for kind, padding in zip(POOLINGS.values(), cycle(PADDING), strict=False)
        ),
        FeatureSpec("plain", "t"),
        FeatureSpec("row", "t", padding_idx=2),
    ],
    name="absent",
)
PLAIN = replace(SPEC, features=tuple(replace(f, padding_idx=2 if f.name == "row" else None) for f in SPEC.features))
BATCH = 3


def batch_of(backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Bags of rows and padding, one of padding alone, one empty."""
    ids, lengths = [], []
    for number, feature in enumerate(SPEC.features):
        padding = feature.padding_idx if feature.padding_idx is not None else 4
        bags: list[list[int]] = [[number % ROWS, padding, 3, 2], [padding], []]
        ids += [i for bag in bags for i in bag]
        lengths += [len(bag) for bag in bags]
    weights = torch.linspace(0.5, 2, len(ids), dtype=torch.float32)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return tuple(tensor.to(device_of(backend)) for tensor in (torch.tensor(ids), offsets, weights))  # type: ignore[return-value]


def made(spec: CollectionSpec, backend: str, bounds_check: str) -> EmbeddingCollection:
    torch.manual_seed(3)
    return collection(spec, backend, optimizer=optim.SGD(lr=0.5), bounds_check=bounds_check)


def stepped(module: EmbeddingCollection, backend: str) -> dict[str, Tensor]:
    """Results, rows after a step, and the gradient of weights."""
    values, offsets, weights = batch_of(backend)
    results = module.forward_dict(values, offsets, weights.requires_grad_())
    sum((k * r.pow(2)).sum() for k, r in enumerate(results.values(), 1)).backward()  # type: ignore[union-attr]
    assert weights.grad is not None
    return {**{name: r.detach() for name, r in results.items()}, "rows": module.weight("t"), "weights": weights.grad}


@every_backend
@pytest.mark.parametrize("bounds_check", ["error", "unchecked"])
def test_padding_ids_that_are_no_rows_are_absent(backend: str, bounds_check: Any) -> None:
    found = stepped(made(SPEC, backend, bounds_check), backend)
    wanted = stepped(made(PLAIN, "reference", "zero"), "reference")
    assert differing({name: tensor.cpu() for name, tensor in found.items()}, wanted) == []
    assert found["none"].shape[0] == 5 and not found["none"][1].any() and not found["concat"][1].any()


@every_backend
def test_other_ids_that_are_no_rows_are_mistakes(backend: str) -> None:
    module = made(SPEC, backend, "error")
    for number, feature in enumerate(SPEC.features):
        values, offsets, weights = batch_of(backend)
        values[offsets[number * BATCH]] = -2
        before = snapshot(module)
        told = f"feature '{feature.name}': id -2 of sample 0, position 0 is not (a row|an id)"
        with pytest.raises(IndexError, match=told):
            module.forward_dict(values, offsets, weights)
            module.check()
        assert differing(before, snapshot(module)) == []


def test_a_feature_without_padding_has_no_absent_id() -> None:
    module = made(SPEC, "cpu", "error")
    values, offsets, weights = batch_of("cpu")
    values[offsets[len(POOLINGS) * BATCH]] = -1  # as other features may have it
    with pytest.raises(IndexError, match="feature 'plain': id -1"):
        module.forward_dict(values, offsets, weights)
