"""Tables without a fused optimizer have sparse gradients, for the optimizers of torch.optim that take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance.training import ONE, draw, sgd, trained, trained_backend
from torch import nn

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.storage.static import COALESCED_ADDRESS

SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_torchs_optimizers_take_the_gradients(name: str) -> None:
    module = trained(spec=ONE, optimizer=None)
    bag = nn.EmbeddingBag(9, 5, mode="sum", sparse=True, include_last_offset=True)
    with torch.no_grad():
        bag.weight.copy_(module.weight("t"))
    ours, theirs = SPARSE[name](module.parameters()), SPARSE[name](bag.parameters())
    for step in range(3):
        values, offsets = torch.tensor([1, 4, 4, 7, step, 1]), torch.tensor([0, 2, 5, 5, 6])
        for model, optimizer in ((module, ours), (bag, theirs)):
            optimizer.zero_grad()
            model(values, offsets).pow(2).sum().backward()
            optimizer.step()
        torch.testing.assert_close(module.weight("t"), bag.weight, rtol=1e-5, atol=1e-7)
    assert not torch.equal(module.weight("t"), bag.weight.new_zeros(9, 5))


@trained_backend
def test_gradients_are_sparse_and_coalesced(backend: Any) -> None:
    module = trained(backend, optimizer=None)
    values, offsets, weights = draw(backend)
    module(values, offsets, weights).sum().backward()
    for name, ids in (("a", values[: offsets[6]].tolist() + values[offsets[12] :].tolist()), ("b", None)):
        gradient = module.weight(name).grad
        assert gradient is not None and gradient.is_sparse and gradient.is_coalesced()
        assert gradient.dtype == module.weight(name).dtype
        rows = gradient.indices()[0].tolist()
        assert rows == sorted(set(rows)) and (ids is None or set(rows) == set(ids))


def test_gradients_of_two_passes_add_up_as_torchs_do() -> None:
    module, once = trained(optimizer=None), trained(optimizer=None)
    for seed in range(2):
        module(*draw(seed=seed)).sum().backward()
    (once(*draw(seed=0)).sum() + once(*draw(seed=1)).sum()).backward()
    for name in "ab":
        ours, theirs = module.weight(name).grad, once.weight(name).grad
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=2**-7, atol=1e-6)
        rows = ours._indices()[0].tolist()
        assert len(rows) == len(set(rows)) or not ours.is_coalesced()  # a wrong mark would lose gradients


def test_the_mark_of_a_coalesced_gradient_is_not_left_behind() -> None:
    module = trained(spec=ONE, optimizer=None)
    module(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    weight = module.weight("t")
    assert not hasattr(weight, COALESCED_ADDRESS)  # it is an address, which another gradient may get
    weight.grad = None
    nn.functional.embedding(torch.tensor([2, 2]), weight, sparse=True).sum().backward()
    assert weight.grad is not None and not weight.grad.is_coalesced()  # type: ignore[unreachable]
    assert weight.grad.to_dense()[2].tolist() == [2.0] * 5


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_tables_have_narrow_gradients(dtype: Any) -> None:
    spec = CollectionSpec([TableSpec("t", 9, 5, dtype)], ONE.features)
    module = trained(spec=spec, optimizer=None)
    before = module.weight("t").detach().clone()
    module(torch.tensor([1, 1, 8]), torch.tensor([0, 3])).sum().backward()
    assert module.weight("t").grad is not None and module.weight("t").grad.dtype == before.dtype
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert torch.equal(module.weight("t")[1], (before[1].float() - 1.0).to(before.dtype))


def test_fp8_tables_are_for_fused_optimizers() -> None:
    spec = CollectionSpec(
        [TableSpec("t", 9, 5), TableSpec("q", 9, 8, "fp8_e4m3")], [*ONE.features, FeatureSpec("g", "q")]
    )
    module = trained(spec=spec, optimizer=None)
    batch = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    module(*batch).sum().backward()
    assert module.weight("t").grad is not None and module.weight("q").grad is None
    with pytest.raises(TypeError, match=r"table 'q': an fp8 table cannot be trained by torch\.optim"):
        module.unfreeze("q")
    module.freeze()
    module.unfreeze()
    assert module.weight("t").requires_grad and not module.weight("q").requires_grad
    module.weight("q").requires_grad_()  # past all advice
    with pytest.raises(TypeError, match=r"give the module an optimizer of embforge\.optim"):
        module(*batch).sum().backward()
    fused = trained(spec=spec, **sgd())
    before = fused.weight("q").float()
    fused(*batch).sum().backward()
    assert (fused.weight("q").float() != before).any(1).tolist() == [False, False, True] + [False] * 6


def test_freezing_a_parameter() -> None:
    module = trained(optimizer=None)
    module.freeze("a")
    module(*draw()).sum().backward()
    assert module.weight("a").grad is None and module.weight("b").grad is not None
    module.freeze()
    assert not module(*draw()).requires_grad
    module.unfreeze("a")
    module(*draw()).sum().backward()
    assert module.weight("a").grad is not None and module.weight("a").grad.is_coalesced()
    module.weight("a").requires_grad_(False)  # torch's own way
    assert not module(*draw()).requires_grad
