"""Batches without samples or without ids: nothing is trained, nothing breaks, and gradients have their shapes."""

from __future__ import annotations

import pytest
import torch
from conformance.backends import device_of
from conformance.training import WITH_ROWS, differing, snapshot, trained, trained_backend
from torch import Tensor

from embforge import optim


@trained_backend
@pytest.mark.parametrize("size", [0, 3, 70])
@pytest.mark.parametrize("more", [{}, {"optimizer": None}, {"accumulate": True}], ids=str)
def test_batches_without_samples_or_ids_train_nothing(backend: str, size: int, more: dict[str, object]) -> None:
    module = trained(backend, WITH_ROWS, **{"optimizer": optim.RowwiseAdagrad(lr=0.1)} | more)
    before = snapshot(module)
    device = device_of(backend)
    values = torch.empty(0, dtype=torch.int64, device=device)
    weights = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
    offsets = torch.zeros(len(WITH_ROWS.features) * size + 1, dtype=torch.int64, device=device)
    results = module.forward_dict(values, offsets, weights)
    total: Tensor = sum((result.sum() for result in results.values()), torch.zeros((), device=device))
    total.backward()
    if more.get("accumulate"):
        module.step()
    assert weights.grad is not None and weights.grad.shape == (0,)
    assert results["s"].shape == (0, 15) and results["x"].shape == (size, 15) and not results["x"].any()
    assert [name for name in differing(before, snapshot(module)) if not name.startswith("optim.")] == []
