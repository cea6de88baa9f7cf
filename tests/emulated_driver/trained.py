"""What the checks of training share: a spec whose backward has every kernel, and tables on a device and for the
reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from support import training
from torch import Tensor

from embforge.codegen.params import CudaBackwardParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules.builtin import rowwise_adam
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import Metadata, update_metadata_of
from embforge.verify.cases import Case, draw_batch
from emulated_driver.cases import DEVICE

SPEC = CollectionSpec(
    (TableSpec("a", 40, 4), TableSpec("b", 30, 3, "bf16")),
    (
        FeatureSpec("sum", "a"),
        FeatureSpec("mean", "b", "mean", weighted=True),
        FeatureSpec("rows", "a", "none"),
        FeatureSpec("max", "a", "max", padding_idx=1),
    ),
    name="trained",
)
UPDATE = Update(rowwise_adam(), "stochastic")
"""States of elements and of rows, a sum over a row, and numbers of the step."""
BACKWARD = Plan("backward", "cuda", "sm_90", "int64", SPEC, CudaBackwardParams(), UPDATE)
REDUCE, WEIGHTS = (replace(BACKWARD, op=op, update=None) for op in ("reduce", "weight_gradient"))
PLANS = (BACKWARD, REDUCE, WEIGHTS)

FEW, USUAL, MANY = Case(5, "one"), Case(5), Case(9, "edges")
"""Less than a chunk of ids in all, more, and many of them."""
BAD_ID = r"feature 'mean': id 77 of sample 0, position 0 is not a row of table 'b'; allowed: 0 to 29"


def batch_of(case: Case, seed: int = 0) -> Batch:
    """A batch of SPEC on the host."""
    drawn = draw_batch(SPEC, case, seed)
    return Batch(*drawn, (len(drawn.offsets) - 1) // len(SPEC.features), None)


def hot_batch() -> Batch:
    """An id that occurs so often that partial sums have two levels."""
    return training.batch_of([[[7] * 4200], [[7, 8]], [[7]], [[1, 7]]], torch.int64)


def bad_batch(seed: int = 0) -> Batch:
    """An id that table 'b' does not have."""
    batch = batch_of(FEW, seed)
    values = batch.values.clone()
    values[5] = 77
    return batch._replace(values=values)


def on_device(batch: Batch, gradients: Gradients, device: torch.device) -> tuple[Batch, Gradients]:
    """The same on a device."""
    tensors = (None if x is None else x.to(device) for x in (*batch[:3], *gradients))
    values, offsets, weights, *rest = tensors
    assert values is not None
    assert offsets is not None
    return batch._replace(values=values, offsets=offsets, weights=weights), Gradients(*rest)  # type: ignore[arg-type]


class Training:
    """Tables that are trained on a device, and equal ones that the reference trains. Equal seeds give equal numbers."""

    def __init__(self, seed: int = 0, device: torch.device = DEVICE, grad_scale: float = 0.0) -> None:
        self.truth = truth = training.module_of(training.reference_of(BACKWARD), seed, grad_scale)
        self.device = device
        self._memory = [_whole(t).to(device) for t in (*truth.tables, *truth.states)]
        views = [
            memory.as_strided(t.shape, t.stride())
            for memory, t in zip(self._memory, (*truth.tables, *truth.states), strict=True)
        ]
        self.tables, self.states = views[: len(truth.tables)], views[len(truth.tables) :]
        self.hyper, self.counters = truth.hyper.to(device), truth.counters.to(device)

    def metadata(self, bounds_check: str = "error") -> Metadata:
        return update_metadata_of(self.tables, self.states, self.truth.trainable, bounds_check)

    def gradients(self, batch: Batch, seed: int = 0) -> Gradients:
        """Gradients of a batch's results, on the host."""
        return training.gradients_of(self.truth, batch, seed)

    def update(
        self, kernel: Any, batch: Batch, bounds_check: str = "error", gradients: Gradients | None = None
    ) -> Tensor:
        """One update on the device; the batch is the host's."""
        return self.updates(kernel, *on_device(batch, gradients or self.gradients(batch), self.device), bounds_check)

    def updates(self, kernel: Any, batch: Batch, gradients: Gradients, bounds_check: str = "error") -> Tensor:
        """One update; all is on the device."""
        states = (self.tables, self.states, batch, gradients, self.hyper, self.counters)
        verdict: Tensor = kernel(self.metadata(bounds_check), *states, bounds_check)
        return verdict

    def follow(self, batch: Batch, bounds_check: str = "error", gradients: Gradients | None = None) -> Tensor:
        """The reference's update."""
        return training.step(self.truth, batch, gradients or self.gradients(batch), bounds_check)

    def both(self, kernel: Any, batch: Batch, bounds_check: str = "error") -> None:
        """One update on the device and one by the reference."""
        gradients = self.gradients(batch)
        self.update(kernel, batch, bounds_check, gradients)
        self.follow(batch, bounds_check, gradients)

    def bits(self) -> list[Tensor]:
        """All bits that an update may change, with the padding between them. Waits for the current stream."""
        return [*(memory.cpu() for memory in self._memory), self.counters.cpu()]

    def assert_right(self) -> None:
        """All bits are the reference's."""
        truth = [*map(_whole, (*self.truth.tables, *self.truth.states)), self.truth.counters]
        for got, want in zip(self.bits(), truth, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Asserts that the block changes no bit, also if it ends with an exception that it expects."""
        before = self.bits()
        yield
        for now, then in zip(self.bits(), before, strict=True):
            assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


def _whole(tensor: Tensor) -> Tensor:
    """All memory that a tensor is part of, on the host."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
