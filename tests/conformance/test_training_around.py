"""Methods of a model that visit all parameters, although fused tables of a module within it are no parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.training import ONE, nothing_changes, trained
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from embforge.collection import EmbeddingCollection

BATCH = torch.arange(9), torch.tensor([0, 4, 9])


class Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"tables": tables})
        self.head = nn.Linear(5, 1)

    def forward(self, *batch: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner["tables"](*batch))
        return found


def run(model: nn.Module, module: EmbeddingCollection) -> None:
    loss = model(*BATCH).sum()
    if loss.requires_grad:
        loss.backward()
    module.step()


WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "accumulate": {"accumulate": True},
    "compiled": {},
    "torch.optim": {"optimizer": None},
}
FREEZE: dict[str, Callable[[Model, bool], Any]] = {
    "model": lambda model, on: model.requires_grad_(on),
    "list": lambda model, on: model.inner.requires_grad_(on),
    "module": lambda model, on: model.inner["tables"].requires_grad_(on),
    "tables": lambda model, on: model.inner["tables"].tables.requires_grad_(on),  # type: ignore[union-attr, operator]
}


@pytest.mark.parametrize("freeze", FREEZE)
@pytest.mark.parametrize("way", WAYS)
def test_requires_grad_of_a_model_reaches_its_tables(way: str, freeze: str) -> None:
    module = trained(spec=ONE, **WAYS[way])
    model = Model(module)
    run_model = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    run(run_model, module)
    FREEZE[freeze](model, False)
    with nothing_changes(module):
        run(run_model, module)
    assert not module(*BATCH).requires_grad
    FREEZE[freeze](model, True)
    assert module(*BATCH).requires_grad
    before = module.weight("t").detach().clone()
    run(run_model, module)
    assert module.weight("t").grad is not None if way == "torch.optim" else not torch.equal(before, module.weight("t"))


def test_listing_parameters_freezes_nothing() -> None:
    """Optimizers and wrappers list parameters often, also within a function called `requires_grad_`."""
    module = trained(spec=ONE)
    model = Model(module)

    def requires_grad_(requires_grad: bool = False) -> list[Any]:
        return [*model.parameters(), *model.named_modules(), *model.buffers()]

    requires_grad_()
    assert module(*BATCH).requires_grad


def test_zero_grad_of_a_model_drops_its_tables_gradients() -> None:
    module = trained(spec=ONE, accumulate=True)
    for model in (Model(module), module):
        run_loss = model(*BATCH).sum()
        run_loss.backward()
        model.zero_grad()
        with nothing_changes(module):
            module.step()


def test_averaged_models_are_refused() -> None:
    module = trained(spec=ONE)
    model = Model(module)
    for each in (model, module):
        with pytest.raises(RuntimeError, match="AveragedModel averages parameters, and the tables of this"):
            AveragedModel(each)
    copy.deepcopy(model)
    module.freeze()
    AveragedModel(model).update_parameters(model)
    sparse = trained(spec=ONE, optimizer=None)
    average = AveragedModel(sparse)
    average.update_parameters(sparse)
    rows = sparse.weight("t").detach().clone()
    with torch.no_grad():
        sparse.weight("t").add_(1)
    average.update_parameters(sparse)
    torch.testing.assert_close(average.module.weight("t").detach(), rows + 0.5)  # type: ignore[operator]
