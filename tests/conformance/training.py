"""Helpers for tests of training: a small collection, its batches, and all that a backward may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conformance.backends import collection, device_of
from torch import Tensor

from embforge import optim
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.verify.cases import Case, draw_batch

SPEC = CollectionSpec(
    [TableSpec("a", 60, 15), TableSpec("b", 12, 4, "bf16")],
    [FeatureSpec("x", "a", weighted=True), FeatureSpec("y", "b", "mean"), FeatureSpec("z", "a", "max")],
    name="trained",
)
WITH_ROWS = CollectionSpec(SPEC.tables, [*SPEC.features, FeatureSpec("s", "a", "none")], name="trained_rows")
ONE = CollectionSpec([TableSpec("t", 9, 5)], [FeatureSpec("f", "t")])
trained_backend = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")),
    ],
)
"""For tests that do not depend on a kernel: simt's images take seconds to build, and few tests need them."""


def trained(backend: Any = "reference", spec: CollectionSpec = SPEC, **more: Any) -> EmbeddingCollection:
    """A module that trains by Adam unless `more` says otherwise. Modules with equal arguments start with equal rows."""
    torch.manual_seed(7)
    return collection(spec, backend, **{"optimizer": optim.Adam(lr=0.1)} | more)


def sgd() -> dict[str, Any]:
    """Arguments of a module whose updates are linear in the gradients."""
    return {"optimizer": optim.SGD(lr=0.5, rounding="nearest")}


def draw(backend: Any = "reference", seed: int = 0, spec: CollectionSpec = SPEC, size: int = 6) -> Any:
    """Draws ids, offsets and weights."""
    return draw_batch(spec, Case(size), seed, device_of(backend))


def snapshot(module: EmbeddingCollection) -> dict[str, Tensor]:
    """All that training changes: rows, states, counters."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of tensors whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def steps(module: EmbeddingCollection) -> int:
    """The number of updates so far."""
    return int(module.state_dict()["optim.step"])


@contextmanager
def nothing_changes(module: EmbeddingCollection) -> Iterator[None]:
    """Asserts that the block changes no rows, states and counters."""
    before = snapshot(module)
    yield
    assert differing(before, snapshot(module)) == []


def verdict(module: EmbeddingCollection) -> float:
    """The sum of what the backward passes reported to a gradient scaler since `zero_grad()`."""
    assert module.optimizer is not None
    return float(module.optimizer.param_groups[0]["params"][0].grad)
