"""The devices on which a module's tables may be, and the errors for other devices."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from embforge import optim
from embforge.codegen.errors import ToolchainError
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.sharded import VocabParallelEmbedding

SPEC = CollectionSpec([TableSpec("t", 30, 4)], [FeatureSpec("f", "t")])


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("mps", "'mps' is not supported: embforge has no kernels for it"),
        ("cpuu", "'cpuu' is not a device that torch knows"),
    ],
)
def test_an_unsupported_device_is_refused(device: str, why: str) -> None:
    for make in (lambda: EmbeddingCollection(SPEC, device), lambda: VocabParallelEmbedding(9, 4, device=device)):
        with pytest.raises(ValueError, match=f"device={re.escape(why)}.*; allowed: 'cpu', 'cuda' .*'meta'"):
            make()


@pytest.mark.parametrize("optimizer", [None, optim.SGD()])
def test_a_module_is_not_moved_where_it_cannot_work(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is a part of a model whose `.to` is called. Nothing has changed after a refusal."""
    module = EmbeddingCollection(SPEC, optimizer=optimizer)
    model = torch.nn.Sequential(module)
    if not torch.cuda.is_available():
        for move in (lambda: model.to("cuda:1"), model.cuda, lambda: model.to_empty(device="cuda")):
            with pytest.raises(ToolchainError, match=r"device 'cuda' needs a CUDA GPU.*none is here.*device='cpu'"):
                move()
    for device in ("mps", "xpu"):
        if not getattr(torch, device).is_available():
            with pytest.raises(
                ToolchainError, match=r"cannot be moved there; torch's error: .*; allowed: 'cpu', 'cuda'"
            ):
                model.to(device)
    monkeypatch.setattr("embforge.chosen_device.TABLE_DEVICES", ("cpu",))  # so that torch knows one that we do not
    with pytest.raises(ValueError, match="device='meta' is not supported: embforge has no kernels for it; allowed"):
        model.to("meta")
    assert module.device == torch.device("cpu")
    assert model[0](torch.tensor([1]), torch.tensor([0, 1])).shape == (1, 4)
